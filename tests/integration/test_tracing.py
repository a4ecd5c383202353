"""Spans of requests at a real OTLP receiver, through both lanes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.sockets import tcp_server
from tests.support.waiting import until

from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault

PROMPT = "a very private prompt " * 40
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
async def sim() -> AsyncIterator[RunningSim]:
    async with run_sim(SimOptions(time_scale=0)) as running:
        yield running


@dataclass
class Collector:
    """An OTLP receiver. `bodies` are the exports; it answers only while `may_answer` is set."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
            assert length is not None
            self.bodies.append(await reader.readexactly(int(length[1])))
            await self.may_answer.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()

    def spans(self) -> list[Any]:
        found = []
        for body in self.bodies:
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    found += scope.spans
        return found


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    running = Collector()
    running.may_answer.set()
    async with tcp_server(running.serve) as port:
        running.url = f"http://127.0.0.1:{port}/v1/traces"
        yield running


async def send(client, **headers: str):
    body = json.dumps(
        {
            "model": "sim-model",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 2,
            "stream": True,
        }
    ).encode()

    return await client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json", **headers}
    )


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value for each in span.attributes}


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
async def test_the_workers_spans_lie_below_ours_and_ours_below_the_clients(run_gateway, sim, strategy):
    async with (
        collector() as otel,
        run_gateway(
            [sim.url],
            tracing={"endpoint": otel.url},
            routing={"strategy": strategy},
            tokens={"timeout_ms": 10_000},
        ) as running,
    ):
        answer = await send(running.client, traceparent=CLIENT)
        assert answer.status_code == 200
        spans = {span.name: span for span in await until(lambda: _whole(running, otel))}

    root, worker, decide = spans["kvroute request"], spans["worker"], spans["decide"]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert worker.parent_span_id == decide.parent_span_id == root.span_id
    assert spans["stream"].parent_span_id == spans["first byte"].parent_span_id == worker.span_id
    assert _sent_parent(sim) == worker.span_id.hex()
    assert ("tokenize" in spans) == (strategy == "kvaware")
    assert attributes(decide)["kvroute.strategy"].string_value == strategy
    [candidate] = decide.events
    assert attributes(candidate)["kvroute.worker"].string_value == "w0"
    assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in spans.values())
    assert all(span.end_time_unix_nano <= root.end_time_unix_nano for span in spans.values())
    assert not any(b"private" in body for body in otel.bodies)


def _whole(running, otel: Collector) -> list[Any]:
    """All spans, once the last one of a request has arrived."""
    running.runtime._journal.flush()
    spans = otel.spans()
    return spans if any(span.name == "stream" for span in spans) else []


async def test_both_legs_of_a_handover_have_spans_and_the_workers_spans_lie_below_them(run_gateway):
    options = SimOptions(time_scale=0, nixl=True)
    async with run_sim(options) as prefill, run_sim(options) as decode, collector() as otel:
        workers = [
            {"id": "p", "url": prefill.url, "role": "prefill"},
            {"id": "d", "url": decode.url, "role": "decode"},
        ]
        routing = {"prefill_decode": {"threshold_tokens": 64}}
        async with run_gateway(workers, tracing={"endpoint": otel.url}, routing=routing) as running:
            answer = await send(running.client, traceparent=CLIENT)
            spans = {span.name: span for span in await until(lambda: _whole(running, otel))}

    root, worker = spans["kvroute request"], spans["worker"]
    leg, transfer = spans["prefill leg"], spans["transfer"]
    assert leg.parent_span_id == transfer.parent_span_id == worker.span_id
    assert [_sent_parent(sim) for sim in (prefill, decode)] == [leg.span_id.hex(), worker.span_id.hex()]
    assert attributes(leg)["kvroute.worker"].string_value == "p"
    assert attributes(transfer)["kvroute.worker"].string_value == "d"
    moved = int(answer.headers["x-kvroute-moved-tokens"])
    for span in (root, transfer):
        assert attributes(span)["kvroute.moved_tokens"].int_value == moved
    assert attributes(root)["kvroute.prefill_worker"].string_value == "p"
    assert [event.name for event in spans["decide"].events] == ["candidate"] * 2 + ["prefill candidate"]
    assert leg.end_time_unix_nano == transfer.start_time_unix_nano
    assert transfer.end_time_unix_nano <= spans["stream"].start_time_unix_nano


