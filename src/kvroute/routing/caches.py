"""What the workers' caches hold, as routing sees it: prompts known token by token, places, tiers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

from kvroute.blocks.chunks import ChunkKey, PromptChunks
from kvroute.blocks.keys import BlockKey
from kvroute.blocks.tokens import KEY_TOKENS
from kvroute.fleet.worker import Worker
from kvroute.index.chunk_index import ChunkHolder

Probed: TypeAlias = Mapping[ChunkHolder, Collection[ChunkKey]] | None
"""What a shared store said it has of a prompt; None where none was asked."""


class ExactPrompt(NamedTuple):
    """One prompt as the engine will see it.

    `keys` are `blocks.tokens.prompt_keys` of its `tokens` ids, one for `key_tokens` of them; `chunks` names
    the same tokens as LMCache does, as far as asked; `salt` is the request's cache salt, `adapter` its LoRA
    adapter, `probed` what a shared store says it has of it.
    """

    tokens: int
    keys: Sequence[BlockKey]
    chunks: PromptChunks
    salt: str = ""
    adapter: str | None = None
    probed: Probed = None
    key_tokens: int = KEY_TOKENS


class Standing(StrEnum):
    """How far a place's map is to be believed."""

    WHOLE = "whole"
    """It is what the worker holds."""
    PARTIAL = "partial"
    """What it says is true; the worker may hold more."""
    NONE = "none"
    """It says nothing; what was sent there is believed instead."""


class CachePlace(NamedTuple):
    """Where a request can go: a worker, or one data-parallel rank of it, with a cache of its own.

    `slot` is its number in the map, unique among all places; `why` says what is wrong while `standing` is
    not WHOLE.
    """

    slot: int
    rank: int
    standing: Standing
    why: str = ""


class Tokens(NamedTuple):
    """Tokens of a prompt by where they lie; a tier counts what the ones before it lack."""

    gpu: int = 0
    l1: int = 0
    l2: int = 0

    @property
    def total(self) -> int:
        return self.gpu + self.l1 + self.l2

    def tier(self) -> str:
        """The slowest tier that has a part, as a metric label."""
        return "l2" if self.l2 else "l1" if self.l1 else "gpu" if self.gpu else "none"


class Held(NamedTuple):
    """What one candidate is believed to hold of a query's prompts, and where it lies.

    `rank` is the data-parallel rank to ask for, None where the worker has only one; `slot` is None where
    the worker has no map. `mapped` is False where `tokens` are judged by what was sent there.
    """

    tokens: Tokens
    slot: int | None = None
    rank: int | None = None
    mapped: bool = False
    why: str = ""


class CacheMap(Protocol):
    """The live map of which blocks lie where. Read synchronously, never across an await."""

    def look(self, at_once: bool) -> bool:
        """Take in what has come, unless that was done a moment ago and it need not be `at_once`. True if
        all that had come by now is known then."""
        ...

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        """The worker's places by rank; empty as long as none is known."""
        ...

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        """Per slot that holds any: its leading tokens of the prompt. Changes nothing."""
        ...


class NoMap:
    """For a gateway that follows no caches."""

    def look(self, at_once: bool) -> bool:
        return True

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        return ()

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        return {}
