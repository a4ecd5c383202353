"""Requests of which many share their beginning, and what the gateway and the engine said of each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Asked:
    """One request: the gateway's number and reason, the engine's number, the prompt's length, the worker.

    Strategies that predict nothing have the number 0.
    """

    promised: int
    reason: str
    cached: int
    prompt: int
    worker: str


class Workload:
    """Chats, questions about shared documents, forks of a system prompt, and repeats, one after another.
    Lengths are in units: blocks of the model. The requests draw their name of the model from `models`.
    Without `has_chats` chats are sent as completions. Mutable: the open chats and what was asked."""

    def __init__(
        self,
        url: str,
        words: list[str],
        seed: str,
        *,
        unit: int = 32,
        has_chats: bool = True,
        models: Sequence[str] = ("tiny",),
    ) -> None:
        self.log: list[Asked] = []
        self._models = models
        self._has_chats = has_chats
        self._url = url
        self._words = words
        self._unit = unit
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
        sent = {"model": self._random.choice(self._models), "temperature": 0, "ignore_eos": True, **body}
        answer = await http.post(f"{self._url}/v1/{path}", json=sent)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        self.log.append(
            Asked(
                int(answer.headers.get("x-kvroute-hit-tokens", 0)),
                answer.headers["x-kvroute-reason"],
                usage["prompt_tokens_details"]["cached_tokens"] or 0,
                usage["prompt_tokens"],
                answer.headers["x-kvroute-worker"],
            )
        )
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice


BY_MAP = ("kv_hit", "kv_spill", "kv_miss")
"""Reasons of `kvaware` when the map decided."""


def by_map(log: Sequence[Asked]) -> list[Asked]:
    """Those for which the map decided."""
    return [each for each in log if each.reason in BY_MAP]


def wrong_of(log: Sequence[Asked]) -> list[tuple[int, int]]:
    """The gateway's and the engine's number, where they differ."""
    return [(each.promised, each.cached) for each in log if each.promised != each.cached]


def hit_share(log: Sequence[Asked]) -> float:
    """The share of the prompts' tokens that were hits, by the engine's own count."""
    return sum(each.cached for each in log) / sum(each.prompt for each in log)
