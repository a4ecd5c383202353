"""Which addresses a program may register with LMCache's coordinator, and how many servers it may have.

The coordinator's protocol has no authentication (LMCache 0.5.6), and the gateway sends requests to the
addresses that are registered: polls and, with prefetches, the token ids of prompts. So a program may register
only an address of its own, of a worker, or of `lmcache.coordinator.servers`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final

MAX_SERVERS_PER_SENDER: Final = 64
"""Servers that one address may register; a node has about one for each GPU."""

_LOOPBACK_NAMES: Final = frozenset({"localhost", "::1", "127.0.0.1"})

Network = IPv4Network | IPv6Network


class RegistrationRefused(Exception):
    """A message to the coordinator is not believed; `status` is that of the answer."""

    def __init__(self, text: str, status: int = 403) -> None:
        super().__init__(text)
        self.status = status


def normalized_host(host: str) -> str:
    """The host in one form, so that equal hosts compare equal. Names are not resolved."""
    host = host.strip("[]").lower()
    if host in _LOOPBACK_NAMES:
        return "127.0.0.1"
    try:
        address = ip_address(host)
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).compressed


class ServerAddresses:
    """Decides whether a sender may register an address. Immutable.

    `servers`: hosts and networks, as in `lmcache.coordinator.servers`. `is_local`: whether an address
    belongs to this machine. Raises ValueError for an entry that is neither.
    """

    def __init__(self, servers: Sequence[str], is_local: Callable[[str], bool]) -> None:
        self._networks: list[Network] = []
        self._names: set[str] = set()
        for entry in servers:
            if "/" in entry:
                self._networks.append(ip_network(entry))
            else:
                self._names.add(normalized_host(entry))
        self._is_local = is_local

    def is_listed(self, host: str) -> bool:
        """Whether the operator has named this host or its network."""
        host = normalized_host(host)
        if host in self._names:
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def belongs(self, host: str, sender: str) -> bool:
        """Whether `host` is an address of the machine that sends from the address `sender`."""
        host, sender = normalized_host(host), normalized_host(sender)
        if host == sender:
            return True
        return _is_loopback(sender) and (_is_loopback(host) or self._is_local(host))

    def check(self, host: str, sender: str, workers: Collection[str]) -> None:
        """Raise RegistrationRefused if `sender` may not register `host`. `workers`: the workers' hosts."""
        if self.belongs(host, sender) or self.is_listed(host):
            return
        if normalized_host(host) in {normalized_host(worker) for worker in workers}:
            return
        raise RegistrationRefused(
            f"{sender} may not register the address {host[:100]!r}: it is neither its own nor a worker's; "
            "--coordinator-advertise-ip at the LMCache server or lmcache.coordinator.servers"
        )


def is_local_address(host: str) -> bool:
    """Whether an interface of this machine has this IP address. Sends nothing."""
    try:
        family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (OSError, ValueError):
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
