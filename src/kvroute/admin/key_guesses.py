"""Slows down those who guess the admin key: a bound on wrong keys, per client and in all."""

from __future__ import annotations

import logging
from ipaddress import IPv6Address, ip_address, ip_network
from math import ceil
from typing import Final

from msgspec import Struct

from kvroute.access.client_keys import Bucket
from kvroute.clock import Clock
from kvroute.errors import TooManyGuesses
from kvroute.lru import Lru

log = logging.getLogger(__name__)

PER_PEER: Final = 10
"""Wrong keys of one client in a minute; then one every 6 s."""
IN_ALL: Final = 100
"""Wrong keys in a minute of all clients on other machines that have not had a right one."""

_MAX_PEERS: Final = 1024
_MAX_KNOWN: Final = 256
_MAX_PEER_CHARS: Final = 64
_IPV6_SITE_BITS: Final = 64
"""One subscriber has at least so many addresses; they count as one client."""
_LOG_PAUSE_S: Final = 10.0
_OWN_ADDRESSES: Final = ("127.0.0.1", "::/64")
"""Loopback, as `peer_of` returns it."""


class _Peer(Struct, eq=False):
    """The wrong keys of one client. Mutable, by `KeyGuesses`."""

    bucket: Bucket
    last: int = 0
    """A hash of its last wrong key."""


class KeyGuesses:
    """Counts wrong admin keys of this process.

    A client whose key was right before, or that is on this machine, is not refused because of the guesses of
    others. Mutable: `wrong` and `right`; it remembers at most 1024 clients with wrong keys, and 256 with
    right ones.
    """

    # A client that has too many wrong keys is refused also with the right one: otherwise the answer would
    # still tell whether a guess was right.

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._peers: Lru[str, _Peer] = Lru(_MAX_PEERS)
        self._known: Lru[str, bool] = Lru(_MAX_KNOWN)
        self._all = Bucket(IN_ALL, clock.now())
        self._next_line = float("-inf")

    def check(self, address: str, key: bytes) -> None:
        """Raises TooManyGuesses if no key of this client may be compared now."""
        peer, now = peer_of(address), self._clock.now()
        state = self._peers.get(peer)
        if state is not None and state.last == hash(key):
            return  # a page or a script that repeats an old key guesses nothing
        wait_s = 0.0 if state is None else state.bucket.wait_s(1.0, now)
        if not self._is_known(peer):
            wait_s = max(wait_s, self._all.wait_s(1.0, now))
        if wait_s:
            self._log(peer, wait_s, now)
            raise TooManyGuesses("Too many wrong admin keys were sent.", retry_after_s=ceil(wait_s))

    def wrong(self, address: str, key: bytes) -> None:
        """The key of this client was wrong."""
        peer, now, hashed = peer_of(address), self._clock.now(), hash(key)
        state = self._peers.get(peer)
        if state is None:
            state = _Peer(Bucket(PER_PEER, now))
            self._peers.put(peer, state)
        if state.last != hashed:
            state.last = hashed
            state.bucket.take(1.0, now)
            if not self._is_known(peer):
                self._all.take(1.0, now)

    def right(self, address: str) -> None:
        """The key of this client was right."""
        self._known.put(peer_of(address), True)

    def _is_known(self, peer: str) -> bool:
        return peer in self._known or peer in _OWN_ADDRESSES

    def _log(self, peer: str, wait_s: float, now: float) -> None:
        if now >= self._next_line:
            self._next_line = now + _LOG_PAUSE_S
            log.warning(
                "too many wrong admin keys were sent, the last by %s; its next key is compared in %d s",
                peer or "an unknown client",
                ceil(wait_s),
            )


def peer_of(address: str) -> str:
    """What counts as one client: an IPv4 address, the /64 of an IPv6 address, or another text, shortened."""
    try:
        found = ip_address(address)
    except ValueError:
        return address[:_MAX_PEER_CHARS]
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ip_network((int(found), _IPV6_SITE_BITS), strict=False))
    return str(found)
