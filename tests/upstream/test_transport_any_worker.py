"""One httpx client for all workers."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from tests.support.certificates import Authority

from kvroute.caches.tracker import worker_client
from kvroute.config.config import Config
from kvroute.fleet.probe import ProbeFailure, Prober, probe_client
from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.transport import AnyWorkerTransport


def answers(text: bytes, read_request: Any) -> Any:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                await read_request(reader)
            except asyncio.IncompleteReadError:
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))

    return script


async def test_each_worker_has_its_own_kept_connection(serve: Any, read_request: Any) -> None:
    one, other = await serve(answers(b"one", read_request)), await serve(answers(b"other", read_request))

    async with httpx.AsyncClient(transport=AnyWorkerTransport(UpstreamOptions())) as client:
        texts = [(await client.get(f"{server.url}/health")).text for server in (one, other, one, other)]

    assert texts == ["one", "other", "one", "other"]
    assert (one.accepted, other.accepted) == (1, 1)


async def test_a_refused_connection_is_known_as_one(serve: Any, read_request: Any) -> None:
    server = await serve(answers(b"", read_request))
    await server.close()

    async with probe_client(AnyWorkerTransport(UpstreamOptions())) as client:
        failure = await Prober(client, timeout_s=5.0).health(server.url)

    assert failure == ProbeFailure("connection refused", refused=True)


async def test_a_worker_that_hangs_fails_at_the_deadline_and_keeps_no_other(
    serve: Any, read_request: Any
) -> None:
    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    hanging, well = await serve(hangs), await serve(answers(b"", read_request))
    async with probe_client(AnyWorkerTransport(UpstreamOptions(max_connections=1))) as client:
        prober = Prober(client, timeout_s=0.2)
        failures = await asyncio.gather(
            *(prober.health(hanging.url) for _ in range(2)), prober.health(well.url)
        )

    assert failures == [
        *[ProbeFailure("/health gave no answer within 0.2 s")] * 2,
        None,
    ]


async def test_workers_without_connections_are_forgotten(serve: Any, read_request: Any) -> None:
    server = await serve(answers(b"", read_request))
    transport = AnyWorkerTransport(UpstreamOptions())
    async with httpx.AsyncClient(transport=transport) as client:
        await client.get(server.url)
        for port in (1, 2, 3):
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{port}")

        assert transport.origins == 2


async def test_no_worker_has_another_scheme() -> None:
    async with httpx.AsyncClient(transport=AnyWorkerTransport(UpstreamOptions())) as client:
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.get("ftp://127.0.0.1:1/")


async def test_certificates_are_checked_as_for_answers_to_clients(
    serve: Any, read_request: Any, server_tls: ssl.SSLContext
) -> None:
    server = await serve(answers(b"well", read_request), tls=server_tls)

    async with httpx.AsyncClient(transport=AnyWorkerTransport(UpstreamOptions(verify_tls=False))) as client:
        assert (await client.get(server.url)).text == "well"
    async with httpx.AsyncClient(transport=AnyWorkerTransport(UpstreamOptions())) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(server.url)


async def test_tokenizer_calls_check_certificates_as_answers_to_clients_do(
    serve: Any, read_request: Any, server_tls: ssl.SSLContext
) -> None:
    server, refused = await serve(answers(b"well", read_request), tls=server_tls), list[str]()
    trusting = Config.model_validate({"upstream": {"verify_tls": False}})

    async with worker_client(trusting, refused.append) as client:
        assert (await client.get(server.url)).text == "well"
    async with worker_client(Config(), refused.append) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(server.url)


async def test_a_private_authority_and_a_client_certificate_come_from_the_files(
    serve: Any, read_request: Any, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("own")
    server = await serve(
        answers(b"well", read_request), tls=authority.server(authority.issue("worker"), asks=True)
    )
    files = {"ca_file": authority.file, "cert_file": own.cert, "key_file": own.key}

    async with httpx.AsyncClient(
        transport=AnyWorkerTransport(UpstreamOptions.model_validate({"tls": files}))
    ) as client:
        assert (await client.get(server.url)).text == "well"
    del files["cert_file"], files["key_file"]
    async with httpx.AsyncClient(
        transport=AnyWorkerTransport(UpstreamOptions.model_validate({"tls": files}))
    ) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(server.url)


def test_an_authority_that_nothing_checks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="no effect if verify_tls is off"):
        UpstreamOptions.model_validate({"verify_tls": False, "tls": {"ca_file": tmp_path / "ca.pem"}})
