"""The addresses of workers, as Envoy knows them, and the options of the picker."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import TypeAlias
from urllib.parse import urlsplit

from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.worker import Worker
from kvroute.options import Options, option

log = logging.getLogger(__name__)

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host name, the preferred one first. Raises OSError."""


class EppOptions(Options):
    """`kvroute epp`: the picker's own options. Its gRPC listener has `server.host` and `server.port`."""

    http_port: int = option(
        9090,
        "TCP port of `/metrics`, `/ready`, the admin API and the live page, on `server.host`; 0 lets the "
        "system choose. The port also relays requests, like `kvroute serve`.",
        ge=0,
        le=65535,
    )
    fallbacks: int = option(
        2,
        "Addresses after the first one in `x-gateway-destination-endpoint`, in the order of the ranking. "
        "Envoy's policy `override_host` tries them when a retry is due. 0: one address, as clusters of the "
        "type `ORIGINAL_DST` need it.",
        unit="addresses",
        higher="more dead workers in a row are survived",
        lower="shorter headers",
        ge=0,
        le=16,
    )
    resolve_interval_s: float = option(
        10.0,
        "Time between resolutions of workers' host names. Envoy gets IP addresses only.",
        unit="s",
        higher="fewer queries",
        lower="a changed address is used sooner",
        gt=0,
    )
    first_token_interval_s: float = option(
        0.02,
        "With `kvaware`: how often the cache map is read for prompts that are being computed. The picker "
        "sees no first token; a prompt whose last block the worker has published has one.",
        unit="s",
        higher="less CPU",
        lower="the queue of a worker, and learned costs, are more exact",
        gt=0,
    )
    attach_timeout_s: float = option(
        5.0,
        "With two filters: how long a picked request waits for the stream of the second filter, which shows "
        "its end. After that its load is returned.",
        unit="s",
        higher="a slow Envoy keeps its requests accounted",
        lower="the load of requests whose second stream went to another picker is returned sooner",
        gt=0,
    )


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of `host` by the system's resolver, IPv4 first."""
    address_infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(sockaddr[0]) for _, _, _, _, sockaddr in address_infos]
    return sorted(dict.fromkeys(addresses), key=lambda address: ":" in address)


class Endpoints:
    """Maps the fleet's workers to `ip:port`.

    A worker whose URL has a path or whose name cannot be resolved has no address: Envoy could not send a
    request there. Mutable: changes of the fleet and `run` change it.
    """

    def __init__(self, fleet: Fleet, clock: Clock, interval_s: float, resolve: Resolve = resolve) -> None:
        self._fleet = fleet
        self._clock = clock
        self._interval_s = interval_s
        self._resolve = resolve
        self._addresses: dict[str, str] = {}
        """The worker's URL -> `ip:port`."""
        self._named: dict[str, tuple[str, int]] = {}
        """The worker's URL -> its host name and port, if the host is no IP address."""
        self._refused: set[str] = set()
        """URLs for which a warning was logged."""
        self._joined = asyncio.Event()
        for worker in fleet.workers():
            self._add(worker)
        fleet.subscribe(self._fleet_changed)

    def of(self, worker: Worker) -> str | None:
        """The worker's address; None while it has none."""
        return self._addresses.get(worker.spec.url)

    async def run(self) -> None:
        """Resolve host names until cancelled: at once for a worker that joins, then every interval."""
        while True:
            self._joined.clear()
            await asyncio.gather(*(self._look_up(url) for url in list(self._named)))
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._joined.wait()
            except TimeoutError:
                pass

    async def _look_up(self, url: str) -> None:
        if url not in self._named:
            return  # the worker has left meanwhile
        host, port = self._named[url]
        try:
            async with asyncio.timeout(self._interval_s):
                addresses = await self._resolve(host, port)
        except (OSError, TimeoutError, UnicodeError) as error:  # UnicodeError: no name could be like that
            # The last known address stays: a name server that fails must not empty the fleet.
            self._warn(url, f"its host name cannot be resolved ({error or 'no answer in time'})")
            return
        if url in self._named and addresses:
            self._refused.discard(url)
            self._addresses[url] = joined(addresses[0], port)

    def _fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.JOINED:
            self._add(worker)
        elif change is FleetChange.LEFT and all(
            other.spec.url != worker.spec.url for other in self._fleet.workers()
        ):
            for by_url in (self._addresses, self._named):
                by_url.pop(worker.spec.url, None)
            self._refused.discard(worker.spec.url)

    def _add(self, worker: Worker) -> None:
        url = worker.spec.url
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if parts.path not in ("", "/"):
            self._warn(url, "its URL has a path, which Envoy does not get")
            return
        try:
            self._addresses[url] = joined(str(ip_address(host)), port)
        except ValueError:
            self._named[url] = (host, port)
            self._joined.set()

    def _warn(self, url: str, reason: str) -> None:
        if url not in self._refused:
            self._refused.add(url)
            log.warning(
                "the worker at %s cannot be picked: %s", urlsplit(url).netloc.rpartition("@")[2], reason
            )


def joined(address: str, port: int) -> str:
    """`ip:port`, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
