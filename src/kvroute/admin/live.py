"""The data of the live page: a snapshot and then changes each second, merged over all processes.

Nothing here runs, and nothing is recorded, while no page is open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from math import log
from typing import Any, Final, Protocol

import msgspec

from kvroute.clock import Clock
from kvroute.errors import InvalidRequest, TooManyRequests
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.load import describe_foreign
from kvroute.fleet.worker import Worker
from kvroute.journal.journal import Entry, Journal
from kvroute.metrics import Metrics
from kvroute.request.record import Record
from kvroute.routing.audit import Audit
from kvroute.routing.recording import RecordedDecision
from kvroute.routing.router import Router
from kvroute.routing.strategy import Candidate, RouteDecision

INTERVAL_S: Final = 1.0
MOST_PAGES: Final = 8
_SLOW_INTERVALS: Final = 5
"""Figures that change slowly, or cost more, are sent in every fifth line."""
KEEP_RECORDING_S: Final = 60.0
"""After the last page was closed, so that a reloaded page finds the decisions."""
_MOST_ROWS: Final = 60
"""Finished requests in one line; the figures count the others, too."""
_HOTTEST: Final = 12
_SLICE: Final = 64
"""Requests counted, or decisions made again, before other work of the event loop runs."""
_FIRST_S: Final = 0.001
_GROWTH: Final = 1.25
"""Ratio of neighbouring places in the histogram of times; `_FIRST_S` is at place 0."""
_TIMEOUT_S: Final = 1.0
_WHAT_IF_TIMEOUT_S: Final = 30.0
_PART: Final = "live"
_WHAT_IF: Final = "what_if"

_encode: Final = msgspec.json.encode
_decode: Final = msgspec.json.decode

Json = dict[str, Any]


class Peers(Protocol):
    """The other gateway processes: `replicas.mesh.Mesh`."""

    @property
    def number(self) -> int: ...
    @property
    def peers(self) -> Sequence[int]: ...
    def handle(self, topic: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None: ...
    async def request_all(self, topic: str, argument: bytes, timeout_s: float) -> Mapping[int, bytes]: ...


class LiveFigures:
    """What the page shows. Mutable: the number of open pages, and the timer that ends recording.

    `streams` returns a row per event stream, `slow` the sections that are sent every five seconds. At a
    shutdown the pages' streams end, so that the gateway need not wait for them. `keep_recording_s` is how
    long decisions are recorded after the last page was closed. `peers` are the other processes, if there are
    any: they answer with their part, and they record, too. `member` names this process among them.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        journal: Journal,
        audit: Audit,
        clock: Clock,
        metrics: Metrics,
        *,
        streams: Callable[[], Iterable[Json]],
        slow: Callable[[], Json],
        is_shutting_down: Callable[[], bool],
        keep_recording_s: float = KEEP_RECORDING_S,
        peers: Peers | None = None,
        member: str = "",
    ) -> None:
        self._fleet = fleet
        self._member = member
        self._router = router
        self._journal = journal
        self._audit = audit
        self._clock = clock
        self._metrics = metrics
        self._streams = streams
        self._slow = slow
        self._peers = peers
        self._pages = 0
        self._recording: asyncio.TimerHandle | None = None
        self._is_shutting_down = is_shutting_down
        self._keep_recording_s = keep_recording_s
        if peers is not None:
            peers.handle(_PART, self._answer_part)
            peers.handle(_WHAT_IF, self._answer_what_if)

    def end(self) -> None:
        """End the recording: the gateway has shut down."""
        if self._recording is not None:
            self._recording.cancel()
        self._stop_recording()

    def open(self) -> AsyncIterator[bytes]:
        """The lines of one page (NDJSON). Raises TooManyRequests if `MOST_PAGES` are open."""
        if self._pages >= MOST_PAGES:
            raise TooManyRequests(f"{MOST_PAGES} pages are open already; close one of them.")
        self._pages += 1
        return self._lines()

    async def _lines(self) -> AsyncIterator[bytes]:
        """A first line with everything, then a line per second with the rows that have changed."""
        sent: Json = {}
        cursors: dict[int, int] = {}
        turn = 0
        try:
            while not self._is_shutting_down():
                started = self._clock.now()
                whole = await self._merged(cursors, with_slow=turn % _SLOW_INTERVALS == 0)
                yield _encode(_changes(sent, whole)) + b"\n"
                turn += 1
                await self._clock.sleep(max(0.1, INTERVAL_S - (self._clock.now() - started)))
        finally:
            self._pages -= 1

    async def _merged(self, cursors: dict[int, int], *, with_slow: bool) -> Json:
        own_number = 0
        others: Mapping[int, bytes] = {}
        if self._peers is not None:
            own_number = self._peers.number
            argument = _encode({"cursors": cursors, "slow": with_slow})
            others = await self._peers.request_all(_PART, argument, _TIMEOUT_S)
        parts = {number: _decode(answer) for number, answer in others.items()}
        parts[own_number] = await self.part(cursors.get(own_number), with_slow=with_slow)
        for number, part in parts.items():
            cursors[number] = part["cursor"]
        whole = self._fleet_sections(parts[own_number])
        processes = 1 if self._peers is None else 1 + len(self._peers.peers)
        whole["processes"] = {"all": processes, "missing": processes - len(parts)}
        whole["streams"] = {key: row for part in parts.values() for key, row in part["streams"].items()}
        whole["bucket"] = _sum_buckets([part["bucket"] for part in parts.values()])
        rows = [row for part in parts.values() for row in part["requests"]]
        rows.sort(key=lambda row: row["time"])
        whole["requests"] = rows[-_MOST_ROWS:]
        recording = [part["recording"] for part in parts.values()]
        whole["recording"] = {name: sum(each[name] for each in recording) for name in recording[0]}
        whole["clients"] = _merge_clients([part["clients"] for part in parts.values()])
        whole["prefixes"] = _merge_prefixes([part["prefixes"] for part in parts.values()])
        if with_slow:
            whole["accuracy"] = _merge_accuracy([part["accuracy"] for part in parts.values()])
        return whole

    def _fleet_sections(self, own: Json) -> Json:
        """Sections that this process knows for all processes: every process accounts for all requests."""
        now = self._clock.now()
        whole: Json = {
            "time": self._clock.wall(),
            "strategy": self._router.default_strategy,
            "strategies": list(self._router.strategies),
            "workers": {worker.id: self._worker(worker, now) for worker in self._fleet.workers()},
        }
        if "slow" in own:
            whole |= own["slow"]
        return whole

    def _worker(self, worker: Worker, now: float) -> Json:
        load = worker.load
        wait_s, foreign = load.wait(now), describe_foreign(load, now)
        return {
            "url": worker.spec.url,
            "state": worker.state.value,
            "role": worker.role.value,
            "fetched_tokens": worker.facts.fetched.total,
            "trouble": worker.trouble or worker.asleep or None,
            "models": sorted(worker.models),
            "capacity_tokens": worker.capacity_tokens,
            "block_size": worker.block_size,
            "in_flight": load.in_flight,
            "queued": load.queued,
            "queued_prefill_s": round(wait_s - (foreign["wait_s"] if foreign else 0.0), 3),
            "foreign": foreign,
            "busy": round(load.recent(now)[0], 3),
            "active_tokens": load.active_tokens,
            "ramp": round(worker.share_at(now), 3),
            "history": self._router.describe_worker(worker)["tracked_blocks"],
            "history_capacity": self._router.describe_worker(worker)["capacity_blocks"],
        }

    # One process's part

    async def part(self, cursor: int | None, *, with_slow: bool) -> Json:
        """What only this process knows, since `cursor`. Renews the recording. In slices of 0.2 ms."""
        self._keep_recording()
        cursor, entries = self._journal.since(cursor)
        bucket = _Bucket()
        for number, entry in enumerate(entries):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            bucket.add(entry, self._saved_s)
        recorder = self._router.record()
        workers = self._fleet.workers()
        prefixes = [
            {
                "prefix": f"{key:016x}",
                "model": prefix.model,
                "blocks": prefix.blocks,
                "tokens": prefix.tokens,
                "exact": prefix.prompt is not None,
                "requests": prefix.requests,
                "holders": {
                    worker: tokens._asdict()
                    for worker, tokens in self._router.holders(prefix, workers).items()
                },
            }
            for key, prefix in recorder.prefixes.hottest(_HOTTEST)
        ]
        part: Json = {
            "cursor": cursor,
            "streams": {f"{row['worker']} {row['rank']}": row for row in self._streams()},
            "bucket": bucket.figures,
            "requests": [_row(entry) | {"member": self._member} for entry in entries[-_MOST_ROWS:]],
            "recording": {"recorded": len(recorder), "skipped": recorder.skipped},
            "clients": _clients(self._metrics),
            "prefixes": prefixes,
        }
        if with_slow:
            part["slow"] = self._slow()
            part["accuracy"] = self._audit.describe()
        return part

    async def _answer_part(self, argument: bytes) -> bytes:
        asked = _decode(argument)
        assert self._peers is not None
        cursor = asked["cursors"].get(str(self._peers.number))
        return _encode(await self.part(cursor, with_slow=asked["slow"]))

    def _saved_s(self, record: Record, cached_tokens: int) -> float:
        """Estimated prefill seconds that the cached tokens have saved."""
        tokens = record.tokens if record.usage is None else record.usage.prompt_tokens
        costs = self._router.costs(self._fleet.canonical(record.model))
        cached_tokens = min(cached_tokens, tokens)
        return costs.prefill_s(tokens, 0) - costs.prefill_s(tokens - cached_tokens, cached_tokens)

    def _keep_recording(self) -> None:
        if self._recording is not None:
            self._recording.cancel()
        loop = asyncio.get_running_loop()
        self._recording = loop.call_later(self._keep_recording_s, self._stop_recording)

    def _stop_recording(self) -> None:
        self._recording = None
        self._router.recorder = None

    # What another strategy would have done

    async def what_if(self, strategy: str, limit: int) -> Json:
        """The last `limit` requests of each process, decided again by `strategy`; sums and single decisions.

        Raises InvalidRequest for an unknown strategy.
        """
        if not self._router.knows(strategy):
            known = ", ".join(self._router.strategies)
            raise InvalidRequest(f"strategy: {strategy!r} is none of {known}.", param="strategy")
        parts = [await self._redecide(strategy, limit)]
        if self._peers is not None:
            asked = _encode({"strategy": strategy, "limit": limit})
            answers = await self._peers.request_all(_WHAT_IF, asked, _WHAT_IF_TIMEOUT_S)
            parts += [_decode(answer) for answer in answers.values()]
        whole = {"strategy": strategy, **_sum_what_if(parts)}
        whole["decisions"] = whole["decisions"][:limit]
        return whole

    async def _answer_what_if(self, argument: bytes) -> bytes:
        asked = _decode(argument)
        return _encode(await self._redecide(asked["strategy"], asked["limit"]))

    async def _redecide(self, strategy: str, limit: int) -> Json:
        _, entries = self._journal.since(None)
        records = [entry[2] for entry in entries[-limit:]]
        decided = [record for record in records if record.decision is not None]
        recorder, redecider = self._router.recorder, self._router.redecider(strategy)
        decisions = [record.decision for record in decided if record.decision is not None]
        found = [None] * len(decisions) if recorder is None else recorder.find(decisions)
        reasons: Counter[str] = Counter()
        rows: list[Json] = []
        started = self._clock.now()
        for record, recorded in zip(decided, found, strict=True):
            if recorded is None:
                reasons[_why_unrecorded(record)] += 1
                continue
            why = redecider.why_not(recorded)
            if why:
                reasons[why] += 1
                continue
            # Each may take 0.2 ms: requests are relayed in between.
            if self._clock.now() - started > 1e-3:
                await asyncio.sleep(2e-3)
                started = self._clock.now()
            rows.append(_compared(record, recorded, redecider.redecide(recorded)))
        return {
            "requests": len(records),
            "without_decision": len(records) - len(decided),
            "reasons": dict(reasons),
            "decisions": rows[::-1],
        }


