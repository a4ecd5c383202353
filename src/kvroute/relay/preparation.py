"""Prepares requests before they are planned: exact tokens, and key spaces of adapters and tenants.

Also the exchanges that start later, because their requests are prepared or wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import KEY_TOKENS, BlockKey, adapter_space
from kvroute.blocks.known_prompts import KeyCache
from kvroute.blocks.media import MediaItem, media_keys
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker
from kvroute.metrics import Metrics
from kvroute.openai.request import InferenceRequest
from kvroute.relay.key_spaces import KeySpaces
from kvroute.routing.strategy import ExactPrompt, Probed
from kvroute.tokens.options import TokensReason

if TYPE_CHECKING:
    from kvroute.tokens.exact import ExactPrompts, ExactTokens

WINDOW = 200
"""Number of prompts of one model over which the share with late tokens is computed."""
HIGH, LOW = 0.05, 0.02
"""Shares at which the warning starts and ends. They differ, so that a share between them is not logged
again."""


@dataclass(slots=True)
class _Window:
    prompts: int = 0
    late: int = 0
    is_high: bool = False


class LateShare:
    """The share of prompts, by model, whose exact tokens came too late. Mutable: `count`."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def count(self, model: str, *, is_late: bool) -> tuple[bool, int] | None:
        """Count one prompt. If the share has just become high or low, return whether it is high and how many
        of the last `WINDOW` prompts were late; otherwise None."""
        window = self._windows.get(model)
        if window is None:
            window = self._windows[model] = _Window()
        window.prompts += 1
        window.late += is_late
        if window.prompts < WINDOW:
            return None
        late, window.prompts, window.late = window.late, 0, 0
        is_high = late / WINDOW >= (LOW if window.is_high else HIGH)
        if is_high is window.is_high:
            return None
        window.is_high = is_high
        return is_high, late


log = logging.getLogger(__name__)

Probe: TypeAlias = Callable[[Sequence[ExactPrompt]], Awaitable[Sequence[Probed]]]
TimeoutOf: TypeAlias = Callable[[str, int], float]
"""Seconds that a request may wait for its tokens, by model and bytes of its body."""

_OVERLOADED = (TokensReason.LATE, TokensReason.BUSY)
"""Reasons that mean that tokenizing is too slow."""
_NO_TOKENIZER = (
    TokensReason.LATE,
    TokensReason.WORKER_FAILED,
    TokensReason.WORKER_LOST,
    TokensReason.FAILED,
)
"""Reasons that mean, several times in a row, that no tokenizer answers."""
_MANY_IN_A_ROW = 3
_LOG_EVERY_S = 30.0
_TRY_EVERY_S = 1.0


@dataclass(slots=True)
class _Outage:
    failures: int = 0
    """Prompts in a row."""
    is_logged: bool = False
    logged_at: float = -math.inf
    tried_at: float = -math.inf


class TokenizerOutages:
    """Notices that the tokenizer of a model does not answer, and says it in the log. Mutable: `count`."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: monotonic seconds."""
        self._now = now
        self._outages: dict[str, _Outage] = {}
        self.reasons: dict[str, TokensReason] = {}
        """By model, while its tokenizer does not answer."""

    def count(self, model: str, reason: TokensReason | None) -> None:
        """Count one prompt; `reason` is None if it got exact tokens. About 0.1 us while all do."""
        outage = self._outages.get(model)
        if reason is None:
            if outage is not None:
                self._ended(model, outage)
            return
        if reason not in _NO_TOKENIZER:
            return
        if outage is None:
            outage = self._outages[model] = _Outage()
        outage.failures += 1
        if outage.failures < _MANY_IN_A_ROW:
            return
        self.reasons[model] = reason
        if self._now() - outage.logged_at >= _LOG_EVERY_S:
            outage.is_logged, outage.logged_at = True, self._now()
            log.warning(
                "kvaware: the last %d prompts for %s got no exact tokens (%s), and are routed by the route "
                "history",
                outage.failures,
                model,
                reason,
            )

    def may_try(self, model: str) -> bool:
        """Whether the next prompt should wait for a tokenizer: one a second while all wait in vain."""
        if self.reasons.get(model) is not TokensReason.LATE:
            return True  # the tokenizer answers, or refuses at once
        outage, now = self._outages[model], self._now()
        if now - outage.tried_at < _TRY_EVERY_S:
            return False
        outage.tried_at = now
        return True

    def _ended(self, model: str, outage: _Outage) -> None:
        outage.failures = 0
        self.reasons.pop(model, None)
        if outage.is_logged:
            outage.is_logged = False
            log.info("kvaware: prompts for %s get exact tokens again", model)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's prompts with exact tokens, or why the tokens are unknown."""

    prompts: tuple[ExactPrompt, ...] = ()
    why_not: str = ""
    lost: Worker | None = None
    """The worker that broke off while it tokenized the prompt."""


