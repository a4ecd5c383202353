"""Objects that are not in the daemon's memory: at the daemons of other nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple
from urllib.parse import quote

import httpx

from kvroute.clock import Clock
from kvroute.tierd.options import PeerOptions
from kvroute.tierd.pool import Counts, ObjectName

log = logging.getLogger(__name__)

INCARNATION_HEADER = "x-kvroute-tierd"
"""A header of every answer to a peer: the incarnation of the daemon that answers."""


class FoundObject(NamedTuple):
    """An object that a peer has."""

    url: str
    """The object's URL."""
    size_bytes: int


class Peers:
    """The other daemons. Mutable: their resolved addresses, which are skipped, and which is our own.

    `run` keeps the addresses up to date; `close` ends the running queries.
    """

    def __init__(self, options: PeerOptions, incarnation: str, counts: Counts, clock: Clock) -> None:
        self._options = options
        self._incarnation = incarnation
        self._counts = counts
        self._clock = clock
        self._resolved: tuple[str, ...] = ()
        self._own_urls: set[str] = set()
        self._skipped_until: dict[str, float] = {}
        self._search_slots = asyncio.Semaphore(options.questions)
        self._queries: set[asyncio.Task[FoundObject | None]] = set()
        headers = {}
        if options.key is not None:
            headers["authorization"] = f"Bearer {options.key.get_secret_value()}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=options.fetch_timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=options.questions),
            trust_env=False,
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of all known peers, without our own."""
        both = dict.fromkeys((*self._options.urls, *self._resolved))
        return tuple(url for url in both if url not in self._own_urls)

    async def run(self) -> None:
        """Resolve the DNS name every `refresh_s` seconds. Returns immediately when none is configured."""
        while self._options.dns is not None:
            await self.refresh()
            await self._clock.sleep(self._options.refresh_s)

    async def refresh(self) -> None:
        """Resolve the DNS name now. If that fails, the known addresses stay."""
        if self._options.dns is None:
            return
        host, _, port = self._options.dns.rpartition(":")
        try:
            async with asyncio.timeout(self._options.refresh_s):
                address_infos = await asyncio.get_running_loop().getaddrinfo(
                    host, int(port), type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError) as exc:
            log.debug("peers.dns: cannot resolve %s: %s", host, exc)
            return
        urls = tuple(sorted({_url(*address[:2]) for *_, address in address_infos}))
        if urls != self._resolved:
            log.info("peers.dns: %s resolves to %d addresses", host, len(urls))
            # The address may belong to another daemon now.
            self._own_urls.difference_update(set(self._resolved) - set(urls))
            self._resolved = urls

    async def find(self, name: ObjectName) -> FoundObject | None:
        """Query all peers that are not skipped. Returns None if no peer reports the object in time."""
        async with self._search_slots:
            now = self._clock.now()
            urls = [url for url in self.urls if self._skipped_until.get(url, 0.0) <= now]
            queries = {asyncio.create_task(self._query(url, name)) for url in urls}
            for query in queries:
                self._queries.add(query)
                query.add_done_callback(self._queries.discard)
            while queries:
                # Slower queries run to their end: cancelling one would close its connection.
                done, queries = await asyncio.wait(queries, return_when=asyncio.FIRST_COMPLETED)
                for found_object in (query.result() for query in done):
                    if found_object is not None:
                        return found_object
            return None

    async def _query(self, url: str, name: ObjectName) -> FoundObject | None:
        target = f"{url}/v1/kv/{quote(name.bucket, safe='')}/{quote(name.key, safe='')}"
        try:
            async with asyncio.timeout(self._options.answer_timeout_s):
                answer = await self._http.head(target)
            if answer.headers.get(INCARNATION_HEADER) == self._incarnation:
                self._own_urls.add(url)
                return None
            is_found = answer.status_code == 200
            size_bytes = int(answer.headers["content-length"]) if is_found else 0
            if answer.status_code not in (200, 404):
                raise ValueError(f"status {answer.status_code}")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, KeyError, ValueError) as exc:
            self._skip_peer(url, exc)
            return None
        self._counts.peer_questions[url, "yes" if is_found else "no"] += 1
        return FoundObject(target, size_bytes) if is_found and size_bytes > 0 else None

    async def fetch(self, found_object: FoundObject, pieces: Sequence[memoryview]) -> bool:
        """Fill `pieces`, whose total size is the object's. Returns False, with undefined contents, on
        failure."""
        try:
            async with (
                asyncio.timeout(self._options.fetch_timeout_s),
                self._http.stream("GET", found_object.url) as answer,
            ):
                if answer.status_code != 200:
                    return False
                filled = await _fill(pieces, answer.aiter_raw())
        except (httpx.HTTPError, TimeoutError) as exc:
            peer = httpx.URL(found_object.url).netloc.decode()
            log.warning("fetching an object from %s failed: %s", peer, _error_text(exc))
            return False
        self._counts.fetched_bytes += found_object.size_bytes
        return filled == found_object.size_bytes

    async def close(self) -> None:
        """Cancel the running queries and close the connections."""
        for query in self._queries:
            query.cancel()
        await asyncio.gather(*self._queries, return_exceptions=True)
        await self._http.aclose()

    def _skip_peer(self, url: str, exc: Exception) -> None:
        self._counts.peer_questions[url, "failed"] += 1
        now = self._clock.now()
        if self._skipped_until.get(url, 0.0) <= now:
            log.warning(
                "peer %s failed; it is skipped for %.0f s: %s", url, self._options.rest_s, _error_text(exc)
            )
            self._skipped_until[url] = now + self._options.rest_s


async def _fill(pieces: Sequence[memoryview], chunks: AsyncIterator[bytes]) -> int:
    """Write `chunks` into `pieces`. Returns the bytes written, plus one if there were more than fit."""
    room = list(reversed(pieces))
    filled = 0
    async with contextlib.aclosing(chunks) as received:  # type: ignore[type-var]
        async for chunk in received:
            unread = memoryview(chunk)
            while unread:
                if not room:
                    return filled + 1
                piece = room.pop()
                count = min(len(piece), len(unread))
                piece[:count] = unread[:count]
                unread = unread[count:]
                filled += count
                if count < len(piece):
                    room.append(piece[count:])
    return filled


def _url(host: str | int, port: str | int) -> str:
    return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"


def _error_text(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
