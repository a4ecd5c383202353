"""What an answer's head says about the workers that were tried, and what the cache map says of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from tests.support.waiting import until

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier, token_keys
from kvroute.epp.messages import AnswerHead, EnvoyAttempts, attempts_of, read_answer
from kvroute.epp.picker import AssumedPrefills, Expected, FirstTokens, PickedDispatch
from kvroute.fleet.foreign import EngineFigures
from kvroute.fleet.load import WorkerLoad
from kvroute.fleet.worker import Worker, WorkerSpec
from kvroute.index.map_trust import MapTrust
from kvroute.index.prefix_index import Holder, PrefixIndex
from kvroute.request.record import Record
from kvroute.routing.router import Dispatch
from kvroute.routing.strategy import (
    CachePlace,
    Candidate,
    CandidateMatch,
    CostTerms,
    ExactPrompt,
    NoMap,
    RouteQuery,
    Tokens,
)

ADDRESSES = ("10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80")
RESET = "upstream_reset_before_response_started"


def head(
    served: str = "", trouble: str = "", *, fault: bool = False, attempts: int | None = None
) -> AnswerHead:
    return AnswerHead(503 if trouble else 200, served, False, trouble, fault, attempts)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (head("10.0.0.1:80"), EnvoyAttempts(1, 0, 0)),
        (head("10.0.0.3:80", attempts=3), EnvoyAttempts(3, 2, 2)),
        (head(), EnvoyAttempts(1, 0, 0)),  # Envoy says nothing
        (head(attempts=2), EnvoyAttempts(2, 1, 1)),
        (head("10.9.9.9:80", attempts=4), EnvoyAttempts(4, 3, None)),  # the last one by Envoy's own choice
        (head("10.9.9.9:80", attempts=1), EnvoyAttempts(1, 0, None)),
        (head("10.0.0.1:80", attempts=4), EnvoyAttempts(4, 3, 0)),  # Envoy has begun again
        (head("10.0.0.1:80", RESET, fault=True, attempts=1), EnvoyAttempts(1, 1, None)),
        (head("10.0.0.3:80", RESET, fault=True, attempts=3), EnvoyAttempts(3, 3, None)),
        (
            head("10.0.0.1:80", RESET, fault=True, attempts=4),
            EnvoyAttempts(4, 3, None),
        ),  # tried again
        (head("", RESET, fault=True), EnvoyAttempts(1, 1, None)),
        (head("10.0.0.1:80", "response_timeout", attempts=1), EnvoyAttempts(1, 0, None)),
        (head("10.0.0.2:80", "response_timeout", attempts=2), EnvoyAttempts(2, 1, None)),
        (head("", "response_timeout"), EnvoyAttempts(1, 0, None)),
        (head("", "no_healthy_upstream", attempts=0), EnvoyAttempts(0, 0, None)),
        (head("10.9.9.9:80", RESET, fault=True, attempts=4), EnvoyAttempts(4, 3, None)),
    ],
)
def test_only_what_a_worker_did_counts_as_its_failure(answer: AnswerHead, expected: EnvoyAttempts) -> None:
    assert attempts_of(answer, ADDRESSES) == expected


@pytest.mark.parametrize(
    ("details", "trouble", "is_workers_fault"),
    [
        ("via_upstream", "", False),
        ("", "", False),
        (f"{RESET}{{remote_connection_failure|delayed_connect_error:_Connection_refused}}", RESET, True),
        (f"{RESET}{{connection_termination}}", RESET, True),
        (f"{RESET}{{overflow}}", RESET, False),
        (f"{RESET}{{local_reset}}", RESET, False),
        ("response_timeout", "response_timeout", False),
        ("upstream_per_try_timeout", "upstream_per_try_timeout", False),
        ("no_healthy_upstream", "no_healthy_upstream", False),
        ("direct_response", "direct_response", False),
    ],
)
def test_envoys_details_say_whose_fault_an_answer_is(
    details: str, trouble: str, is_workers_fault: bool
) -> None:
    message = pb.ProcessingRequest()
    status = base_pb2.HeaderValue(key=":status", raw_value=b"503")
    message.response_headers.headers.headers.append(status)
    message.attributes["envoy.filters.http.ext_proc"].update(
        {"response.code_details": details, "upstream.request_attempt_count": 2}
    )

    answer = read_answer(message)

    assert (answer.trouble, answer.is_workers_fault, answer.attempts) == (trouble, is_workers_fault, 2)


SLOT, OTHER_SLOT = 7, 8
IDS = array("I", range(100, 141))
"""The token ids of a prompt with two full blocks."""


class IndexMap(NoMap):
    """A cache map over a real index of two slots. Mutable: counts how often it is refreshed and asked."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.holders = {slot: Holder(Tier.GPU) for slot in (SLOT, OTHER_SLOT)}
        for slot, holder in self.holders.items():
            self.index.attach(slot, holder)
        self.place = CachePlace(SLOT, 0, MapTrust.WHOLE)
        self.reads = self.lookups = 0

    def refresh(self, force: bool) -> bool:
        self.reads += 1
        return True

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        return (self.place,)

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        raise AssertionError("one slot is to be asked, not all of them")

    def holds(self, slot: int, keys: Sequence[BlockKey], tokens: int) -> bool:
        self.lookups += 1
        return self.index.holds(slot, keys, tokens)


