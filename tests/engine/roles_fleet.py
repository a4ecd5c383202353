"""Real engines with roles behind a gateway, and chats whose answers can be compared."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from kvroute.deploy.plan import ProcessPlan
from kvroute.deploy.processes import ChildProcess

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"x": {}}}},
    }
]


@dataclass
class RolesFleet:
    """Workers with roles and a gateway, as `kvroute up` starts them."""

    plan: ProcessPlan
    processes: dict[str, ChildProcess]
    http: httpx.AsyncClient

    async def ask(self, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
        answer = await self.http.post(self.plan.gateway.url + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer

    def url(self, name: str) -> str:
        return next(worker.url for worker in self.plan.workers if worker.child.name == name)

    async def metric(self, name: str, metric: str, **labels: str) -> float:
        url = self.plan.gateway.url if name == "gateway" else self.url(name)
        page = (await self.http.get(f"{url}/metrics")).text
        found = re.findall(rf"^{re.escape(metric)}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
        return sum(
            float(value)
            for shown, value in found
            if all(f'{label}="{wanted}"' in shown for label, wanted in labels.items())
        )


def texts_of(plan: ProcessPlan) -> Callable[[str, int], str]:
    """`(seed, words)` -> a text of about that many tokens."""
    vocabulary = json.loads((plan.model_folder / "tokenizer.json").read_text())["model"]["vocab"]
    known = sorted(entry.replace("Ġ", " ") for entry in vocabulary if re.fullmatch("Ġ[a-z]{4,}", entry))
    return lambda seed, words: "".join(random.Random(seed).choices(known, k=words))


def greedy_chat(model: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "temperature": 0, "max_tokens": 12}
    return {**body, "messages": [{"role": "user", "content": text}], **more}


def choices(answer: httpx.Response) -> Any:
    """What the engine generated, without ids and times."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return _without_ids(answer.json()["choices"])
    merged: dict[int, list[Any]] = {}
    for line in answer.text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            text, reason, _ = merged.setdefault(choice["index"], ["", None, []])
            logprobs = merged[choice["index"]][2]
            logprobs += (choice.get("logprobs") or {}).get("content") or []
            # The engine may put several tokens into one event.
            merged[choice["index"]] = [
                text + (choice["delta"].get("content") or ""),
                choice["finish_reason"] or reason,
                logprobs,
            ]
    return merged


def _without_ids(choices: Any) -> str:
    return re.sub(r"chatcmpl-tool-[0-9a-f]+|call_[0-9a-f]+", "ID", json.dumps(choices, sort_keys=True))
