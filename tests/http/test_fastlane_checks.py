import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvroute.http.fastlane_checks import fast_lane_problem


def test_the_installed_uvicorn_is_as_expected():
    assert fast_lane_problem() == ""


class NoBegin(HttpToolsProtocol):
    def data_received(self, data):
        self.headers = []


class OtherCycle(HttpToolsProtocol):
    def on_headers_complete(self):
        super().on_headers_complete()
        del self.cycle.response_complete


class NoTimer(HttpToolsProtocol):
    def on_response_complete(self):
        self.server_state.total_requests += 1
        self.flow.resume_reading()


class StaysOpen(HttpToolsProtocol):
    def shutdown(self):
        pass


class Forgetful(HttpToolsProtocol):
    def connection_made(self, transport):
        super().connection_made(transport)
        self.connections.clear()


class CountsConnections(HttpToolsProtocol):
    def connection_made(self, transport):
        super().connection_made(transport)
        self.number = 1


class KeepsMore(HttpToolsProtocol):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen: list[bytes] = []


@pytest.mark.parametrize(
    "changed", [NoBegin, OtherCycle, NoTimer, StaysOpen, Forgetful, CountsConnections, KeepsMore]
)
def test_a_uvicorn_that_works_otherwise_is_found_out(changed):
    assert fast_lane_problem(changed)
