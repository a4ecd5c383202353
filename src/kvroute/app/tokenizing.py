"""Exact tokens of every model that the fleet serves: threads, tokenizers and what keeps them up to date."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import httpx
from prometheus_client.core import Metric

from kvroute.app.token_sources import TokenSources
from kvroute.app.upkeep import Upkeep
from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.worker import Worker
from kvroute.gateway.isolation import AdapterIsolation
from kvroute.gateway.preparation import DeadlineOf, Preparer, Probe
from kvroute.metrics import Metrics, counter
from kvroute.tokens.chat import EngineFlags
from kvroute.tokens.exact import ExactTokens, Mode
from kvroute.tokens.options import TokensOptions
from kvroute.tokens.threads import TokenThreads


class Tokenizing:
    """`preparer` gives a request's prompts token by token. Mutable: `open` begins its work in `upkeep`, whose
    owner ends it before `aclose`. The client belongs to the caller and knows the workers' key."""

    def __init__(
        self,
        options: TokensOptions,
        client: httpx.AsyncClient,
        fleet: Fleet,
        metrics: Metrics,
        clock: Clock,
        isolation: AdapterIsolation,
        probe: Probe,
        is_probing: Callable[[], bool],
        deadline_s: DeadlineOf,
    ) -> None:
        self._fleet = fleet
        self._threads = TokenThreads(options.threads)
        self._tokens = ExactTokens(
            self._threads,
            client,
            flags=EngineFlags(
                chat_template_kwargs=options.chat_template_kwargs,
                content_format=options.content_format,
                tools_dropped_for_none=options.tools_dropped_for_none,
            ),
            cache_bytes=options.cache_mib * 1024 * 1024,
            allow_fastokens=options.fastokens,
        )
        self._sources = TokenSources(self._tokens, fleet, clock, options)
        self.preparer = Preparer(self._tokens, fleet, metrics, isolation, deadline_s, probe, is_probing)

    async def open(self, upkeep: Upkeep) -> None:
        await self._threads.__aenter__()
        upkeep.begin("token sources", self._sources.run)

    async def aclose(self) -> None:
        await self._threads.__aexit__(None, None, None)

    def fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        self._sources.fleet_changed(change, worker)

    def notes(self) -> list[str]:
        """Models without exact tokens, and why."""
        notes = []
        for model in self._fleet.catalog.bases:
            source = self._tokens.sources.get(model)
            if source is None or source.mode is Mode.NONE:
                why = "not checked yet" if source is None else source.why
                notes.append(f"kvaware: no exact tokens of {model!r}: {why}")
        return notes

    def metrics(self) -> Iterable[Metric]:
        yield counter(
            "kvroute_tokenizing_cpu_seconds",
            "CPU time spent on making prompts exact (reading, rendering, tokenizing, hashing the ids), by "
            "whose thread it was: the event loop's or the tokenizer's own.",
            ("thread",),
            [(("loop",), self.preparer.cpu_s), (("tokenizer",), self._threads.cpu_s)],
        )

    def describe(self) -> dict[str, object]:
        """For the admin API."""
        return {
            model: {"told_by": source.mode.value, "through": source.through, "why": source.why}
            for model, source in self._tokens.sources.items()
        }
