"""One worker's rank being followed, as others see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvroute.blocks.tokens import Tier
from kvroute.events.counts import LedgerCounts, StreamCounts
from kvroute.events.ledger import Ledger
from kvroute.events.repair import KnownPrompt, PromptMemory
from kvroute.events.subscriber import KvEventSubscriber
from kvroute.events.trust import Reason, Trust
from kvroute.fleet.worker import Worker, WorkerId


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """One worker's rank being followed. `slot` is its place in the index."""

    worker: Worker
    rank: int
    slot: int
    ledger: Ledger
    subscriber: KvEventSubscriber
    prompts: PromptMemory

    @property
    def trust(self) -> Trust:
        return self.subscriber.trust

    @property
    def reason(self) -> Reason | None:
        """Why the map is not whole; None if it is."""
        return self.subscriber.reason

    @property
    def why(self) -> str:
        """The same in a word, empty if it is whole."""
        return self.subscriber.reason or ""

    def served(self, new_tokens: int, started: float | None = None) -> None:
        """The worker's rank has answered a request and had to compute `new_tokens` for it (of its prompt,
        or of prompt and answer): see `KvEventSubscriber.served`."""
        self.subscriber.served(new_tokens, started)

    def note_prompt(self, prompt: KnownPrompt) -> None:
        """The worker's rank has computed this prompt: it can be asked for it again. Keeps it, bounded by
        `ProbeOptions.memory_tokens`."""
        self.prompts.note(prompt)


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """One stream's figures, as of now; `counts` and `blocks` go on counting."""

    worker: WorkerId
    rank: int
    trust: Trust
    reason: Reason | None
    held_blocks: Mapping[Tier, int]
    aside_blocks: int
    counts: StreamCounts
    blocks: LedgerCounts
