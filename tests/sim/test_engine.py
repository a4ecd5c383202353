from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.engine import EngineRequest, RequestPhase, SimEngine
from kvroute.sim.timing import TimingModel
from kvroute.wire.vllm import BlockRemoved, BlockStored


def engine(capacity: int = 64, size: int = 4, **timing: int) -> SimEngine:
    return SimEngine(PagedCache(capacity, size, record=True), TimingModel(**timing))


def request(prompt: int, output: int = 1, *, name: int = 1, common: int = 0, size: int = 4) -> EngineRequest:
    """A request whose first `common` blocks are the same in all requests."""
    blocks = (prompt + output) // size
    keys = [block if block < common else name << 16 | block for block in range(blocks)]
    return EngineRequest(Chain(keys, list(range(prompt + output))), prompt, output)


def drain(sim: SimEngine, limit: int = 10_000) -> list[EngineRequest]:
    ended = []
    for _ in range(limit):
        if sim.begin() is None:
            return ended
        progress = sim.finish()
        ended += progress.finished + progress.refused
    raise AssertionError("the engine does not come to an end")


def test_a_request_produces_its_first_token_with_its_prefill_and_one_each_iteration() -> None:
    sim, item = engine(), request(10, 3)
    sim.add(item)
    produced = []

    while sim.begin() is not None:
        progress = sim.finish()
        produced.append(item.produced(sim.iteration))
        if len(produced) == 1:
            assert progress.prefilled == [item]
            assert progress.finished == []

    assert produced == [1, 2, 3]
    assert item.phase is RequestPhase.FINISHED
    assert not sim.has_work


def test_an_idle_engine_schedules_no_iteration() -> None:
    sim = engine()

    assert sim.begin() is None
    with pytest.raises(RuntimeError):
        sim.finish()


def test_a_repeated_prompt_hits_but_never_whole() -> None:
    sim = engine()
    first, again = request(8), request(8)
    sim.add(first)
    drain(sim)
    sim.add(again)
    drain(sim)

    assert (first.cached_tokens, first.stored_tokens) == (0, 8)
    assert (again.cached_tokens, again.stored_tokens) == (4, 4)
    assert (sim.counters.cache_queries, sim.counters.cache_hits) == (16, 4)
    assert sim.counters.computed_tokens == 12


def test_the_next_turn_finds_the_answer_except_its_last_token() -> None:
    sim = engine()
    keys = list(range(1, 10))
    sim.add(EngineRequest(Chain(keys), prompt_tokens=6, output_tokens=7))
    drain(sim)
    following = EngineRequest(Chain(keys), prompt_tokens=20, output_tokens=1)
    sim.add(following)
    drain(sim)

    # 6 + 6 tokens were computed; the 13th, sampled last, never was.
    assert following.cached_tokens == 12


def test_equal_prompts_of_one_iteration_share_their_blocks() -> None:
    sim = engine()
    twins = [request(9), request(9)]
    for twin in twins:
        sim.add(twin)
    sim.begin()
    events = sim.finish().events

    assert [twin.cached_tokens for twin in twins] == [0, 8]
    assert [len(event.block_hashes) for event in events if isinstance(event, BlockStored)] == [2]


def test_equal_answers_generated_at_the_same_time_are_stored_twice() -> None:
    sim = engine()
    for _ in range(2):
        sim.add(request(5, 8))
    stored: list[int | bytes] = []
    while sim.begin() is not None:
        for event in sim.finish().events:
            if isinstance(event, BlockStored):
                stored += event.block_hashes

    assert sorted(stored, key=str) == sorted(
        [1 << 16, 1 << 16 | 1, 1 << 16 | 1, 1 << 16 | 2, 1 << 16 | 2], key=str
    )


def test_long_prompts_are_computed_in_chunks_and_announced_chunk_by_chunk() -> None:
    sim = engine(max_batched_tokens=8)
    sim.add(request(20))
    lengths, firsts = [], []
    while sim.begin() is not None:
        progress = sim.finish()
        firsts.append(bool(progress.prefilled))
        lengths.append([len(e.block_hashes) for e in progress.events if isinstance(e, BlockStored)])

    assert firsts == [False, False, True]
    assert lengths == [[2], [2], [1]]


def test_decodes_continue_while_a_long_prompt_is_computed() -> None:
    sim = engine(max_batched_tokens=8)
    short, long = request(4, 6, name=1), request(30, 1, name=2)
    sim.add(short)
    sim.begin()
    sim.finish()
    sim.add(long)

    for expected in (2, 3, 4):
        sim.begin()
        sim.finish()
        assert short.produced(sim.iteration) == expected

    # The decode used one of the eight tokens of each iteration.
    assert long.computed == 21


def test_the_length_of_an_iteration_follows_the_timing_model() -> None:
    sim = engine(capacity=4096)
    timing = sim.timing
    sim.add(request(1000, 3))

    assert sim.begin() == pytest.approx(timing.iteration_s(1000, 1000 * 500, 0))
    sim.finish()
    assert sim.begin() == pytest.approx(timing.iteration_s(1, 0, 1001))
    sim.finish()
    assert sim.begin() == pytest.approx(timing.iteration_s(1, 0, 1002))