async def test_a_failed_first_leg_has_an_error_span(run_gateway, sim):
    async with run_sim(SimOptions(time_scale=0, nixl=True)) as prefill, collector() as otel:
        workers = [{"url": prefill.url, "role": "prefill"}, {"url": sim.url, "role": "decode"}]
        prefill.worker.faults.add(Fault(kind="status", status=500, path="/v1/chat/completions"))
        routing = {"prefill_decode": {"threshold_tokens": 64}}
        async with run_gateway(workers, tracing={"endpoint": otel.url}, routing=routing) as running:
            await send(running.client)
            spans = {span.name: span for span in await until(lambda: _whole(running, otel))}

    assert attributes(spans["prefill leg"])["error.type"].string_value == "status"
    assert attributes(spans["kvroute request"])["kvroute.handover_fallback"].string_value == "status"
    assert "transfer" not in spans


def _sent_parent(sim: RunningSim) -> str:
    """The span that a worker was told to be the parent of its own."""
    [sent] = [
        value.decode()
        for request in sim.worker.received
        if request.method == "POST" and request.target == "/v1/chat/completions"
        for name, value in request.headers
        if name == b"traceparent"
    ]
    return sent.split("-")[2]


async def test_keys_never_reach_the_collector(run_gateway, sim):
    async with (
        collector() as otel,
        run_gateway(
            [sim.url], tracing={"endpoint": otel.url}, server={"api_keys": ["secret-key"]}
        ) as running,
    ):
        await send(running.client, authorization="Bearer secret-key")
        assert await until(lambda: _whole(running, otel))

    assert not any(b"secret-key" in body for body in otel.bodies)


async def test_a_request_without_a_sampled_parent_is_passed_on_untouched(run_gateway, sim):
    unsampled = CLIENT[:-2] + "00"
    async with (
        collector() as otel,
        run_gateway([sim.url], tracing={"endpoint": otel.url, "sample_ratio": 0}) as running,
    ):
        await send(running.client, traceparent=unsampled)
        await send(running.client)
        await send(running.client, traceparent=CLIENT)
        spans = await until(lambda: _whole(running, otel))

    received = [dict(request.headers) for request in sim.worker.received if request.method == "POST"]
    assert [each.get(b"traceparent", b"")[:55] for each in received][:2] == [unsampled.encode(), b""]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert len([span for span in spans if span.name == "kvroute request"]) == 1


async def test_errors_name_the_trace(run_gateway, sim):
    async with collector() as otel, run_gateway([sim.url], tracing={"endpoint": otel.url}) as running:
        answer = await running.client.post(
            "/v1/completions", json={"model": "unknown", "prompt": "x"}, headers={"traceparent": CLIENT}
        )

    assert answer.status_code == 404
    assert answer.json()["error"]["trace_id"] == TRACE
    assert answer.headers["x-kvroute-trace-id"] == TRACE


@pytest.mark.parametrize("size", [0, 1_000_000])
async def test_errors_before_the_body_is_read_name_the_trace_and_have_a_span(run_gateway, sim, size):
    body = b'{"model": 1, "prompt": "' + b"x" * size + b'"}'
    async with collector() as otel, run_gateway([sim.url], tracing={"endpoint": otel.url}) as running:
        answer = await running.client.post("/v1/completions", content=body, headers={"traceparent": CLIENT})
        plain = await running.client.post("/v1/completions", content=body)
        running.runtime._journal.flush()
        spans = {
            span.trace_id.hex(): span for span in await until(lambda: len(otel.spans()) == 2 and otel.spans())
        }

    assert answer.status_code == plain.status_code == 400
    assert answer.json()["error"]["trace_id"] == answer.headers["x-kvroute-trace-id"] == TRACE
    own = plain.json()["error"]["trace_id"]
    assert {span.name for span in spans.values()} == {"kvroute request"}
    assert spans[TRACE].parent_span_id.hex() == "b7ad6b7169203331"
    assert spans[own].parent_span_id == b""


GOOD = b"host: a\r\ntraceparent: %b\r\n" % CLIENT.encode()
HEADS = {
    "a line that is no header": b"POST /v1/completions HTTP/1.1\r\n%bno header\r\n\r\n" % GOOD,
    "a broken line before it": b"POST /v1/completions HTTP/1.1\r\nno header\r\n%b\r\n" % GOOD,
    "an unknown method": b"WHAT? /v1/completions HTTP/1.1\r\n%b\r\n" % GOOD,
    "no host": b"POST /v1/completions HTTP/1.1\r\ntraceparent: %b\r\n\r\n" % CLIENT.encode(),
    "two lengths": b"POST /v1/completions HTTP/1.1\r\n%bcontent-length: 1\r\ncontent-length: 2\r\n\r\n"
    % GOOD,
    "another version": b"POST /v1/completions HTTP/1.2\r\n%b\r\n" % GOOD,
    "a broken chunk": b"POST /v1/completions HTTP/1.1\r\n%btransfer-encoding: chunked\r\n\r\nno chunk\r\n"
    % GOOD,
}


