"""The Prometheus metrics of kvroute, with counters and histograms that are cheap to update.

Names start with `kvroute_` and units are base units. The number of label values is bounded: worker, model
(known models, and `OTHER` for all others), strategy, reason, status, kind, name of a key (those of the key
file). Each runtime has its own `Metrics` and registry, so that several gateways can run in one process.
docs/metrics.md lists every family (`app/reference.py`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvroute import __version__
from kvroute.clock import Clock
from kvroute.tallies import Family, FastCounter, FastHistogram, RequestLabels

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_ROUTING_S = (25e-6, 50e-6, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.05)
_ERROR_TOKENS = (0, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
_MATCHED_TOKENS = (0, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_BYTES = (256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)


OTHER: Final = "other"
"""The label of a model that the fleet does not have: clients may send any name."""
SERIES_KEPT_S = 300.0
"""How long the series of a worker or key that left stay, so that their last values are scraped."""
_TIERS: Final = ("gpu", "l1", "l2")


AnsweredRequest: TypeAlias = tuple[
    float, float | None, int, int, tuple[int, int, int] | None, int | None, int | None
]
"""What is counted of an answered request: seconds to its end, and to its first byte (None if that is not
seen, `Record.is_unseen`); its prompt's tokens; the predicted ones, in all and by tier (None: all are the
GPU's); prompt tokens and cached tokens of the worker's `usage` (None: not reported)."""


def _in_tiers(request: AnsweredRequest) -> tuple[int, int, int]:
    return request[4] or (request[3], 0, 0)


class Series:
    """All counters of the requests with the same `RequestLabels`, so that a request needs one lookup.

    Mutable: `text` and `waiting` belong to the journal.
    """

    __slots__ = ("_answered", "_metrics", "_outcome", "_reported", "_seconds", "_streamed", "text", "waiting")

    def __init__(self, metrics: Metrics, outcome: RequestLabels, streamed: bool) -> None:
        self.text = ""
        """What the log lines of these requests share."""
        self.waiting: list[AnsweredRequest] = []
        """Answered requests that the journal has not counted yet."""
        self._streamed = streamed
        self._metrics = metrics
        self._outcome = outcome
        # Children are created at their first count, so that a metric without values has no series.
        self._answered: (
            tuple[FastCounter, FastCounter, FastHistogram, FastCounter, FastHistogram, FastHistogram] | None
        ) = None
        self._reported: tuple[FastCounter, FastCounter] | None = None
        self._seconds: tuple[FastCounter, FastHistogram, FastHistogram] | None = None

    def answered(self, requests: Sequence[AnsweredRequest]) -> None:
        """Count finished requests whose answers had at least one byte.

        Raises if one of them has a figure that cannot be counted; then none of them is.
        """
        if self._answered is None:
            metrics, outcome = self._metrics, self._outcome
            self._answered = (*metrics.routed_tokens(outcome), *metrics.seconds(outcome, self._streamed))
        prompts, hits, matched, finished, duration, first_byte = self._answered
        durations, first_bytes, lengths, matched_tokens, tiers, reported, cached = zip(*requests, strict=True)
        if None in first_bytes:
            first_bytes = tuple(seconds for seconds in first_bytes if seconds is not None)
        if None in cached:
            reported = tuple(count for count in reported if count is not None)
            cached = tuple(count or 0 for count in cached)
        # Everything that may fail comes before the first count.
        tokens, by_tier = float(sum(lengths)), [float(sum(matched_tokens)), 0.0, 0.0]
        if any(tiers):
            by_tier = [float(sum(column)) for column in zip(*map(_in_tiers, requests), strict=True)]
        usage = float(sum(reported)), float(sum(cached))
        prompts.value += tokens
        hits.value += by_tier[0]
        for tier, tier_tokens in zip(_TIERS[1:], by_tier[1:], strict=True):
            if tier_tokens:
                self._metrics.hit_tokens(self._outcome, tier).value += tier_tokens
        matched.extend(matched_tokens)
        finished.value += len(requests)
        duration.extend(durations)
        first_byte.extend(first_bytes)
        if reported:
            self.reported(*usage)

    def reported(self, prompt_tokens: float, cached_tokens: float | None) -> None:
        """Count the tokens that the `usage` of one or more answers reported."""
        if self._reported is None:
            self._reported = self._metrics.reported_tokens(self._outcome)
        prompts, cached = self._reported
        prompts.value += prompt_tokens
        if cached_tokens:
            cached.value += cached_tokens

    def finished(self, duration_s: float, first_byte_s: float | None) -> None:
        """Count one finished request; `first_byte_s` is None if no body byte arrived."""
        if self._seconds is None:
            self._seconds = self._metrics.seconds(self._outcome, self._streamed)
        requests, duration, first_byte = self._seconds
        requests.value += 1.0
        duration.append(duration_s)
        if first_byte_s is not None:
            first_byte.append(first_byte_s)


class Metrics(Collector):
    """All metric families of one gateway. Mutable: counts, and caches of children for fast lookups.

    A request needs a few lookups; `prometheus_client`'s own counter takes a lock and about 0.5 us per update.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        self._counters: list[Family[FastCounter]] = []
        self._gauges: list[Family[FastCounter]] = []
        self._histograms: list[Family[FastHistogram]] = []
        info = self._gauge("kvroute_build_info", "Version of kvroute; always 1.", ["version", "python"])
        info.labels(__version__, platform.python_version()).inc()

        self._requests = self._counter(
            "kvroute_requests", "Finished inference requests.", RequestLabels._fields
        )
        pool = ["model", "worker", "strategy"]
        self._duration = self._histogram(
            "kvroute_request_duration_seconds",
            "From the complete request to the last byte of its answer.",
            _LATENCY_S,
            pool,
        )
        self._first_byte = self._histogram(
            "kvroute_time_to_first_byte_seconds",
            "From the complete request to the first body byte of its answer. Streamed answers: the first "
            "token. Others: the whole answer.",
            _LATENCY_S,
            [*pool, "streamed"],
        )
        self._gaps = self._histogram(
            "kvroute_inter_token_seconds",
            "Between two chunks of a streamed answer from the worker; usually one token per chunk.",
            _INTER_TOKEN_S,
            pool,
        )
        self.config_reloads = self._counter(
            "kvroute_config_reloads", "Attempts to load the configuration again (SIGHUP).", ["outcome"]
        )
        self.tasks = self._gauge("kvroute_tasks", "Asyncio tasks of the gateway.", [])
        self.memory_share = self._gauge(
            "kvroute_memory_used_ratio", "Used share of the memory limit, with `server.memory_watermark`.", []
        )
        self.out_of_descriptors = self._counter(
            "kvroute_out_of_descriptors", "Connections that were not opened: no free descriptor.", ["side"]
        )
        self.in_flight = self._gauge(
            "kvroute_requests_in_flight", "Inference requests being served now."
        ).labels()
        self.routing_time = self._histogram(
            "kvroute_routing_duration_seconds",
            "Time of reading the body, matching its prefix and ranking the workers.",
            _ROUTING_S,
        ).labels()
        self._prompt_tokens = self._counter(
            "kvroute_prompt_tokens", "Prompt tokens routed, as estimated before forwarding.", pool
        )
        self._hit_tokens = self._counter(
            "kvroute_predicted_hit_tokens",
            "Prompt tokens that the chosen worker was predicted to have cached, by the tier that they were "
            "predicted in.",
            [*pool, "tier"],
        )
        self._matched = self._histogram(
            "kvroute_matched_tokens",
            "Prompt tokens of one request that the chosen worker was predicted to have cached.",
            _MATCHED_TOKENS,
            ["strategy"],
        )
        self._reported_prompt_tokens = self._counter(
            "kvroute_reported_prompt_tokens",
            "Prompt tokens that the workers reported in `usage`.",
            ["model", "worker"],
        )
        self._cached_tokens = self._counter(
            "kvroute_reported_cached_tokens",
            "Cached prompt tokens that the workers reported in `usage`.",
            ["model", "worker"],
        )
        self.inexact = self._counter(
            "kvroute_inexact_prompts",
            "Requests routed by the approximate history because exact tokens were not available, by cause.",
            ["model", "cause"],
        )
        self.exact = self._counter(
            "kvroute_exact_prompts", "Requests that were routed with exact tokens.", ["model"]
        )
        self.token_wait = self._histogram(
            "kvroute_token_wait_seconds",
            "Time that requests waited for exact tokens that were not available immediately.",
            _LATENCY_S,
        ).labels()
        self._predictions = self._counter(
            "kvroute_predictions",
            "Predictions of cached tokens compared with the worker's report, by the slowest predicted tier.",
            ["strategy", "worker", "tier", "outcome"],
        )
        self._prediction_error = self._histogram(
            "kvroute_prediction_error_tokens",
            "Absolute difference between predicted and reported cached tokens.",
            _ERROR_TOKENS,
            ["strategy", "worker", "tier"],
        )
        self.map_demotions = self._counter(
            "kvroute_map_demotions",
            "Times that a worker's map lost its trust, by cause.",
            ["worker", "cause"],
        )
        self.retries = self._counter(
            "kvroute_retries", "Attempts that were repeated on another worker.", ["cause"]
        )
        self.requests_lost = self._counter(
            "kvroute_requests_lost",
            "Requests that a worker broke off without a complete answer, except where it was to leave.",
            ["worker"],
        )
        self.lost_requests_refused = self._counter(
            "kvroute_lost_requests_refused", "Requests that were refused because their body has lost workers."
        ).labels()
        self.busy_answers = self._counter(
            "kvroute_busy_answers", "Answers of workers that said that they are full.", ["worker"]
        )
        self._handovers = self._counter(
            "kvroute_handovers",
            "Answers of a worker to prompts that another worker computed.",
            ["worker", "prefill_worker"],
        )
        self.handover_fallbacks = self._counter(
            "kvroute_handover_fallbacks",
            "Requests that one worker did as a whole, because handing over their prompt failed.",
            ["cause"],
        )
        self._handover_tokens = self._counter(
            "kvroute_handover_tokens", "Prompt tokens that workers got from others.", ["worker"]
        )
        self._handover_computed = self._counter(
            "kvroute_handover_computed_tokens", "Prompt tokens that workers computed for others.", ["worker"]
        )
        self._handover_prefill = self._histogram(
            "kvroute_handover_prefill_seconds",
            "Time of a prefill worker's part of a request, its queue included.",
            _LATENCY_S,
            ["worker"],
        )
        self._handover_transfer = self._histogram(
            "kvroute_handover_transfer_seconds",
            "Time from the second part of a request to the first byte of its streamed answer.",
            _LATENCY_S,
            ["worker"],
        )
        self.handover_blocks_kept = self._counter(
            "kvroute_handover_blocks_kept",
            "Prompts whose blocks stay on the prefill worker until their lease ends, because no worker could "
            "take them.",
        ).labels()
        self.retries_denied = self._counter(
            "kvroute_retries_denied", "Attempts that were not repeated because of the retry budget."
        ).labels()
        self.ejections = self._counter(
            "kvroute_worker_ejections", "Ejections of workers from routing.", ["worker", "cause"]
        )
        self.streams_moved = self._counter(
            "kvroute_streams_moved",
            "Event streams that another worker continued after the client had got the lost worker's head.",
        ).labels()
        self.streams_aborted = self._counter(
            "kvroute_streams_aborted", "Exchanges that ended early, by the side that ended them.", ["by"]
        )
        self.trace_spans = self._counter(
            "kvroute_trace_spans",
            "Spans of traced requests, by outcome: exported, dropped (the queue was full), failed (the "
            "collector refused them or did not answer).",
            ["outcome"],
        )
        self.rejected = self._counter(
            "kvroute_requests_rejected", "Requests that the gateway answered itself, by error code.", ["code"]
        )
        self.client_timeouts = self._counter(
            "kvroute_client_timeouts",
            "Client connections closed because too few bytes arrived in time: no request (idle), a partial "
            "head (head), a partial body (body); or because no byte of an answer was accepted (write).",
            ["wait"],
        )
        for wait in ("idle", "head", "body"):
            self.client_timeouts.labels(wait)
        self.bodies_over_limit = self._counter(
            "kvroute_bodies_over_limit",
            "Request bodies that exceed a limit and were not read, by the limit's name (`nesting` and "
            "`plain_json` have no option) and by outcome: `forwarded` unread, or `refused`.",
            ["limit", "outcome"],
        )
        self.certificate_expiry = self._gauge(
            "kvroute_certificate_expiry_timestamp_seconds",
            "Earliest expiry of the certificates in the loaded file, by the file's option.",
            ["option"],
        )
        self.tls_handshakes = self._counter(
            "kvroute_tls_handshakes",
            "TLS handshakes of clients by outcome: started, finished, or the cause of a failure.",
            ["outcome"],
        )
        self.tls_reloads = self._counter(
            "kvroute_tls_reloads", "Changed files of server.tls that were loaded or refused.", ["outcome"]
        )
        self.epp_streams = self._counter(
            "kvroute_epp_streams",
            "Streams of Envoy's filters at the endpoint picker, by the part of a request that they show "
            "(whole, pick or watch) and by how they ended.",
            ["part", "end"],
        )
        self.epp_response_bodies = self._counter(
            "kvroute_epp_response_bodies", "Pieces of answers that passed the endpoint picker.", []
        )
        self.epp_not_served = self._counter(
            "kvroute_epp_not_served", "Picked requests that Envoy could not send to this worker.", ["worker"]
        )
        self.key_requests = self._counter(
            "kvroute_key_requests", "Requests that were admitted, by the name of their key.", ["key"]
        )
        self.key_tokens = self._counter(
            "kvroute_key_tokens", "Prompt and completion tokens charged to keys that limit them.", ["key"]
        )
        self.key_limited = self._counter(
            "kvroute_key_limited", "Requests refused by a limit of their key.", ["key", "limit"]
        )
        self.key_overshoot = self._counter(
            "kvroute_key_overshoot", "Use beyond a limit, seen late from other processes.", ["key", "limit"]
        )
        self.key_reloads = self._counter(
            "kvroute_key_reloads", "Changes of the file of keys that were loaded or refused.", ["outcome"]
        )
        self.jwks_reads = self._counter(
            "kvroute_jwks_reads", "Reads of tokens' signing keys: loaded, unchanged or failed.", ["outcome"]
        )
        self.answers_refused = self._counter(
            "kvroute_answers_refused",
            "Answers to the gateway's own requests that were too long (size) or compressed (encoding).",
            ["reason"],
        )
        self.tokens_checked = self._counter(
            "kvroute_tokens_checked",
            "JSON Web Tokens that were checked because their outcome was not remembered: valid or refused.",
            ["outcome"],
        )
        self.queue_waiting = self._gauge(
            "kvroute_queue_waiting",
            "Requests that wait for a worker with a free permit, by the name of their key.",
            ["model", "key"],
        )
        self.queue_wait = self._histogram(
            "kvroute_queue_wait_seconds",
            "Time that requests waited before they were sent; 0 for those that did not wait.",
            _LATENCY_S,
            ["model", "key"],
        )
        self.queue_shed = self._counter(
            "kvroute_queue_shed",
            "Requests answered 429 because of the queue: it was full, the expected wait was too long, a "
            "preferred request displaced it, or the deadline passed.",
            ["model", "key", "cause"],
        )
        self.queue_heads = self._counter(
            "kvroute_queue_heads",
            "Event streams whose head was sent while they waited in the queue, by what followed: a worker's "
            "answer, an error event (error), or nothing, because the client left (client).",
            ["end"],
        )
        self.isolated = self._counter(
            "kvroute_isolated_requests",
            "Requests that got a key space of their own, for their LoRA adapter or their tenant.",
            ["model"],
        )
        self.request_bytes = self._histogram(
            "kvroute_request_body_bytes", "Size of request bodies.", _BYTES
        ).labels()
        for by in ("client", "worker", "shutdown"):
            self.streams_aborted.labels(by)
        self._series: dict[tuple[str, str, str, str, int, bool], Series] = {}
        self._before_collect: list[Callable[[], None]] = []
        self._prefilled: dict[str, tuple[FastHistogram, FastCounter]] = {}
        self._handed_over: dict[tuple[str, str], tuple[FastCounter, FastCounter]] = {}
        registry.register(self)

    def series(
        self, model: str, worker: str, strategy: str, reason: str, status: int, streamed: bool = False
    ) -> Series:
        """The counters of requests with these labels; "-" for a value that does not exist."""
        key = (model, worker, strategy, reason, status, streamed)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series(
                self, RequestLabels(model, worker, strategy, reason, str(status)), streamed
            )
        return series

    def seconds(
        self, outcome: RequestLabels, streamed: bool
    ) -> tuple[FastCounter, FastHistogram, FastHistogram]:
        """Counter of finished requests, histograms of duration and time to first byte. For `Series`."""
        pool = (outcome.model, outcome.worker, outcome.strategy)
        first_byte = self._first_byte.labels(*pool, "true" if streamed else "false")
        return self._requests.labels(*outcome), self._duration.labels(*pool), first_byte

    def routed_tokens(self, outcome: RequestLabels) -> tuple[FastCounter, FastCounter, FastHistogram]:
        """Counters of prompt tokens and of tokens predicted on the GPU; predictions by length. For
        `Series`."""
        pool = (outcome.model, outcome.worker, outcome.strategy)
        return (
            self._prompt_tokens.labels(*pool),
            self.hit_tokens(outcome, _TIERS[0]),
            self._matched.labels(outcome.strategy),
        )

    def hit_tokens(self, outcome: RequestLabels, tier: str) -> FastCounter:
        """Counter of the tokens that were predicted in a tier. For `Series`."""
        return self._hit_tokens.labels(outcome.model, outcome.worker, outcome.strategy, tier)

    def reported_tokens(self, outcome: RequestLabels) -> tuple[FastCounter, FastCounter]:
        """Counters of reported prompt tokens and reported cached tokens. For `Series`."""
        pair = (outcome.model, outcome.worker)
        return self._reported_prompt_tokens.labels(*pair), self._cached_tokens.labels(*pair)

    def gaps(self, model: str, worker: str, strategy: str) -> FastHistogram:
        """The histogram of the times between the chunks of a stream, in seconds."""
        return self._gaps.labels(model, worker, strategy)

    def predicted(
        self,
        strategy: str,
        worker: str,
        tier: str,
        outcomes: Iterable[tuple[str, int]],
        error_tokens: Sequence[int],
    ) -> None:
        """Count predictions: their number by outcome, and the tokens by which each of them was wrong."""
        for outcome, number in outcomes:
            if number:
                self._predictions.labels(strategy, worker, tier, outcome).inc(number)
        self._prediction_error.labels(strategy, worker, tier).extend(error_tokens)

    def prefilled(self, worker: str, seconds: float, computed_tokens: int) -> None:
        """Count a prompt that a prefill worker has computed for another worker."""
        children = self._prefilled.get(worker)
        if children is None:
            computed = self._handover_computed.labels(worker)
            children = self._prefilled[worker] = self._handover_prefill.labels(worker), computed
        duration, tokens = children
        duration.append(seconds)
        tokens.value += computed_tokens

    def handed_over(
        self, prefill_worker: str, worker: str, moved_tokens: int, transfer_s: float | None
    ) -> None:
        """Count an answer of `worker` to a prompt that `prefill_worker` has computed."""
        key = worker, prefill_worker
        children = self._handed_over.get(key)
        if children is None:
            children = self._handed_over[key] = (
                self._handovers.labels(*key),
                self._handover_tokens.labels(worker),
            )
        answers, tokens = children
        answers.value += 1.0
        tokens.value += moved_tokens
        if transfer_s is not None:
            self._handover_transfer.labels(worker).append(transfer_s)

    def forget_workers(self, names: Collection[str]) -> None:
        """Remove all series with these values of the label `worker`. O(all series)."""
        self._series = {key: series for key, series in self._series.items() if key[1] not in names}
        self._prefilled = {key: children for key, children in self._prefilled.items() if key not in names}
        self._handed_over = {
            key: children for key, children in self._handed_over.items() if key[0] not in names
        }
        for family in (*self._counters, *self._gauges):
            family.remove("worker", names)
        for histogram in self._histograms:
            histogram.remove("worker", names)

    def forget_keys(self, names: Collection[str]) -> None:
        """Remove all series of the clients' keys with these names, except while requests of a key wait.

        O(all series).
        """
        for counted in self._counters:
            counted.remove("key", names)
        for observed in self._histograms:
            observed.remove("key", names)
        waiting = self.queue_waiting
        label_index = waiting.label_names.index("key")
        busy = {labels[label_index] for labels, counter in waiting.children.items() if counter.value}
        waiting.remove("key", set(names) - busy)

    def answer_refused(self, reason: str) -> None:
        """Count an answer to one of the gateway's own requests that was refused: size or encoding."""
        self.answers_refused.labels(reason).inc()

    def call_before_collect(self, count: Callable[[], None]) -> None:
        """Call `count` before each collection, for a caller that counts in batches."""
        self._before_collect.append(count)

    def flush(self) -> None:
        """Count the values that were appended to the histograms.

        A frequent caller of `FastHistogram.append` calls this from time to time.
        """
        for family in self._histograms:
            for histogram in family.children.values():
                histogram.flush()

    def collect(self) -> Iterable[Metric]:
        for count in self._before_collect:
            count()
        for counted in self._counters:
            total = CounterMetricFamily(counted.name, counted.help_text, labels=counted.label_names)
            for values, counter in counted.children.items():
                total.add_metric(values, counter.value)
            yield total
        for gauge in self._gauges:
            level = GaugeMetricFamily(gauge.name, gauge.help_text, labels=gauge.label_names)
            for values, counter in gauge.children.items():
                level.add_metric(values, counter.value)
            yield level
        for observed in self._histograms:
            distribution = HistogramMetricFamily(
                observed.name, observed.help_text, labels=observed.label_names
            )
            for values, counts in observed.children.items():
                distribution.add_metric(values, counts.cumulative(), counts.sum)
            yield distribution

    def _counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Family[FastCounter]:
        family = Family(FastCounter, name, help_text, labels)
        self._counters.append(family)
        return family

    def _gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Family[FastCounter]:
        family = Family(FastCounter, name, help_text, labels)
        self._gauges.append(family)
        return family

    def _histogram(
        self, name: str, help_text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> Family[FastHistogram]:
        family = Family(lambda: FastHistogram(bounds), name, help_text, labels)
        self._histograms.append(family)
        return family


class DepartedSeries:
    """Removes the series of workers or keys `SERIES_KEPT_S` after they left.

    Mutable: remembers the names that left and have not returned.
    """

    def __init__(self, metrics: Metrics, clock: Clock, forget: Callable[[Collection[str]], None]) -> None:
        """`forget`: `Metrics.forget_workers` or `Metrics.forget_keys`."""
        self._clock = clock
        self._forget = forget
        self._departed_at: dict[str, float] = {}
        """Name -> when it left."""
        metrics.call_before_collect(self._remove)

    def returned(self, name: str) -> None:
        self._departed_at.pop(name, None)

    def mark_departed(self, name: str) -> None:
        self._departed_at[name] = self._clock.now()
        self._remove()

    def _remove(self) -> None:
        due = self._clock.now() - SERIES_KEPT_S
        if names := {name for name, departed_at in self._departed_at.items() if departed_at <= due}:
            self._forget(names)
            for name in names:
                del self._departed_at[name]
