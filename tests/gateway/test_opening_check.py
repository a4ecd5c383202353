from itertools import count

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvroute.gateway.complete import CompleteProtocol
from kvroute.gateway.opening_check import opening_trouble


@pytest.mark.parametrize("protocol_class", [HttpToolsProtocol, CompleteProtocol])
def test_this_uvicorn_is_as_expected(protocol_class):
    assert opening_trouble(protocol_class) == ""


class SetsMoreAtOpening(HttpToolsProtocol):
    def connection_made(self, transport):
        super().connection_made(transport)
        self.greeted = True


class Counts(HttpToolsProtocol):
    numbers = count()

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.number = next(self.numbers)


class OtherClient(HttpToolsProtocol):
    def connection_made(self, transport):
        super().connection_made(transport)
        self.client = ("unix", 0)


class Unregistered(HttpToolsProtocol):
    def connection_lost(self, exc):
        pass


class Needy(HttpToolsProtocol):
    def __init__(self, config, server_state, app_state, _loop=None, *, more):
        super().__init__(config, server_state, app_state, _loop)


@pytest.mark.parametrize("changed", [SetsMoreAtOpening, Counts, OtherClient, Unregistered, Needy])
def test_a_protocol_that_differs_is_noticed(changed):
    assert opening_trouble(changed) != ""
