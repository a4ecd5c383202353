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
        lmcache_reports_l1: Callable[[int], bool],
    ) -> None:
        """`lmcache_reports_l1(slot)`: LMCache reports that slot's L1, so vLLM's events about L1 are
        ignored."""
        self._index = index
        self._chunks = chunks
        self._ingest = ingest
        self.refresh = ingest.refresh
        self._lmcache_reports_l1 = lmcache_reports_l1
        self._places: dict[int, tuple[TrustReason | None, tuple[CachePlace]]] = {}
        """Trust reason and place of each slot."""

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        streams = self._ingest.streams(worker)
        if len(streams) == 1:
            return self._place(streams[0])
        return [self._place(stream)[0] for stream in streams]

    def _place(self, stream: Stream) -> tuple[CachePlace]:
        reason, slot = stream.subscriber.reason, stream.slot
        cached = self._places.get(slot)
        if cached is None or cached[0] is not reason or cached[1][0].rank != stream.rank:
            why = "" if reason is None else reason.value
            place = CachePlace(slot, stream.rank, trust_for(reason), why)
            cached = self._places[slot] = reason, (place,)
        return cached[1]

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        return held_tokens(self._index, self._chunks, self._lmcache_reports_l1, prompt)


def held_tokens(
    index: PrefixIndex, chunks: ChunkIndex, lmcache_reports_l1: Callable[[int], bool], prompt: ExactPrompt
) -> Mapping[int, Tokens]:
    """The leading tokens of the prompt that each slot can use, from both indexes together."""
    if not prompt.probed and not chunks.is_read:
        gpu = index.match_gpu(prompt.keys)
        if gpu is not None:  # a shortcut for fleets without slower tiers, with the same result
            # Like `Tokens(...)`, but without its constructor, which is Python code.
            return {slot: _new(Tokens, (tokens, 0, 0)) for slot, tokens in gpu.items()}
    blocks = index.match(prompt.keys)
    starts = {slot: match.gpu for slot, match in blocks.items()}
    behind = chunks.match(prompt.chunks, prompt.salt, starts, prompt.probed)
    found = {
        slot: Tokens(match.gpu) if match.l1 and lmcache_reports_l1(slot) else Tokens(*match)
        for slot, match in blocks.items()
    }
    for slot, (l1, l2) in behind.items():
        known = found.get(slot)
        if known is None:
            found[slot] = Tokens(0, l1, l2)
        elif l1 + l2 > known.l1 + known.l2:
            found[slot] = Tokens(known.gpu, l1, l2)
    return found
