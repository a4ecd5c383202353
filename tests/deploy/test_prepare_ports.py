from __future__ import annotations

import pytest
from tests.support.sockets import listening

from kvroute.deploy import prepare as ports_module
from kvroute.deploy.prepare import SERVER_PORTS, FreePorts, free_ports, require_free_port
from kvroute.errors import ConfigError


def test_a_port_in_use_is_reported() -> None:
    with listening() as port, pytest.raises(ConfigError, match=r"^port: cannot listen on"):
        require_free_port("127.0.0.1", port)


def test_free_ports_differ_and_are_not_those_of_outgoing_connections() -> None:
    ports = set(free_ports(20))

    assert len(ports) == 20
    assert ports <= set(SERVER_PORTS)


def test_no_port_is_given_twice() -> None:
    ports = FreePorts()

    runs = [range(first, first + length) for length in (1, 3, 2) * 10 for first in (ports.run(length),)]

    given = [port for run in runs for port in run]
    assert len(set(given)) == len(given)


def test_every_port_of_a_run_is_free() -> None:
    first = FreePorts().run(4)

    for port in range(first, first + 4):
        require_free_port("127.0.0.1", port)


def test_a_run_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_module, "ATTEMPTS", 3)

    with pytest.raises(ConfigError, match="no 70000 neighbouring free ports"):
        FreePorts().run(70_000)
