"""The order of an exchange's steps: worker and client get their bytes before anything is accounted."""

from types import SimpleNamespace
from typing import Any

from kvroute.errors import ConnectionLost
from kvroute.relay.attempts import Attempts
from kvroute.relay.exchange import Exchange
from kvroute.request.plan import RequestPlan
from kvroute.request.record import Record
from kvroute.routing.strategy import Candidate, CostTerms, RouteDecision, RouteQuery, RouteReason
from kvroute.upstream.response import PlainAnswer, UpstreamResponse

EVENT = b"data: {}\n\n"
HEAD = PlainAnswer(200, b"OK", b"", b"content-type: text/event-stream\r\n", True, 0, None)


class Recorder:
    """Replaces every collaborator of an exchange and records the calls in order."""

    def __init__(self, *, can_forward: bool = True) -> None:
        self.calls: list[str] = []
        self.response = UpstreamResponse(0.0)
        self.heads = SimpleNamespace(encode=self.head)
        self._can_forward = can_forward
        self.is_paused = False

    def __getattr__(self, name: str) -> Any:
        def note(*_: Any, **__: Any) -> Any:
            self.calls.append(name)

        return note

    def head(self, *_: Any) -> bytes:
        if not self._can_forward:
            raise ValueError("no target")
        return b""

    def of(self, _worker: Any) -> Any:
        return self

    def submit(self, *arguments: Any) -> UpstreamResponse:
        self.calls.append("submit")
        self.response.listener = arguments[2]
        return self.response

    def dispatch(self, *_: Any) -> Any:
        self.calls.append("dispatch")
        return self

    def gaps(self, *_: Any) -> Any:
        return self

    def lines(self, *_: Any) -> bytes:
        return b""

    def framed_writer(self) -> None:
        return None


def started(recorder: Any) -> Exchange:
    worker: Any = SimpleNamespace(id="w", spec=SimpleNamespace(id="w"))
    candidate = Candidate(worker, 0.0, 0, 0.0, CostTerms())
    decision = RouteDecision("prefixaware", RouteReason.PREFIX_MISS, (candidate,))
    plan = RequestPlan(b"POST", b"/", b"", "m", (), RouteQuery("m", 0.0), decision)
    labelled = SimpleNamespace(labels=lambda *_: recorder)
    metrics = SimpleNamespace(gaps=recorder.gaps, rejected=labelled, streams_aborted=labelled)
    attempts: Any = SimpleNamespace(
        router=recorder,
        transports=recorder,
        health=recorder,
        budget=recorder,
        metrics=metrics,
        on_sent=None,
        log_traces=False,
        retry_statuses=frozenset(),
        now=lambda: 1.0,
    )
    deps: Any = SimpleNamespace(
        attempts=attempts,
        metrics=metrics,
        journal=recorder,
        attribution=recorder,
        streams=None,
        now=lambda: 1.0,
    )
    record = Record(b"id", "/", 0.0)
    exchange = Exchange(deps, plan, record, Attempts(attempts, plan, record, b""), recorder, lambda _: None)
    exchange.start()
    return exchange


def arrive(recorder: Recorder, exchange: Exchange, error: ConnectionLost | None = None) -> list[str]:
    recorder.calls.clear()
    response = recorder.response
    response.status, response.plain = 200, HEAD
    response.parts.append(EVENT)
    response.is_over, response.error = error is not None, error
    exchange.answer_arrived(response)
    return recorder.calls


def test_a_request_is_sent_before_it_is_accounted():
    recorder = Recorder()

    started(recorder)

    assert recorder.calls == ["count_request", "submit", "dispatch"]


def test_a_request_that_cannot_be_forwarded_is_not_accounted():
    recorder = Recorder(can_forward=False)

    assert started(recorder).is_over

    assert "dispatch" not in recorder.calls
    assert "finished" in recorder.calls


def test_a_first_event_is_passed_on_before_it_is_accounted():
    recorder = Recorder()

    calls = arrive(recorder, started(recorder))

    assert calls == ["report_status", "start_relayed", "write", "first_token"]


def test_a_first_event_counts_even_if_the_answer_breaks_off_behind_it():
    recorder = Recorder()
    exchange = started(recorder)

    calls = arrive(recorder, exchange, ConnectionLost("closed"))

    assert exchange.is_over
    assert calls.index("write") < calls.index("first_token") < calls.index("finish")