def _why_unrecorded(record: Record) -> str:
    assert record.decision is not None
    if record.decision.reason == "response_owner":
        return "Only one worker had the stored response that the request continued."
    return "The decision was made while no page was open, or more came in a second than are recorded."


def _compared(record: Record, recorded: RecordedDecision, again: RouteDecision) -> Json:
    """Both choices, in the arithmetic of the strategy that decided."""
    believed = {candidate.worker.id: candidate for candidate in recorded.decision.ranking}
    actual, chosen = recorded.decision.ranking[0], again.ranking[0].worker.id
    would = believed[chosen]
    return {
        "request_id": record.request_id.decode(),
        "actual": actual.worker.id,
        "would": chosen,
        "reason": again.reason.value,
        "actual_matched": actual.matched_tokens,
        "would_matched": would.matched_tokens,
        "actual_prefill_s": actual.prefill_s,
        "would_prefill_s": would.prefill_s,
        "actual_cost_s": actual.score,
        "would_cost_s": would.score,
    }


def _sum_what_if(parts: Sequence[Json]) -> Json:
    reasons: Counter[str] = Counter()
    rows = [row for part in parts for row in part["decisions"]]
    for part in parts:
        reasons.update(part["reasons"])
    workers: dict[str, list[int]] = {}
    for row in rows:
        workers.setdefault(row["actual"], [0, 0])[0] += 1
        workers.setdefault(row["would"], [0, 0])[1] += 1
    return {
        "requests": sum(part["requests"] for part in parts),
        "without_decision": sum(part["without_decision"] for part in parts),
        "made_again": len(rows),
        "same": sum(row["actual"] == row["would"] for row in rows),
        "sums": {
            name: sum(row[name] for row in rows)
            for side in ("actual", "would")
            for name in (f"{side}_matched", f"{side}_prefill_s", f"{side}_cost_s")
        },
        "workers": workers,
        "reasons": dict(reasons),
        "decisions": rows,
    }


