"""KV events of a sender that means harm."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import zmq
import zmq.asyncio
from tests.blackbox.conftest import Process, StartServe, StartSim
from tests.support.sockets import free_port
from tests.support.waiting import until

LONG_BYTES = 400_000_000


async def listening(serve: StartServe, sim: StartSim) -> tuple[Process, int]:
    """A gateway that workers send their events to, and the port."""
    port = free_port()
    url = await sim("--time-scale", "0")
    gateway = await serve(
        "--worker", url, "--strategy", "kvaware", "--set", f"kv_events.bind=tcp://127.0.0.1:{port}",
        "--set", "kv_events.topic=one", "--set", "kv_events.replay_endpoint=",
    )  # fmt: skip
    return gateway, port


async def test_a_message_without_bounds_costs_no_memory_and_events_go_on(
    serve: StartServe, sim: StartSim
) -> None:
    gateway, port = await listening(serve, sim)
    context = zmq.asyncio.Context()
    sender = context.socket(zmq.PUB)
    sender.setsockopt(zmq.LINGER, 0)
    sender.connect(f"tcp://127.0.0.1:{port}")
    cleared = msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]] * 3, 0])
    number = 0

    async def send(payload: bytes) -> None:
        nonlocal number
        await sender.send_multipart([b"one", number.to_bytes(8), payload])
        number += 1

    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:

        async def received() -> float:
            page = (await client.get("/metrics")).text
            lines = [
                line for line in page.splitlines() if line.startswith("kvroute_kv_events_messages_total")
            ]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

        async def arrives() -> bool:
            await send(cleared)
            return await received() > before

        before = 0.0
        await until(arrives)
        try:
            await send(bytes(LONG_BYTES))
            before = await received() + 1
            await until(arrives)
            assert gateway.peak_rss_mb < 400
        finally:
            context.destroy(linger=0)


async def test_a_message_whose_frames_do_not_end_costs_no_memory_and_events_go_on(
    serve: StartServe, sim: StartSim
) -> None:
    gateway, port = await listening(serve, sim)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + (3).to_bytes(4) + b"PUB"
    writer.write(greeting + bytes((4, len(ready))) + ready)
    await reader.readuntil(b"READY")
    frames = (b"\x01\x00" * 65_536 + b"\x03" + (1 << 20).to_bytes(8) + bytes(1 << 20)) * 4
    sent = 0
    try:
        async with asyncio.timeout(60):
            while sent < LONG_BYTES:
                writer.write(frames)
                await writer.drain()
                sent += len(frames)
    except OSError:
        pass
    finally:
        writer.close()
    context = zmq.asyncio.Context()
    sender = context.socket(zmq.PUB)
    sender.setsockopt(zmq.LINGER, 0)
    sender.connect(f"tcp://127.0.0.1:{port}")
    number = 0
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:

        async def arrives() -> bool:
            nonlocal number
            payload = msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]], 0])
            await sender.send_multipart([b"one", number.to_bytes(8), payload])
            number += 1
            page = (await client.get("/metrics")).text
            lines = [
                line for line in page.splitlines() if line.startswith("kvroute_kv_events_messages_total")
            ]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines) > 0

        try:
            await until(arrives)
        finally:
            context.destroy(linger=0)

    assert sent < LONG_BYTES, "the connection ends"
    assert gateway.peak_rss_mb < 400
