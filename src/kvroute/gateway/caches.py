"""The cache map that strategies read: vLLM's blocks and LMCache's chunks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvroute.events.ingest import EventIngest, Stream
from kvroute.fleet.worker import Worker
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.prefix_index import PrefixIndex
from kvroute.index.trust import TrustReason, trust_for
from kvroute.routing.strategy import CachePlace, ExactPrompt, Tokens

_new: Final = tuple.__new__


class LiveCaches:
    """The `CacheMap` over the prefix index, the chunk index and the state of the event streams.

    Mutable: caches the last place of each slot, because every request reads it.
    """

    def __init__(
        self,
        index: PrefixIndex,
        chunks: ChunkIndex,
        ingest: EventIngest,
        told_by_lmcache: Callable[[int], bool],
    ) -> None:
        """`told_by_lmcache` says of which slots' L1 LMCache itself tells: then vLLM's word does not count."""
        self._index = index
        self._chunks = chunks
        self._ingest = ingest
        self.refresh = ingest.refresh
        self._told_by_lmcache = told_by_lmcache
        self._given: dict[int, tuple[TrustReason | None, tuple[CachePlace]]] = {}
        """By slot."""

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        streams = self._ingest.streams(worker)
        if len(streams) == 1:
            return self._place(streams[0])
        return [self._place(stream)[0] for stream in streams]

    def _place(self, stream: Stream) -> tuple[CachePlace]:
        reason, slot = stream.subscriber.reason, stream.slot
        given = self._given.get(slot)
        if given is None or given[0] is not reason or given[1][0].rank != stream.rank:
            why = "" if reason is None else reason.value
            place = CachePlace(slot, stream.rank, trust_for(reason), why)
            given = self._given[slot] = reason, (place,)
        return given[1]

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        return held_tokens(self._index, self._chunks, self._told_by_lmcache, prompt)


def held_tokens(
    index: PrefixIndex, chunks: ChunkIndex, told_by_lmcache: Callable[[int], bool], prompt: ExactPrompt
) -> Mapping[int, Tokens]:
    """Per slot: the leading tokens of the prompt that both maps together say it can use."""
    if not prompt.probed and not chunks.is_read:
        gpu = index.match_gpu(prompt.keys)
        if gpu is not None:  # as below, for fleets without slower tiers
            # As `Tokens(...)`, without its Python-level constructor.
            return {slot: _new(Tokens, (tokens, 0, 0)) for slot, tokens in gpu.items()}
    blocks = index.match(prompt.keys)
    starts = {slot: match.gpu for slot, match in blocks.items()}
    behind = chunks.match(prompt.chunks, prompt.salt, starts, prompt.probed)
    found = {
        slot: Tokens(match.gpu) if match.l1 and told_by_lmcache(slot) else Tokens(*match)
        for slot, match in blocks.items()
    }
    for slot, (l1, l2) in behind.items():
        known = found.get(slot)
        if known is None:
            found[slot] = Tokens(0, l1, l2)
        elif l1 + l2 > known.l1 + known.l2:
            found[slot] = Tokens(known.gpu, l1, l2)
    return found
