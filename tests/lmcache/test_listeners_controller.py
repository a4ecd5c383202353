"""The controller over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio
from tests.support.clocks import TickingClock
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.lmcache.listeners import ControllerSockets
from kvroute.lmcache.options import ControllerOptions
from kvroute.wire import lmcache_controller as wire

CHUNK = 64
CPU = "LocalCPUBackend"


class Peer:
    """A worker's sockets."""

    def __init__(self, served: ControllerSockets) -> None:
        self.context = zmq.asyncio.Context()
        self.push = self._open(zmq.PUSH, served.pull)
        self.requests = self._open(zmq.DEALER, served.reply)
        self.heartbeats = self._open(zmq.DEALER, served.heartbeat)

    def _open(self, kind: int, address: str) -> zmq.asyncio.Socket:
        connected = self.context.socket(kind)
        connected.connect(f"tcp://{address}")
        return connected

    async def request(self, message: wire.Message | bytes, at: zmq.asyncio.Socket | None = None) -> Any:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        socket = at or self.requests
        await socket.send_multipart([b"", payload])
        return wire.decode_reply((await socket.recv_multipart())[-1])

    async def push_messages(self, *messages: wire.Message | bytes) -> None:
        await self.push.send_multipart(
            [message if isinstance(message, bytes) else wire.encode(message) for message in messages]
        )


@pytest.fixture
def sockets_of(rig: Any) -> Callable[..., ControllerSockets]:
    """Creates sockets for the rig's controller on free ports; they are not bound and not running."""

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


async def test_a_worker_registers_stores_and_is_a_peer_over_sockets(
    rig: Any, served: ControllerSockets, peer: Peer, worker_of: Any
) -> None:
    worker = worker_of(rig)
    sender = worker.sender
    registered = await peer.request(wire.Register(**sender, **worker.address))
    assert registered.extra_config == {"heartbeat_url": served.heartbeat}

    await peer.push_messages(worker.batch("admit", [1, 2]), worker.batch("evict", [1]))
    await until(lambda: rig.counts.operations == 3)
    assert worker.in_index == {2}

    worker.batch("admit", [4])
    await peer.push_messages(worker.batch("admit", [3]))
    await until(lambda: rig.counts.gaps == 1)
    beat = await peer.request(wire.Heartbeat(**sender), peer.heartbeats)
    assert [command.reason for command in beat.commands] == ["operations_missing"]

    start, *parts = worker.sync_messages()
    assert (await peer.request(start)).accepted
    await peer.push_messages(*parts)
    await until(lambda: rig.counts.syncs_done == 1)
    assert (await peer.request(wire.FullSyncStatus(**sender, sync_id="s1"))).can_exit_freeze
    assert worker.in_index == worker.held[CPU] == {2, 3, 4}
    found = await peer.request(wire.P2pLookup(instance_id="b", worker_id=0, hashes=[2, 3, 9]))
    assert found.layout_info == [("a", CPU, 2, "a:1")]


async def test_garbage_is_counted_and_answered_and_does_not_stop_the_service(
    rig: Any, peer: Peer, worker_of: Any
) -> None:
    half = wire.encode(worker_of(rig).batch("admit", [1, 2, 3]))[:-5]
    deep = b'{"a":' * 100_000

    await peer.push_messages(b"", b"{", half, b"\xc1" * 50, deep)
    await until(lambda: rig.counts.unreadable == 5)
    for payload in (b"", b'{"type":"Other"}', half):
        assert isinstance(await peer.request(payload), wire.ErrorReply)
    await peer.requests.send_multipart([b"\x00"])
    assert isinstance(wire.decode_reply((await peer.requests.recv_multipart())[-1]), wire.ErrorReply)
    reply = await peer.request(worker_of(rig).batch("admit", [1]))
    assert "not a request" in reply.error

    assert isinstance(await peer.request(wire.Register(instance_id="a", worker_id=0)), wire.RegisterReply)
    assert rig.counts.failed == 0


async def test_other_work_runs_while_a_burst_is_applied(rig: Any, worker_of: Any, sockets_of: Any) -> None:
    worker, sockets = worker_of(rig), sockets_of(clock=TickingClock(0.001))
    sockets.bind()
    peer = Peer(sockets)
    running = asyncio.create_task(sockets.run())
    await peer.request(wire.Register(**worker.sender, **worker.address))
    turns = 0

    await peer.push_messages(worker.batch("admit", range(100_000)))
    while rig.counts.operations < 100_000:
        await asyncio.sleep(0)
        turns += rig.counts.operations > 0

    assert turns > 20
    assert rig.controller.gauges().chunks == 100_000
    assert rig.counts.gaps == 0
    await ended(running, peer)