class Preparer:
    """Gets the exact tokens of prompts, within a deadline.

    Mutable: caches the keys of recent prompts, and counts in `cpu_s` the CPU seconds of this work on the
    event loop's thread.
    """

    def __init__(
        self,
        tokens: ExactTokens,
        fleet: Fleet,
        metrics: Metrics,
        isolation: KeySpaces,
        timeout_s: TimeoutOf,
        probe: Probe | None = None,
        is_probing: Callable[[], bool] = lambda: True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`probe` queries a shared store for cached parts of prompts, while `is_probing` returns true. `now`:
        monotonic seconds."""
        self._tokens = tokens
        self._probe = probe
        self._is_probing = is_probing
        self._fleet = fleet
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._late = LateShare()
        self.outages = TokenizerOutages(now)
        self._isolation = isolation
        self._keys = KeyCache()
        self.cpu_s = 0.0

    def try_cached(self, request: InferenceRequest, model: str) -> Prepared | None:
        """The result of `prepare` if it needs no waiting and at most about 1 ms; otherwise None."""
        if self._probe is not None and self._is_probing():
            return None
        began = time.thread_time()
        prepared = self._try_cached(request, model)
        self.cpu_s += time.thread_time() - began
        return prepared

    def _try_cached(self, request: InferenceRequest, model: str) -> Prepared | None:
        base = self._base(model)
        found = self._tokens.prompts_if_quick(request, model=self._fleet.canonical(base or model))
        if found is None:
            return None
        if isinstance(found, TokensReason):
            return self._inexact(model, found)
        salt = self._isolation.salt(request, model)
        adapter = model if base else None
        prompts = []
        for ids in found.prompts:
            usable, last_id = _usable(ids), ids[-1] if ids else None
            keys = self._keys.in_one_step(usable, adapter_space(adapter, salt).seed)
            if keys is None:
                return None
            prompts.append(
                ExactPrompt(len(ids), keys, PromptChunks(usable, last_id), salt, adapter, last_id=last_id)
            )
        return self._exact(model, prompts)

    async def prepare(self, request: InferenceRequest, model: str) -> Prepared:
        """Wait for the tokens, at most until the request's deadline. Raises nothing except CancelledError.

        `model` is the name that workers use.
        """
        base = self._base(model)
        name = base or model
        source = self._fleet.canonical(name)
        # A local tokenizer is always asked: it finishes late prompts, and later turns find them in its cache.
        if self._tokens.is_remote(source) and not self.outages.may_try(self._fleet.canonical(model)):
            return self._inexact(model, TokensReason.LATE)
        found: ExactPrompts | TokensReason = TokensReason.NO_SOURCE
        began = now = time.monotonic()
        until = began + self._timeout_s(model, len(request.body))
        lost = None
        for worker in self._fleet.view(model).workers[:2]:
            found = await self._tokens.prompts(
                request, model=source, name=name, url=worker.spec.url, timeout_s=max(0.0, until - now)
            )
            now = time.monotonic()
            if found is TokensReason.WORKER_LOST:
                lost = worker
            if found is not TokensReason.WORKER_FAILED:
                break  # otherwise try another worker: this one may have died before it was asked
        self._metrics.token_wait.observe(now - began)
        if isinstance(found, TokensReason):
            return self._inexact(model, found, lost)
        salt = self._isolation.salt(request, model)
        adapter = model if base else None
        prompts, seed = [], adapter_space(adapter, salt).seed
        for ids, media in zip_longest(found.prompts, found.media, fillvalue=()):
            usable, last_id = _usable(ids), ids[-1] if ids else None
            if media:
                prompts.append(await self._with_media(ids, media, seed, salt, adapter))
                continue
            keys = await self._in_steps(self._keys.steps(usable, seed))
            prompts.append(
                ExactPrompt(len(ids), keys, PromptChunks(usable, last_id), salt, adapter, last_id=last_id)
            )
        if self._probe is not None:
            answers = await self._probe(prompts)
            prompts = [each._replace(probed=held) for each, held in zip(prompts, answers, strict=True)]
        return self._exact(model, prompts)

    async def _with_media(
        self, ids: Sequence[int], media: Sequence[MediaItem], seed: int, salt: str, adapter: str | None
    ) -> ExactPrompt:
        """A prompt with images: its keys contain their identifiers.

        LMCache's chunks and the last id are those of the text before the first one: LMCache hashes its own
        ids for placeholders (0.5.6), and a key at the prompt's very end is not computed.
        """
        usable = _usable(ids)
        first = media[0].offset // KEY_TOKENS * KEY_TOKENS
        keys = [*await self._in_steps(self._keys.steps(usable[:first], seed))]
        rest = (item._replace(offset=item.offset - first) for item in media)
        keys += media_keys(usable[first:], keys[-1] if keys else seed, rest)
        return ExactPrompt(len(ids), keys, PromptChunks(usable[: media[0].offset], None), salt, adapter)

    def _base(self, model: str) -> str | None:
        """The base model if `model` is a LoRA adapter; otherwise None."""
        workers = self._fleet.view(model).workers
        return _base_of(workers[0], model) if workers else None

    def _exact(self, model: str, prompts: Sequence[ExactPrompt]) -> Prepared:
        self._metrics.exact.labels(model).inc()
        canonical = self._fleet.canonical(model)
        self.outages.count(canonical, None)
        self._count(canonical, is_late=False)
        return Prepared(tuple(prompts))

    def _inexact(self, model: str, reason: TokensReason, lost: Worker | None = None) -> Prepared:
        self._metrics.inexact.labels(model, reason.value).inc()
        canonical = self._fleet.canonical(model)
        self.outages.count(canonical, reason)
        self._count(canonical, is_late=reason in _OVERLOADED)
        return Prepared(why_not=reason.value, lost=lost)

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

    async def _in_steps(self, steps: Generator[None, None, Sequence[BlockKey]]) -> Sequence[BlockKey]:
        """Run all steps; other tasks run between them."""
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
    """The tokens that a cache can serve: all except the last one, which is always computed."""
    return ids[: max(0, len(ids) - 1)]


def _base_of(worker: Worker, model: str) -> str | None:
    """The base model if `model` is a LoRA adapter on `worker`; otherwise None."""
    for adapter, parent in worker.facts.adapters:
        if adapter == model:
            return parent
    return None
