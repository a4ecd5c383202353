"""Prompts with images on real engines: no hit is promised across different images, and repeats are exact.

The engine's environment (deploy/assets/engine_cpu) lacks what vLLM imports for models with images. So these
engines get more packages, and a shim (media_shim): with it PyPI's torchvision loads beside a torch for CPUs.
KVROUTE_MODELS_SEED draws another workload.
"""

from __future__ import annotations

import base64
import os
import random
import struct
import zlib
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from tests.engine.conftest import both_routable
from tests.engine.models import write_model
from tests.engine.pool import EngineKind, Model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
]

SEED = os.environ.get("KVROUTE_MODELS_SEED", "1")
PATIENT = ("--set", "tokens.timeout_ms=5000", "--set", "tokens.max_timeout_ms=5000")
REQUESTS, EXACT = 60, 0.99
SIDE = 112
"""Pixels."""
PACKAGES = (
    "torchvision==0.28.0",  # for torch 2.13
    "mistral_common==1.13.1",
    "pydantic_extra_types==2.11.1",
    "pycountry==26.2.16",
)


def _llava(folder) -> None:
    write_model("llava", folder)


def _qwen2_vl(folder) -> None:
    write_model("qwen2_vl", folder)


LLAVA = EngineKind(
    Model("llava", _llava),
    blocks=200,
    max_model_len=1024,
    args=("--enable-scale-out", "--max-num-batched-tokens", "2048", "--limit-mm-per-prompt", '{"image":4}'),
    packages=PACKAGES,
    is_real=True,
)
QWEN2_VL = replace(LLAVA, model=Model("qwen2_vl", _qwen2_vl))


def png(colour: tuple[int, int, int]) -> str:
    """A square of one colour, as the data of a URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    rows = (b"\0" + bytes(colour) * SIDE) * SIDE
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    image = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(image).decode()


def image(colour: tuple[int, int, int], **members: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": png(colour)}, **members}


@dataclass(frozen=True)
class Asked:
    promised: int
    cached: int
    prompt: int
    reason: str


class Chats:
    """Sends chats with images through the gateway. Mutable: `log` grows."""

    def __init__(self, http: httpx.AsyncClient, url: str, words: list[str], seed: str) -> None:
        self.log: list[Asked] = []
        self._http = http
        self._url = url
        self._words = words
        self._random = random.Random(seed)
        self._images = [image((40 * number, 255 - 50 * number, 90)) for number in range(4)]
        self._open: list[list[dict[str, Any]]] = []

    def text(self, count: int) -> dict[str, str]:
        return {"type": "text", "text": "".join(self._random.choices(self._words, k=count))}

    async def ask(self, *messages: dict[str, Any]) -> Asked:
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = await self._http.post(f"{self._url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        asked = Asked(
            int(answer.headers["x-kvroute-hit-tokens"]),
            usage["prompt_tokens_details"]["cached_tokens"] or 0,
            usage["prompt_tokens"],
            answer.headers["x-kvroute-reason"],
        )
        self.log.append(asked)
        return asked

    async def run(self, requests: int) -> None:
        """Chats about four images, with more images in later turns, and repeats of the last prompt."""
        system = {"role": "system", "content": [self.text(60)]}
        while len(self.log) < requests:
            if len(self._open) < 4 or self._random.random() < 0.2:
                self._open = [*self._open[-3:], [system]]
            messages = self._random.choice(self._open)
            parts: list[dict[str, Any]] = [self.text(20)]
            if len(messages) < 4 or self._random.random() < 0.3:
                parts.insert(self._random.randrange(2), self._random.choice(self._images))
            messages.append({"role": "user", "content": parts})
            for _ in range(self._random.choice((1, 1, 2))):
                await self.ask(*messages)
            messages.append({"role": "assistant", "content": [self.text(10)]})
            images = sum(part["type"] == "image_url" for m in messages for part in m["content"])
            if images > 3 or len(messages) > 9:
                self._open.remove(messages)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("llava", marks=pytest.mark.engines(LLAVA, replace(LLAVA, number=1, core=1))),
        pytest.param(
            "qwen2_vl",
            marks=pytest.mark.engines(QWEN2_VL, replace(QWEN2_VL, number=1, core=1)),
        ),
    ],
)
async def test_hits_of_prompts_with_images_are_exact(model, leased, run_gateway, words, capsys) -> None:
    for engine, name in zip(leased, "ab", strict=True):
        engine.name = name
    async with run_gateway(leased, "kvaware", *PATIENT) as gateway:
        await both_routable(gateway.url, len(leased))
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            chats = Chats(http, gateway.url, words, f"{SEED} {model}")
            await chats.run(REQUESTS)
            log = chats.log[5:]

            question = chats.text(200)
            of_red = {"role": "user", "content": [image((250, 0, 0)), question]}
            of_blue = {"role": "user", "content": [image((0, 0, 250)), question]}
            named = {"role": "user", "content": [image((250, 0, 0), uuid="a-name"), question]}
            pairs = [await chats.ask(each) for each in (of_red, of_red, of_blue, of_blue, named, named)]

    decided = [each for each in log if each.reason.startswith("kv_") and each.reason != "kv_approximate"]
    wrong = [(each.promised, each.cached) for each in decided if each.promised != each.cached]
    hits = sum(each.cached for each in log) / sum(each.prompt for each in log)
    with capsys.disabled():
        print(
            f"\n{model}, seed {SEED}: {len(wrong)} of {len(decided)} wrong {wrong[:8]}, {hits:.3f} of the "
            f"prompt tokens were hits; pairs {[(each.promised, each.cached) for each in pairs]}"
        )
    assert len(decided) >= 0.95 * len(log)
    assert len(wrong) <= (1 - EXACT) * len(decided)
    assert hits >= 0.4
    assert [each.promised for each in pairs] == [each.cached for each in pairs]
    assert pairs[1].cached > pairs[2].cached, "another image is another prompt"
    assert pairs[1].cached > 0