class _Bucket:
    """Sums over finished requests. Mutable: `add`."""

    def __init__(self) -> None:
        self.figures: Json = dict.fromkeys(_SUMS, 0) | {"first_byte": {}}

    def add(self, entry: Entry, saved_s: Callable[[Record, int], float]) -> None:
        record = entry[2]
        figures = self.figures
        figures["requests"] += 1
        if record.first_byte is None or record.status != 200:
            figures["failed"] += 1
            return
        if record.streamed:  # the first byte of another answer is its end
            first_s = max(record.first_byte - record.started, 1e-6)
            place = str(max(0, round(log(first_s / _FIRST_S, _GROWTH))))
            times = figures["first_byte"]
            times[place] = times.get(place, 0) + 1
        figures["prompt_tokens"] += record.tokens
        figures["predicted_tokens"] += record.matched_tokens
        held = None if record.decision is None else _candidate(record.decision, record)
        if held is not None and held.match is not None and held.match.mapped:
            gpu, l1, l2 = held.match.tokens
            figures["gpu"] += gpu
            figures["l1"] += l1
            figures["l2"] += l2
        else:
            figures["history"] += record.matched_tokens
        cached = record.matched_tokens
        usage = record.usage
        if usage is not None and usage.cached_tokens is not None:
            cached = usage.cached_tokens
            figures["reported"] += 1
            figures["reported_prompt_tokens"] += usage.prompt_tokens
            figures["reported_cached_tokens"] += cached
            figures["reported_predicted_tokens"] += record.matched_tokens
        if cached:
            figures["saved_tokens"] += cached
            figures["saved_s"] += saved_s(record, cached)


