"""Sockets for both families of addresses."""

from __future__ import annotations

import socket

import pytest

from kvroute.dual_stack import dual_stack_socket, without_mapping


def test_a_socket_for_both_families_takes_connections_of_both():
    with dual_stack_socket(0) as listening:
        listening.listen()
        listening.setblocking(True)
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), timeout=30):
                accepted, (address, *_) = listening.accept()
                accepted.close()
            assert without_mapping(address) == host


@pytest.mark.parametrize("address", ["::1", "10.0.0.1", "::ffff:1", "fd00::1", ""])
def test_other_addresses_stay(address):
    assert without_mapping(address) == address
