"""Follows the `kvroute tierd` daemons behind LMCache's in-process connector.

LMCache in the engine does not report to its controller what it puts into a remote store. So the gateway asks
the daemons, with a call that each daemon answers at the next change (`GET /v1/changes/{bucket}`). All daemons
are one pool: each of them fetches from the others what it lacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple
from urllib.parse import quote, urlsplit

import httpx
import msgspec
from msgspec import Meta, Struct

from kvroute.blocks.chunks import ChunkKey, ChunkScheme, ChunkSpace
from kvroute.blocks.keys import Tier
from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.fleet.discovery.dns import Resolve, system_addresses
from kvroute.index.chunk_index import ChunkHolder, ChunkIndex
from kvroute.lmcache.options import TierdSourceOptions

_Count = Annotated[int, Meta(ge=0)]
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
_TAG: Final = "kvroute%"
"""The gateway's own tag: the key space of an adapter or a tenant (`openai.rewriting`)."""
_LARGEST: Final = 2**64


class StoreChanges(Struct, frozen=True):
    """The objects that came or went since a position. `whole`: `stored` are all objects of the bucket."""

    incarnation: str
    """It changes when the daemon restarts."""
    number: _Count
    """The position after these changes, for the next call."""
    whole: bool = False
    stored: list[str] = []
    removed: list[str] = []


class StoredKind(NamedTuple):
    """Objects of one kind: only workers with the same model, world size and type of numbers read them."""

    model: str
    """vLLM's `--model`, often a path."""
    world: int
    dtype: str


class StoredPart(NamedTuple):
    """One rank's part of a chunk. `salt` is the key space of an adapter or a tenant, else empty."""

    kind: StoredKind
    rank: int
    chunk: int
    """LMCache's hash of the chunk, signed for `builtin`."""
    salt: str = ""


def decode_changes(body: bytes) -> StoreChanges:
    """The answer to `GET /v1/changes/{bucket}`. Raises WireError."""
    try:
        return msgspec.json.decode(body, type=StoreChanges)
    except _UNREADABLE as error:
        raise WireError(f"not a list of changes: {error}") from error


def parse_name(name: str) -> StoredPart | None:
    """Read an object's name; None if LMCache in the engine gives no such name. Some microseconds.

    Also None: names with tags of clients, whose requests the gateway does not predict; parts of single
    layers; names of LMCache's servers.
    """
    parts = name.split("@")
    salt = ""
    if parts[-1].startswith(_TAG):
        salt = parts.pop().removeprefix(_TAG)
    if len(parts) < 5 or "%" in parts[-1]:
        return None
    *model, world, rank, chunk, dtype = parts
    if len(model) > 1 and model[0] == "vllm":
        del model[0]
    if not (world.isdecimal() and rank.isdecimal() and dtype and not dtype.isdecimal()):
        return None
    try:
        key = int(chunk, 16)
    except ValueError:
        return None
    if not -_LARGEST < key < _LARGEST or int(rank) >= int(world):
        return None
    return StoredPart(StoredKind("@".join(model), int(world), dtype), int(rank), key, salt)


log = logging.getLogger(__name__)

_HOLD_S: Final = 20.0
"""How long a daemon may hold a call."""
_ANSWER_S: Final = 10.0
"""How long the answer may take after that."""
_PAUSE_S: Final = 0.01
"""Between two calls, so that many changes come with one answer."""
_RETRY_S: Final = 1.0
_KEEP_S: Final = 10.0
"""How long a daemon's objects count while it does not answer."""
_STEP: Final = 128
"""Names that are read without a pause of the event loop: about 1 ms."""


@dataclass(frozen=True, slots=True)
class ClassicWorker:
    """A slot whose engine has LMCache inside. `models`: vLLM's own names of its model, empty if unknown."""

    models: frozenset[str]
    ranks: int
    """Ranks of the LMCache instance: the tensor-parallel world size."""