_SUMS: Final = (
    "requests",
    "failed",
    "prompt_tokens",
    "predicted_tokens",
    "gpu",
    "l1",
    "l2",
    "history",
    "reported",
    "reported_prompt_tokens",
    "reported_cached_tokens",
    "reported_predicted_tokens",
    "saved_tokens",
    "saved_s",
)


def _candidate(decision: RouteDecision, record: Record) -> Candidate | None:
    """The candidate that the request was sent to last."""
    attempt = max(1, record.attempts) - 1
    return decision.ranking[attempt] if attempt < len(decision.ranking) else None


def _sum_buckets(buckets: Sequence[Json]) -> Json:
    times: Counter[str] = Counter()
    for bucket in buckets:
        times.update(bucket["first_byte"])
    return {name: sum(bucket[name] for bucket in buckets) for name in _SUMS} | {"first_byte": dict(times)}


def _row(entry: Entry) -> Json:
    wall, duration, record = entry
    decision, usage, handover = record.decision, record.usage, record.handover
    return {
        "time": wall,
        "id": record.request_id.decode(),
        "model": record.model,
        "worker": record.worker,
        "status": record.status,
        "strategy": None if decision is None else decision.strategy,
        "reason": record.error or None if decision is None else decision.reason.value,
        "tokens": record.tokens,
        "matched": record.matched_tokens,
        "cached": None if usage is None else usage.cached_tokens,
        "ttfb_s": None if record.first_byte is None else record.first_byte - record.started,
        "duration_s": duration,
        "attempts": record.attempts,
        "prefill_worker": None if handover is None else handover.prefill_worker,
        "moved": None if handover is None or handover.fallback else handover.moved_tokens,
        "handover_fallback": None if handover is None else handover.fallback or None,
    }


