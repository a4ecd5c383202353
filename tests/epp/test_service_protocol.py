"""The picker's protocol without Envoy: subsets, the served address, health, TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2
from tests.epp.conftest import picker_config
from tests.integration.conftest import Gateway, gateway
from tests.support.certificates import Authority
from tests.support.waiting import until

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

CHAT = b'{"model": "sim-model", "messages": [{"role": "user", "content": "hello"}]}'
DESTINATION = "x-gateway-destination-endpoint"


def head(*extra: tuple[str, bytes], is_last: bool = False, subset: Any = None, part: str = "request") -> Any:
    pairs = [(":method", b"POST"), (":path", b"/v1/chat/completions"), (":authority", b"h"), *extra]
    values = [base_pb2.HeaderValue(key=key, raw_value=value) for key, value in pairs]
    message = pb.ProcessingRequest()
    headers = message.request_headers if part == "request" else message.response_headers
    headers.headers.headers.extend(values)
    headers.end_of_stream = is_last
    if subset is not None:
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({f"{DESTINATION}-subset": subset})
    return message


def body(data: bytes = CHAT, *, is_last: bool = True) -> Any:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=is_last))


@asynccontextmanager
async def running(count: int = 2, **sections: Any) -> AsyncIterator[tuple[Gateway, list[str]]]:
    """A picker in front of `count` workers, and the workers' addresses."""
    options = SimOptions(time_scale=0, kv_events=False)
    async with run_sim(options) as one, run_sim(options) as two:
        urls = [one.url, two.url][:count]
        async with gateway(picker_config(urls, **sections), is_picker=True) as picker:
            await picker.until_healthy(count)
            yield picker, [url.removeprefix("http://") for url in urls]


@asynccontextmanager
async def stream(picker: Gateway, part: str = "") -> AsyncIterator[Any]:
    metadata = (("x-kvroute-part", part),) if part else None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.grpc_port}") as channel:
        yield channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )(metadata=metadata)


def addresses(answer: Any) -> list[str]:
    """The addresses in the answer to a request's head: those of header and metadata, which must be equal."""
    changed = answer.request_headers.response
    headers = {
        each.header.key: each.header.raw_value.decode() for each in changed.header_mutation.set_headers
    }
    assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == headers[DESTINATION]
    assert changed.clear_route_cache
    return headers[DESTINATION].split(",")


async def send(call: Any, *messages: Any) -> None:
    for message in messages:
        await call.write(message)


async def test_the_head_is_answered_when_the_body_is_complete_and_the_body_comes_back_in_pieces():
    text = CHAT.replace(b"hello", b"x" * 150_000)
    async with running() as (picker, workers), stream(picker) as call:
        await send(call, head(), body(text[:70_000], is_last=False), body(text[70_000:]))

        answer = await call.read()
        assert sorted(addresses(answer)) == sorted(workers)
        pieces = []
        while not pieces or not pieces[-1].end_of_stream:
            message = await call.read()
            pieces.append(message.request_body.response.body_mutation.streamed_response)
        assert b"".join(piece.body for piece in pieces) == text
        assert max(len(piece.body) for piece in pieces) <= 62_000
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_trailers_may_end_the_body():
    async with running() as (picker, _), stream(picker) as call:
        trailers = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
        await send(call, head(), body(is_last=False), trailers)

        kinds = [(await call.read()).WhichOneof("response") for _ in range(3)]
        assert kinds == ["request_headers", "request_body", "request_trailers"]


@pytest.mark.parametrize("as_text", [True, False])
async def test_a_subset_hint_restricts_the_workers(as_text):
    async with running() as (picker, workers):
        for worker in workers:
            hint = [worker, "10.0.0.1:80"]
            async with stream(picker) as call:
                await send(call, head(subset=", ".join(hint) if as_text else hint), body())

                assert addresses(await call.read()) == [worker]


@pytest.mark.parametrize("subset", ["", "10.0.0.1:80"])
async def test_a_subset_without_a_worker_is_answered_503(subset):
    async with running() as (picker, _), stream(picker) as call:
        await send(call, head(subset=subset), body())

        refused = (await call.read()).immediate_response
        assert refused.status.code == 503
        assert b"no_routable_worker" in refused.body
        await until(lambda: picker.metric("kvroute_epp_streams_total", part="whole", end="refused") == 1)


