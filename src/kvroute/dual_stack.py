"""Listening on `::`: every interface of IPv6 and IPv4, as operators expect of it."""

from __future__ import annotations

import socket
from typing import Final

EVERY_ADDRESS: Final = "::"
_MAPPED: Final = "::ffff:"


def dual_stack_socket(port: int) -> socket.socket:
    """A socket that is bound to `::`, for both families; it does not listen yet. Raises OSError.

    For `loop.create_server(sock=...)`: asyncio and uvloop make a socket for `::` themselves IPv6 only.
    """
    bound = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setblocking(False)
        bound.bind((EVERY_ADDRESS, port))
    except OSError:
        bound.close()
        raise
    return bound


def without_mapping(address: str) -> str:
    """The IPv4 address that such a socket shows as an address of IPv6; other addresses unchanged."""
    unmapped = address.removeprefix(_MAPPED)
    return unmapped if "." in unmapped else address
