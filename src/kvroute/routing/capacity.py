"""Keeps each worker's part of the history as large as its KV cache."""

from __future__ import annotations

from kvroute.fleet.worker import ASSUMED_BLOCK_TOKENS, Worker
from kvroute.index.history import RouteHistory
from kvroute.routing.decision import RouteQuery

TOLERANCE = 0.02
_LEAST_WEIGHT = 0.1


class PartSizes:
    """Capacities are tokens, parts are blocks of bytes, and how many tokens fill a block is an estimate
    that improves with each answer: this converts, and follows. Mutable: by its own methods."""

    def __init__(self, history: RouteHistory) -> None:
        self._history = history
        self.block_tokens: dict[int, float] = {}
        """By worker's index; what `sending` would change nothing about need not be told to it."""
        self._sized_by: dict[int, float] = {}
        """By worker's index: what its part has its capacity by, which follows `block_tokens` in steps."""

    def resize(self, worker: Worker) -> None:
        """The worker joined, or its capacity changed."""
        block_tokens = self.block_tokens.setdefault(worker.index, float(ASSUMED_BLOCK_TOKENS))
        self._sized_by[worker.index] = block_tokens
        self._history.set_capacity(worker.index, max(1, int(worker.capacity_tokens / block_tokens)))

    def sending(self, worker: Worker, query: RouteQuery) -> None:
        """A prompt is about to go to the worker: weigh its blocks' tokens by their number."""
        index = worker.index
        for prompt in query.prompts:
            block_tokens = prompt.block_tokens
            known = self.block_tokens.get(index)
            if known is None:
                self.block_tokens[index] = block_tokens
                self.resize(worker)
                continue
            change, bearable = block_tokens - known, TOLERANCE * known
            if change > bearable or -change > bearable:
                blocks = len(prompt.keys)
                weight = max(_LEAST_WEIGHT, blocks / (blocks + self._history.part(index).blocks + 1))
                estimate = self.block_tokens[index] = known + weight * change
                sized_by = self._sized_by[index]
                if abs(estimate - sized_by) > TOLERANCE * sized_by:
                    self.resize(worker)

    def forget(self, worker: Worker) -> None:
        """The worker left; its index may come to stand for another one."""
        self.block_tokens.pop(worker.index, None)
        self._sized_by.pop(worker.index, None)
