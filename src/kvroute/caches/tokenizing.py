"""Exact tokens for every model of the fleet: threads, tokenizers, and the task that keeps them current."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import httpx
from prometheus_client.core import Metric

from kvroute.background_tasks import BackgroundTasks
from kvroute.caches.metrics import next_turns_metric, tokenizing_metric
from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.probe import ProbeFailure, Prober
from kvroute.fleet.worker import HealthState, Worker
from kvroute.metrics import Metrics
from kvroute.openai.shown import billing_rule
from kvroute.relay.key_spaces import KeySpaces
from kvroute.relay.preparation import Preparer, Probe, TimeoutOf
from kvroute.tokens.chat import EngineFlags
from kvroute.tokens.exact import ExactTokens, Mode, TokenThreads
from kvroute.tokens.options import TokensOptions

log = logging.getLogger(__name__)

_VERSION_TIMEOUT_S = 5.0


class TokenSources:
    """Prepares `tokens` for each model when a worker serves it, and again after a worker restarts.

    `probe` reads the release of the worker that a model is prepared with. Mutable: the set of stale models.
    `run` is a background task; `fleet_changed` subscribes to the fleet.
    """

    def __init__(
        self, tokens: ExactTokens, fleet: Fleet, clock: Clock, options: TokensOptions, probe: Prober
    ) -> None:
        self._tokens = tokens
        self._fleet = fleet
        self._clock = clock
        self._options = options
        self._probe = probe
        self._changed = asyncio.Event()
        self._stale: set[str] = set()
        self._logged: dict[str, str] = {}

    def fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.RESTARTED:
            self._stale |= worker.models
        if change in (FleetChange.STATE, FleetChange.RESTARTED):
            self._changed.set()

    async def run(self) -> None:
        """Prepare models whenever the fleet changes; runs until it is cancelled."""
        while True:
            self._changed.clear()
            missing = False
            for model in self._fleet.catalog.bases:
                try:
                    missing |= not await self._is_prepared(model)
                except Exception:
                    missing = True
                    log.exception("choosing a token source for %s failed", model)
            if not missing and not self._tokens.shows_dates:
                await self._changed.wait()
                continue
            try:
                async with asyncio.timeout(self._options.recheck_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _is_prepared(self, model: str) -> bool:
        """Prepare the model; return whether its exact tokens are available now."""
        source = self._tokens.sources.get(model)
        is_stale = model in self._stale or self._tokens.is_of_another_day(model)
        if source is not None and source.mode is not Mode.NONE and not is_stale:
            return True
        worker = next((w for w in self._fleet.view(model).workers if w.state is HealthState.HEALTHY), None)
        if worker is None:
            return False
        root = _root_of(worker, model)
        folder = await asyncio.to_thread(model_folder, model, root, self._options.models, os.environ)
        url = worker.spec.url
        release = await self._probe.release(url)
        billing = billing_rule(None if isinstance(release, ProbeFailure) else release)
        source = await self._tokens.prepare(model, folder=folder, url=url, billing=billing, root=root)
        self._stale.discard(model)
        level = logging.WARNING if source.mode is Mode.NONE else logging.INFO
        self._log_change(model, level, f"{source.mode.value}: {source.explanation}")
        return source.mode is not Mode.NONE

    def _log_change(self, model: str, level: int, source: str) -> None:
        """Log the model's token source if it differs from the last one."""
        if self._logged.get(model) != source:
            self._logged[model] = source
            log.log(level, "tokens of %s come from: %s", model, source)


def _root_of(worker: Worker, model: str) -> str:
    """The model that vLLM was started with: a path, or a name on the Hugging Face hub."""
    roots = (card.get("root") for card in worker.facts.model_cards if card["id"] == model)
    return str(next(roots, None) or "")


def model_folder(
    model: str, root: str, configured: Mapping[str, Path], environ: Mapping[str, str]
) -> Path | None:
    """The folder with the files of `model`; None if there is none. Reads the disk.

    In this order: the configured folder, the worker's `root` if it exists on this machine, the newest
    snapshot in the Hugging Face cache.
    """
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
    """Owns the tokenizers and their threads; `preparer` makes a request's prompts exact.

    `open` starts a task in `background`, whose owner cancels it before `aclose`. The client belongs to the
    caller and sends the workers' key. Mutable: through its parts.
    """

    def __init__(
        self,
        options: TokensOptions,
        client: httpx.AsyncClient,
        fleet: Fleet,
        metrics: Metrics,
        clock: Clock,
        isolation: KeySpaces,
        probe: Probe,
        is_probing: Callable[[], bool],
        timeout_s: TimeoutOf,
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
            harmony_vocabulary=options.harmony_vocabulary,
            computed_samples=options.computed_samples,
            media_keys=options.media_keys,
        )
        version = Prober(client, timeout_s=_VERSION_TIMEOUT_S)
        self._sources = TokenSources(self._tokens, fleet, clock, options, version)
        self.preparer = Preparer(
            self._tokens, fleet, metrics, isolation, timeout_s, probe, is_probing, clock.now
        )

    async def open(self, background: BackgroundTasks) -> None:
        await self._threads.__aenter__()
        background.start("token sources", self._sources.run)

    async def aclose(self) -> None:
        await self._threads.__aexit__(None, None, None)

    def fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        self._sources.fleet_changed(change, worker)

    def notes(self) -> list[str]:
        """Notes for `/ready`: models without exact tokens, with the reason."""
        notes = []
        for model in self._fleet.catalog.bases:
            source = self._tokens.sources.get(model)
            if source is None or source.mode is Mode.NONE:
                why = "not checked yet" if source is None else source.explanation
                notes.append(f"kvaware: no exact tokens of {model!r}: {why}")
            elif source.refused:
                shapes = ", ".join(sorted(source.refused))
                notes.append(f"kvaware: no exact tokens of {model!r} for {shapes}: {source.explanation}")
        for model, reason in self.preparer.outages.reasons.items():
            notes.append(f"kvaware: no exact tokens of the last prompts for {model!r}: {reason}")
        return notes

    def metrics(self) -> Iterable[Metric]:
        yield tokenizing_metric({"loop": self.preparer.cpu_s, "tokenizer": self._threads.cpu_s})
        yield next_turns_metric(self._tokens.turns())

    def describe(self) -> dict[str, object]:
        """The token source of each model, for the admin API."""
        return {
            model: {"told_by": source.mode.value, "through": source.through, "why": source.explanation}
            for model, source in self._tokens.sources.items()
        }
