"""Client connections that begin as the first one did are connections of their own."""

import asyncio

from uvicorn.config import Config
from uvicorn.server import ServerState

from kvroute.gateway.edge import ClientBounds
from kvroute.gateway.fastlane import ITS_OWN, ConnectionTemplate, FastLaneProtocol
from kvroute.gateway.options import ServerOptions
from kvroute.metrics import Metrics


def test_nothing_is_known_before_the_first_one():
    assert ConnectionTemplate().members({}, []) == {}


def test_what_is_each_ones_own_is_not_passed_on():
    beginning = ConnectionTemplate()
    of = {}
    beginning.learn({"parser": 1, "pipeline": 2, "flow": None}, of)
    assert beginning.members(of) == {"flow": None}


def test_connections_of_other_objects_begin_anew_even_if_these_are_equal():
    beginning, of = ConnectionTemplate(), {}
    beginning.learn({"flow": None}, of)
    assert beginning.members({}) == {}


async def test_every_connection_can_be_left_to_uvicorn():
    async def application(_scope, _receive, _send):
        """Never answers."""

    bounds = ClientBounds(ServerOptions(), Metrics())
    members = {"plane": None, "plain": None, "beginning": ConnectionTemplate(), "bounds": bounds}
    bound = type("Bound", (FastLaneProtocol,), members)
    config, state, app_state = Config(application, http=bound, ws="none", lifespan="off"), ServerState(), {}
    config.load()
    loop = asyncio.get_running_loop()
    connections = [bound(config, state, app_state, loop) for _ in range(3)]
    for connection in connections[1:]:
        assert not ITS_OWN & vars(connection).keys()
        assert vars(connection).keys() | ITS_OWN == vars(connections[0]).keys()

    for number, connection in enumerate(connections):
        connection.connection_made(asyncio.Transport())
        connection._leave_to_uvicorn(b"GET /%d HTTP/1.1\r\n" % number)

    assert len(state.connections) == 3
    for number, connection in enumerate(connections):
        connection._leave_to_uvicorn(b"host: x\r\n\r\n")
        assert connection.cycle.scope["path"] == f"/{number}"
        assert connection.transport is connection.flow._transport
    await asyncio.gather(*state.tasks, return_exceptions=True)