async def refused_with(gateway, *parts: bytes) -> tuple[str, str]:
    """The trace id in the header and in the body of the answer to these bytes."""
    reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
    for part in parts:
        writer.write(part)
        await writer.drain()
    head, _, body = (await reader.read()).rpartition(b"\r\n\r\n")
    writer.close()
    found = re.search(rb"x-kvroute-trace-id: (\S+)", head)
    return found[1].decode() if found else "", json.loads(body)["error"].get("trace_id", "")


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
async def test_the_error_about_a_malformed_head_names_the_trace_and_has_a_span(run_gateway, sim, head):
    async with collector() as otel, run_gateway([sim.url], tracing={"endpoint": otel.url}) as running:
        assert await refused_with(running, head) == (TRACE, TRACE)
        assert await refused_with(running, head) == (TRACE, TRACE)
        [span, _] = await until(lambda: len(otel.spans()) == 2 and otel.spans())

    assert (span.name, span.trace_id.hex()) == ("kvroute request", TRACE)
    assert attributes(span)["error.type"].string_value


async def test_a_malformed_head_without_a_traceparent_gets_a_trace_of_its_own(run_gateway, sim):
    first = b"GET /health HTTP/1.1\r\n%b\r\n" % GOOD
    async with collector() as otel, run_gateway([sim.url], tracing={"endpoint": otel.url}) as running:
        header, field = await refused_with(running, first, b"WHAT? / HTTP/1.1\r\nhost: a\r\n\r\n")
        [span] = await until(otel.spans)
    async with run_gateway([sim.url]) as running:
        untraced = await refused_with(running, HEADS["no host"])

    assert header == field == span.trace_id.hex() != TRACE  # the earlier request's
    assert untraced == ("", "")


async def test_a_connection_that_had_to_be_opened_has_a_span(run_gateway, sim):
    """The first request opens a connection, the second uses it again."""
    async with collector() as otel, run_gateway([sim.url], tracing={"endpoint": otel.url}) as running:
        [worker, opened] = await _connects(running, otel)
        [_, *further] = await _connects(running, otel)

    assert opened.parent_span_id == worker.span_id
    assert attributes(opened)["kvroute.worker"].string_value == "w0"
    assert worker.start_time_unix_nano <= opened.start_time_unix_nano < opened.end_time_unix_nano
    assert opened.end_time_unix_nano <= worker.end_time_unix_nano
    assert not further


async def test_a_refused_connection_has_a_span_with_its_error(run_gateway, sim):
    async with (
        collector() as otel,
        run_sim(SimOptions(time_scale=0)) as gone,
        run_gateway(
            [gone.url, sim.url],
            tracing={"endpoint": otel.url},
            routing={"strategy": "roundrobin"},
            fleet={"health": {"interval_s": 60}},
        ) as running,
    ):
        await gone.kill()
        found = [span for _ in "ab" for span in (await _connects(running, otel))[1:]]

    refused = [span for span in found if attributes(span)["kvroute.worker"].string_value == "w0"]
    assert [attributes(span)["error.type"].string_value for span in refused] == ["refused"]
    assert refused[0].status.code == refused[0].status.STATUS_CODE_ERROR
    assert refused[0].end_time_unix_nano > refused[0].start_time_unix_nano


async def _connects(running, otel: Collector) -> list[Any]:
    """The spans `worker` and `connect` of one more request."""
    otel.bodies.clear()
    assert (await send(running.client)).status_code == 200
    spans = await until(lambda: _whole(running, otel))
    return [
        *(span for span in spans if span.name == "worker"),
        *(span for span in spans if span.name == "connect"),
    ]


async def test_a_collector_that_does_not_answer_delays_no_request_and_drops_are_counted(run_gateway, sim):
    async with collector() as otel:
        otel.may_answer.clear()
        tracing = {"endpoint": otel.url, "max_waiting": 8, "timeout_s": 60}
        async with run_gateway([sim.url], tracing=tracing) as running:
            await send(running.client, traceparent=CLIENT)
            running.runtime._journal.flush()
            await until(lambda: otel.bodies)
            for _ in range(8):
                assert (await send(running.client, traceparent=CLIENT)).status_code == 200
            running.runtime._journal.flush()

            assert running.metric("kvroute_trace_spans_total", outcome="dropped") > 0
            otel.may_answer.set()


async def test_without_an_endpoint_nothing_is_traced(run_gateway, sim):
    async with run_gateway([sim.url]) as running:
        answer = await send(running.client, traceparent=CLIENT)
        assert answer.status_code == 200

    [received] = [dict(request.headers) for request in sim.worker.received if request.method == "POST"]
    assert received[b"traceparent"] == CLIENT.encode()
    assert running.runtime._tracer is None
