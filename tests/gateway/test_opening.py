"""Connections that are opened for less are, for whoever looks at them, as the protocol makes them."""

import asyncio
import logging

import pytest
import uvicorn
from uvicorn.logging import TRACE_LOG_LEVEL
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvroute.gateway.opening import ClientProtocols

REQUEST = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"


class Socket(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.written = b""

    def get_extra_info(self, name, default=None):
        self.asked.append(name)
        return {"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data):
        self.written += data

    def is_closing(self):
        return False

    def close(self):
        pass

    def resume_reading(self):
        pass


async def application(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": str(scope["client"][1]).encode()})


@pytest.fixture
def state():
    return ServerState()


@pytest.fixture
def connect(state):
    config = uvicorn.Config(application, ws="none", lifespan="off", log_config=None)
    config.load()
    config.loaded_app = application  # a function: uvicorn's own wrappers are objects
    app_state: dict[str, object] = {}
    makers: dict[type, ClientProtocols] = {}

    def connect(protocol_class=HttpToolsProtocol, socket=None):
        make = makers.setdefault(protocol_class, ClientProtocols(protocol_class))
        protocol = make(config, state, app_state, asyncio.get_running_loop())
        protocol.connection_made(socket or Socket())
        return protocol

    return connect


async def test_a_request_is_answered(connect):
    protocol = connect()

    protocol.data_received(REQUEST)
    await asyncio.gather(*protocol.tasks)

    assert protocol.transport.written == b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n2"
    protocol.connection_lost(None)


async def test_the_kernel_is_asked_for_no_address_before_a_request_needs_it(connect, state):
    protocol = connect()
    assert state.connections == {protocol}
    assert protocol.transport.asked == []

    protocol.connection_lost(None)

    assert protocol.transport.asked == []
    assert state.connections == set()


async def test_connections_share_nothing_that_is_one_connections(connect):
    one, other = connect(), connect()

    one.data_received(REQUEST)

    assert one.parser is not other.parser
    assert one.pipeline is not other.pipeline
    assert other.cycle is None
    for task in one.tasks:
        task.cancel()


class Remembers(HttpToolsProtocol):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = 0
        self.heard = []


async def test_what_was_set_before_stays_when_the_rest_is_made(connect):
    protocol = connect(Remembers)
    protocol.seen = 3

    protocol.heard.append(1)

    assert protocol.seen == 3
    assert protocol.heard == [1]
    assert protocol.client == ("127.0.0.1", 2)
    assert connect(Remembers).heard == []


async def test_a_parser_that_was_given_up_is_not_made_again(connect):
    protocol = connect()
    protocol.connection_lost(None)

    assert protocol.parser is None
    assert list(protocol.pipeline) == []
    assert protocol.parser is None


async def test_uvicorn_traces_connections_as_ever(connect, caplog):
    with caplog.at_level(TRACE_LOG_LEVEL, "uvicorn.error"):
        connect().connection_lost(None)

    messages = [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"]
    assert messages == ["127.0.0.1:2 - HTTP connection made", "127.0.0.1:2 - HTTP connection lost"]


async def test_whoever_left_before_its_client_was_asked_for_is_logged_by_nobody(connect, caplog):
    with caplog.at_level(logging.DEBUG, "uvicorn.error"):
        connect().connection_lost(None)

    assert not caplog.records
