"""Recording of decisions, and counting of hot prefixes. Decisions made again: tests/integration."""

from __future__ import annotations

from kvroute.blocks.keys import PromptKeys, block_keys
from kvroute.fleet.worker import FleetView, HealthState, Worker, WorkerId, WorkerSpec
from kvroute.routing.recording import MOST_DECISIONS, MOST_WORKERS_PER_SECOND, HotPrefixes
from kvroute.routing.router import Router
from kvroute.routing.strategy import RouteQuery

WORKERS = tuple(
    Worker(WorkerSpec(WorkerId(name), f"http://{name}"), state=HealthState.HEALTHY, index=index)
    for index, name in enumerate(("a", "b"))
)


def query(text: str, now: float = 0.0) -> RouteQuery:
    keys = block_keys(text.encode())
    return RouteQuery("m", now, (PromptKeys(keys, len(text) // 4, 16.0),), len(text) // 4)


def view() -> FleetView:
    return FleetView("m", WORKERS, 1)


def test_a_prefix_of_several_requests_is_shown_at_its_longest_shared_length() -> None:
    prefixes = HotPrefixes()
    shared = "system prompt. " * 100
    for number in range(5):
        prefixes.add(query(shared + f"question {number} " * 50, now=float(number)))

    [(key, hottest), *_] = prefixes.hottest(3)

    assert hottest.requests == 5
    shared_blocks = len(block_keys(shared.encode()))
    assert hottest.blocks <= shared_blocks < 2 * hottest.blocks
    assert list(hottest.chain or ())[-1] == key == block_keys(shared.encode())[hottest.blocks - 1]


def test_prefixes_that_return_at_the_same_moment_after_a_pause_are_all_shown() -> None:
    prefixes = HotPrefixes()
    for now in (0.0, 60.0):
        for number in range(20):
            prefixes.add(query(f"{number} conversation " * 100, now=now))

    assert len(prefixes.hottest(100)) == 20


def test_prompts_of_one_request_are_not_hot() -> None:
    prefixes = HotPrefixes()
    for number in range(5):
        prefixes.add(query(f"{number} different " * 100, now=float(number)))

    assert prefixes.hottest(3) == []


def test_the_holders_of_a_prefix_are_those_that_got_it() -> None:
    router = Router()
    for worker in WORKERS:
        router.worker_joined(worker)
    recorder = router.record()
    for now in (0.0, 1.0):
        asked = query("the same beginning " * 100, now)
        decision = router.decide(asked, view())
        router.dispatch(asked, decision, decision.ranking[0], now).finish(now)

    [(_, hottest), *_] = recorder.prefixes.hottest(1)
    holders = router.holders(hottest, WORKERS)

    assert set(holders) == {decision.ranking[0].worker.id}
    assert holders[decision.ranking[0].worker.id].gpu == hottest.tokens


def test_more_decisions_in_a_second_than_are_recorded_are_counted() -> None:
    router = Router()
    recorder = router.record()
    most = MOST_WORKERS_PER_SECOND // len(WORKERS)
    for _ in range(most + 3):
        router.decide(query("short", now=5.0), view())
    assert (len(recorder), recorder.skipped) == (MOST_DECISIONS, 3)

    router.decide(query("short", now=6.0), view())
    assert recorder.skipped == 3


def test_a_stopped_router_records_nothing_more() -> None:
    router = Router()
    recorder = router.record()
    router.recorder = None
    router.decide(query("short"), view())

    assert len(recorder) == 0
