"""The other nodes' daemons: who they are, which of them has an object, and its bytes.

A question is a HEAD, answered from the asked daemon's own levels only, so questions never travel on. All
peers are asked at once and the first that has it is taken. A peer that fails is left alone for a while.
"""

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
from kvroute.tierd.counts import Counts
from kvroute.tierd.options import PeerOptions
from kvroute.tierd.pool import ObjectName

log = logging.getLogger("kvroute.tierd")

INCARNATION_HEADER = "x-kvroute-tierd"
"""In every answer to a peer: whose it is. So a daemon learns which of the addresses is its own."""


class FoundObject(NamedTuple):
    """A peer that has an object."""

    url: str
    """Of the object."""
    size_bytes: int


class Peers:
    """Mutable: the addresses of the name, which peers rest, and which address is our own.

    `run` keeps the addresses; `close` ends the questions that are still out.
    """

    def __init__(self, options: PeerOptions, incarnation: str, counts: Counts, clock: Clock) -> None:
        self._options = options
        self._incarnation = incarnation
        self._counts = counts
        self._clock = clock
        self._resolved: tuple[str, ...] = ()
        self._ourselves: set[str] = set()
        self._rests_until: dict[str, float] = {}
        self._turns = asyncio.Semaphore(options.questions)
        self._asking: set[asyncio.Task[FoundObject | None]] = set()
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
        """Everyone who is known, without ourselves."""
        both = dict.fromkeys((*self._options.urls, *self._resolved))
        return tuple(url for url in both if url not in self._ourselves)

    async def run(self) -> None:
        """Look the name up again and again; returns at once when there is none."""
        while self._options.dns is not None:
            await self.refresh()
            await self._clock.sleep(self._options.refresh_s)

    async def refresh(self) -> None:
        """Look the name up now. Keeps the addresses that are known if that fails."""
        if self._options.dns is None:
            return
        host, _, port = self._options.dns.rpartition(":")
        try:
            async with asyncio.timeout(self._options.refresh_s):
                found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as exc:
            log.debug("peers.dns: %s: %s", host, exc)
            return
        urls = tuple(sorted({_url(*address[:2]) for *_, address in found}))
        if urls != self._resolved:
            log.info("peers.dns: %d addresses", len(urls))
            # An address may be another daemon's now.
            self._ourselves.difference_update(set(self._resolved) - set(urls))
            self._resolved = urls

    async def find(self, name: ObjectName) -> FoundObject | None:
        """Ask everyone who does not rest. None: nobody has it, or nobody said so in time."""
        async with self._turns:
            now = self._clock.now()
            asked = [url for url in self.urls if self._rests_until.get(url, 0.0) <= now]
            questions = {asyncio.create_task(self._ask(url, name)) for url in asked}
            for question in questions:
                self._asking.add(question)
                question.add_done_callback(self._asking.discard)
            while questions:
                # Those that answer later are let finish: cancelling would cost their connections.
                done, questions = await asyncio.wait(questions, return_when=asyncio.FIRST_COMPLETED)
                for found in (question.result() for question in done):
                    if found is not None:
                        return found
            return None

    async def _ask(self, url: str, name: ObjectName) -> FoundObject | None:
        target = f"{url}/v1/kv/{quote(name.bucket, safe='')}/{quote(name.key, safe='')}"
        try:
            async with asyncio.timeout(self._options.answer_timeout_s):
                answer = await self._http.head(target)
            if answer.headers.get(INCARNATION_HEADER) == self._incarnation:
                self._ourselves.add(url)
                return None
            has_it = answer.status_code == 200
            size_bytes = int(answer.headers["content-length"]) if has_it else 0
            if answer.status_code not in (200, 404):
                raise ValueError(f"status {answer.status_code}")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, KeyError, ValueError) as exc:
            self._failed(url, exc)
            return None
        self._counts.peer_questions[url, "yes" if has_it else "no"] += 1
        return FoundObject(target, size_bytes) if has_it and size_bytes > 0 else None

    async def fetch(self, found: FoundObject, pieces: Sequence[memoryview]) -> bool:
        """Fill `pieces`, together as long as the object; False, with anything in them, if that failed."""
        try:
            async with (
                asyncio.timeout(self._options.fetch_timeout_s),
                self._http.stream("GET", found.url) as answer,
            ):
                if answer.status_code != 200:
                    return False
                filled = await _fill(pieces, answer.aiter_raw())
        except (httpx.HTTPError, TimeoutError) as exc:
            log.warning("fetching from %s failed: %s", httpx.URL(found.url).netloc.decode(), _said(exc))
            return False
        self._counts.fetched_bytes += found.size_bytes
        return filled == found.size_bytes

    async def close(self) -> None:
        """End the questions and the connections."""
        for question in self._asking:
            question.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._http.aclose()

    def _failed(self, url: str, exc: Exception) -> None:
        self._counts.peer_questions[url, "failed"] += 1
        now = self._clock.now()
        if self._rests_until.get(url, 0.0) <= now:
            log.warning("peer %s rests for %.0f s: %s", url, self._options.rest_s, _said(exc))
            self._rests_until[url] = now + self._options.rest_s


async def _fill(pieces: Sequence[memoryview], chunks: AsyncIterator[bytes]) -> int:
    """Bytes written; one more than there is room for when there are too many."""
    room = list(reversed(pieces))
    filled = 0
    async with contextlib.aclosing(chunks) as received:  # type: ignore[type-var]
        async for chunk in received:
            rest = memoryview(chunk)
            while rest:
                if not room:
                    return filled + 1
                piece = room.pop()
                count = min(len(piece), len(rest))
                piece[:count] = rest[:count]
                rest = rest[count:]
                filled += count
                if count < len(piece):
                    room.append(piece[count:])
    return filled


def _url(host: str | int, port: str | int) -> str:
    return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"


def _said(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
