import pytest
from tests.support.memory import growth_bytes

from kvroute.fleet.worker import Worker, WorkerId, WorkerSpec
from kvroute.relay.attribution import Attribution
from kvroute.routing.strategy import Candidate, CandidateMatch, CostTerms, RouteDecision, RouteReason, Tokens


def candidate(worker_id: str = "w0", matched: int = 0, match: CandidateMatch | None = None) -> Candidate:
    worker = Worker(WorkerSpec(WorkerId(worker_id), "http://w"))
    return Candidate(worker, 0.0, matched, 0.0, CostTerms(), match)


def lines(attribution: Attribution, chosen: Candidate, strategy: str, reason: RouteReason) -> list[bytes]:
    made = attribution.lines(chosen, RouteDecision(strategy, reason, (chosen,)))
    assert made.endswith(b"\r\n")
    return made.split(b"\r\n")[:-1]


def test_the_lines_name_worker_strategy_and_reason():
    assert lines(
        Attribution(frozenset({"prefixaware", "kvaware"})), candidate(), "roundrobin", RouteReason.ROUND_ROBIN
    ) == [
        b"x-kvroute-worker: w0",
        b"x-kvroute-strategy: roundrobin",
        b"x-kvroute-reason: round_robin",
    ]


@pytest.mark.parametrize(
    ("chosen", "hits"),
    [
        (candidate(matched=48), (b"48", b"gpu=48;l1=0;l2=0")),
        (candidate(matched=60, match=CandidateMatch(Tokens(16, 32, 12))), (b"60", b"gpu=16;l1=32;l2=12")),
        (candidate(), (b"0", b"gpu=0;l1=0;l2=0")),
    ],
)
def test_a_strategy_that_predicts_hits_gives_each_requests_prediction(chosen, hits):
    attribution = Attribution(frozenset({"prefixaware", "kvaware"}))
    lines(attribution, candidate(matched=7), "prefixaware", RouteReason.PREFIX_HIT)

    assert lines(attribution, chosen, "prefixaware", RouteReason.PREFIX_HIT)[3:] == [
        b"x-kvroute-hit-tokens: " + hits[0],
        b"x-kvroute-hit-tiers: " + hits[1],
    ]


def test_no_number_of_workers_fills_the_memory():
    attribution = Attribution(frozenset({"prefixaware", "kvaware"}))

    def attribute(number: int) -> None:
        lines(attribution, candidate(f"w{number}"), "session", RouteReason.SESSION)

    assert growth_bytes(attribute, 15_000) < 3_000_000
