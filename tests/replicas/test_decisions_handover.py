"""A request whose prompt one worker computes and another one answers, in the accounts of another process."""

from __future__ import annotations

import pytest
from tests.replicas.test_decisions import MODEL, Gateway
from tests.support.clocks import ManualClock

from kvroute.routing.cache_value import CacheValue
from kvroute.routing.prefill_decode import PrefillDecodeOptions
from kvroute.routing.registry import RoutingOptions


def gateway(strategy: str, clock: ManualClock) -> Gateway:
    made = Gateway(strategy, clock, roles=("prefill", "decode", "decode"))
    made.router.configure(
        RoutingOptions(strategy=strategy, prefill_decode=PrefillDecodeOptions(threshold_tokens=0))
    )
    made.router.cache_value = CacheValue(180.0)
    made.own.counts_repeats = True
    return made


@pytest.mark.parametrize("ends", ["before it is published", "after the prefill was published", "later"])
@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware", "session"])
def test_a_handover_is_one_use_of_a_cache_in_each_process(strategy, ends):
    clock = ManualClock()
    one, other = gateway(strategy, clock), gateway(strategy, clock)
    text = "hello " * 200

    for turn in range(1, 4):
        query = one.query(text * turn, hands_over=True, session_key="s")
        decision = one.router.decide(query, one.fleet.view(MODEL))
        assert decision.handover is not None
        dispatch = one.router.dispatch_handover(query, decision, clock.now())
        if ends == "later":
            other.receive(one)
        dispatch.prefill_done(clock.now())
        if ends == "after the prefill was published":
            other.receive(one)
        dispatch.first_token(clock.now())
        dispatch.finish(clock.now())
        other.receive(one)

    assert other.loads() == one.loads() == [(0.0, 0, 0, 0)] * 3
    assert other.explained(text) == one.explained(text)
    own, theirs = (
        [each.router.cache_value.seconds(worker.index, clock.now()) for worker in each.fleet.workers()]
        for each in (one, other)
    )
    assert theirs == pytest.approx(own)
    assert sum(own) > 0
