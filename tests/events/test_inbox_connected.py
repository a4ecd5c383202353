"""A worker's PUB socket read without libzmq: by libzmq's own publishers, and by peers that are none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
from tests.support.sockets import tcp_server
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.errors import WireError
from kvroute.events.inbox import ConnectedInbox, Frames
from kvroute.events.poller import SocketPoller, TimeSlicer
from kvroute.wire.zmq import GREETING, command, ready

LONG_S = 20.0


class Publisher:
    def __init__(self, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def subscribed(self) -> bytes:
        """Waits for the next subscription and returns it."""
        await until(lambda: self._socket.poll(0), within_s=LONG_S)
        return bytes(self._socket.recv())

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)


def poller() -> SocketPoller:
    clock = SystemClock()
    return SocketPoller(clock, 0.5, TimeSlicer(clock, 0.5))


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


async def received(inbox: ConnectedInbox, count: int) -> list[list[bytes]]:
    found: list[list[bytes]] = []
    while len(found) < count:
        assert await inbox.wait(LONG_S)
        inbox.interrupted()
        found += [list(frames) for frames in inbox.take(1000)]
    return found


async def _subscribed_messages_arrive() -> None:
    publisher = Publisher()
    inbox = ConnectedInbox(poller(), publisher.endpoint, "kv", 1000)
    await inbox.ready(LONG_S)
    assert await publisher.subscribed() == b"\x01kv"
    sizes = [0, 1, 255, 256, 8000, 70_000, 1_000_000, 5]
    for number, size in enumerate(sizes):
        publisher.send(b"other", b"x")
        publisher.send(b"kv@1", number.to_bytes(8), bytes(size))

    found = await received(inbox, len(sizes))

    assert [(topic, int.from_bytes(number), len(body)) for topic, number, body in found] == [
        (b"kv@1", number, size) for number, size in enumerate(sizes)
    ]
    await inbox.aclose()
    publisher.close()


async def test_subscribed_messages_arrive_whole_and_in_order() -> None:
    await _subscribed_messages_arrive()


def test_so_it_does_on_the_loop_that_is_served_with() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_subscribed_messages_arrive())


async def test_a_path_is_an_endpoint_too(tmp_path: Path) -> None:
    publisher = Publisher(f"ipc://{tmp_path}/kv")
    inbox = ConnectedInbox(poller(), publisher.endpoint, "", 1000)
    await inbox.ready(LONG_S)
    await publisher.subscribed()
    publisher.send(b"kv", b"1")
    assert await received(inbox, 1) == [[b"kv", b"1"]]
    await inbox.aclose()
    publisher.close()


async def test_a_lost_connection_is_reported_and_opened_again(publisher: Publisher) -> None:
    inbox = ConnectedInbox(poller(), publisher.endpoint, "kv", 1000)
    await inbox.ready(LONG_S)
    await publisher.subscribed()
    assert inbox.interrupted()  # what was published before
    assert not inbox.interrupted()
    publisher.send(b"kv", b"1")
    assert await received(inbox, 1) == [[b"kv", b"1"]]
    publisher.close()
    assert await inbox.wait(LONG_S)
    assert inbox.interrupted()
    assert not inbox.take(10)

    again = Publisher(publisher.endpoint)
    await again.subscribed()
    again.send(b"kv", b"2")

    assert await inbox.wait(LONG_S)
    assert inbox.interrupted()
    assert await received(inbox, 1) == [[b"kv", b"2"]]
    await inbox.aclose()
    again.close()


async def test_messages_beyond_the_queue_wait_at_the_worker(publisher: Publisher) -> None:
    inbox = ConnectedInbox(poller(), publisher.endpoint, "kv", 20)
    await inbox.ready(LONG_S)
    await publisher.subscribed()
    for number in range(2000):
        publisher.send(b"kv", number.to_bytes(8), bytes(5000))
    lengths: list[int] = []

    def is_paused() -> bool:
        """No message has come during 50 polls."""
        lengths.append(len(inbox))
        return lengths[-1] > 0 and len(lengths) >= 50 and len({*lengths[-50:]}) == 1

    await until(is_paused)
    assert 20 <= len(inbox) < 60  # the queue, and the other messages of one read

    found = await received(inbox, 2000)

    assert [int.from_bytes(number) for _, number, _ in found] == list(range(2000))
    await inbox.aclose()


async def test_messages_are_passed_to_the_fast_path_unless_others_wait(publisher: Publisher) -> None:
    inbox = ConnectedInbox(poller(), publisher.endpoint, "kv", 1000)
    await inbox.ready(LONG_S)
    await publisher.subscribed()
    inbox.interrupted()
    taken: list[bytes] = []

    def apply_fast(messages: Sequence[Frames], until: float) -> int:
        fit = list(takewhile(lambda number: number != b"3", (frames[1] for frames in messages)))
        taken.extend(fit)
        return len(fit)

    inbox.on_messages = apply_fast
    for number in range(6):
        publisher.send(b"kv", b"%d" % number)

    assert await received(inbox, 3) == [[b"kv", b"3"], [b"kv", b"4"], [b"kv", b"5"]]

    assert taken == [b"0", b"1", b"2"]
    await inbox.aclose()


async def test_a_wait_ends_without_messages_also_after_earlier_ones(publisher: Publisher) -> None:
    inbox = ConnectedInbox(poller(), publisher.endpoint, "kv", 1000)
    await inbox.ready(LONG_S)
    inbox.interrupted()
    assert not await inbox.wait(0.01)
    assert not await inbox.wait(0.01)
    await publisher.subscribed()
    publisher.send(b"kv", b"1")
    assert await inbox.wait(LONG_S)
    await inbox.aclose()


class Peer:
    """Writes `greeting` to each connection. Counts `connections` and reads all that comes."""

    def __init__(self, greeting: bytes) -> None:
        self.received = b""
        self.connections = 0
        self._greeting = greeting

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.write(self._greeting)
        while data := await reader.read(1000):
            self.received += data


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n".ljust(64), "no ZMTP greeting"),
        (GREETING[:12] + b"PLAIN".ljust(20, b"\0") + GREETING[32:], "PLAIN"),
        (GREETING + command(b"ERROR", b"\x03why"), "why"),
        (GREETING + b"\x00\x01x", "before the handshake"),
        (GREETING + ready() + b"\x77", "not a ZMTP frame"),
    ],
)
async def test_a_peer_that_is_no_publisher_is_complained_of_once_and_tried_again(
    sent: bytes, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.events.inbox._RECONNECT_S", 0.001)
    if sent.endswith(b"\x77"):
        sent += b"\x77"
    peer = Peer(sent)
    with caplog.at_level(logging.WARNING):
        async with tcp_server(peer.serve) as port:
            inbox = ConnectedInbox(poller(), f"tcp://127.0.0.1:{port}", "kv", 10)
            await until(lambda: peer.connections >= 3)
            await inbox.aclose()

    (line,) = {record.getMessage() for record in caplog.records}
    assert why in line
    assert not inbox.take(10)


async def test_a_silent_peer_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.events.inbox._RECONNECT_S", 0.001)
    monkeypatch.setattr("kvroute.events.inbox._HANDSHAKE_S", 0.001)
    peer = Peer(b"")
    with caplog.at_level(logging.WARNING):
        async with tcp_server(peer.serve) as port:
            inbox = ConnectedInbox(poller(), f"tcp://127.0.0.1:{port}", "kv", 10)
            await until(lambda: peer.connections >= 2)
            await inbox.aclose()

    (line,) = [record.getMessage() for record in caplog.records]
    assert "no ZMTP handshake" in line


async def test_a_peer_that_is_no_publisher_behind_its_handshake_is_complained_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.events.inbox._RECONNECT_S", 0.001)
    peer = Peer(GREETING + ready() + b"\x77\x77")
    with caplog.at_level(logging.WARNING):
        async with tcp_server(peer.serve) as port:
            inbox = ConnectedInbox(poller(), f"tcp://127.0.0.1:{port}", "kv", 10)
            await until(lambda: peer.connections >= 3)
            await inbox.aclose()

    assert len(caplog.records) == 1


async def test_an_unexpected_error_is_logged_and_connecting_continues(
    publisher: Publisher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.events.inbox._RECONNECT_S", 0.001)
    loop = asyncio.get_running_loop()
    real, calls = loop.getaddrinfo, 0

    async def getaddrinfo(host: str, port: int, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise UnicodeError("label too long")
        return await real(host, port, **more)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    inbox = ConnectedInbox(poller(), publisher.endpoint, "kv", 10)

    await inbox.ready(LONG_S)

    assert await publisher.subscribed() == b"\x01kv"
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    await inbox.aclose()


async def test_an_address_without_a_server_leaves_time_for_the_next_address(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An IPv6 address, say, where there is no way for IPv6."""
    monkeypatch.setattr("kvroute.events.inbox._CONNECT_S", 0.1)
    loop = asyncio.get_running_loop()
    lookup, connect = loop.getaddrinfo, loop.sock_connect

    async def getaddrinfo(host: str, port: int, **more: Any) -> Any:
        (found, *_) = await lookup(host, port, **more)
        return [(*found[:4], ("192.0.2.1", port)), found]

    async def sock_connect(opened: Any, address: Any) -> None:
        if address[0] == "192.0.2.1":
            await asyncio.Event().wait()
        await connect(opened, address)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(loop, "sock_connect", sock_connect)
    inbox = ConnectedInbox(poller(), publisher.endpoint, "kv", 10)

    await inbox.ready(LONG_S)

    assert await publisher.subscribed() == b"\x01kv"
    await inbox.aclose()


