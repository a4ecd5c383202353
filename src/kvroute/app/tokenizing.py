"""Exact tokens of every model that the fleet serves: threads, tokenizers and what keeps them up to date."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import httpx
from prometheus_client.core import Metric

from kvroute.app.background_tasks import BackgroundTasks
from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.worker import HealthState, Worker
from kvroute.gateway.preparation import AdapterIsolation, DeadlineOf, Preparer, Probe
from kvroute.metrics import Metrics, counter
from kvroute.tokens.chat import EngineFlags
from kvroute.tokens.exact import ExactTokens, Mode, TokenThreads
from kvroute.tokens.options import TokensOptions

log = logging.getLogger(__name__)


class TokenSources:
    """Prepares `tokens` for each model once a worker serves it, and again when its workers restarted.

    Mutable: what has been prepared. `run` is a task of the runtime; `fleet_changed` a listener of the fleet.
    """

    def __init__(self, tokens: ExactTokens, fleet: Fleet, clock: Clock, options: TokensOptions) -> None:
        self._tokens = tokens
        self._fleet = fleet
        self._clock = clock
        self._options = options
        self._changed = asyncio.Event()
        self._stale: set[str] = set()
        self._said: dict[str, str] = {}

    def fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.RESTARTED:
            self._stale |= worker.models
        if change in (FleetChange.STATE, FleetChange.RESTARTED):
            self._changed.set()

    async def run(self) -> None:
        """Ends only by cancellation."""
        while True:
            self._changed.clear()
            missing = False
            for model in self._fleet.catalog.bases:
                try:
                    missing |= not await self._prepared(model)
                except Exception:
                    missing = True
                    log.exception("finding out who tells the tokens of %s failed", model)
            if not missing:
                await self._changed.wait()
                continue
            try:
                async with asyncio.timeout(self._options.recheck_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _prepared(self, model: str) -> bool:
        """Whether the model's tokens can be told now."""
        source = self._tokens.sources.get(model)
        if source is not None and source.mode is not Mode.NONE and model not in self._stale:
            return True
        worker = next((w for w in self._fleet.view(model).workers if w.state is HealthState.HEALTHY), None)
        if worker is None:
            return False
        root = _root_of(worker, model)
        folder = await asyncio.to_thread(model_folder, model, root, self._options.models, os.environ)
        source = await self._tokens.prepare(model, folder=folder, url=worker.spec.url)
        self._stale.discard(model)
        level = logging.WARNING if source.mode is Mode.NONE else logging.INFO
        self._say(model, level, f"{source.mode.value}: {source.why}")
        return source.mode is not Mode.NONE

    def _say(self, model: str, level: int, what: str) -> None:
        """Log a change."""
        if self._said.get(model) != what:
            self._said[model] = what
            log.log(level, "tokens of %s are told by: %s", model, what)


def _root_of(worker: Worker, model: str) -> str:
    """What vLLM was told to load: a path, or a name on the hub."""
    roots = (card.get("root") for card in worker.facts.model_cards if card["id"] == model)
    return str(next(roots, None) or "")


def model_folder(
    model: str, root: str, configured: Mapping[str, Path], environ: Mapping[str, str]
) -> Path | None:
    """Where the files of `model` are: as configured, else the worker's own `root` if this machine has it,
    else the newest snapshot in the Hugging Face cache; None if nowhere. Looks at the disk."""
    if model in configured:
        return configured[model]
    if root and (Path(root) / "tokenizer.json").is_file():
        return Path(root)
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    for name in filter(None, (root, model)):
        found = list((cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/tokenizer.json"))
        if found:
            return max(found, key=lambda path: path.stat().st_mtime).parent
    return None


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

    async def open(self, upkeep: BackgroundTasks) -> None:
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