async def test_many_messages_do_not_delay_a_request(
    rig: Any, worker_of: Any, sockets_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, sockets = worker_of(rig), sockets_of(clock=TickingClock(0.001))
    sockets.bind()
    peer = Peer(sockets)
    handle, applied_before = rig.controller.handle, []

    def noted(message: wire.Message, *more: Any) -> Any:
        if isinstance(message, wire.Heartbeat):
            applied_before.append(rig.counts.operations)
        return handle(message, *more)

    monkeypatch.setattr(rig.controller, "handle", noted)
    await asyncio.gather(*(peer.push_messages(worker.batch("admit", range(50))) for _ in range(2000)))
    answer = asyncio.create_task(peer.request(wire.Heartbeat(**worker.sender), peer.heartbeats))
    # Both sockets must have messages before any message is handled.
    ready = [bound for bound in sockets._sockets if bound.endpoint in (sockets.pull, sockets.heartbeat)]
    await until(lambda: all(bound.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN for bound in ready))
    running = asyncio.create_task(sockets.run())
    await answer
    await until(lambda: rig.counts.operations == 2000 * 50)

    assert applied_before[0] < 100 * 50
    await ended(running, peer)


async def test_an_address_in_use_is_named_before_anything_runs(
    served: ControllerSockets, sockets_of: Any
) -> None:
    sockets = sockets_of(reply=served.reply, heartbeat="127.0.0.1:0")

    with pytest.raises(ConfigError, match=r"lmcache\.controller\.reply: 127\.0\.0\.1:\d+ is already in use"):
        sockets.bind()
    assert (sockets.heartbeat, sockets.reply, sockets.pull) == ("", "", "")


async def test_it_can_be_run_again(rig: Any, sockets_of: Any) -> None:
    sockets = sockets_of()
    for _ in range(2):
        running = asyncio.create_task(sockets.run())
        await sockets.wait_until_serving()
        peer = Peer(sockets)
        assert isinstance(await peer.request(wire.Register(instance_id="a", worker_id=0)), wire.RegisterReply)
        await ended(running, peer)
    assert rig.counts.messages == 2


async def test_a_defect_in_the_handling_of_a_broken_message_does_not_stop_the_service(
    rig: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: bytes) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(rig.controller, "on_unreadable", fails)

    assert (await peer.request(b"garbage")).error == "internal error"
    assert isinstance(await peer.request(wire.Register(instance_id="a", worker_id=0)), wire.RegisterReply)
    assert rig.counts.failed == 1


async def test_without_a_heartbeat_address_workers_get_none(sockets_of: Any) -> None:
    sockets = sockets_of(heartbeat="")
    running = asyncio.create_task(sockets.run())
    await sockets.wait_until_serving()
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://{sockets.reply}")

    await dealer.send_multipart([b"", wire.encode(wire.Register(instance_id="a", worker_id=0))])
    reply = wire.decode_reply((await dealer.recv_multipart())[-1])

    assert reply == wire.RegisterReply()
    await ended(running)
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("bound", "advertise", "worker_ip", "expected"),
    [
        ("0.0.0.0", "", "127.0.0.1", "127.0.0.1"),
        ("*", "", "::1", "[::1]"),
        ("0.0.0.0", "gateway.internal", "10.1.2.3", "gateway.internal"),
        ("127.0.0.1", "", "10.1.2.3", "127.0.0.1"),
    ],
)
async def test_the_heartbeat_address_is_one_that_the_worker_can_reach(
    sockets_of: Any, bound: str, advertise: str, worker_ip: str, expected: str
) -> None:
    sockets = sockets_of(heartbeat=f"{bound}:0", advertise=advertise)
    running = asyncio.create_task(sockets.run())
    await sockets.wait_until_serving()

    url = sockets._heartbeat_url(wire.Register(instance_id="a", worker_id=0, ip=worker_ip))

    assert url == f"{expected}:{sockets.heartbeat.rpartition(':')[2]}"
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


def test_without_a_seed_only_sha256_is_accepted() -> None:
    assert ControllerOptions(hash_seed="", hash_algorithm="sha256_cbor").hash_seed == ""
