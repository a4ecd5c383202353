"""The controller over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.lmcache.controller_sockets import ControllerSockets
from kvroute.lmcache.options import ControllerOptions
from kvroute.wire import lmcache_controller as wire

CHUNK = 64
CPU = "LocalCPUBackend"


class Peer:
    """A worker's sockets."""

    def __init__(self, served: ControllerSockets) -> None:
        self.context = zmq.asyncio.Context()
        self.push = self._open(zmq.PUSH, served.pull)
        self.ask_at = self._open(zmq.DEALER, served.reply)
        self.beat_at = self._open(zmq.DEALER, served.heartbeat)

    def _open(self, kind: int, address: str) -> zmq.asyncio.Socket:
        made = self.context.socket(kind)
        made.connect(f"tcp://{address}")
        return made

    async def ask(self, message: wire.Message | bytes, at: zmq.asyncio.Socket | None = None) -> Any:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        asked = at or self.ask_at
        await asked.send_multipart([b"", payload])
        return wire.decode_reply((await asked.recv_multipart())[-1])

    async def tell(self, *messages: wire.Message | bytes) -> None:
        await self.push.send_multipart(
            [message if isinstance(message, bytes) else wire.encode(message) for message in messages]
        )


@pytest.fixture
def sockets_of(rig: Any) -> Callable[..., ControllerSockets]:
    """The rig's controller at addresses of the system's choice; not bound, not running."""

    def make(clock: SystemClock | None = None, **more: str) -> ControllerSockets:
        places = {"pull": "127.0.0.1:0", "reply": "127.0.0.1:0", "heartbeat": "127.0.0.1:0", **more}
        options = ControllerOptions.model_validate({"chunk_tokens": CHUNK, **places})
        return ControllerSockets(rig.controller, clock or SystemClock(), options)

    return make


async def ended(running: asyncio.Task[None], peer: Peer | None = None) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    if peer is not None:
        peer.context.destroy(linger=0)


@pytest.fixture
async def served(sockets_of: Any) -> AsyncIterator[ControllerSockets]:
    sockets = sockets_of()
    running = asyncio.create_task(sockets.run())
    await sockets.wait_until_serving()
    yield sockets
    await ended(running)


@pytest.fixture
async def peer(served: ControllerSockets) -> AsyncIterator[Peer]:
    peer = Peer(served)
    yield peer
    peer.context.destroy(linger=0)


async def test_a_worker_registers_stores_and_is_asked_over_sockets(
    rig: Any, served: ControllerSockets, peer: Peer, until: Any, worker_of: Any
) -> None:
    worker = worker_of(rig)
    who = worker.who
    registered = await peer.ask(wire.Register(**who, **worker.place))
    assert registered.extra_config == {"heartbeat_url": served.heartbeat}

    await peer.tell(worker.batch("admit", [1, 2]), worker.batch("evict", [1]))
    await until(lambda: rig.counts.operations == 3)
    assert worker.believed == {2}

    worker.batch("admit", [4])
    await peer.tell(worker.batch("admit", [3]))
    await until(lambda: rig.counts.gaps == 1)
    beat = await peer.ask(wire.Heartbeat(**who), peer.beat_at)
    assert [command.reason for command in beat.commands] == ["operations_missing"]

    start, *parts = worker.sync_messages()
    assert (await peer.ask(start)).accepted
    await peer.tell(*parts)
    await until(lambda: rig.counts.syncs_done == 1)
    assert (await peer.ask(wire.FullSyncStatus(**who, sync_id="s1"))).can_exit_freeze
    assert worker.believed == worker.held[CPU] == {2, 3, 4}
    found = await peer.ask(wire.P2pLookup(instance_id="b", worker_id=0, hashes=[2, 3, 9]))
    assert found.layout_info == [("a", CPU, 2, "a:1")]


async def test_garbage_is_counted_and_answered_and_ends_nothing(
    rig: Any, peer: Peer, until: Any, worker_of: Any
) -> None:
    half = wire.encode(worker_of(rig).batch("admit", [1, 2, 3]))[:-5]
    deep = b'{"a":' * 100_000

    await peer.tell(b"", b"{", half, b"\xc1" * 50, deep)
    await until(lambda: rig.counts.unreadable == 5)
    for payload in (b"", b'{"type":"Other"}', half):
        assert isinstance(await peer.ask(payload), wire.ErrorReply)
    await peer.ask_at.send_multipart([b"\x00"])
    assert isinstance(wire.decode_reply((await peer.ask_at.recv_multipart())[-1]), wire.ErrorReply)
    told = await peer.ask(worker_of(rig).batch("admit", [1]))
    assert "not a request" in told.error

    assert isinstance(await peer.ask(wire.Register(instance_id="a", worker_id=0)), wire.RegisterReply)
    assert rig.counts.failed == 0


class Slow(SystemClock):
    """Every look at it takes a millisecond."""

    time = 0.0

    def now(self) -> float:  # type: ignore[override]
        self.time += 0.001
        return self.time


