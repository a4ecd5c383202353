from __future__ import annotations

import socket

import pytest

from kvroute.errors import ConfigError
from kvroute.replicas.shared_port import SharedPort


def test_several_listen_on_one_port():
    shared = SharedPort("127.0.0.1", 0)
    listening = [sock for _ in range(3) for sock in shared.sockets()]
    for sock in listening:
        sock.listen()

    assert {sock.getsockname() for sock in listening} == {("127.0.0.1", shared.port)}
    with socket.create_connection(("127.0.0.1", shared.port), timeout=10):
        pass
    for sock in listening:
        sock.close()
    shared.close()


def test_holding_a_port_takes_no_connections():
    shared = SharedPort("127.0.0.1", 0)

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", shared.port), timeout=10)
    shared.close()


def test_another_gateways_port_is_not_shared():
    first = SharedPort("127.0.0.1", 0)
    (listening,) = first.sockets()
    listening.listen()

    with pytest.raises(ConfigError, match=r"server\.port"):
        SharedPort("127.0.0.1", first.port)
    listening.close()
    first.close()


def test_every_address_of_a_name_is_bound():
    shared = SharedPort("localhost", 0)

    listening = shared.sockets()
    assert {sock.getsockname()[1] for sock in listening} == {shared.port}
    for sock in listening:
        sock.close()
    shared.close()


def test_an_unknown_host_is_a_config_error():
    with pytest.raises(ConfigError, match=r"server\.host"):
        SharedPort("no-such-host.invalid", 0)


def test_an_address_of_another_machine_is_a_config_error():
    with pytest.raises(ConfigError, match=r"server\.port"):
        SharedPort("192.0.2.1", 0)
