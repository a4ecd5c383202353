"""Asking a worker for batches that it has published before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from kvroute.wire.framing import EventMessage, pack_replay_request, unpack_replay


@asynccontextmanager
async def replay(
    context: zmq.asyncio.Context, endpoint: str, start_seq: int, timeout_s: float
) -> AsyncIterator[AsyncIterator[EventMessage]]:
    """All buffered batches from `start_seq` on, in order, as they come.

    Each has `timeout_s`. Raises TimeoutError, WireError, zmq.ZMQError; so does the iterator.
    """
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        async with asyncio.timeout(timeout_s):
            await socket.send_multipart(pack_replay_request(start_seq))
        yield _messages(socket, timeout_s)
    finally:
        socket.close(linger=0)


async def _messages(socket: zmq.asyncio.Socket, timeout_s: float) -> AsyncIterator[EventMessage]:
    while True:
        async with asyncio.timeout(timeout_s):
            frames = await socket.recv_multipart()
        message = unpack_replay(frames)
        if message is None:
            return
        yield message
