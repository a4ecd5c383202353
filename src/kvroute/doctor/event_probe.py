"""Connections to a worker's event stream: does it publish batches, and does it answer replay requests?"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

CONNECT_TIMEOUT_S = 5.0


class EventTap:
    """Counts the batches of one event stream while the context is open."""

    def __init__(self, endpoint: str) -> None:
        self.messages = 0
        self._endpoint = endpoint

    def __enter__(self) -> EventTap:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(self._endpoint)
        return self

    def read(self) -> int:
        """Count the messages that have arrived; returns their number since the start. Does not block."""
        with suppress(zmq.Again):
            while True:
                self._socket.recv_multipart(zmq.NOBLOCK)
                self.messages += 1
        return self.messages

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._context.term()


async def why_closed(endpoint: str) -> str:
    """Why a connection to a ZMQ endpoint fails; "" if it succeeds or cannot be tried."""
    if not endpoint.startswith("tcp://"):
        return ""
    try:
        address = urlsplit(endpoint)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
    except TimeoutError:
        return f"accepts no connection within {CONNECT_TIMEOUT_S:g} s"
    except (OSError, ValueError) as error:
        return "refuses connections" if isinstance(error, ConnectionRefusedError) else _trouble(error)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return ""


async def why_no_replay(endpoint: str, timeout_s: float) -> str:
    """Why a replay endpoint gives no answer to a request; "" if it answers."""
    closed = await why_closed(endpoint)
    if closed:
        return closed
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.DEALER)
        try:
            socket.connect(endpoint)
            # Beyond the newest batch: the answer is only the end marker.
            await socket.send_multipart([b"", (2**62).to_bytes(8, "big")])
            async with asyncio.timeout(timeout_s):
                await socket.recv_multipart()
        except TimeoutError:
            return f"gave no answer within {timeout_s:g} s"
        except zmq.ZMQError as error:
            return str(error)
        finally:
            socket.close(linger=0)
    finally:
        context.term()
    return ""


def _trouble(error: BaseException) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    return f"cannot be reached ({reason})"
