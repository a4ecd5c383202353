"""A virtual fleet in which one worker computes the prompt and another one answers."""

from __future__ import annotations

import pytest

from kvroute.sim.cache_tiers import Link
from kvroute.sim.fleet import FleetRequest, HandoverFleet, make_engines
from kvroute.sim.timing import TimingModel
from kvroute.wire.vllm import KvEvent

BLOCK = 512
TOKEN_BYTES = 1000
BYTES_S = 1e8
LATENCY_S = 0.005


class Scripted:
    """Sends each conversation to the pair (prefill worker or -1, decode worker) that is named for it."""

    def __init__(self, pairs: dict[int, tuple[int, int]]) -> None:
        self.pairs = pairs
        self.transfers: list[tuple[int, float]] = []
        self.steps: list[str] = []

    def place(self, request: FleetRequest, now: float) -> int:
        request.prefill_worker, worker = self.pairs[request.conversation]
        return worker

    def prefilled(self, request: FleetRequest, now: float) -> None:
        self.steps.append("prefilled")

    def moved(self, request: FleetRequest, tokens: int, seconds: float, now: float) -> None:
        self.steps.append("moved")
        self.transfers.append((tokens, seconds))

    def first_token(self, request: FleetRequest, now: float) -> None:
        self.steps.append("first token")

    def finished(self, request: FleetRequest, now: float) -> None:
        self.steps.append("finished")

    def events(self, worker: int, events: list[KvEvent], now: float) -> None:
        """The caches record no events."""


def fleet(
    pairs: dict[int, tuple[int, int]], capacity_tokens: int = 100_000
) -> tuple[HandoverFleet, Scripted]:
    engines = make_engines(2, capacity_tokens=capacity_tokens, block_size=BLOCK)
    placement = Scripted(pairs)
    links = [Link(BYTES_S) for _ in engines]
    return (
        HandoverFleet(engines, placement, links=links, token_bytes=TOKEN_BYTES, latency_s=LATENCY_S),
        placement,
    )


def request(conversation: int, tokens: int, output: int = 10) -> FleetRequest:
    keys = [conversation << 32 | place for place in range((tokens + output) // BLOCK)]
    return FleetRequest(keys, tokens, output, conversation=conversation)


def test_the_prefill_worker_computes_the_prompt_and_the_other_one_only_its_last_token() -> None:
    run, placement = fleet({1: (0, 1)})
    run.submit(request(1, 4000), 0.0)
    run.run()
    assert run.computed_tokens() == [4000, 1]
    assert placement.steps == ["prefilled", "moved", "first token", "finished"]
    assert run.moved_tokens == 4000


def test_the_first_token_comes_after_prefill_transfer_and_one_iteration() -> None:
    run, placement = fleet({1: (0, 1)})
    run.submit(request(1, 4000), 0.0)
    run.run()
    timing = TimingModel()
    prefill_s = timing.iteration_s(4000, 4000 * 2000, 0)
    transfer_s = 4000 * TOKEN_BYTES / BYTES_S + LATENCY_S
    step_s = timing.iteration_s(1, 3999.5, 0)
    assert placement.transfers == [(4000, pytest.approx(transfer_s))]
    assert run.done[0].ttft_s == pytest.approx(prefill_s + transfer_s + step_s)


def test_blocks_that_the_decode_worker_holds_are_not_moved() -> None:
    run, placement = fleet({1: (0, 1)})
    run.submit(request(1, 4000), 0.0)
    run.submit(request(1, 5000), 10.0)
    run.run()
    held = 4009 // BLOCK * BLOCK  # the first prompt and its answer, but for the last token
    assert [tokens for tokens, _ in placement.transfers] == [4000, 5000 - held]


def test_transfers_into_one_worker_follow_one_another() -> None:
    run, placement = fleet({1: (0, 1), 2: (0, 1)})
    run.submit(request(1, 4000), 0.0)
    run.submit(request(2, 600), 0.0)  # computed in the next iteration, before the first transfer has ended
    run.run()
    later_s = TimingModel().iteration_s(600, 600 * 300, 0)
    both_s = 4600 * TOKEN_BYTES / BYTES_S
    assert [tokens for tokens, _ in placement.transfers] == [4000, 600]
    assert placement.transfers[1][1] == pytest.approx(both_s - later_s + LATENCY_S)


def test_the_prefill_worker_keeps_its_blocks_until_they_are_moved() -> None:
    # A cache for one prompt: the second one must wait until the first transfer has ended.
    run, _ = fleet({1: (0, 1), 2: (-1, 0)}, capacity_tokens=5120)
    run.submit(request(1, 4000), 0.0)
    run.submit(request(2, 4000), 0.01)
    run.run()
    first, second = sorted(run.done, key=lambda each: each.conversation)
    moved_s = TimingModel().iteration_s(4000, 4000 * 2000, 0) + 4000 * TOKEN_BYTES / BYTES_S + LATENCY_S
    assert second.first_token_s > moved_s
    assert first.prefill_worker == 0


def test_a_request_without_a_prefill_worker_is_done_by_one_worker() -> None:
    run, placement = fleet({1: (-1, 1)})
    run.submit(request(1, 4000), 0.0)
    run.run()
    assert run.computed_tokens() == [0, 4000]
    assert placement.steps == ["first token", "finished"]
    assert placement.transfers == []