def kind_of(worker: ClassicWorker, kinds: Collection[StoredKind], *, is_mixed: bool) -> StoredKind | None:
    """The kind of objects that the worker reads; None if no kind fits, or several do.

    With MLA only the first rank stores, with a world size of 1. Such objects count for a worker of several
    ranks unless `is_mixed`: other workers of its model have one rank.
    """
    candidates = [kind for kind in kinds if kind.model in worker.models]
    if not worker.models and len({kind.model for kind in kinds}) == 1:
        candidates = list(kinds)
    fits = [kind for kind in candidates if kind.world == worker.ranks]
    if not fits and not is_mixed:
        fits = [kind for kind in candidates if kind.world == 1]
    return fits[0] if len(fits) == 1 else None


class TierdPool:
    """The chunks that all daemons together hold, written to the index with one holder per kind.

    A chunk counts if the daemons have the parts of all ranks. Mutable: `store` and `remove` change it.
    O(parts).
    """

    def __init__(self, index: ChunkIndex, scheme: ChunkScheme) -> None:
        self.holders: dict[StoredKind, ChunkHolder] = {}
        self._index = index
        self._scheme = scheme
        self._copies: dict[StoredPart, int] = {}
        """How many daemons have a part."""
        self._ranks: dict[StoredPart, int] = {}
        """For several ranks: the part of rank 0 -> the ranks whose parts are there, as bits."""

    def store(self, parts: Iterable[StoredPart]) -> None:
        """One more daemon has each of these parts."""
        whole: dict[tuple[StoredKind, str], list[ChunkKey]] = {}
        for stored_part in parts:
            copies = self._copies.get(stored_part, 0)
            self._copies[stored_part] = copies + 1
            if not copies and self._completes(stored_part):
                whole.setdefault((stored_part.kind, stored_part.salt), []).append(stored_part.chunk)
        for (kind, salt), chunks in whole.items():
            holder = self.holders.get(kind)
            if holder is None:
                holder = self.holders[kind] = ChunkHolder(Tier.L2, shared=True)
            self._index.store(holder, ChunkSpace(self._scheme, "", salt), chunks)

    def remove(self, parts: Iterable[StoredPart]) -> None:
        """One daemon less has each of these parts."""
        gone: dict[tuple[StoredKind, str], list[ChunkKey]] = {}
        for stored_part in parts:
            copies = self._copies.pop(stored_part, 0)
            if copies > 1:
                self._copies[stored_part] = copies - 1
            elif copies and self._breaks(stored_part):
                gone.setdefault((stored_part.kind, stored_part.salt), []).append(stored_part.chunk)
        for (kind, salt), chunks in gone.items():
            self._index.remove_all(self.holders[kind], ChunkSpace(self._scheme, "", salt), chunks)

    def _completes(self, stored_part: StoredPart) -> bool:
        """Note a rank's part. Returns whether the chunk is complete with it."""
        world = stored_part.kind.world
        if world == 1:
            return True
        chunk = stored_part._replace(rank=0)
        bits = self._ranks[chunk] = self._ranks.get(chunk, 0) | 1 << stored_part.rank
        return bits == (1 << world) - 1

    def _breaks(self, stored_part: StoredPart) -> bool:
        """Forget a rank's part. Returns whether the chunk was complete with it."""
        world = stored_part.kind.world
        if world == 1:
            return True
        chunk = stored_part._replace(rank=0)
        bits = self._ranks.pop(chunk, 0)
        if remaining := bits & ~(1 << stored_part.rank):
            self._ranks[chunk] = remaining
        return bits == (1 << world) - 1


@dataclass(slots=True, eq=False)
class FollowedDaemon:
    """One daemon. Mutable: changed by `TierdFollower`."""

    url: str
    incarnation: str = ""
    number: int = 0
    parts: set[StoredPart] = field(default_factory=set)
    answered_at: float | None = None
    failures: int = 0
    problem: str = ""
    """Why the last call failed; empty if it succeeded."""
    task: asyncio.Task[None] | None = None


