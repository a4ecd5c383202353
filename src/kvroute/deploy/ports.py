"""Ports of this host that nobody listens on."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

from kvroute.errors import ConfigError

ATTEMPTS = 100
# Below what Linux gives to outgoing connections, so that a server that starts again finds its port free.
LONG_LIVED = range(20_000, 32_768)


def require_free_port(host: str, port: int, *, path: str = "port") -> None:
    """Raise `ConfigError` about `path` when nobody could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigError(path, f"cannot listen on {host}:{port}: {exc.strerror}") from exc


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of the loopback interface that nobody listens on now."""
    with ExitStack() as held:
        # All are held until the last is found, so that they differ.
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return tuple(probe.getsockname()[1] for probe in probes)


class FreePorts:
    """Finds runs of neighbouring free ports. Mutable: what it has given, which it gives only once."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def run(self, length: int = 1) -> int:
        """The first of `length` neighbouring ports. Raises `ConfigError` when there are none."""
        for _ in range(ATTEMPTS):
            first = random.choice(LONG_LIVED)
            ports = range(first, first + length)
            if self._are_free(ports):
                self._given.update(ports)
                return first
        raise ConfigError("", f"found no {length} free ports side by side on this host")

    def _are_free(self, ports: range) -> bool:
        if ports[-1] not in LONG_LIVED or not self._given.isdisjoint(ports):
            return False
        with ExitStack() as held:
            try:
                for port in ports:
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                return False
        return True
