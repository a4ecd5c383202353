"""The bodies that have lost workers; `tests/blackbox/test_poison.py` shows the whole gateway."""

from types import SimpleNamespace

import pytest
from tests.support.clocks import ManualClock

from kvroute.errors import NotFound, RequestLostWorkers
from kvroute.fleet.worker import HealthState
from kvroute.metrics import Metrics
from kvroute.relay.poison import LostRequests, digest_of
from kvroute.upstream.options import RetryOptions

BODY = b'{"prompt":"x"}'


def worker(state=HealthState.HEALTHY):
    return SimpleNamespace(id="w0", state=state)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def lost(clock):
    return LostRequests(RetryOptions(refuse_s=60.0), clock, Metrics())


def lose(lost, count=1, body=BODY, key="k"):
    for _ in range(count):
        lost.lost(worker(), key, b"/v1/completions", body, "m")


def test_a_body_is_refused_after_two_losses_for_its_key_and_endpoint(lost):
    lose(lost)
    assert not lost.sizes
    lose(lost)

    assert lost.sizes == {len(BODY)}
    with pytest.raises(RequestLostWorkers):
        lost.check("k", b"/v1/completions", BODY)
    lost.check("other", b"/v1/completions", BODY)
    lost.check("k", b"/v1/embeddings", BODY)
    lost.check("k", b"/v1/completions", BODY[::-1])


def test_it_is_served_again_when_its_time_has_passed(lost, clock):
    lose(lost, 2)
    clock.time += 61.0

    lost.check("k", b"/v1/completions", BODY)
    assert not lost.sizes
    assert lost.describe() == []


def test_a_worker_that_drains_or_has_left_does_not_count(lost):
    for _ in range(3):
        lost.lost(worker(HealthState.DRAINING), "k", b"/v1/completions", BODY, "m")

    assert lost.describe() == []


def test_losses_of_other_processes_count_once_each(lost, clock):
    other = LostRequests(RetryOptions(refuse_s=60.0), clock, Metrics())
    other.share = lost.merge
    lose(other, 2)
    for loss, age_s in other.losses():
        lost.merge(loss, age_s)

    assert lost.describe() == other.describe()
    assert len(lost.describe()[0]["workers"]) == 2


def test_memory_is_bounded(lost):
    for number in range(3000):
        lose(lost, 2, body=b"%d" % number)

    assert len(lost.describe()) == 1024
    assert lost.sizes == {4}


def test_clearing_one_body_or_all(lost):
    lose(lost, 2)
    lose(lost, 2, body=b"other")

    assert lost.clear(digest_of("k", b"/v1/completions", BODY)) == 1
    assert lost.sizes == {5}
    with pytest.raises(NotFound):
        lost.clear(bytes(16))
    assert lost.clear() == 1
    assert not lost.sizes