def _clients(metrics: Metrics) -> Json:
    """What each key used and how long it waited, by its name; "-" is all requests without a named key."""
    rows: Json = {}

    def count(name: str, key: str, value: float) -> None:
        row = rows.setdefault(key, dict.fromkeys(_CLIENT_SUMS, 0))
        row[name] += value

    for (key,), tally in metrics.key_requests.children.items():
        count("requests", key, tally.value)
    for (key,), tally in metrics.key_tokens.children.items():
        count("tokens", key, tally.value)
    for (key, _), tally in metrics.key_limited.children.items():
        count("limited", key, tally.value)
    for (_, key), tally in metrics.queue_waiting.children.items():
        count("waiting", key, tally.value)
    for (_, key), waits in metrics.queue_wait.children.items():
        count("started", key, waits.cumulative()[-1][1])
        count("waited_s", key, waits.sum)
    for (_, key, _), tally in metrics.queue_shed.children.items():
        count("shed", key, tally.value)
    return rows


_CLIENT_SUMS: Final = ("requests", "tokens", "limited", "waiting", "started", "waited_s", "shed")


def _merge_clients(parts: Sequence[Json]) -> Json:
    """The sums of all processes, by key."""
    rows: Json = {}
    for part in parts:
        for key, row in part.items():
            known = rows.setdefault(key, dict.fromkeys(_CLIENT_SUMS, 0))
            for name in _CLIENT_SUMS:
                known[name] += row[name]
    return rows


def _merge_prefixes(parts: Sequence[Sequence[Json]]) -> list[Json]:
    """The hottest prefixes of all processes; requests are added up, holders are those of the fastest tier."""
    found: dict[str, Json] = {}
    for rows in parts:
        for row in rows:
            known = found.get(row["prefix"])
            if known is None:
                found[row["prefix"]] = row
            else:
                known["requests"] += row["requests"]
    rows = sorted(found.values(), key=lambda row: (row["requests"], row["tokens"]), reverse=True)
    return rows[:_HOTTEST]


def _merge_accuracy(parts: Sequence[Json]) -> list[Json]:
    """Sums of `Audit.describe` by strategy, worker and tier."""
    sums: dict[tuple[str, str, str], Json] = {}
    for part in parts:
        for row in part["predictions"]:
            key = row["strategy"], row["worker"], row["slowest_tier"]
            known = sums.setdefault(key, dict.fromkeys(row, 0) | dict(zip(_ACCURACY_KEY, key, strict=True)))
            for name, value in row.items():
                if name not in _ACCURACY_KEY:
                    known[name] += value
    return list(sums.values())


_ACCURACY_KEY: Final = ("strategy", "worker", "slowest_tier")
_TABLES: Final = ("workers", "streams")
"""Sections of rows, of which only changed ones are sent."""
_ALWAYS: Final = ("time", "bucket", "requests")


def _changes(sent: Json, whole: Json) -> Json:
    """What of `whole` differs from `sent`, which becomes `whole`.

    Of a table, the changed rows, and null for a row that has gone.
    """
    line: Json = {}
    for name, section in whole.items():
        if name in _TABLES:
            before: Json = sent.get(name, {})
            rows = {key: row for key, row in section.items() if before.get(key) != row}
            rows |= {key: None for key in before if key not in section}
            if rows or name not in sent:
                line[name] = rows
        elif name in _ALWAYS or section != sent.get(name):
            line[name] = section
        sent[name] = section
    return line