async def test_a_burst_is_taken_in_while_other_work_runs(
    rig: Any, worker_of: Any, sockets_of: Any, until: Any
) -> None:
    worker, sockets = worker_of(rig), sockets_of(clock=Slow())
    sockets.bind()
    peer = Peer(sockets)
    running = asyncio.create_task(sockets.run())
    await peer.ask(wire.Register(**worker.who, **worker.place))
    turns = 0

    await peer.tell(worker.batch("admit", range(100_000)))
    while rig.counts.operations < 100_000:
        await asyncio.sleep(0)
        turns += rig.counts.operations > 0

    assert turns > 20
    assert rig.controller.gauges().chunks == 100_000
    assert rig.counts.gaps == 0
    await ended(running, peer)


async def test_many_messages_do_not_hold_up_a_question(
    rig: Any, worker_of: Any, sockets_of: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, sockets = worker_of(rig), sockets_of(clock=Slow())
    sockets.bind()
    peer = Peer(sockets)
    handle, seen = rig.controller.handle, []

    def noted(message: wire.Message, *more: Any) -> Any:
        if isinstance(message, wire.Heartbeat):
            seen.append(rig.counts.operations)
        return handle(message, *more)

    monkeypatch.setattr(rig.controller, "handle", noted)
    await asyncio.gather(*(peer.tell(worker.batch("admit", range(50))) for _ in range(2000)))
    asking = asyncio.create_task(peer.ask(wire.Heartbeat(**worker.who), peer.beat_at))
    # Everything has been sent; what matters is that both are there before anything is taken in.
    ready = [bound for bound in sockets._sockets if bound.endpoint in (sockets.pull, sockets.heartbeat)]
    await until(lambda: all(bound.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN for bound in ready))
    running = asyncio.create_task(sockets.run())
    await asking
    await until(lambda: rig.counts.operations == 2000 * 50)

    assert seen[0] < 100 * 50
    await ended(running, peer)


async def test_a_taken_address_is_named_before_anything_runs(
    served: ControllerSockets, sockets_of: Any
) -> None:
    sockets = sockets_of(reply=served.reply, heartbeat="127.0.0.1:0")

    with pytest.raises(ConfigError, match=r"lmcache\.controller\.reply: 127\.0\.0\.1:\d+ is taken"):
        sockets.bind()
    assert (sockets.heartbeat, sockets.reply, sockets.pull) == ("", "", "")


async def test_it_can_be_run_again(rig: Any, sockets_of: Any) -> None:
    sockets = sockets_of()
    for _ in range(2):
        running = asyncio.create_task(sockets.run())
        await sockets.wait_until_serving()
        peer = Peer(sockets)
        assert isinstance(await peer.ask(wire.Register(instance_id="a", worker_id=0)), wire.RegisterReply)
        await ended(running, peer)
    assert rig.counts.messages == 2


async def test_a_defect_on_a_broken_message_ends_nothing(
    rig: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: bytes) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(rig.controller, "on_unreadable", fails)

    assert (await peer.ask(b"garbage")).error == "internal error"
    assert isinstance(await peer.ask(wire.Register(instance_id="a", worker_id=0)), wire.RegisterReply)
    assert rig.counts.failed == 1


async def test_without_a_heartbeat_address_workers_are_told_none(sockets_of: Any) -> None:
    sockets = sockets_of(heartbeat="")
    running = asyncio.create_task(sockets.run())
    await sockets.wait_until_serving()
    context = zmq.asyncio.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(f"tcp://{sockets.reply}")

    await asking.send_multipart([b"", wire.encode(wire.Register(instance_id="a", worker_id=0))])
    reply = wire.decode_reply((await asking.recv_multipart())[-1])

    assert reply == wire.RegisterReply()
    await ended(running)
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("bound", "advertise", "worker_ip", "told"),
    [
        ("0.0.0.0", "", "127.0.0.1", "127.0.0.1"),
        ("*", "", "::1", "[::1]"),
        ("0.0.0.0", "gateway.internal", "10.1.2.3", "gateway.internal"),
        ("127.0.0.1", "", "10.1.2.3", "127.0.0.1"),
    ],
)
async def test_the_heartbeat_address_can_be_reached_by_the_worker(
    sockets_of: Any, bound: str, advertise: str, worker_ip: str, told: str
) -> None:
    sockets = sockets_of(heartbeat=f"{bound}:0", advertise=advertise)
    running = asyncio.create_task(sockets.run())
    await sockets.wait_until_serving()

    url = sockets._heartbeat_url(wire.Register(instance_id="a", worker_id=0, ip=worker_ip))

    assert url == f"{told}:{sockets.heartbeat.rpartition(':')[2]}"
    await ended(running)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pull": "tcp://1.2.3.4:5"}, None),
        ({"pull": "8300"}, "host:port"),
        ({"reply": "127.0.0.1:99999"}, "host:port"),
        ({"hash_seed": "random"}, "0 to 4294967295"),
        ({"hash_seed": "4294967296"}, "0 to 4294967295"),
        ({"hash_seed": ""}, "random in every process"),
        ({"slice_ms": 3}, "less than or equal to 2"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str | None) -> None:
    with pytest.raises(ValueError, match=message or "host:port"):
        ControllerOptions(**options)


def test_without_a_seed_only_sha256_can_be_followed() -> None:
    assert ControllerOptions(hash_seed="", hash_algorithm="sha256_cbor").hash_seed == ""
