"""The journal: what is counted and written of a request, and that it may come late but not too late."""

from __future__ import annotations

import io
import json
import logging

import pytest
from tests.support.clocks import ManualClock

from kvroute.journal.journal import Journal
from kvroute.logs import ACCESS, JsonFormatter, LogHandler, TextFormatter
from kvroute.metrics import Metrics
from kvroute.request.record import Record, Usage, trace_id_in


def figures(metrics: Metrics, name: str) -> float:
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    )


async def journal_of(metrics: Metrics, *, log_requests: bool = False) -> Journal:
    return Journal(metrics, ManualClock(10.0, epoch=1000.0), log_requests=log_requests, kept=100)


async def test_a_scrape_contains_the_request_that_has_just_ended() -> None:
    metrics = Metrics()
    journal = await journal_of(metrics)

    record = Record(b"1", "/p", 9.0, "m", 30, worker="w", matched_tokens=20, status=200, first_byte=9.5)
    record.usage = Usage(40, 16)
    journal.finished(record, 9.75)

    assert figures(metrics, "kvroute_requests_total") == 1
    assert figures(metrics, "kvroute_request_duration_seconds_sum") == 0.75
    assert figures(metrics, "kvroute_time_to_first_byte_seconds_sum") == 0.5
    assert figures(metrics, "kvroute_prompt_tokens_total") == 30
    assert figures(metrics, "kvroute_predicted_hit_tokens_total") == 20
    assert figures(metrics, "kvroute_reported_prompt_tokens_total") == 40
    assert figures(metrics, "kvroute_reported_cached_tokens_total") == 16
    journal.flush()


async def test_a_part_that_fails_costs_no_request_and_no_other_part(caplog: pytest.LogCaptureFixture) -> None:
    metrics, heard = Metrics(), list[tuple[str, bytes]]()
    journal = await journal_of(metrics)

    def fails(record: Record) -> None:
        raise RuntimeError("a defect of a part")

    journal.observers = (fails, lambda record: heard.append(("finished", record.request_id)))
    record = Record(b"1", "/p", 9.0, status=200)
    record.on_end = [fails, lambda record: heard.append(("released", record.request_id))]
    journal.finished(record, 9.5)
    journal.flush()

    assert heard == [("released", b"1"), ("finished", b"1")]
    assert figures(metrics, "kvroute_requests_total") == 1
    assert [each.levelname for each in caplog.records] == ["ERROR", "ERROR"]


async def test_a_request_without_an_answer_has_no_first_byte_and_predicts_nothing() -> None:
    metrics = Metrics()
    journal = await journal_of(metrics)

    journal.finished(Record(b"1", "/p", 9.0, tokens=30, status=503, error="full"), 9.25)

    assert figures(metrics, "kvroute_requests_total") == 1
    assert figures(metrics, "kvroute_time_to_first_byte_seconds_count") == 0
    assert figures(metrics, "kvroute_prompt_tokens_total") == 0
    journal.flush()


async def test_the_last_decisions_contain_the_request_that_has_just_ended_with_its_time() -> None:
    journal = await journal_of(Metrics())

    journal.finished(Record(b"1", "/p", 8.0), 9.5)

    assert [(entry["time"], entry["duration_s"]) for entry in journal.decisions(5)] == [(1009.5, 1.5)]
    journal.flush()


def access_log(monkeypatch: pytest.MonkeyPatch, formatter: logging.Formatter | None = None) -> io.StringIO:
    """The text of the access log from now on. No fixture: pytest would add its own handler after it."""
    written = io.StringIO()
    handler = LogHandler(written)
    handler.setFormatter(formatter or TextFormatter())
    access = logging.getLogger(ACCESS)
    monkeypatch.setattr(access, "handlers", [handler])
    monkeypatch.setattr(access, "propagate", False)
    monkeypatch.setattr(access, "level", logging.INFO)
    monkeypatch.setattr(access, "_cache", {})  # `logging` keeps there which levels are enabled
    return written


async def test_many_requests_are_written_before_the_timer_fires(monkeypatch: pytest.MonkeyPatch) -> None:
    written = access_log(monkeypatch)
    journal = await journal_of(Metrics(), log_requests=True)

    for _ in range(10_000):
        journal.finished(Record(b"1", "/p", 9.0), 9.5)

    assert written.getvalue().count("\n") > 9_000
    journal.flush()
    assert written.getvalue().count("\n") == 10_000


async def test_a_record_that_cannot_be_written_costs_no_other_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written, metrics = access_log(monkeypatch), Metrics()
    journal = await journal_of(metrics, log_requests=True)

    for request_id in (b"first", b"no text: \xff", b"last"):
        journal.finished(Record(request_id, "/p", 9.0), 9.5)
    journal.flush()

    assert [line.split()[3] for line in written.getvalue().splitlines()] == ["first", "last"]
    assert [entry["request_id"] for entry in journal.decisions(5)] == ["last", "first"]
    assert "recording 1 requests failed" in caplog.text


async def test_lines_come_in_order_with_the_time_at_which_each_request_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = access_log(monkeypatch)
    journal = await journal_of(Metrics(), log_requests=True)

    for number, ended in enumerate((8.0, 8.0004, 8.0625, 9.25)):
        journal.finished(Record(b"%d" % number, "/p", 7.0), ended)
    journal.flush()

    lines = [line.split(" ") for line in written.getvalue().splitlines()]
    stamps = ["48.000Z", "48.000Z", "48.062Z", "49.250Z"]
    assert [line[0] for line in lines] == [f"1970-01-01T00:16:{stamp}" for stamp in stamps]
    assert [line[6] for line in lines] == ["0", "1", "2", "3"]


async def test_a_json_log_has_each_figure_of_a_request_as_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    written = access_log(monkeypatch, JsonFormatter())
    journal = await journal_of(Metrics(), log_requests=True)

    record = Record(b"7", "/v1/chat/completions", 9.0, "m", 30, worker="w", matched_tokens=20, status=200)
    record.first_byte, record.usage, record.streamed, record.attempts = 9.25, Usage(40, 16), True, 2
    record.key, record.trace_id = "team-a", "4bf92f3577b34da6a3ce929d0e0e4736"
    journal.finished(record, 9.5)
    journal.finished(Record(b"8", "/v1/chat/completions", 9.0, status=503, error="no_routable_worker"), 9.5)
    journal.flush()

    served, refused = map(json.loads, written.getvalue().splitlines())
    assert served == {
        "time": "1970-01-01T00:16:49.500Z",
        "level": "info",
        "logger": ACCESS,
        "message": "request finished",
        "request_id": "7",
        "path": "/v1/chat/completions",
        "status": 200,
        "worker": "w",
        "model": "m",
        "strategy": "-",
        "reason": "-",
        "matched_tokens": 20,
        "prompt_tokens": 30,
        "attempts": 2,
        "streamed": True,
        "time_to_first_byte_s": 0.25,
        "duration_s": 0.5,
        "reported_prompt_tokens": 40,
        "reported_cached_tokens": 16,
        "key": "team-a",
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    }
    assert refused["error"] == refused["reason"] == "no_routable_worker"
    assert refused["time_to_first_byte_s"] is None


@pytest.mark.parametrize("name", [b"traceparent", b"Traceparent"])
def test_the_trace_id_is_read_from_a_header_line_of_any_case(name: bytes) -> None:
    parent = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    assert trace_id_in(b"accept: */*\r\n%b: %b\r\n" % (name, parent)) == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert trace_id_in(b"x-traceparent: %b\r\n" % parent) == ""
    assert trace_id_in(b"traceparent: 00-xyz\r\n") == ""
