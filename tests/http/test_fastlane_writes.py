"""An answer that waits for the end of an iteration is written before anything else on its connection."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from kvroute.http.edge import ClientBounds
from kvroute.http.fastlane import ConnectionTemplate, FastLaneProtocol
from kvroute.http.options import ServerOptions
from kvroute.http.request_heads import PlainRequests
from kvroute.metrics import Metrics
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.upstream.writes import Outbox

REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\n\r\n{}"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def get_write_buffer_size(self):
        return 0

    def write(self, data):
        self.sent.append(bytes(data))

    def is_closing(self):
        return self.sent[-1:] == [b"closed"]

    def close(self):
        self.sent.append(b"closed")

    def write_eof(self):
        raise NotImplementedError

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Plane:
    """Takes every request and answers none by itself."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.max_body_bytes, self.has_keys, self.seen_client = 1000, False, None
        self.asked: list[Any] = []
        self.entry_control = self.bodies = self

    def admits(self, _headers, _client):
        return True

    def new_record(self, *_):
        return SimpleNamespace()

    def read(self, *_):
        return None

    def relay(self, call):
        self.asked.append(call.client)
        return self

    is_over = False


@pytest.fixture
async def lane():
    async def application(_scope, _receive, _send):
        """Never run."""

    plane = Plane()
    requests = PlainRequests(ENDPOINTS.values(), hidden_fields=frozenset(), added_fields=b"")
    bounds = ClientBounds(ServerOptions(), Metrics())
    members = {"plane": plane, "plain_requests": requests, "template": ConnectionTemplate(), "bounds": bounds}
    bound = type("Bound", (FastLaneProtocol,), members)
    config = Config(application, http=bound, ws="none", lifespan="off", log_config=None)
    config.load()
    for _ in range(20):
        plane.outbox.send(Transport(), b"x")
    await asyncio.sleep(0)  # an iteration with several writes: the next ones wait
    protocol = bound(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(Transport())
    protocol.data_received(REQUEST)
    assert plane.asked == [protocol]
    yield protocol
    protocol.connection_lost(None)


def answer(protocol) -> None:
    protocol.answer(200, b"content-length: 2\r\n", b"{}", True)
    assert protocol.transport.sent == []


def status_lines(protocol) -> list[bytes]:
    return [data[:12] for data in protocol.transport.sent]


async def test_it_is_written_at_the_end_of_the_iteration(lane):
    answer(lane)
    await asyncio.sleep(0)
    assert status_lines(lane) == [b"HTTP/1.1 200"]


async def test_the_next_request_in_the_same_iteration_is_answered_after_it(lane):
    answer(lane)
    lane.data_received(b"no HTTP at all\r\n\r\n")
    assert status_lines(lane)[:2] == [b"HTTP/1.1 200", b"HTTP/1.1 400"]


async def test_a_shutdown_in_the_same_iteration_closes_after_it(lane):
    answer(lane)
    lane.shutdown()
    assert status_lines(lane) == [b"HTTP/1.1 200", b"closed"]
