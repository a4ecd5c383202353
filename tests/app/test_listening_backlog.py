"""Accepting clients that come together, on asyncio's loop and on uvloop."""

import asyncio
import socket

import pytest
from tests.support.waiting import until

from kvroute.app.listening import Backlog
from kvroute.app.runtime import Runtime
from kvroute.app.server import GatewayServer, uvicorn_config
from kvroute.config.config import Config

CLIENTS = 100
ITERATIONS = 20  # 13 to accept 100 clients; in the others the protocols learn of their connections


class Protocol(asyncio.Protocol):
    def __init__(self, opened: list[asyncio.BaseTransport], received: list[bytes]) -> None:
        self.opened, self.received = opened, received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.opened.append(transport)

    def data_received(self, data: bytes) -> None:
        self.received.append(data)


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0), backlog=CLIENTS) as listening:
        listening.setblocking(False)
        yield listening


@pytest.fixture
def dial(listening):
    clients = []

    def dial(count: int) -> list[socket.socket]:
        for _ in range(count):
            clients.append(socket.create_connection(listening.getsockname(), timeout=10))
        return clients

    yield dial
    for client in clients:
        client.close()


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_clients_that_come_together_do_not_wait_for_a_round_of_the_loop_each(listening, dial):
    opened: list[asyncio.BaseTransport] = []
    backlog = Backlog(lambda: Protocol(opened, []), CLIENTS)
    await backlog.start([listening])
    dial(CLIENTS)

    await rounds(ITERATIONS)

    assert len(opened) == CLIENTS
    backlog.close()
    for transport in opened:
        transport.close()
    await rounds(2)


async def test_accepted_connections_are_served_and_stay_open_when_accepting_ends(listening, dial):
    opened: list[asyncio.BaseTransport] = []
    received: list[bytes] = []
    backlog = Backlog(lambda: Protocol(opened, received), CLIENTS)
    await backlog.start([listening])
    (client,) = dial(1)
    await until(lambda: opened)
    backlog.close()
    client.sendall(b"hello")
    await until(lambda: received)

    assert received == [b"hello"]
    accepted = opened[0].get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    opened[0].close()
    await rounds(2)


async def test_a_closed_backlog_accepts_no_client(listening, dial):
    opened: list[asyncio.BaseTransport] = []
    backlog = Backlog(lambda: Protocol(opened, []), CLIENTS)
    await backlog.start([listening])
    backlog.close()
    backlog.close()
    address = listening.getsockname()
    dial(1)

    await rounds(ITERATIONS)

    assert opened == []
    listening.close()
    with pytest.raises(ConnectionRefusedError):  # it holds no descriptor that would keep the port open
        socket.create_connection(address)


async def test_a_cancelled_start_leaves_nothing_that_accepts(listening):
    backlog = Backlog(lambda: Protocol([], []), CLIENTS)
    starting = asyncio.create_task(backlog.start([listening]))
    await rounds(3)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    backlog.close()
    address = listening.getsockname()
    await rounds(2)

    listening.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


async def test_a_connection_that_cannot_be_set_up_is_closed_and_logged(listening, dial, caplog):
    def fails() -> asyncio.Protocol:
        raise RuntimeError("no protocol")

    backlog = Backlog(fails, CLIENTS)
    await backlog.start([listening])
    (client,) = dial(1)

    await rounds(ITERATIONS)

    assert client.recv(1) == b""
    assert "could not be set up" in caplog.text
    backlog.close()


async def test_the_gateway_accepts_them_so_and_refuses_once_it_shuts_down():
    config = Config.model_validate({"server": {"port": 0}})
    async with Runtime(config) as runtime:
        settings = uvicorn_config(config, runtime)
        server = GatewayServer(settings, runtime, config.server)
        settings.load()
        server.lifespan = settings.lifespan_class(settings)
        await server.startup()
        address = server.servers[0].sockets[0].getsockname()
        clients = [socket.create_connection(address, timeout=10) for _ in range(CLIENTS)]

        await rounds(ITERATIONS)

        assert len(server.server_state.connections) == CLIENTS
        for client in clients:
            client.close()
        await server.shutdown()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
