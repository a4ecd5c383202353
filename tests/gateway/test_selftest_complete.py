import logging

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvroute.gateway.complete import CompleteProtocol
from kvroute.gateway.selftest import complete_trouble


def test_this_uvicorn_is_as_expected():
    assert complete_trouble() == ""


def test_its_requests_are_nobodys_and_not_logged(caplog):
    access = logging.getLogger("uvicorn.access")
    access.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, access.name):
        complete_trouble()
    access.removeHandler(caplog.handler)

    assert caplog.messages == []


class LosesBody(CompleteProtocol):
    def on_body(self, body):
        super().on_body(body[:-1])


class ForgetsHeaders(CompleteProtocol):
    def on_header(self, name, value):
        pass


class ClosesAfterEach(CompleteProtocol):
    def on_headers_complete(self):
        super().on_headers_complete()
        self.cycle.keep_alive = False


class NeverCompletes(CompleteProtocol):
    def on_message_complete(self):
        pass


class TellsNobody(CompleteProtocol):
    def connection_lost(self, exc):
        HttpToolsProtocol.connection_lost(self, exc)


@pytest.mark.parametrize(
    "changed", [LosesBody, ForgetsHeaders, ClosesAfterEach, NeverCompletes, TellsNobody, HttpToolsProtocol]
)
def test_another_uvicorn_is_noticed(changed):
    assert complete_trouble(changed)
