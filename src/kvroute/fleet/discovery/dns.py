"""Discovery in DNS: one worker for each address of a name."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvroute.clock import Clock
from kvroute.errors import DiscoveryError
from kvroute.fleet.options import DnsOptions, FleetOptions, place_of
from kvroute.fleet.worker import WorkerId, WorkerSpec

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""host -> its IPv4 and IPv6 addresses; raises OSError, as `socket.getaddrinfo` does."""


async def system_addresses(host: str) -> Sequence[str]:
    """Resolve `host` with the system's resolver, in a thread. `/etc/hosts` and search domains count."""
    loop = asyncio.get_running_loop()
    resolutions = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in resolutions]


@dataclass(slots=True)
class _Name:
    """The state of one name. Mutable: each DNS lookup changes it."""

    host: str
    port: int
    role: str | None = None
    addresses: tuple[str, ...] = ()
    failing_since: float | None = None
    trouble: str = ""
    """The last logged problem; empty after a successful lookup."""
    lookup: asyncio.Task[Sequence[str]] | None = None
    """The running lookup. After a timeout it continues and is awaited again: its thread cannot be stopped."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class DnsDiscovery:
    """Resolves each name every `interval_s`.

    Mutable: `errors` counts failed lookups; the Discoverer sets `recheck_s`.
    """

    is_explicit = False

    def __init__(self, options: DnsOptions, clock: Clock, resolve: Resolve = system_addresses) -> None:
        self.errors = 0
        self.recheck_s: float | None = None
        self._options = options
        self._clock = clock
        self._resolve = resolve
        self._names = [_Name(*place_of(name), role) for name, role in options.by_role()]

    @classmethod
    def configured(cls, options: FleetOptions, clock: Clock) -> DnsDiscovery | None:
        """None if `options` have no name."""
        return cls(options.dns, clock) if options.dns.by_role() else None

    async def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        """Yield the workers of all names after the first lookups, then after each change."""
        yielded: tuple[WorkerSpec, ...] | None = None
        try:
            while True:
                errors = self.errors
                await asyncio.gather(*(self._look_up(name) for name in self._names))
                specs = self._specs()
                # A failed lookup does not confirm the set.
                if specs != yielded or (self.recheck_s is not None and self.errors == errors):
                    yielded = specs
                    yield specs
                interval_s = self._options.interval_s
                await self._clock.sleep(
                    interval_s if self.recheck_s is None else min(interval_s, self.recheck_s)
                )
        finally:
            for name in self._names:
                if name.lookup is not None:
                    name.lookup.cancel()
                    await asyncio.gather(name.lookup, return_exceptions=True)
                    name.lookup = None

    async def _look_up(self, name: _Name) -> None:
        try:
            addresses = of_family(await self._addresses(name), self._options.family)
            if not addresses:
                raise DiscoveryError(f"has no {self._options.family} address")
        except (OSError, UnicodeError, DiscoveryError) as error:
            self._failed(name, str(error) or type(error).__name__)
            return
        if name.trouble:
            log.info("%s is resolved again", name)
        name.addresses, name.failing_since, name.trouble = addresses, None, ""

    async def _addresses(self, name: _Name) -> Sequence[str]:
        if name.lookup is None:
            name.lookup = asyncio.create_task(_call(self._resolve, name.host), name=f"look up {name.host}")
        done, _ = await asyncio.wait({name.lookup}, timeout=self._options.timeout_s)
        if not done:
            raise DiscoveryError(f"no answer within {self._options.timeout_s:g} s")
        lookup, name.lookup = name.lookup, None
        return lookup.result()

    def _failed(self, name: _Name, trouble: str) -> None:
        self.errors += 1
        now = self._clock.now()
        if name.failing_since is None:
            name.failing_since = now
        if trouble != name.trouble:
            name.trouble = trouble
            log.error("%s: %s; the known addresses stay", name, trouble)
        if name.addresses and now - name.failing_since >= self._options.keep_s:
            log.error("%s could not be resolved for %g s: its workers leave", name, self._options.keep_s)
            name.addresses = ()

    def _specs(self) -> tuple[WorkerSpec, ...]:
        roles: dict[str, str | None] = {}
        for name in self._names:
            for address in name.addresses:
                host = f"[{address}]" if ":" in address else address
                roles.setdefault(f"{host}:{name.port}", name.role)
        scheme = self._options.scheme
        return tuple(
            WorkerSpec(WorkerId(authority), f"{scheme}://{authority}", role=role)
            for authority, role in roles.items()
        )


async def _call(resolve: Resolve, host: str) -> Sequence[str]:
    return await resolve(host)


def of_family(addresses: Sequence[str], family: str) -> tuple[str, ...]:
    """The distinct addresses of `family`, sorted; with "auto", IPv6 only if there is no IPv4. Pure."""
    four = sorted({address for address in addresses if ":" not in address})
    six = sorted({address for address in addresses if ":" in address})
    if family == "ipv4":
        return tuple(four)
    if family == "ipv6":
        return tuple(six)
    return tuple(four or six)