@pytest.mark.parametrize("context", [b"hello", b"x" * 60_000])
async def test_a_publishers_ping_is_answered(context: bytes) -> None:
    """With the sixteen bytes that a context may have, and not with more."""
    peer = Peer(GREETING + ready() + command(b"PING", b"\x00\x64" + context))
    async with tcp_server(peer.serve) as port:
        inbox = ConnectedInbox(poller(), f"tcp://127.0.0.1:{port}", "kv", 10)
        await until(lambda: command(b"PONG", context[:16]) in peer.received)
        await inbox.aclose()


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://host", "tcp://host:port", "tcp://host:1/x", "ipc://", "udp://host:1"]
)
async def test_an_invalid_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(WireError):
        ConnectedInbox(poller(), endpoint, "kv", 10)


async def test_something_is_left_until_the_reader_has_applied_what_it_took(publisher: Publisher) -> None:
    reads = poller()
    inbox = ConnectedInbox(reads, publisher.endpoint, "kv", 1000)
    await inbox.ready(LONG_S)
    await publisher.subscribed()
    assert await inbox.wait(LONG_S)
    assert inbox.interrupted()
    publisher.send(b"kv", bytes(8), b"a batch that needs the reader's task")
    assert await inbox.wait(LONG_S)
    assert not reads.poll()
    assert len(inbox.take(10)) == 1  # taken, and being applied
    assert not reads.poll()
    waiting = asyncio.create_task(inbox.wait(LONG_S))
    await asyncio.sleep(0)
    assert reads.poll()
    waiting.cancel()
    await inbox.aclose()
