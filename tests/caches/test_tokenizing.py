"""Every model gets a token source; a model without one does not affect the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.waiting import until

from kvroute.caches.tokenizing import TokenSources
from kvroute.clock import SystemClock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.probe import Prober
from kvroute.fleet.worker import WorkerFacts, WorkerId, WorkerSpec
from kvroute.openai.shown import BillingRule
from kvroute.tokens.exact import Mode, TokenSource
from kvroute.tokens.options import TokensOptions


class FakeTokens:
    """Prepares every model except those in `broken`."""

    def __init__(self) -> None:
        self.sources: dict[str, TokenSource] = {}
        self.broken: set[str] = set()
        self.failures = 0
        self.prepared: list[str] = []
        self.rules: dict[str, BillingRule | None] = {}
        self.outdated: set[str] = set()
        self.shows_dates = False

    def is_of_another_day(self, model: str) -> bool:
        return model in self.outdated

    async def prepare(
        self, model: str, *, folder: Path | None, url: str, billing: BillingRule | None, root: str = ""
    ) -> TokenSource:
        if model in self.broken:
            self.failures += 1
            raise RuntimeError("a defect")
        self.prepared.append(model)
        self.rules[model] = billing
        self.outdated.discard(model)
        self.sources[model] = TokenSource(model, Mode.LOCAL, "it agrees")
        return self.sources[model]


def prober(**releases: str) -> Prober:
    """Reads `/version` of the workers that are named; the others have none."""

    def answer(request: httpx.Request) -> httpx.Response:
        release = releases.get(request.url.host.partition(".")[0])
        return httpx.Response(404) if release is None else httpx.Response(200, json={"version": release})

    return Prober(httpx.AsyncClient(transport=httpx.MockTransport(answer)), timeout_s=60.0)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    specs = [WorkerSpec(WorkerId(name), f"http://{name}.example") for name in "ab"]
    fleet.apply("test", specs)
    for worker in fleet.workers():
        fleet.update_facts(worker, WorkerFacts(models=frozenset({f"model-{worker.id}"})))
        fleet.mark_healthy(worker, 0.0)
    return fleet


async def test_a_model_that_fails_is_retried_and_the_others_are_ready_meanwhile(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    tokens: Any = FakeTokens()
    tokens.broken = {"model-a"}
    sources = TokenSources(tokens, fleet, SystemClock(), TokensOptions(recheck_s=0.01), prober())
    running = asyncio.create_task(sources.run())
    await until(lambda: "model-b" in tokens.sources)
    tokens.broken = set()
    await until(lambda: "model-a" in tokens.sources)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert "choosing a token source for model-a failed" in caplog.text


async def test_a_restart_whose_check_failed_is_checked_again(fleet: Fleet) -> None:
    tokens: Any = FakeTokens()
    sources = TokenSources(tokens, fleet, SystemClock(), TokensOptions(recheck_s=0.01), prober())
    running = asyncio.create_task(sources.run())
    await until(lambda: len(tokens.prepared) >= 2)
    tokens.broken = {"model-a"}
    sources.fleet_changed(FleetChange.RESTARTED, fleet.get("a"))
    await until(lambda: tokens.failures)
    tokens.broken = set()
    await until(lambda: tokens.prepared.count("model-a") >= 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert tokens.prepared.count("model-b") == 1


@pytest.mark.parametrize(
    ("release", "rule"),
    [
        ("0.17.1", BillingRule(blocks=False, lines=False)),
        ("0.18.0", BillingRule(blocks=True, lines=False)),
        ("0.31.0", BillingRule(blocks=True, lines=False)),
        ("0.32.0", BillingRule()),
        ("0.33.1.dev7+gabc", BillingRule()),
        ("unknown", BillingRule()),
    ],
)
async def test_exact_tokens_keep_what_the_release_of_the_worker_keeps(
    fleet: Fleet, release: str, rule: BillingRule
) -> None:
    tokens: Any = FakeTokens()
    sources = TokenSources(
        tokens, fleet, SystemClock(), TokensOptions(recheck_s=0.01), prober(a=release, b="0.32.0")
    )
    running = asyncio.create_task(sources.run())
    await until(lambda: len(tokens.prepared) == 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert tokens.rules == {"model-a": rule, "model-b": BillingRule()}


async def test_a_worker_without_a_release_is_read_as_the_newest_one(fleet: Fleet) -> None:
    tokens: Any = FakeTokens()
    sources = TokenSources(tokens, fleet, SystemClock(), TokensOptions(recheck_s=0.01), prober())
    running = asyncio.create_task(sources.run())
    await until(lambda: len(tokens.prepared) == 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert set(tokens.rules.values()) == {BillingRule()}
