"""What answers without usage have generated: counted, or estimated from their time."""

from __future__ import annotations

import pytest

from kvroute.request.metering import Meter, Pace, longest_answer
from kvroute.request.plan import RequestPlan
from kvroute.routing.strategy import RouteDecision, RouteQuery

CHAT = "/v1/chat/completions"


class Client:
    is_paused = False

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def start(self, *_: object) -> None: ...
    def cut(self) -> None: ...
    def start_relayed(self, *_: object, is_sized: bool) -> None: ...
    def answer(self, status, fields, body, is_sized) -> None:
        self.written.append(body)

    def write(self, chunk: bytes) -> None:
        self.written.append(chunk)

    def framed_writer(self):
        return self.written.append

    def finish(self, chunk: bytes = b"") -> None:
        self.written.append(chunk)


def plan(body: bytes = b"{}", *, streamed: bool = False) -> RequestPlan:
    query = RouteQuery("m", 0.0, streamed=streamed)
    return RequestPlan(b"POST", b"/", body, "m", (), query, RouteDecision("roundrobin", "next", ()))


def meter_of(client: Client | None = None, body: bytes = b"{}", path: str = CHAT, **fields) -> Meter:
    return Meter.of(client or Client(), plan(body, **fields), path, Pace(), 10.0)


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        ([b'data: {"choices": []}\n\n'] * 5 + [b"data: [DONE]\n\n"], 5),
        ([b'{"text": "', b"x" * 40, b'"}'], 13),
    ],
)
def test_a_meter_estimates_completion_tokens_and_changes_no_byte(chunks, tokens):
    client = Client()
    meter = meter_of(client)
    meter.start_relayed(200, b"", is_sized=False)
    framed = meter.framed_writer()
    assert framed is not None

    meter.write(chunks[0])
    for chunk in chunks[1:]:
        (framed if chunk.startswith(b"data") else meter.write)(chunk)
    meter.finish()

    assert meter.estimate(99.0) == tokens
    assert b"".join(client.written) == b"".join(chunks)


def test_a_meter_counts_an_answer_that_comes_at_once():
    client = Client()
    meter = meter_of(client)

    meter.answer(200, b"", b"x" * 40, is_sized=True)

    assert (meter.estimate(99.0), client.written) == (10, [b"x" * 40])


def test_of_an_answer_that_was_cut_by_its_client_the_whole_length_counts():
    meter = meter_of()

    meter.start_relayed(200, b"server: x\r\ncontent-length: 4000\r\n", is_sized=True)
    meter.write(b"x" * 400)

    assert meter.estimate(10.1) == 1000


def test_an_answer_that_nothing_was_seen_of_is_estimated_by_its_time():
    assert meter_of().estimate(12.0) == 100  # 20 ms a token
    assert meter_of(body=b'{"max_tokens": 30}').estimate(12.0) == 30
    assert meter_of(streamed=True).estimate(12.0) == 0  # it has sent no token
    assert meter_of(path="/v1/embeddings").estimate(12.0) == 0


def test_the_pace_is_that_of_the_models_answers():
    pace = Pace()
    meter = Meter.of(Client(), plan(), CHAT, pace, 10.0)

    meter.reported(50, 15.0)

    assert meter.estimate(12.0) == 20
    assert pace.tokens_in("another", 2.0) == 100
    pace.learn("m", 1.0, 0)  # an answer without tokens teaches nothing
    assert meter.estimate(12.0) == 20


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b"{}", None),
        (b'{"max_tokens": 8}', 8),
        (b'{"max_tokens": 8, "max_completion_tokens": 5, "n": 3}', 15),
        (b'{"max_output_tokens": 7}', 7),
        (b'{"max_tokens": null, "n": "many"}', None),
        (b'{"max_tokens": -1}', None),
        (b"no json", None),
    ],
)
def test_the_longest_answer_that_a_request_permits(body, tokens):
    assert longest_answer(plan(body)) == tokens
