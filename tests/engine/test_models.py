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
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.conftest import both_routable
from tests.engine.models import ARCHITECTURES, write_model
from tests.engine.pool import EngineKind, Model

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
    Subject("llama_eagle", 90, in_ci=True),
    Subject("gpt_oss", 150, has_chats=False, notes=("exact tokens",)),
    Subject("gemma3", 260, in_ci=True),
    Subject("llama4", 220),
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
    args = ["--max-num-batched-tokens", "2048", "--max-num-seqs", "8"]
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


@dataclass(frozen=True)
class Asked:
    """One request: the gateway's number and reason, the engine's number, and the length of the prompt."""

    promised: int
    reason: str
    cached: int
    prompt: int


class Workload:
    """Chats, questions about shared documents, forks of a system prompt, and repeats, one after another.
    Lengths are in units: blocks of the model. Mutable: the open chats and what was asked."""

    def __init__(self, url: str, words: list[str], subject: Subject, seed: str) -> None:
        self.log: list[Asked] = []
        self._has_chats = subject.has_chats
        self._url = url
        self._words = words
        self._unit = subject.unit
        self._random = random.Random(seed)
        self._system = self.text(3.3)
        self._documents = [self.text(units) for units in (4.2, 3.1, 5.4)]
        self._prompts: list[str] = []
        self._chats: list[list[dict[str, str]]] = []

    def text(self, units: float) -> str:
        return "".join(self._random.choices(self._words, k=max(1, round(units * self._unit))))

    async def run(self, http: httpx.AsyncClient, requests: int) -> None:
        while len(self.log) < requests:
            kind = self._random.choice((self._turn, self._turn, self._document, self._fork, self._repeat))
            await kind(http)

    async def _turn(self, http: httpx.AsyncClient) -> None:
        if len(self._chats) < 4 or self._random.random() < 0.15:
            self._chats = [*self._chats[-3:], [{"role": "system", "content": self._system}]]
        messages = self._random.choice(self._chats)
        messages.append({"role": "user", "content": self.text(0.7)})
        if self._has_chats:
            answer = await self._ask(http, "chat/completions", {"messages": messages, "max_tokens": 12})
            said = answer["message"]["content"] or ""
        else:
            prompt = "".join(message["content"] for message in messages)
            answer = await self._ask(http, "completions", {"prompt": prompt, "max_tokens": 12})
            said = answer["text"]
        messages.append({"role": "assistant", "content": said})
        if len(messages) > 11:
            self._chats.remove(messages)

    async def _document(self, http: httpx.AsyncClient) -> None:
        await self._complete(http, self._random.choice(self._documents) + self.text(0.6))

    async def _fork(self, http: httpx.AsyncClient) -> None:
        kept = round(self._random.choice((2, 2.5, 3)) * self._unit)
        words = self._system.split()
        await self._complete(http, "".join(f" {word}" for word in words[:kept]) + self.text(1.4))

    async def _repeat(self, http: httpx.AsyncClient) -> None:
        await self._complete(http, self._random.choice(self._prompts[-6:] or [self.text(2.5)]))

    async def _complete(self, http: httpx.AsyncClient, prompt: str) -> None:
        self._prompts.append(prompt)
        await self._ask(http, "completions", {"prompt": prompt, "max_tokens": 2})

    async def _ask(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        sent = {"model": "tiny", "temperature": 0, "ignore_eos": True, **body}
        answer = await http.post(f"{self._url}/v1/{path}", json=sent)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        self.log.append(
            Asked(
                int(answer.headers["x-kvroute-hit-tokens"]),
                answer.headers["x-kvroute-reason"],
                usage["prompt_tokens_details"]["cached_tokens"] or 0,
                usage["prompt_tokens"],
            )
        )
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice


BY_MAP = ("kv_hit", "kv_spill", "kv_miss")
"""Reasons of `kvaware` when the map decided."""


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
        workload = Workload(gateway.url, words, subject, f"{SEED} {subject.architecture}")
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            await workload.run(http, REQUESTS)

    counted = workload.log[WARM_UP:]
    decided = [each for each in counted if each.reason in BY_MAP]
    over = [(each.promised, each.cached) for each in decided if each.promised > each.cached]
    under = [(each.promised, each.cached) for each in decided if each.promised < each.cached]
    exact = 1 - (len(over) + len(under)) / max(1, len(decided))
    hits = sum(each.cached for each in counted) / sum(each.prompt for each in counted)
    with capsys.disabled():
        print(
            f"\n{subject.architecture}, seed {SEED}: exact {exact:.4f} of {len(decided)} by the map "
            f"({len(decided) / len(counted):.3f} of all), {len(over)} too much {over[:8]}, {len(under)} too "
            f"little {under[:8]}, {hits:.3f} of the prompt tokens were hits; "
            f"reasons {dict(Counter(each.reason for each in counted))}"
        )
    assert hits >= HITS
    if subject.is_exact or decided:
        assert exact >= EXACT
    if subject.is_exact:
        assert len(decided) / len(counted) >= DECIDED
