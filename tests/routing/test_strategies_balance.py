"""The pitfalls of prefix routing, in virtual time, on the simulator's engine and its default timing.

Hundreds of chats over seven workers: tests/sim/test_fleet_chat.py.
"""

from __future__ import annotations

import pytest

from kvroute.routing.registry import STRATEGIES
from kvroute.sim.fleet import ChatClients, ChatShape, imbalance, returned_share

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.005])
@pytest.mark.parametrize("prefix", [256, 1024, 4096, 16_384])
def test_one_hot_prefix_is_spread_over_both_workers(virtual_fleet, keys_of, rng, prefix, gap_s) -> None:
    """60 requests at once that share all but their last tokens."""
    fleet, shared = virtual_fleet(2), keys_of(rng, prefix)
    for number in range(60):
        fleet.ask(number * gap_s, shared + keys_of(rng, 160), prefix + 32, 128)

    fleet.fleet.run()

    assert max(fleet.shares()) <= 40
    assert fleet.is_at_rest()


def test_a_hot_prefix_that_one_worker_holds_already_is_copied(virtual_fleet, keys_of, rng) -> None:
    fleet, shared = virtual_fleet(2), keys_of(rng, 1024)
    fleet.ask(0.0, shared + keys_of(rng, 160), 1056, 128)
    for number in range(60):
        fleet.ask(30.0 + number * 0.001, shared + keys_of(rng, 160), 1056, 128)

    fleet.fleet.run()

    assert max(fleet.shares()) <= 41


def test_cold_prompts_one_after_another_reach_both_workers(virtual_fleet, keys_of, rng) -> None:
    fleet = virtual_fleet(2)
    for number in range(40):
        fleet.ask(number * 5.0, keys_of(rng, 800), 700, 100)

    fleet.fleet.run()

    assert max(fleet.shares()) <= 28


def test_a_first_block_that_all_share_draws_nothing_together(virtual_fleet, keys_of, rng) -> None:
    """Following any match at all would send everything to one worker."""
    fleet, first = virtual_fleet(7), keys_of(rng, 16)
    for _ in range(500):
        fleet.ask(rng.uniform(0, 30), first + keys_of(rng, 2016), 1900, 100)

    fleet.fleet.run()

    assert imbalance(fleet.fleet.computed_tokens()) <= 1.2


def test_half_of_the_requests_on_one_prefix_load_all_workers(virtual_fleet, keys_of, rng) -> None:
    fleet, hot = virtual_fleet(4), keys_of(rng, 4096)
    for number in range(400):
        keys = (hot if number % 2 else []) + keys_of(rng, 1024)
        fleet.ask(rng.uniform(0, 20), keys, 16 * len(keys) - 100, 64)

    fleet.fleet.run()

    assert imbalance(fleet.shares()) <= 1.4


def test_a_long_prompt_counts_by_its_prefill_time(virtual_fleet, keys_of, rng) -> None:
    """One prompt of 100K tokens holds up its worker for seconds; as a count it would be one request."""
    fleet = virtual_fleet(2)
    long = fleet.ask(0.0, keys_of(rng, 100_160), 100_000, 64)
    short = [fleet.ask(0.1 + number * 0.05, keys_of(rng, 512), 500, 8) for number in range(20)]

    fleet.fleet.run()

    assert {request.worker for request in short} == {1 - long.worker}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chats_load_all_workers_alike(virtual_fleet, strategy) -> None:
    fleet = virtual_fleet(3, strategy)
    ChatClients(fleet.fleet, clients=60, requests=360).start()

    fleet.fleet.run()

    assert imbalance(fleet.fleet.computed_tokens()) <= 1.3
    assert returned_share(fleet.fleet.done) >= (0.85 if STRATEGIES[strategy].has_affinity else 0.0)
    assert fleet.is_at_rest()


def test_predicted_hits_equal_the_engines_hits(virtual_fleet) -> None:
    """Except the end of the last answer, which the router sees with the next turn."""
    fleet = virtual_fleet(2)
    ChatClients(fleet.fleet, clients=20, requests=200).start()

    fleet.fleet.run()

    assert fleet.matched_tokens > 0
    cached = sum(request.cached_tokens for request in fleet.fleet.done)
    assert fleet.matched_tokens == pytest.approx(cached, rel=0.1)


@pytest.mark.parametrize("prompt_tokens", [100, 400, 2000])
def test_chats_whose_answers_are_not_streamed_return_too(virtual_fleet, prompt_tokens) -> None:
    """24 chats at once on 4 workers whose answers take about 0.2 s each."""
    fleet = virtual_fleet(4)
    fleet.streamed = False
    shape = ChatShape(
        system_tokens=0,
        context_tokens=prompt_tokens,
        mean_turns=6.0,
        turn_tokens=40,
        output_tokens=14,
        think_s=0.01,
    )
    ChatClients(fleet.fleet, clients=24, requests=240, shape=shape).start()

    fleet.fleet.run()

    assert returned_share(fleet.fleet.done) >= 0.85
    assert imbalance(fleet.shares()) <= 1.4
    assert fleet.is_at_rest()
