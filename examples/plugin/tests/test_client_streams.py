"""The part alone: what enters, what is refused, and what is released."""

from types import SimpleNamespace

import pytest
from kvroute_example.client_streams import ClientStreams, ClientStreamsOptions

from kvroute.errors import TooManyRequests
from kvroute.request.record import Record


def call(agent: bytes) -> SimpleNamespace:
    return SimpleNamespace(headers=[(b"user-agent", agent)], record=Record(b"id", "/v1/completions", 0.0))


@pytest.fixture
def part():
    gateway = SimpleNamespace(clock=None)
    return ClientStreams.build(ClientStreamsOptions(most=1), gateway)


def test_a_second_request_of_one_program_is_refused_until_the_first_has_ended(part):
    first = call(b"a")
    part.enter(first)
    part.enter(call(b"b"))
    with pytest.raises(TooManyRequests):
        part.enter(call(b"a"))

    for callback in first.record.on_end:
        callback(first.record)
    part.enter(call(b"a"))


def test_a_changed_limit_holds_at_once(part):
    part.enter(call(b"a"))
    part.configure(ClientStreamsOptions(most=0))
    part.enter(call(b"a"))
