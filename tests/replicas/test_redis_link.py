"""The link to Redis, over real sockets to a scripted server. tests/integration has a real one."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
import redis
from pydantic import SecretStr
from redis.asyncio.connection import Connection
from tests.support.waiting import until

from kvroute.replicas.envelope import MAX_ENVELOPE_BYTES
from kvroute.replicas.options import SharingOptions
from kvroute.replicas.redis_link import AnswerReader, RedisLink


class Owner:
    """A `LinkOwner` that records."""

    def __init__(self) -> None:
        self.waiting: list[tuple[bytes, bytes]] = []
        self.received: list[bytes] = []
        self.states: list[str] = []
        self.too_large: list[int] = []

    def on_too_large(self, size):
        self.too_large.append(size)

    def next_command(self):
        return self.waiting.pop(0) if self.waiting else None

    def on_data(self, data):
        self.received.append(data)

    def on_up(self):
        self.states.append("up")

    def on_down(self, why):
        self.states.append(why)

    def on_refused(self, why):
        self.states.append(f"refused: {why}")


class Server:
    """Answers as Redis does; `cut` bytes in each write. `script` may replace the answer to a command."""

    def __init__(self, cut: int = 1 << 20) -> None:
        self.cut = cut
        self.script: dict[bytes, bytes] = {}
        self.published: list[bytes] = []
        self.subscribers: list[asyncio.StreamWriter] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                words = [await self.word(reader) for _ in range(int((await reader.readuntil(b"\r\n"))[1:]))]
                command = words[0].upper()
                if command in self.script:
                    await self.write(writer, self.script[command])
                elif command == b"SUBSCRIBE":
                    self.subscribers.append(writer)
                    for number, channel in enumerate(words[1:], 1):
                        await self.write(writer, array(b"subscribe", channel) + b":%d\r\n" % number)
                elif command == b"PUBLISH":
                    self.published.append(words[2])
                    await self.write(writer, b":1\r\n")
                    for each in self.subscribers:
                        await self.write(each, array(b"message", *words[1:]))
                else:
                    await self.write(writer, b"+OK\r\n")

    @staticmethod
    async def word(reader: asyncio.StreamReader) -> bytes:
        size = int((await reader.readuntil(b"\r\n"))[1:])
        return (await reader.readexactly(size + 2))[:-2]

    async def write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        for start in range(0, len(data), self.cut):
            writer.write(data[start : start + self.cut])
            await writer.drain()
            await asyncio.sleep(0)


def array(*words: bytes) -> bytes:
    parts = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return b"*3\r\n" + parts


@asynccontextmanager
async def linked(server: Server, owner: Owner):
    """A running link to the server."""
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        link = RedisLink(SharingOptions(url=SecretStr(f"redis://127.0.0.1:{port}")), (b"all", b"own"), owner)
        running = asyncio.create_task(link.run())
        try:
            await until(lambda: owner.states)
            yield link
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for writer in server.writers:
                writer.close()


async def test_messages_arrive_in_order_however_their_bytes_are_cut():
    server, owner = Server(cut=1), Owner()
    sent = [b"", b"\r\n", b"$5\r\n*3", bytes(range(256)), b"last"]

    async with linked(server, owner) as link:
        owner.waiting = [(b"all", data) for data in sent]
        link.wake()
        await until(lambda: len(owner.received) == len(sent))

    assert owner.received == server.published == sent
    assert owner.states == ["up"]


async def test_what_waited_is_published_once_the_link_is_up():
    server, owner = Server(), Owner()
    owner.waiting = [(b"all", b"early")]

    async with linked(server, owner):
        await until(lambda: owner.received)

    assert owner.received == [b"early"]


async def test_a_refused_command_is_reported_and_the_link_stays():
    server, owner = Server(), Owner()
    server.script[b"PUBLISH"] = b"-NOPERM no permissions to access a channel\r\n"

    async with linked(server, owner) as link:
        owner.waiting = [(b"all", b"x")]
        link.wake()
        await until(lambda: len(owner.states) == 2)

    assert owner.states[0] == "up"
    assert "does not permit" in owner.states[1]


async def test_a_refused_subscription_is_the_reason_why_the_link_is_down():
    server, owner = Server(), Owner()
    server.script[b"SUBSCRIBE"] = b"-NOPERM no permissions to access a channel\r\n"

    async with linked(server, owner):
        pass

    assert "does not permit" in owner.states[0]


async def test_bytes_that_are_no_answer_end_the_link_and_it_is_made_again():
    server, owner = Server(), Owner()

    async with linked(server, owner) as link:
        await until(lambda: server.subscribers)
        server.subscribers.pop().write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await until(lambda: owner.states[-1:] == ["up"] and len(owner.states) == 3)
        owner.waiting = [(b"all", b"again")]
        link.wake()
        await until(lambda: owner.received)

    assert owner.received == [b"again"]


async def test_a_message_that_is_too_large_is_not_kept_and_the_next_one_arrives():
    """Anybody who can write to the Redis can publish 512 MB."""
    server, owner = Server(), Owner()
    size = 3 * MAX_ENVELOPE_BYTES

    async with linked(server, owner):
        await until(lambda: server.subscribers)
        (subscriber,) = server.subscribers
        subscriber.write(b"*3\r\n$7\r\nmessage\r\n$3\r\nall\r\n$%d\r\n%b\r\n" % (size, bytes(size)))
        subscriber.write(b"*3\r\n$7\r\nmessage\r\n$3\r\nall\r\n$4\r\nnext\r\n")
        await until(lambda: owner.received)

    assert owner.too_large == [size]
    assert owner.received == [b"next"]


@pytest.mark.parametrize("data", [b"*1\r\n" * 2, b"*17\r\n", b"$" + b"1" * 5000, b"x\r\n", b"$x\r\n"])
def test_answers_that_no_subscriber_gets_are_refused(data):
    with pytest.raises(ValueError, match=r"."):
        AnswerReader(100).feed(data, lambda _: None)


async def test_redis_py_has_the_private_name_that_the_link_uses():
    connection = Connection()
    assert hasattr(connection, "_writer"), (
        f"redis-py {redis.__version__} has no Connection._writer any more: find the transport of an open "
        "connection elsewhere (kvroute.replicas.redis_link._transport_of), or limit redis in pyproject.toml"
    )


async def test_a_client_without_that_name_is_the_reason_why_the_link_is_down(monkeypatch):
    class Renamed(Connection):
        @property
        def _writer(self):
            raise AttributeError("_writer")

        @_writer.setter
        def _writer(self, value): ...

        async def connect(self): ...
        async def disconnect(self, nowait=False): ...

    owner = Owner()
    link = RedisLink(SharingOptions(url=SecretStr("redis://127.0.0.1:1")), (b"all",), owner)
    monkeypatch.setattr(link._factory, "connection_class", Renamed)
    running = asyncio.create_task(link.run())
    await until(lambda: owner.states)
    running.cancel()

    assert "is not supported: redis.asyncio.Connection has no _writer" in owner.states[0]