class TierdFollower:
    """Keeps the pool up to date, and attaches the slots to their kinds of objects.

    Mutable; `run` is the only task that changes the pool. `ranks_of(slot)`: the ranks of the slot's LMCache
    instance, 0 if none reports for the slot. The caller owns and closes the client.
    """

    def __init__(
        self,
        index: ChunkIndex,
        scheme: ChunkScheme,
        ranks_of: Callable[[int], int],
        client: httpx.AsyncClient,
        clock: Clock,
        options: TierdSourceOptions,
        resolve: Resolve = system_addresses,
    ) -> None:
        self.daemons: dict[str, FollowedDaemon] = {}
        """By URL."""
        self.pool = TierdPool(index, scheme)
        self._index = index
        self._scheme = scheme
        self._ranks_of = ranks_of
        self._client = client
        self._clock = clock
        self._options = options
        self._resolve = resolve
        self._headers = {"authorization": f"Bearer {options.key.get_secret_value()}"} if options.key else {}
        self._models: dict[int, frozenset[str]] = {}
        self._kinds: dict[StoredKind, StoredKind] = {}
        self._attached: dict[int, ChunkHolder] = {}

    # The fleet

    def slots_changed(self, slots: Iterable[int], models: frozenset[str]) -> None:
        """Set the slots of a worker. `models`: vLLM's own names of its model (`/v1/models`, `root`)."""
        self._models |= dict.fromkeys(slots, models)
        self.update_attachments()

    def slot_removed(self, slot: int) -> None:
        self._models.pop(slot, None)
        self.update_attachments()

    def update_attachments(self) -> None:
        """Find each slot's objects again. Also called regularly, because instances register later."""
        workers = {
            slot: ClassicWorker(models, ranks)
            for slot, models in self._models.items()
            if (ranks := self._ranks_of(slot))
        }
        single = {model for worker in workers.values() if worker.ranks == 1 for model in worker.models}
        required: dict[int, ChunkHolder] = {}
        for slot, worker in workers.items():
            kind = kind_of(worker, self.pool.holders, is_mixed=bool(single & worker.models))
            if kind is not None:
                required[slot] = self.pool.holders[kind]
        for slot, holder in self._attached.items():
            if required.get(slot) is not holder:
                self._index.detach(slot, holder)
        for slot, holder in required.items():
            if self._attached.get(slot) is not holder:
                # The same domain as that of LMCache's L1: the kind is known by the holder.
                self._index.attach(slot, holder, [(self._scheme, "")])
        self._attached = required

    # The daemons

    async def run(self) -> None:
        """Follow each daemon until cancelled."""
        for daemon in self.daemons.values():
            daemon.task = None  # an earlier call of `run` has ended
        async with asyncio.TaskGroup() as group:
            while True:
                await self._update_daemons(group)
                self.update_attachments()
                await self._clock.sleep(self._options.refresh_s)

    async def _update_daemons(self, group: asyncio.TaskGroup) -> None:
        """Resolve the names, and start and end the tasks accordingly. A name that fails changes nothing."""
        urls: set[str] = set()
        for url in self._options.urls:
            host, port = urlsplit(url).hostname or "", urlsplit(url).port
            try:
                async with asyncio.timeout(self._options.refresh_s):
                    addresses = await self._resolve(host)
            except (OSError, TimeoutError) as error:
                log.debug("lmcache.tierd.urls: cannot resolve %s: %r", host, error)
                return
            urls |= {
                f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
                for address in addresses
            }
        for url in [url for url in self.daemons if url not in urls]:
            gone = self.daemons.pop(url)
            if gone.task is not None:
                gone.task.cancel()
                await asyncio.wait([gone.task])
            await self._change(gone, [], list(gone.parts))
        for url in sorted(urls):
            daemon = self.daemons.setdefault(url, FollowedDaemon(url))
            if daemon.task is None:
                daemon.task = group.create_task(self._follow(daemon))

    async def _follow(self, daemon: FollowedDaemon) -> None:
        while True:
            try:
                await self._poll(daemon)
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, WireError) as error:
                await self._failed(daemon, error)
                await self._clock.sleep(_RETRY_S)
            else:
                await self._clock.sleep(_PAUSE_S)

    async def _poll(self, daemon: FollowedDaemon) -> None:
        query: Mapping[str, str | int] = {
            "incarnation": daemon.incarnation,
            "after": daemon.number,
            "timeout_ms": int(1000 * _HOLD_S),
        }
        target = f"{daemon.url}/v1/changes/{quote(self._options.bucket, safe='')}"
        async with asyncio.timeout(_HOLD_S + _ANSWER_S):
            answer = await self._client.get(target, params=query, headers=self._headers, timeout=None)
        answer.raise_for_status()
        await self._apply(daemon, decode_changes(answer.content))
        if daemon.problem or daemon.answered_at is None:
            log.info("tierd at %s: its entries are followed", daemon.url)
        daemon.answered_at, daemon.problem = self._clock.now(), ""

    async def _apply(self, daemon: FollowedDaemon, changes: StoreChanges) -> None:
        stored = await _parsed(changes.stored, self._kinds)
        if changes.whole:
            removed = daemon.parts.difference(stored)
        else:
            removed = daemon.parts.intersection(await _parsed(changes.removed, self._kinds))
        kinds = len(self.pool.holders)
        await self._change(
            daemon, [stored_part for stored_part in stored if stored_part not in daemon.parts], list(removed)
        )
        daemon.incarnation, daemon.number = changes.incarnation, changes.number
        if kinds != len(self.pool.holders):
            self.update_attachments()

    async def _change(
        self, daemon: FollowedDaemon, stored: list[StoredPart], removed: list[StoredPart]
    ) -> None:
        """Apply changes in steps. `daemon.parts` is right after each step, so this may be cancelled."""
        for parts, is_stored in ((removed, False), (stored, True)):
            for start in range(0, len(parts), _STEP):
                step = parts[start : start + _STEP]
                if is_stored:
                    daemon.parts.update(step)
                    self.pool.store(step)
                else:
                    daemon.parts.difference_update(step)
                    self.pool.remove(step)
                await asyncio.sleep(0)

    async def _failed(self, daemon: FollowedDaemon, error: Exception) -> None:
        daemon.failures += 1
        status = f" {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else ""
        problem = type(error).__name__ + status
        if not daemon.problem:
            log.warning("tierd at %s: its changes cannot be read: %s", daemon.url, problem)
            daemon.answered_at = daemon.answered_at or self._clock.now()
        daemon.problem = problem
        if daemon.parts and self._clock.now() - (daemon.answered_at or 0.0) > _KEEP_S:
            # It may have evicted any of its objects since.
            await self._change(daemon, [], list(daemon.parts))
            daemon.incarnation, daemon.number = "", 0

    def notes(self) -> list[str]:
        """Notes for `/ready`: the daemons that do not answer."""
        return [
            f"tierd at {daemon.url}: its changes cannot be read ({daemon.problem})"
            for daemon in self.daemons.values()
            if daemon.problem
        ]


async def _parsed(names: list[str], kinds: dict[StoredKind, StoredKind]) -> list[StoredPart]:
    """The parts of chunks among the names; other objects are left out. `kinds` grows by new kinds."""
    parts = []
    for start in range(0, len(names), _STEP):
        for name in names[start : start + _STEP]:
            stored_part = parse_name(name)
            if stored_part is not None:
                # Equal kinds share one object: a kind with its texts takes more memory than a part.
                parts.append(stored_part._replace(kind=kinds.setdefault(stored_part.kind, stored_part.kind)))
        await asyncio.sleep(0)
    return parts
