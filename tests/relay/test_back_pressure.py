"""Which answers say that a worker is full; `tests/blackbox/test_full_workers.py` shows what follows."""

import pytest

from kvroute.fleet.load import WorkerLoad
from kvroute.relay.back_pressure import PENDING, estimated_retry_after_s, retry_after_of

FULL = b'{"error":{"message":"The engine is currently busy and cannot accept new requests. Please"}}'


@pytest.mark.parametrize(
    ("value", "expected"),
    [(b"7", 7), (b" 7 ", 7), (b"9" * 9, 3600), (b"9" * 400, 0), (b"-3", 0), (b"soon", 0), (b"", 0)],
)
def test_retry_after_is_bounded_and_need_not_be_a_number(value, expected):
    assert retry_after_of(503, [(b"Retry-After", value)], b"", is_over=False) == expected


def test_a_503_is_a_failure_unless_it_says_otherwise():
    assert retry_after_of(503, [], b"down", is_over=True) is None
    assert retry_after_of(503, [], b"x" * 5000, is_over=False) is None
    assert retry_after_of(503, [], FULL[:30], is_over=False) == PENDING
    assert retry_after_of(503, [], FULL, is_over=True) == 0
    assert retry_after_of(429, [], b"", is_over=False) == 0


def test_the_estimate_is_the_time_until_a_request_has_probably_ended():
    idle, busy = WorkerLoad(), WorkerLoad()
    busy.residence_s, busy.in_flight = 40.0, 4

    assert estimated_retry_after_s([idle]) == 1
    assert estimated_retry_after_s([idle, busy]) == 10
    busy.in_flight = 0
    busy.residence_s = 4000.0
    assert estimated_retry_after_s([busy]) == 60


def test_a_refused_request_counts_in_no_average():
    load = WorkerLoad()
    load.reserve(0.0, 1.0, 100, streamed=False).abandon(0.001)

    assert (load.in_flight, load.active_tokens, load.queued, load.residence_s) == (0, 0, 0, None)
    assert load.recent(0.001) == WorkerLoad().recent(0.001)
