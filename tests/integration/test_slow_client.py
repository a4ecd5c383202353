"""A client that takes its answer slowly holds its worker back, not the gateway's memory."""

from __future__ import annotations

import asyncio
import socket

PLAIN = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b"
)
BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'
CHUNK = b"x" * 40_000
CHUNKS = 1_000  # 40 MB: more than the sockets in between hold
MOST_BYTES = 700_000
"""The transport's mark (64 KiB), what the complete way holds (256 KiB), a read (256 KiB) and a chunk."""


async def test_a_slow_client_makes_the_gateway_hold_little_and_gets_all(run_gateway, raw_worker):
    raw_worker.answer = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK) * CHUNKS
        + b"0\r\n\r\n"
    )
    async with run_gateway([raw_worker.url]) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        client = socket.socket()
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, PLAIN % (len(BODY), BODY))

        held = gateway.server.server_state.connections
        await gateway.until(lambda: any(connection.flow.write_paused for connection in held))
        for _ in range(100):
            await asyncio.sleep(0)
            assert sum(connection.transport.get_write_buffer_size() for connection in held) < MOST_BYTES

        received = bytearray()
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += await loop.sock_recv(client, 1 << 20)
        client.close()

    assert received.count(b"x") >= len(CHUNK) * CHUNKS
