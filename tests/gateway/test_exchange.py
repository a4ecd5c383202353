"""What an exchange does first: the other sides get theirs before anything is accounted."""

from types import SimpleNamespace
from typing import Any

from kvroute.errors import ConnectionLost
from kvroute.gateway.exchange import Exchange
from kvroute.gateway.journal import Record
from kvroute.gateway.planner import RequestPlan
from kvroute.routing.strategy import Candidate, CostTerms, RouteDecision, RouteQuery, RouteReason
from kvroute.upstream.plain_answer import PlainAnswer
from kvroute.upstream.response import UpstreamResponse

EVENT = b"data: {}\n\n"
HEAD = PlainAnswer(200, b"OK", b"", b"content-type: text/event-stream\r\n", True, 0, None)


class Told:
    """Everybody that an exchange speaks with. Notes what it hears, in order."""

    def __init__(self, *, can_forward: bool = True) -> None:
        self.heard: list[str] = []
        self.response = UpstreamResponse(0.0)
        self.heads = SimpleNamespace(head=self.head)
        self._can_forward = can_forward
        self.is_paused = False

    def __getattr__(self, name: str) -> Any:
        def told(*_: Any, **__: Any) -> Any:
            self.heard.append(name)

        return told

    def head(self, *_: Any) -> bytes:
        if not self._can_forward:
            raise ValueError("no target")
        return b""

    def of(self, _worker: Any) -> Any:
        return self

    def submit(self, *arguments: Any) -> UpstreamResponse:
        self.heard.append("submit")
        self.response.listener = arguments[2]
        return self.response

    def dispatch(self, *_: Any) -> Any:
        self.heard.append("dispatch")
        return self

    def gaps(self, *_: Any) -> Any:
        return self

    def lines(self, *_: Any) -> bytes:
        return b""

    def framed_writer(self) -> None:
        return None


def began(told: Any) -> Exchange:
    worker: Any = SimpleNamespace(id="w", spec=SimpleNamespace(id="w"))
    candidate = Candidate(worker, 0.0, 0, 0.0, CostTerms())
    decision = RouteDecision("prefixaware", RouteReason.PREFIX_MISS, (candidate,))
    plan = RequestPlan(b"POST", b"/", b"", "m", (), RouteQuery("m", 0.0), decision)
    labelled = SimpleNamespace(labels=lambda *_: told)
    use: Any = SimpleNamespace(
        router=told,
        transports=told,
        health=told,
        budget=told,
        metrics=SimpleNamespace(gaps=told.gaps, rejected=labelled, streams_aborted=labelled),
        journal=told,
        attribution=told,
        sent=None,
        retry_statuses=frozenset(),
        now=lambda: 1.0,
    )
    exchange = Exchange(use, plan, Record(b"id", "/", 0.0), b"", told, lambda _: None)
    exchange.begin()
    return exchange


def arrives(told: Told, exchange: Exchange, error: ConnectionLost | None = None) -> list[str]:
    told.heard.clear()
    response = told.response
    response.status, response.plain = 200, HEAD
    response.parts.append(EVENT)
    response.is_over, response.error = error is not None, error
    exchange.answer_arrived(response)
    return told.heard


def test_a_request_is_on_its_way_before_it_is_accounted():
    told = Told()

    began(told)

    assert told.heard == ["request", "submit", "dispatch"]


def test_what_cannot_be_forwarded_is_not_accounted():
    told = Told(can_forward=False)

    assert began(told).is_over

    assert "dispatch" not in told.heard
    assert "finished" in told.heard


def test_a_first_event_is_passed_on_before_it_is_accounted():
    told = Told()

    heard = arrives(told, began(told))

    assert heard == ["report_status", "start_relayed", "write", "first_token"]


def test_a_first_event_counts_even_if_the_answer_breaks_off_behind_it():
    told = Told()
    exchange = began(told)

    heard = arrives(told, exchange, ConnectionLost("gone"))

    assert exchange.is_over
    assert heard.index("write") < heard.index("first_token") < heard.index("finish")
