"""Keeps a way to tokenize for every model that the fleet serves."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.worker import HealthState, Worker
from kvroute.tokens.exact import ExactTokens, Mode
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
