"""What a strategy wants to know of a prompt that takes time to find out: its token ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.tokens import adapter_space, token_keys
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker
from kvroute.metrics import Metrics
from kvroute.openai.prompt import cache_salt_of
from kvroute.openai.request import InferenceRequest
from kvroute.routing.caches import ExactPrompt, Probed
from kvroute.tokens.exact import ExactPrompts, ExactTokens
from kvroute.tokens.reason import Reason

Probe: TypeAlias = Callable[[Sequence[ExactPrompt]], Awaitable[Sequence[Probed]]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's prompts token by token, or why they are not known."""

    prompts: tuple[ExactPrompt, ...] = ()
    why_not: str = ""


class Preparer:
    """Stateless but for what it is given; one for all requests."""

    def __init__(
        self, tokens: ExactTokens, fleet: Fleet, metrics: Metrics, probe: Probe | None = None
    ) -> None:
        """`probe` asks a shared store what it has of prompts."""
        self._tokens = tokens
        self._probe = probe
        self._fleet = fleet
        self._metrics = metrics

    async def prepare(self, request: InferenceRequest, model: str) -> Prepared:
        """Waits no longer than the tokenizer's deadlines; never raises but for cancellation. `model` is the
        name its workers know it by."""
        workers = self._fleet.view(model).workers
        base = _base_of(workers[0], model) if workers else None
        found: ExactPrompts | Reason = Reason.NO_SOURCE
        if workers:
            found = await self._tokens.prompts(request, model=base or model, url=workers[0].spec.url)
        if isinstance(found, Reason):
            self._metrics.inexact.labels(model, found.value).inc()
            return Prepared(why_not=found.value)
        salt = cache_salt_of(request)
        seed = adapter_space(model if base else None, salt).seed
        prompts = []
        for ids in found.prompts:
            # The last token is always computed: no cache can serve it.
            usable = ids[: max(0, len(ids) - 1)]
            chunks = PromptChunks(usable)
            adapter = model if base else None
            prompts.append(ExactPrompt(len(ids), token_keys(usable, seed), chunks, salt, adapter))
        if self._probe is not None:
            answers = await self._probe(prompts)
            prompts = [each._replace(probed=held) for each, held in zip(prompts, answers, strict=True)]
        return Prepared(tuple(prompts))


def _base_of(worker: Worker, model: str) -> str | None:
    """The model that `model` adapts, where it is a LoRA adapter."""
    for adapter, parent in worker.facts.adapters:
        if adapter == model:
            return parent
    return None
