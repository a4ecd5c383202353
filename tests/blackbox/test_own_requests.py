"""What the gateway asks for itself: probes and lists. Their answers may be hostile."""

from __future__ import annotations

import asyncio
import gzip

import httpx
import pytest
from tests.blackbox.conftest import StartServe
from tests.support.sockets import tcp_server
from tests.support.waiting import until

MODELS = b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":4096}]}'
BOMB = gzip.compress(b"# a comment that says nothing\n" * 25_000_000 + b"vllm:num_requests_running 1\n", 9)
MOST_MB = 300


class Worker:
    """Answers `/metrics` with the head `fields` and `pieces`; lists one model; all else is an empty 200."""

    def __init__(self, fields: bytes, piece: bytes, count: int) -> None:
        self.fields, self.piece, self.count = fields, piece, count
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        path = head.split(b" ")[1]
        if path == b"/metrics":
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n%b\r\n" % self.fields)
            for _ in range(self.count):
                writer.write(self.piece)
                await writer.drain()
        else:
            body = MODELS if path == b"/v1/models" else b""
            head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
        await writer.drain()

    def asked(self, path: bytes) -> int:
        return sum(head.startswith(b"GET " + path + b" ") for head in self.heads)


@pytest.mark.parametrize(
    ("reason", "fields", "piece", "count"),
    [
        ("encoding", b"content-encoding: gzip\r\n", BOMB, 1),
        ("size", b"", b"# a page without end\n" * 5000, 8000),
        ("size", b"content-length: 999999999999\r\n", b"", 0),
    ],
    ids=["compressed", "endless", "announced"],
)
async def test_a_page_that_is_compressed_or_endless_is_refused_and_its_worker_serves_on(
    serve: StartServe, reason: str, fields: bytes, piece: bytes, count: int
) -> None:
    worker = Worker(fields, piece, count)
    async with tcp_server(worker.serve) as port:
        gateway = await serve("--worker", f"http://127.0.0.1:{port}")
        await until(lambda: worker.asked(b"/health") > 1)
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            page = (await client.get("/metrics")).text
            models = (await client.get("/v1/models")).json()
        await gateway.stop()
    assert f'kvroute_answers_refused_total{{reason="{reason}"}}' in page
    assert [each["id"] for each in models["data"]] == ["m"]
    assert gateway.log.count("/metrics is refused") == 1
    assert all(b"accept-encoding: identity" in head.lower() for head in worker.heads)


async def test_a_compressed_page_costs_no_memory(serve: StartServe) -> None:
    worker = Worker(b"content-encoding: gzip\r\n", BOMB, 1)
    async with tcp_server(worker.serve) as port:
        gateway = await serve("--worker", f"http://127.0.0.1:{port}")
        await until(lambda: worker.asked(b"/health") > 1)
        assert gateway.peak_rss_mb < MOST_MB


@pytest.mark.parametrize(
    ("items", "count"), [(b"{},", 700_000), (b'{"metadata":{"name":"a"}},', 50_000)], ids=["tiny", "named"]
)
async def test_a_list_of_far_more_pods_than_any_cluster_has_is_given_up(
    serve: StartServe, items: bytes, count: int
) -> None:
    async def pods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        text = b'{"metadata":{"resourceVersion":"1"},"items":[%b]}' % (items * count)[:-1]
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + text)
        await writer.drain()

    async with tcp_server(pods) as port:
        gateway = await serve(
            "--set", "fleet.kubernetes.enabled=true", "--set", "fleet.kubernetes.namespace=llm",
            "--set", f"fleet.kubernetes.api_url=http://127.0.0.1:{port}", workers=0,
        )  # fmt: skip
        await gateway.logged("10000 objects")


async def test_a_list_of_pods_without_end_is_given_up(serve: StartServe) -> None:
    asked: list[int] = []

    async def pods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.append(0)
        writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"metadata":{},"items":[')
        for _ in range(800):
            writer.write(b'{"kind":"Pod","metadata":{"name":"a"}},' * 25_000)
            await writer.drain()
            asked[-1] += 1
            if len(asked) > 1 or asked[-1] > 700:
                return

    async with tcp_server(pods) as port:
        gateway = await serve(
            "--set", "fleet.kubernetes.enabled=true", "--set", "fleet.kubernetes.namespace=llm",
            "--set", f"fleet.kubernetes.api_url=http://127.0.0.1:{port}", workers=0,
        )  # fmt: skip
        await until(lambda: len(asked) > 1)
        assert gateway.peak_rss_mb < MOST_MB
    assert asked[0] < 200