def test_no_more_sequences_run_than_allowed() -> None:
    sim = engine(max_sequences=2)
    items = [request(4, 3, name=name) for name in range(3)]
    for item in items:
        sim.add(item)

    sim.begin()
    assert (sim.running, sim.waiting) == (2, 1)
    sim.finish()
    assert drain(sim) == items


def test_a_request_waits_until_its_whole_answer_has_room() -> None:
    sim = engine(capacity=4)
    first, second = request(8, 5, name=1), request(8, 1, name=2)
    sim.add(first)
    sim.add(second)

    sim.begin()
    assert (first.phase, second.phase) == (RequestPhase.PREFILL, RequestPhase.WAITING)
    sim.finish()

    assert drain(sim) == [first, second]


def test_evictions_are_announced_before_the_blocks_that_needed_the_room() -> None:
    sim = engine(capacity=3)
    sim.add(request(12, name=1))
    drain(sim)
    sim.add(request(8, name=2))
    sim.begin()
    events = sim.finish().events

    assert [type(event) for event in events] == [BlockRemoved, BlockRemoved, BlockStored]
    assert [key for event in events[:2] for key in event.block_hashes] == [1 << 16 | 2, 1 << 16 | 1]


def test_a_request_that_can_never_fit_is_refused_and_the_next_one_runs() -> None:
    sim = engine(capacity=2)
    big, small = request(12, name=1), request(4, name=2)
    sim.add(big)
    sim.add(small)

    assert drain(sim) == [small, big]
    assert big.phase is RequestPhase.REFUSED


def test_a_request_without_output_ends_with_its_prefill() -> None:
    sim, item = engine(), request(5, 0)
    sim.add(item)
    sim.begin()
    progress = sim.finish()

    assert progress.prefilled == progress.finished == [item]
    assert sim.counters.generation_tokens == 0


def test_reading_the_cache_can_be_declined() -> None:
    sim = engine()
    sim.add(request(9))
    drain(sim)
    blind = request(9)
    blind.reads_cache = False
    sim.add(blind)
    drain(sim)

    assert blind.cached_tokens == 0
    assert sim.counters.cache_queries == 9


def test_a_full_report_announces_hit_blocks_again_from_the_start() -> None:
    sim = engine()
    sim.add(request(9))
    drain(sim)
    asking = request(9)
    asking.report_full = True
    sim.add(asking)
    sim.begin()

    (event,) = sim.finish().events

    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, len(event.block_hashes)) == (None, 2)


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_an_abort_in_any_phase_frees_everything(iterations: int) -> None:
    sim = engine(max_batched_tokens=16)
    item = request(30, 20)
    sim.add(item)
    for _ in range(iterations):
        sim.begin()
        sim.finish()

    sim.abort(item)
    sim.abort(item)

    assert item.phase is RequestPhase.ABORTED
    assert sim.cache.available == 64
    assert sim.counters.aborted == 1
    assert not sim.has_work
    assert drain(sim) == []


def test_an_abort_between_begin_and_finish_is_safe() -> None:
    sim = engine()
    leaving, staying = request(6, 2, name=1), request(6, 2, name=2)
    sim.add(leaving)
    sim.add(staying)
    sim.begin()
    sim.abort(leaving)
    progress = sim.finish()

    assert progress.prefilled == [staying]
    assert drain(sim) == [staying]
    assert sim.cache.available == 64


def test_a_reset_needs_an_idle_engine_and_is_announced_with_the_next_iteration() -> None:
    sim = engine()
    sim.add(request(6, 4))
    sim.begin()
    assert not sim.reset_prefix_cache()
    sim.finish()
    drain(sim)

    assert sim.reset_prefix_cache()
    sim.add(request(6))
    sim.begin()
    kinds = [type(event).__name__ for event in sim.finish().events]

    assert kinds == ["AllBlocksCleared", "BlockStored"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_after_any_traffic_all_blocks_are_free(data: st.DataObject) -> None:
    sim = engine(capacity=12, max_batched_tokens=10, max_sequences=3)
    live: list[EngineRequest] = []
    counts: dict[int | bytes, int] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "step", "step", "abort"]))
        if action == "add":
            name = data.draw(st.integers(1, 3))
            item = request(data.draw(st.integers(1, 30)), data.draw(st.integers(0, 12)), name=name, common=2)
            live.append(item)
            sim.add(item)
        elif action == "abort" and live:
            sim.abort(data.draw(st.sampled_from(live)))
        elif sim.begin() is not None:
            _count(sim.finish().events, counts)
    for _ in range(500):
        if sim.begin() is None:
            break
        _count(sim.finish().events, counts)

    assert not sim.has_work
    assert sim.cache.available == 12
    assert {item.phase for item in live} <= {RequestPhase.FINISHED, RequestPhase.ABORTED}
    assert all(item.produced(sim.iteration) in (0, item.output_tokens) for item in live)
    assert {key for key, count in counts.items() if count} == sim.cache.held_keys


def _count(events: list[object], counts: dict[int | bytes, int]) -> None:
    for event in events:
        assert isinstance(event, BlockStored | BlockRemoved)
        for key in event.block_hashes:
            counts[key] = counts.get(key, 0) + (1 if isinstance(event, BlockStored) else -1)
