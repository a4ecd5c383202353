"""Prepares requests before they are planned: exact tokens, and key spaces of adapters and tenants.

Also the exchanges that start later, because their requests are prepared or wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import KEY_TOKENS, BlockKey, adapter_space
from kvroute.blocks.known_prompts import KeyCache
from kvroute.blocks.media import MediaItem, media_keys
from kvroute.errors import InvalidRequest
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker, WorkerId
from kvroute.gateway.downstream import InFlightRequest
from kvroute.metrics import Metrics
from kvroute.openai.endpoints import Isolation
from kvroute.openai.request import InferenceRequest, cache_salt_of
from kvroute.openai.rewriting import check_can_be_isolated, client_salt, isolated, key_space
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


_NOT_NEEDED = Isolation.NOT_NEEDED  # to look up an enum member in its class costs 80 ns each time


class Adapter(NamedTuple):
    """A LoRA adapter of the fleet.

    `revision` is the one that most of its workers have loaded. `others` maps each other worker to its own
    revision, or to None if the name is not an adapter there.
    """

    name: str
    revision: str
    others: Mapping[WorkerId, str | None]


class KeySpaces:
    """Decides each request's key space, by its LoRA adapter and its tenant.

    With `adapters` False adapters get none. With `tenants` True every request has a tenant; `needs_tag`: some
    workers have LMCache in classic mode. Mutable: caches the fleet's adapters until the fleet changes.

    A worker's metrics show LMCache in some releases only, so every adapter is isolated. Without LMCache the
    only cost is the added bytes.
    """

    def __init__(
        self, fleet: Fleet, *, adapters: bool, tenants: bool = False, needs_tag: bool = False
    ) -> None:
        self._fleet = fleet
        self._enabled = adapters
        self.isolates_tenants = tenants
        self._needs_tag = needs_tag
        self._version = -1
        self._any = False
        self._adapters: dict[str, Adapter | None] = {}

    @property
    def is_active(self) -> bool:
        """Whether requests may be changed: tenants are isolated, or the fleet has adapters now."""
        self._refresh()
        return self._any or self.isolates_tenants

    def adapter(self, model: str) -> Adapter | None:
        """The adapter with this name (as workers know it); None if it is an adapter on no worker."""
        self._refresh()
        if not self._any:
            return None
        if model not in self._adapters:
            found = self._read(model)
            if found is None and not self._fleet.view(model).workers:
                return None  # names come from clients: only those that exist may take up memory
            self._adapters[model] = found
        return self._adapters[model]

    def salt(self, request: InferenceRequest, model: str) -> str:
        """The `cache_salt` that most workers get for this request; "" for none.

        `model` is the name that workers use. The value has no meaning for a request that `bodies` refuses.
        """
        adapter = self.adapter(model)
        tenant = request.tenant
        if (adapter is None and not tenant) or request.endpoint.isolation is _NOT_NEEDED:
            return cache_salt_of(request)
        name, revision = ("", "") if adapter is None else (adapter.name, adapter.revision)
        try:
            return key_space(client_salt(request), name, revision, tenant)
        except InvalidRequest:
            return ""

    def predicts(self, worker: WorkerId, model: str) -> bool:
        """Return True if the worker gets requests for `model` with the salt that predictions assume."""
        adapter = self.adapter(model)
        return adapter is None or worker not in adapter.others

    def bodies(
        self, request: InferenceRequest, body: bytes, adapter: Adapter | None
    ) -> tuple[bytes, Mapping[WorkerId, bytes] | None]:
        """The body to send instead of `body`, and the bodies for workers that need another one (or None).

        Raises InvalidRequest; AdapterNotIsolated or TenantNotIsolated if the body cannot be changed.
        """
        tenant = request.tenant
        if self.isolates_tenants and not tenant:  # a defect must not let tenants share KV
            raise RuntimeError("a request without a tenant")
        if (adapter is None and not tenant) or request.endpoint.isolation is _NOT_NEEDED:
            return body, None
        check_can_be_isolated(request, needs_tag=self._needs_tag)
        salt = client_salt(request)
        made: dict[str | None, bytes] = {None: body}
        if tenant:
            made[None] = isolated(body, request, key_space(salt, "", "", tenant))
            if adapter is None:
                return made[None], None
        assert adapter is not None
        for revision in {adapter.revision, *adapter.others.values()} - {None}:
            assert revision is not None
            made[revision] = isolated(body, request, key_space(salt, adapter.name, revision, tenant))
        others = {worker: made[revision] for worker, revision in adapter.others.items()}
        return made[adapter.revision], others or None

    def _refresh(self) -> None:
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._adapters.clear()
            self._any = self._enabled and any(worker.facts.adapters for worker in self._fleet.workers())

    def _read(self, model: str) -> Adapter | None:
        revisions = {
            worker.id: worker.adapter_revision(model)
            for worker in self._fleet.workers()
            if worker.serves(model)
        }
        counts = Counter(revision for revision in revisions.values() if revision is not None)
        if not counts:
            return None
        # Between equal counts the first name wins, so that all gateways predict the same.
        usual = min(counts, key=lambda revision: (-counts[revision], revision))
        others = {worker: revision for worker, revision in revisions.items() if revision != usual}
        return Adapter(model, usual, others)


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


Prepare: TypeAlias = Callable[[], Coroutine[None, None, InFlightRequest | None]]


class DelayedExchange:
    """A request whose exchange starts later; from then on it passes every call on to the exchange.

    A subclass sets `_exchange`, or `_is_over` if the request ends without one. Mutable: by the subclass and
    the client's side, on one event loop.
    """

    def __init__(self) -> None:
        self._exchange: InFlightRequest | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over if self._exchange is None else self._exchange.is_over

    def end(self, by: str) -> None:
        """See `Exchange.end`."""
        if self._exchange is not None:
            self._exchange.end(by)
        elif not self._is_over:
            self._is_over = True
            self._end_early(by)

    def pause(self) -> None:
        """See `Exchange.pause`."""
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        """See `Exchange.resume`."""
        if self._exchange is not None:
            self._exchange.resume()

    @abstractmethod
    def _end_early(self, by: str) -> None:
        """End the request before it has an exchange. Called once."""


class PendingExchange(DelayedExchange):
    """An exchange that is being prepared in a task.

    `prepare` returns the exchange, or None if it answered the request itself. `on_end` is called if `end`
    comes before `prepare` is ready. Mutable: by its task.
    """

    def __init__(self, prepare: Prepare, on_end: Callable[[PendingExchange, str], None]) -> None:
        super().__init__()
        self._on_end = on_end
        self._task = asyncio.create_task(self._run(prepare), name="prepare a request")

    @property
    def task(self) -> asyncio.Task[None]:
        return self._task

    def _end_early(self, by: str) -> None:
        self._task.cancel()
        self._on_end(self, by)

    async def _run(self, prepare: Prepare) -> None:
        self._exchange = await prepare()
        if self._exchange is None:
            self._is_over = True
