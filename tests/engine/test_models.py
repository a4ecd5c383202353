"""On real engines of today's architectures the gateway promises what the engine finds.

Two engines per architecture behind a gateway with `kvaware`, and a workload of chats, shared documents, forks
of a system prompt and repeats, that is larger than the engines' caches. The gateway's number
(`x-kvroute-hit-tokens`) is compared with the engine's own `cached_tokens`. Requests are sent one after
another: test_kvaware.py has requests that overlap.

KVROUTE_MODELS_SEED draws another workload.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import httpx
import pytest
from tests.engine.conftest import both_routable
from tests.engine.models import ARCHITECTURES, write_model
from tests.engine.pool import EngineKind, Model
from tests.engine.workload import Workload, by_map, hit_share

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

SEED = os.environ.get("KVROUTE_MODELS_SEED", "1")
PATIENT = ("--set", "tokens.timeout_ms=5000")
EXACT, DECIDED, HITS = 0.99, 0.95, 0.40
REQUESTS = 150
WARM_UP = 10
"""Requests until the gateway has learned how the engine hits."""


@dataclass(frozen=True)
class Subject:
    """An architecture, and a number of blocks too small for the workload. `unit`: tokens of a block."""

    architecture: str
    blocks: int
    unit: int = 32
    has_chats: bool = True
    """False: chats are sent as completions. gpt-oss' chats need the vocabulary of Harmony."""
    is_exact: bool = True
    """False: the gateway may give a reason instead of an exact number (window or Mamba layers only)."""
    notes: tuple[str, ...] = ()
    """Texts of the notes that /ready has for the model as long as it runs."""
    in_ci: bool = False


SUBJECTS = (
    Subject("llama", 90),
    Subject("llama_eagle", 90),
    Subject("gpt_oss", 150, has_chats=False, notes=("exact tokens",)),
    Subject("gemma3", 260, in_ci=True),
    Subject("llama4", 220, in_ci=True),
    Subject("qwen3_next", 90, unit=288),
    Subject("granite4", 90, unit=160),
    Subject("jamba", 120, unit=64),
    Subject("mistral_window", 70, is_exact=False, notes=("kinds",)),
    Subject("mamba", 24, is_exact=False, notes=("kinds",)),
)


@cache
def writer(name: str) -> Callable[[Path], object]:
    """Writes the architecture `name`. One function for each, so that equal kinds are one engine."""

    def write(folder: Path) -> None:
        write_model(name, folder)
        if drafter := ARCHITECTURES[name].drafter:
            write_model(drafter, Path(tempfile.gettempdir()) / f"kvroute-drafter-{drafter}")

    return write


def kinds(subject: Subject) -> tuple[EngineKind, EngineKind]:
    """Two engines of it."""
    architecture = ARCHITECTURES[subject.architecture]
    # Caching is off by default for models of state-space layers alone.
    args = ["--max-num-batched-tokens", "2048", "--max-num-seqs", "8", "--enable-prefix-caching"]
    for name, value in architecture.engine.items():
        args += [f"--{name.replace('_', '-')}", str(value)]
    if architecture.drafting:
        drafting = dict(architecture.drafting)
        if architecture.drafter:
            drafting["model"] = str(Path(tempfile.gettempdir()) / f"kvroute-drafter-{architecture.drafter}")
        args += ["--speculative-config", json.dumps(drafting)]
    if subject.architecture.startswith("gpt_oss"):
        args += ["--tool-call-parser", "openai"]
    kind = EngineKind(
        Model(subject.architecture, writer(subject.architecture)),
        blocks=subject.blocks,
        max_model_len=16 * subject.unit,
        args=tuple(args),
        kernels_replaced=architecture.zeroed_kernels == "mamba",
    )
    return kind, replace(kind, number=1, core=1)


@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(
            each,
            id=each.architecture,
            marks=[pytest.mark.engines(*kinds(each)), *([] if each.in_ci else [pytest.mark.full])],
        )
        for each in SUBJECTS
    ],
)
async def test_what_is_promised_is_found(subject, leased, run_gateway, words, capsys) -> None:
    for engine, name in zip(leased, "ab", strict=True):
        engine.name = name
    async with run_gateway(leased, "kvaware", *PATIENT) as gateway:
        await both_routable(gateway.url, len(leased), subject.notes)
        seed = f"{SEED} {subject.architecture}"
        workload = Workload(gateway.url, words, seed, unit=subject.unit, has_chats=subject.has_chats)
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            await workload.run(http, REQUESTS)

    counted = workload.log[WARM_UP:]
    decided = by_map(counted)
    over = [(each.promised, each.cached) for each in decided if each.promised > each.cached]
    under = [(each.promised, each.cached) for each in decided if each.promised < each.cached]
    exact = 1 - (len(over) + len(under)) / max(1, len(decided))
    hits = hit_share(counted)
    with capsys.disabled():
        print(
            f"\n{subject.architecture}, seed {SEED}: exact {exact:.4f} of {len(decided)} by the map "
            f"({len(decided) / len(counted):.3f} of all), {len(over)} too much {over[:8]}, {len(under)} too "
            f"little {under[:8]}, {hits:.3f} of the prompt tokens were hits; "
            f"reasons {dict(Counter(each.reason for each in counted))}"
        )
    assert hits >= HITS
    if subject.is_exact:
        assert exact >= EXACT
        assert len(decided) / len(counted) >= DECIDED
