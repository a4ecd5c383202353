"""One port that several processes listen on."""

from __future__ import annotations

import errno
import socket
from typing import Final

from kvroute.dual_stack import EVERY_ADDRESS
from kvroute.errors import ConfigError

_UNSUPPORTED: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


class SharedPort:
    """An address that several processes of one user listen on together (SO_REUSEPORT).

    The kernel distributes new connections among the processes that listen. This object binds the address,
    which keeps other users' programs away from it, but does not listen itself.
    """

    def __init__(self, host: str, port: int) -> None:
        """Raises ConfigError if the address cannot be bound or another program already listens on it."""
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ConfigError("server.host", f"{host}: {error.strerror}") from error
        self._reserved: list[socket.socket] = []
        failed: OSError | None = None
        for family, *_, address in dict.fromkeys(addresses):
            target = address if not self._reserved or port else (address[0], self.port, *address[2:])
            try:
                # Bound once without SO_REUSEPORT: else another gateway of the same user, which listens there
                # already, would share its clients with this one.
                with _bind(family, target, shared=False) as exclusive:
                    target = exclusive.getsockname()
                self._reserved.append(_bind(family, target, shared=True))
            except OSError as error:
                failed = error
                if (
                    error.errno not in _UNSUPPORTED
                ):  # a name may have addresses that this machine does not have
                    break
        if failed is not None and (failed.errno not in _UNSUPPORTED or not self._reserved):
            self.close()
            raise ConfigError("server.port", f"{host}:{port}: {failed.strerror}") from failed

    @property
    def port(self) -> int:
        """The bound port; the system chose it where the configuration has 0."""
        number: int = self._reserved[0].getsockname()[1]
        return number

    def sockets(self) -> list[socket.socket]:
        """New sockets on the same address, for one process to listen on. Raises OSError."""
        return [_bind(reserved.family, reserved.getsockname(), shared=True) for reserved in self._reserved]

    def close(self) -> None:
        for reserved in self._reserved:
            reserved.close()


def _bind(family: int, address: tuple[object, ...], *, shared: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            only_ipv6 = address[0] != EVERY_ADDRESS
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_ipv6)
        bound.setblocking(False)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