class Queue:
    """Prompts that one worker computes in this order, and the map that shows it."""

    def __init__(self, names: str = "abc") -> None:
        self.map = IndexMap()
        self.load = WorkerLoad()
        self.first_tokens = FirstTokens(self.map, 0.001, lambda: 5.0)
        self.records = {name: Record(name.encode(), "/", 0.0, streamed=name != "b") for name in names}
        self.keys = {name: token_keys([ord(name), *range(39)], 0) for name in names}
        self.dispatches = {name: self._sent(name) for name in names}

    def _sent(self, name: str) -> Dispatch:
        dispatch = Dispatch(self.load, 0.0, 1.0, 40, True, worker=None)  # type: ignore[arg-type]
        self.load.enter(dispatch, 0.0)
        expected = Expected(SLOT, self.keys[name], 32)
        self.first_tokens.expect(expected, PickedDispatch(dispatch, self.records[name]))
        return dispatch

    def holds(self, name: str, tokens: int, slot: int = SLOT) -> None:
        keys = self.keys[name][: tokens // KEY_TOKENS]
        self.map.index.store(self.map.holders[slot], KEY_TOKENS, None, keys)

    @property
    def waiting(self) -> str:
        return "".join(name for name, dispatch in self.dispatches.items() if dispatch.is_queued)

    async def read(self) -> None:
        """Wait until the map was read twice more."""
        reads = self.map.reads
        await until(lambda: self.map.reads > reads + 1)


async def test_a_prompt_whose_full_blocks_the_worker_holds_is_computed() -> None:
    queue = Queue()

    queue.holds("a", 16)
    queue.holds("b", 32, slot=OTHER_SLOT)
    await queue.read()
    assert queue.waiting == "abc"  # in part, or elsewhere
    queue.holds("a", 32)
    await until(lambda: queue.waiting == "bc")

    assert queue.records["a"].first_byte == 5.0
    assert queue.load.queued == 2
    queue.holds("b", 32)
    await until(lambda: queue.waiting == "c")
    assert queue.records["b"].first_byte is None  # an answer in one piece has no first token


async def test_prompts_before_a_computed_one_are_computed_too() -> None:
    """Their blocks may have been evicted already."""
    queue = Queue()

    queue.holds("b", 32)

    await until(lambda: queue.waiting == "c")


async def test_lost_events_of_several_prompts_do_not_hide_a_later_one() -> None:
    queue = Queue()

    queue.holds("c", 32)

    await until(lambda: not queue.waiting)


async def test_lost_events_of_some_prompts_do_not_hide_those_between_them_and_the_last() -> None:
    queue = Queue("abcdefghijkl")

    for name in "abcf":
        queue.holds(name, 32)

    await until(lambda: queue.waiting == "ghijkl")


async def test_a_block_whose_predecessor_is_gone_shows_no_prompt() -> None:
    """The worker computes the prompt again, and stores the missing block."""
    queue = Queue("a")
    first, second = queue.keys["a"]

    queue.map.index.store(queue.map.holders[SLOT], KEY_TOKENS, first, [second])
    await queue.read()
    assert queue.waiting == "a"
    queue.holds("a", 16)

    await until(lambda: not queue.waiting)


async def test_few_of_many_prompts_are_looked_up() -> None:
    queue = Queue("".join(map(chr, range(1000, 2024))))
    reads, lookups = queue.map.reads, queue.map.lookups

    await queue.read()

    assert queue.map.lookups - lookups <= 20 * (queue.map.reads - reads)


async def test_the_map_is_not_read_when_nothing_waits() -> None:
    queue = Queue()

    for dispatch in queue.dispatches.values():
        dispatch.finish(1.0)
    await until(lambda: queue.first_tokens.is_idle)

    assert all(record.first_byte is None for record in queue.records.values())


def sent(held: CandidateMatch | None, prompts: int = 1) -> tuple[RouteQuery, Candidate]:
    """A request of `prompts` prompts with two full blocks, for a worker with `held`."""
    exact = ExactPrompt(len(IDS), token_keys(IDS[:-1], 0), PromptChunks(IDS[:-1]), last_id=IDS[-1])
    worker = Worker(WorkerSpec("w", "http://w"))
    return RouteQuery("m", 0.0, exact=(exact,) * prompts), Candidate(worker, 0.0, 0, 1.0, CostTerms(), held)


def first_tokens_of(place: CachePlace) -> FirstTokens:
    caches = IndexMap()
    caches.place = place
    return FirstTokens(caches, 1.0, lambda: 0.0)


WHOLE = CachePlace(SLOT, 0, MapTrust.WHOLE)


@pytest.mark.parametrize("held", [0, 16, 31])
def test_events_show_a_prompt_that_the_worker_does_not_hold(held: int) -> None:
    query, candidate = sent(CandidateMatch(Tokens(held), SLOT))

    assert first_tokens_of(WHOLE).of(query, candidate) == Expected(SLOT, query.exact[0].keys, 32)


def test_events_show_a_prompt_under_the_keys_of_the_workers_lookahead() -> None:
    query, candidate = sent(CandidateMatch(Tokens(0), SLOT))

    expected = first_tokens_of(WHOLE._replace(ahead=2)).of(query, candidate)

    assert expected == Expected(SLOT, query.exact[0].keys_ahead(2), 32)


@pytest.mark.parametrize(
    ("held", "prompts", "place"),
    [
        (None, 1, WHOLE),  # the strategy reads no map
        (CandidateMatch(Tokens(0), None), 1, WHOLE),  # the worker has no place in it
        (CandidateMatch(Tokens(0), OTHER_SLOT), 1, WHOLE),  # or no longer
        (CandidateMatch(Tokens(0), SLOT), 0, WHOLE),
        (CandidateMatch(Tokens(0), SLOT), 2, WHOLE),  # computed at the same time
        (CandidateMatch(Tokens(0), SLOT), 1, WHOLE._replace(trust=MapTrust.PARTIAL)),
        (CandidateMatch(Tokens(0), SLOT), 1, WHOLE._replace(trust=MapTrust.NONE)),
        (CandidateMatch(Tokens(32), SLOT), 1, WHOLE),  # nothing new is stored
        (CandidateMatch(Tokens(16), SLOT), 1, WHOLE._replace(ahead=20)),
    ],
)
def test_events_show_nothing_about_other_requests(
    held: CandidateMatch | None, prompts: int, place: CachePlace
) -> None:
    assert first_tokens_of(place).of(*sent(held, prompts)) is None


class Assumed:
    """Prompts on one worker whose prefill is assumed to take a minute each, sent 1 s apart from 10 s on."""

    def __init__(self, count: int = 5) -> None:
        self.worker = Worker(WorkerSpec("w", "http://w"))
        self.looks = 0
        self.prefills = AssumedPrefills(self._now, 0.001)
        self.dispatches = [self._sent(10.0 + number) for number in range(count)]

    def _now(self) -> float:
        self.looks += 1
        return 20.0

    def _sent(self, now: float) -> Dispatch:
        dispatch = Dispatch(self.worker.load, now, 60.0, 40, False, worker=self.worker)
        self.worker.load.enter(dispatch, now)
        self.prefills.expect(dispatch, now)
        return dispatch

    async def read(self) -> int:
        """How many prompts wait after the next look at the worker's figures."""
        looks = self.looks
        await until(lambda: self.looks > looks + 1)
        return self.worker.load.queued

    @property
    def is_queued(self) -> list[bool]:
        return [dispatch.is_queued for dispatch in self.dispatches]


@pytest.mark.parametrize(("waiting", "queued"), [(0, 1), (1, 2), (3, 4), (9, 5)])
async def test_the_engines_queue_shows_which_prefills_are_over(waiting: int, queued: int) -> None:
    """One of those that wait no longer may be computed in part."""
    assumed = Assumed()
    assumed.worker.engine_queue = EngineFigures(waiting, 0, 0.0, None, 19.0)

    assert await assumed.read() == queued
    assert assumed.is_queued == [False] * (5 - queued) + [True] * queued


async def test_each_rank_of_a_worker_may_compute_a_prompt_in_part() -> None:
    assumed = Assumed()
    assumed.worker.rank_loads = {rank: WorkerLoad() for rank in range(3)}
    assumed.worker.engine_queue = EngineFigures(0, 0, 0.0, None, 19.0)

    assert await assumed.read() == 3


async def test_requests_that_the_engine_did_not_have_yet_wait_on() -> None:
    assumed = Assumed()
    assumed.worker.engine_queue = EngineFigures(
        0, 0, 0.0, None, 12.5
    )  # only those of 10 s and 11 s can have arrived

    assert await assumed.read() == 4
    assert assumed.is_queued == [False, True, True, True, True]


async def test_without_the_engines_figures_a_prefill_takes_its_assumed_time() -> None:
    assumed = Assumed()

    assert await assumed.read() == 5


async def test_the_engines_figures_are_not_read_when_no_prefill_is_assumed() -> None:
    assumed = Assumed(2)

    for dispatch in assumed.dispatches:
        dispatch.finish(15.0)

    await until(lambda: assumed.prefills.is_idle)
