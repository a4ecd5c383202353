"""Connections that are created from the template work like others."""

import asyncio
from types import SimpleNamespace

from uvicorn.config import Config
from uvicorn.server import ServerState

from kvroute.http.edge import ClientBounds
from kvroute.http.fastlane import PER_CONNECTION, ConnectionTemplate, FastLaneProtocol
from kvroute.http.options import ServerOptions
from kvroute.http.request_heads import PlainRequests
from kvroute.metrics import Metrics
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.upstream.writes import Outbox


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.is_paused = False

    def pause_reading(self):
        self.is_paused = True


def test_a_new_template_is_empty():
    assert ConnectionTemplate().members({}, []) == {}


def test_members_of_one_connection_are_not_shared():
    template = ConnectionTemplate()
    argument = {}
    template.learn({"parser": 1, "pipeline": 2, "flow": None}, argument)
    assert template.members(argument) == {"flow": None}


def test_other_arguments_have_no_template_even_if_they_are_equal():
    template, argument = ConnectionTemplate(), {}
    template.learn({"flow": None}, argument)
    assert template.members({}) == {}


async def test_uvicorn_can_take_over_every_connection():
    async def application(_scope, _receive, _send):
        """Never answers."""

    bounds = ClientBounds(ServerOptions(), Metrics())
    plain = PlainRequests(ENDPOINTS.values(), hidden_fields=frozenset(), added_fields=b"")
    members = {
        "plane": SimpleNamespace(outbox=Outbox()),
        "plain_requests": plain,
        "template": ConnectionTemplate(),
        "bounds": bounds,
    }
    bound = type("Bound", (FastLaneProtocol,), members)
    config, state, app_state = Config(application, http=bound, ws="none", lifespan="off"), ServerState(), {}
    config.load()
    loop = asyncio.get_running_loop()
    connections = [bound(config, state, app_state, loop) for _ in range(3)]
    for connection in connections[1:]:
        assert not PER_CONNECTION & vars(connection).keys()
        assert vars(connection).keys() | PER_CONNECTION == vars(connections[0]).keys()

    for number, connection in enumerate(connections):
        connection.connection_made(Transport())
        connection.data_received(b"GET /%d HTTP/1.1\r\n" % number)

    assert len(state.connections) == 3
    for number, connection in enumerate(connections):
        connection.data_received(b"host: x\r\n\r\n")
        assert connection.cycle.scope["path"] == f"/{number}"
        connection.flow.pause_reading()
        assert [each.transport.is_paused for each in connections] == [n <= number for n in range(3)]
    await asyncio.gather(*state.tasks, return_exceptions=True)
