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
            tokens={"deadline_ms": 10_000},
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
    [sent] = [
        value.decode()
        for request in sim.worker.received
        if request.method == "POST" and request.target == "/v1/chat/completions"
        for name, value in request.headers
        if name == b"traceparent"
    ]
    assert sent == f"00-{TRACE}-{worker.span_id.hex()}-01"
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
        [span] = await until(otel.spans)

    assert answer.status_code == plain.status_code == 400
    assert answer.json()["error"]["trace_id"] == answer.headers["x-kvroute-trace-id"] == TRACE
    assert "trace_id" not in plain.json()["error"]
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        "kvroute request",
        TRACE,
        "b7ad6b7169203331",
    )


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
