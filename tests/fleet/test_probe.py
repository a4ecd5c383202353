from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tests.support.sockets import tcp_server

from kvroute.fleet.probe import ProbeFailure, Prober, probe_client
from kvroute.fleet.worker import MetricsPage, ModelsPage
from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.transport import AnyWorkerTransport

MODELS = b'{"object": "list", "data": [{"id": "m"}]}'


async def test_answers_of_a_real_server_are_read(serve: Any) -> None:
    heads: dict[str, bytes] = {}

    def handle(path: str, head: bytes) -> tuple[int, bytes]:
        heads[path] = head
        return 200, {"/v1/models": MODELS, "/metrics": b"process_start_time_seconds 7\n"}.get(path, b"")

    async with probe_client() as client, serve(handle) as url:
        prober = Prober(client, timeout_s=5.0, path="/alive", api_key="hunter2")

        assert await prober.health(url) is None
        assert await prober.models(url) == ModelsPage(frozenset({"m"}), (), ({"id": "m"},))
        assert await prober.metrics(url) == MetricsPage(start_time=7.0)

    assert {path: b"hunter2" in head for path, head in heads.items()} == {
        "/alive": False,
        "/v1/models": True,
        "/metrics": False,
    }


async def test_a_closed_port_is_a_refusal(serve: Any) -> None:
    async with serve(lambda path, head: (200, b"")) as url:
        pass

    async with probe_client() as client:
        failure = await Prober(client, timeout_s=5.0).health(url)

    assert failure == ProbeFailure("connection refused", refused=True)


async def test_a_server_that_hangs_fails_at_the_deadline(serve: Any) -> None:
    async with probe_client() as client, serve(lambda path, head: None) as url:
        failure = await Prober(client, timeout_s=0.05).health(url)

    assert failure == ProbeFailure("/health gave no answer within 0.05 s")


async def test_a_connection_cut_short_is_a_failure_but_no_refusal() -> None:
    async def slam(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async with tcp_server(slam) as port, probe_client() as client:
        failure = await Prober(client, timeout_s=5.0).health(f"http://127.0.0.1:{port}")

    assert failure is not None
    assert not failure.refused
    assert failure.detail.startswith("/health: ")


@pytest.mark.parametrize("status", [301, 401, 500, 503])
async def test_an_answer_that_is_no_success_is_a_failure(serve: Any, status: int) -> None:
    async with probe_client() as client, serve(lambda path, head: (status, b"")) as url:
        prober = Prober(client, timeout_s=5.0)

        health = await prober.health(url)
        assert health is not None
        assert health.detail.startswith(f"/health answered {status}")
        hint = ": the worker wants an API key (fleet.worker_api_key)" if status == 401 else ""
        assert await prober.models(url) == ProbeFailure(f"/v1/models answered {status}{hint}")
        metrics = await prober.metrics(url)
        assert isinstance(metrics, ProbeFailure)
        assert metrics.detail.startswith(f"/metrics answered {status}")


async def test_a_models_page_that_is_none_is_a_failure(serve: Any) -> None:
    async with probe_client() as client, serve(lambda path, head: (200, b"<html>")) as url:
        assert await Prober(client, timeout_s=5.0).models(url) == ProbeFailure(
            "/v1/models is not a model list: is this a vLLM server?"
        )


@pytest.mark.parametrize(
    ("causes", "refused"),
    [
        ([ConnectionRefusedError(), ConnectionRefusedError()], True),
        ([ConnectionRefusedError(), TimeoutError()], False),
    ],
)
async def test_all_addresses_of_a_host_must_refuse(causes: list[Exception], refused: bool) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("all attempts failed") from ExceptionGroup("attempts", causes)

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
        failure = await Prober(client, timeout_s=5.0).health("http://host")

    assert failure is not None
    assert failure.refused is refused


async def test_a_refused_key_and_a_missing_path_say_what_to_check(serve: Any) -> None:
    async with probe_client() as client, serve(lambda path, head: (401, b"")) as url:
        refused = await Prober(client, timeout_s=5.0, api_key="k").models(url)
    async with probe_client() as client, serve(lambda path, head: (404, b"")) as url:
        missing = await Prober(client, timeout_s=5.0).health(url)

    assert refused == ProbeFailure(
        "/v1/models answered 401: the worker refuses the key of fleet.worker_api_key"
    )
    assert missing == ProbeFailure("/health answered 404: is this a vLLM server?")


@pytest.mark.parametrize("own_transport", [False, True])
async def test_an_unknown_host_is_named_in_plain_words(own_transport: bool) -> None:
    transport = AnyWorkerTransport(UpstreamOptions()) if own_transport else None
    async with probe_client(transport) as client:
        failure = await Prober(client, timeout_s=30.0).health("http://no-such-host.invalid:8000")

    assert failure is not None
    assert failure.detail.startswith("/health: the host name cannot be resolved (")
    assert "Error" not in failure.detail
