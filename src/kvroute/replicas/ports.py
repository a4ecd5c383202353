"""One address for several processes: taken once, listened on by each (SO_REUSEPORT)."""

from __future__ import annotations

import errno
import socket
from typing import Final

from kvroute.errors import ConfigError

_NOT_HERE: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


class SharedPort:
    """An address that processes of one user listen on together; the kernel deals connections out among
    those that do. Holding it keeps others from it, and does not listen."""

    def __init__(self, host: str, port: int) -> None:
        """Raises ConfigError if the address cannot be had, or if somebody listens there already: without
        that check another gateway of the same user would share its clients with this one."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ConfigError("server.host", f"{host}: {error.strerror}") from error
        self._held: list[socket.socket] = []
        failed: OSError | None = None
        for family, *_, address in dict.fromkeys(found):
            place = address if not self._held or port else (address[0], self.port, *address[2:])
            try:
                with _bound(family, place, shared=False) as alone:
                    place = alone.getsockname()
                self._held.append(_bound(family, place, shared=True))
            except OSError as error:
                failed = error
                if error.errno not in _NOT_HERE:  # a name may have addresses that this machine lacks
                    break
        if failed is not None and (failed.errno not in _NOT_HERE or not self._held):
            self.close()
            raise ConfigError("server.port", f"{host}:{port}: {failed.strerror}") from failed

    @property
    def port(self) -> int:
        """As taken, where the configuration left it to the system."""
        number: int = self._held[0].getsockname()[1]
        return number

    def sockets(self) -> list[socket.socket]:
        """Sockets of this process's own, to listen on. Raises OSError."""
        return [_bound(held.family, held.getsockname(), shared=True) for held in self._held]

    def close(self) -> None:
        for held in self._held:
            held.close()


def _bound(family: int, address: tuple[object, ...], *, shared: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setblocking(False)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
