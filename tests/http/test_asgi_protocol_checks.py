import logging

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvroute.http.asgi_protocol import TrimmedProtocol
from kvroute.http.asgi_protocol_checks import trimmed_protocol_problem


def test_this_uvicorn_is_as_expected():
    assert trimmed_protocol_problem() == ""


def test_its_requests_are_nobodys_and_not_logged(caplog):
    access = logging.getLogger("uvicorn.access")
    access.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, access.name):
        trimmed_protocol_problem()
    access.removeHandler(caplog.handler)

    assert caplog.messages == []


class LosesBody(TrimmedProtocol):
    def on_body(self, body):
        super().on_body(body[:-1])


class ForgetsHeaders(TrimmedProtocol):
    def on_header(self, name, value):
        pass


class ClosesAfterEach(TrimmedProtocol):
    def on_headers_complete(self):
        super().on_headers_complete()
        self.cycle.keep_alive = False


class NeverCompletes(TrimmedProtocol):
    def on_message_complete(self):
        pass


class TellsNobody(TrimmedProtocol):
    def connection_lost(self, exc):
        HttpToolsProtocol.connection_lost(self, exc)


@pytest.mark.parametrize(
    "changed", [LosesBody, ForgetsHeaders, ClosesAfterEach, NeverCompletes, TellsNobody, HttpToolsProtocol]
)
def test_another_uvicorn_is_noticed(changed):
    assert trimmed_protocol_problem(changed)