async def test_the_served_address_moves_the_load():
    async with running() as (picker, _):
        async with stream(picker) as call:
            await send(call, head(), body())
            first, second = addresses(await call.read())
            loads = {
                worker.spec.url.removeprefix("http://"): worker.load
                for worker in picker.runtime.fleet.workers()
            }
            assert (loads[first].in_flight, loads[second].in_flight) == (1, 0)
            message = head((":status", b"200"), part="response")
            served = message.metadata_context.filter_metadata["envoy.lb"]
            served.update({f"{DESTINATION}-served": second})
            await call.read()  # the body
            await send(call, message)

            changed = (await call.read()).response_headers.response.header_mutation.set_headers
            names = {each.header.key: each.header.raw_value.decode() for each in changed}
            assert (loads[first].in_flight, loads[second].in_flight) == (0, 1)
            worker = picker.runtime.fleet.get(names["x-kvroute-worker"])
            assert worker.spec.url == f"http://{second}"
            await call.done_writing()
        await until(lambda: loads[second].in_flight == 0)


async def test_the_load_of_a_request_that_nobody_watches_is_returned_after_a_time(caplog):
    async with running(1, epp={"attach_timeout_s": 0.2}) as (picker, _):
        async with stream(picker, "pick") as call:
            await send(call, head(), body())
            await call.read()
            await call.read()
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        (worker,) = picker.runtime.fleet.workers()
        assert worker.load.in_flight == 1

        await until(lambda: worker.load.in_flight == 0)

        await until(lambda: picker.metric("kvroute_epp_streams_total", part="watch", end="missing") == 1)
        assert [record for record in caplog.records if "second filter" in record.message]


async def test_a_stream_that_begins_with_something_else_ends():
    async with running(1) as (picker, _):
        async with stream(picker) as call:
            await send(call, body())
            assert await call.read() is grpc.aio.EOF
        async with stream(picker, "watch") as call:  # of a request that another picker has picked
            await send(call, head(("x-kvroute-pick", b"unknown")))
            assert (await call.read()).WhichOneof("response") == "request_headers"
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF

        await until(lambda: picker.metric("kvroute_epp_streams_total", end="unknown") == 2)


async def test_health_is_that_of_the_services():
    async with (
        running(1) as (picker, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{picker.grpc_port}") as channel,
    ):
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

        async def states() -> list[str]:
            names = ("", "envoy.service.ext_proc.v3.ExternalProcessor", "liveness", "readiness")
            answers = [await check(health_pb2.HealthCheckRequest(service=name)) for name in names]
            return [health_pb2.HealthCheckResponse.ServingStatus.Name(each.status) for each in answers]

        assert await states() == ["SERVING"] * 4
        picker.runtime.fleet.drain("w0")
        assert await states() == ["SERVING"] * 3 + ["NOT_SERVING"]
        picker.runtime.plane.entry_control.announce_shutdown()
        assert await states() == ["NOT_SERVING", "NOT_SERVING", "SERVING", "NOT_SERVING"]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await check(health_pb2.HealthCheckRequest(service="other"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_tls_and_a_client_certificate_if_they_are_set(tmp_path):
    authority = Authority(tmp_path)
    server, client = authority.issue("server"), authority.issue("client")
    tls = {"cert_file": server.cert, "key_file": server.key, "client_ca_file": authority.file}
    async with running(1, server={"tls": tls}) as (picker, workers):
        root = authority.file.read_bytes()
        pair = {"private_key": client.key.read_bytes(), "certificate_chain": client.cert.read_bytes()}
        for own, works in ((pair, True), ({}, False)):
            credentials = grpc.ssl_channel_credentials(root, **own)
            async with grpc.aio.secure_channel(f"localhost:{picker.grpc_port}", credentials) as channel:
                call = channel.stream_stream(
                    "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
                    request_serializer=pb.ProcessingRequest.SerializeToString,
                    response_deserializer=pb.ProcessingResponse.FromString,
                )()
                if works:
                    await send(call, head(), body())
                    assert addresses(await call.read()) == workers
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call.wait_for_connection()
