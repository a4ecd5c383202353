"""What an answer's head says about the workers that were tried, and what the cache map says of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from tests.support.waiting import until

from kvroute.blocks.chunks import PromptChunks
from kvroute.epp.messages import AnswerHead, read_answer
from kvroute.epp.picker import Attempts, Expected, FirstTokens, PickedDispatch, attempts_of
from kvroute.fleet.load import WorkerLoad
from kvroute.fleet.worker import Worker
from kvroute.gateway.journal import Record
from kvroute.routing.router import Dispatch
from kvroute.routing.strategy import CachePlace, ExactPrompt, Tokens

ADDRESSES = ("10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80")
RESET = "upstream_reset_before_response_started"


def head(
    served: str = "", trouble: str = "", *, fault: bool = False, attempts: int | None = None
) -> AnswerHead:
    return AnswerHead(503 if trouble else 200, served, False, trouble, fault, attempts)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (head("10.0.0.1:80"), Attempts(1, 0, 0)),
        (head("10.0.0.3:80", attempts=3), Attempts(3, 2, 2)),
        (head(), Attempts(1, 0, 0)),  # Envoy says nothing
        (head(attempts=2), Attempts(2, 1, 1)),
        (head("10.9.9.9:80", attempts=4), Attempts(4, 3, None)),  # the last one by Envoy's own choice
        (head("10.9.9.9:80", attempts=1), Attempts(1, 0, None)),
        (head("10.0.0.1:80", attempts=4), Attempts(4, 3, 0)),  # Envoy has begun again
        (head("10.0.0.1:80", RESET, fault=True, attempts=1), Attempts(1, 1, None)),
        (head("10.0.0.3:80", RESET, fault=True, attempts=3), Attempts(3, 3, None)),
        (head("10.0.0.1:80", RESET, fault=True, attempts=4), Attempts(4, 3, None)),  # tried again at the end
        (head("", RESET, fault=True), Attempts(1, 1, None)),
        (head("10.0.0.1:80", "response_timeout", attempts=1), Attempts(1, 0, None)),
        (head("10.0.0.2:80", "response_timeout", attempts=2), Attempts(2, 1, None)),
        (head("", "response_timeout"), Attempts(1, 0, None)),
        (head("", "no_healthy_upstream", attempts=0), Attempts(0, 0, None)),
        (head("10.9.9.9:80", RESET, fault=True, attempts=4), Attempts(4, 3, None)),
    ],
)
def test_only_what_a_worker_did_counts_as_its_failure(answer: AnswerHead, expected: Attempts) -> None:
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


class FakeMap:
    """A cache map whose matches a test sets, by the prompt's adapter."""

    def __init__(self) -> None:
        self.held: dict[str, dict[int, Tokens]] = {}
        self.reads = 0

    def refresh(self, force: bool) -> bool:
        self.reads += 1
        return True

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        return ()

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        return self.held.get(prompt.adapter or "", {})


class Queue:
    """Three prompts that one worker computes, and the map that shows it."""

    def __init__(self) -> None:
        self.map = FakeMap()
        self.load = WorkerLoad()
        self.first_tokens = FirstTokens(self.map, 0.001, lambda: 5.0)
        self.records = {name: Record(name.encode(), "/", 0.0, streamed=name != "b") for name in "abc"}
        self.dispatches = {name: self._sent(name) for name in "abc"}

    def _sent(self, name: str) -> Dispatch:
        dispatch = Dispatch(self.load, 0.0, 1.0, 40, True, worker=None)  # type: ignore[arg-type]
        self.load.enter(dispatch, 0.0)
        prompt = ExactPrompt(40, (), PromptChunks([]), adapter=name)
        expected = Expected(7, prompt, 32)
        self.first_tokens.expect(expected, PickedDispatch(dispatch, self.records[name]))
        return dispatch

    def holds(self, name: str, tokens: int, slot: int = 7) -> None:
        self.map.held[name] = {slot: Tokens(tokens)}

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
    queue.holds("b", 32, slot=8)
    await queue.read()
    assert queue.waiting == "abc"  # in part, or elsewhere
    queue.holds("a", 32)
    await until(lambda: queue.waiting == "bc")

    assert queue.records["a"].first_byte == 5.0
    assert queue.load.queued == 2
    queue.holds("b", 48)
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


async def test_the_map_is_not_read_when_nothing_waits() -> None:
    queue = Queue()

    for dispatch in queue.dispatches.values():
        dispatch.finish(1.0)
    await until(lambda: queue.first_tokens.is_idle)

    assert all(record.first_byte is None for record in queue.records.values())
