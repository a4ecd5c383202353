"""What a strategy wants to know of a prompt that takes time to find out: its token ids."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.key_memory import KeyMemory
from kvroute.blocks.keys import BlockKey
from kvroute.blocks.tokens import adapter_space
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker
from kvroute.gateway.approximate import WINDOW, LateShare
from kvroute.gateway.isolation import AdapterIsolation
from kvroute.metrics import Metrics
from kvroute.openai.request import InferenceRequest
from kvroute.routing.caches import ExactPrompt, Probed
from kvroute.tokens.reason import Reason

if TYPE_CHECKING:  # it loads tokenizers, which most gateways do without
    from kvroute.tokens.exact import ExactPrompts, ExactTokens

log = logging.getLogger(__name__)

Probe: TypeAlias = Callable[[Sequence[ExactPrompt]], Awaitable[Sequence[Probed]]]
DeadlineOf: TypeAlias = Callable[[str, int], float]
"""Seconds that a request may wait for its tokens, by model and bytes of its body."""

_OVERLOADED = (Reason.LATE, Reason.BUSY)
"""Reasons that say that tokenizing is too slow, and nothing about the request."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's prompts token by token, or why they are not known."""

    prompts: tuple[ExactPrompt, ...] = ()
    why_not: str = ""


class Preparer:
    """One for all requests. Mutable: remembers the keys of recent prompts, and counts `cpu_s`, what making
    prompts exact has cost the event loop's thread in CPU seconds."""

    def __init__(
        self,
        tokens: ExactTokens,
        fleet: Fleet,
        metrics: Metrics,
        isolation: AdapterIsolation,
        deadline_s: DeadlineOf,
        probe: Probe | None = None,
        is_probing: Callable[[], bool] = lambda: True,
    ) -> None:
        """`probe` asks a shared store what it has of prompts, if there is one now (`is_probing`)."""
        self._tokens = tokens
        self._probe = probe
        self._is_probing = is_probing
        self._fleet = fleet
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._late = LateShare()
        self._isolation = isolation
        self._keys = KeyMemory()
        self.cpu_s = 0.0

    def at_once(self, request: InferenceRequest, model: str) -> Prepared | None:
        """What `prepare` gives, where there is nothing to wait for and it takes about a millisecond at most;
        else None."""
        if self._probe is not None and self._is_probing():
            return None
        began = time.thread_time()
        prepared = self._at_once(request, model)
        self.cpu_s += time.thread_time() - began
        return prepared

    def _at_once(self, request: InferenceRequest, model: str) -> Prepared | None:
        base = self._base(model)
        found = self._tokens.prompts_at_once(request, model=base or model)
        if found is None:
            return None
        if isinstance(found, Reason):
            return self._inexact(model, found)
        salt = self._isolation.salt(request, model)
        adapter = model if base else None
        prompts = []
        for ids in found.prompts:
            usable = _usable(ids)
            keys = self._keys.at_once(usable, adapter_space(adapter, salt).seed)
            if keys is None:
                return None
            prompts.append(ExactPrompt(len(ids), keys, PromptChunks(usable), salt, adapter))
        return self._exact(model, prompts)

    async def prepare(self, request: InferenceRequest, model: str) -> Prepared:
        """Waits for tokens no longer than the request's deadline; never raises but for cancellation. `model`
        is the name its workers know it by."""
        base = self._base(model)
        found: ExactPrompts | Reason = Reason.NO_SOURCE
        began = now = time.monotonic()
        until = began + self._deadline_s(model, len(request.body))
        for worker in self._fleet.view(model).workers[:2]:
            found = await self._tokens.prompts(
                request, model=base or model, url=worker.spec.url, deadline_s=max(0.0, until - now)
            )
            now = time.monotonic()
            if found is not Reason.WORKER_FAILED:
                break  # else: it may have died just now
        self._metrics.token_wait.observe(now - began)
        if isinstance(found, Reason):
            return self._inexact(model, found)
        salt = self._isolation.salt(request, model)
        adapter = model if base else None
        prompts = []
        for ids in found.prompts:
            usable = _usable(ids)
            keys = await self._in_turns(self._keys.steps(usable, adapter_space(adapter, salt).seed))
            prompts.append(ExactPrompt(len(ids), keys, PromptChunks(usable), salt, adapter))
        if self._probe is not None:
            answers = await self._probe(prompts)
            prompts = [each._replace(probed=held) for each, held in zip(prompts, answers, strict=True)]
        return self._exact(model, prompts)

    def _base(self, model: str) -> str | None:
        """The model that `model` adapts, where it is a LoRA adapter."""
        workers = self._fleet.view(model).workers
        return _base_of(workers[0], model) if workers else None

    def _exact(self, model: str, prompts: Sequence[ExactPrompt]) -> Prepared:
        self._metrics.exact.labels(model).inc()
        self._count(model, is_late=False)
        return Prepared(tuple(prompts))

    def _inexact(self, model: str, reason: Reason) -> Prepared:
        self._metrics.inexact.labels(model, reason.value).inc()
        self._count(model, is_late=reason in _OVERLOADED)
        return Prepared(why_not=reason.value)

    def _count(self, model: str, *, is_late: bool) -> None:
        changed = self._late.count(model, is_late=is_late)
        if changed is None:
            return
        is_high, late = changed
        if is_high:
            log.warning(
                "kvaware: %d of the last %d prompts for %s were routed without their exact tokens, because "
                "tokenizing took too long",
                late,
                WINDOW,
                model,
            )
        else:
            log.info("kvaware: prompts for %s get their exact tokens in time again", model)

    async def _in_turns(self, steps: Generator[None, None, Sequence[BlockKey]]) -> Sequence[BlockKey]:
        """Run to the end, with a turn for others between the steps."""
        while True:
            began = time.thread_time()
            try:
                next(steps)
            except StopIteration as end:
                keys: Sequence[BlockKey] = end.value
                return keys
            finally:
                self.cpu_s += time.thread_time() - began
            await asyncio.sleep(0)


def _usable(ids: Sequence[int]) -> Sequence[int]:
    """The last token is always computed: no cache can serve it."""
    return ids[: max(0, len(ids) - 1)]


def _base_of(worker: Worker, model: str) -> str | None:
    """The model that `model` adapts, where it is a LoRA adapter."""
    for adapter, parent in worker.facts.adapters:
        if adapter == model:
            return parent
    return None
