"""What requests cost their key when the client leaves before the answer is there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re

import httpx
import pytest
import yaml
from tests.blackbox.raw import connected

KEY = "kvr-test-abort-0123456789abcdef"


async def figure(url: str, name: str) -> float:
    async with httpx.AsyncClient(trust_env=False) as client:
        found = re.search(rf"^{name}\S* (\S+)$", (await client.get(f"{url}/metrics")).text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def until_above(url: str, name: str, figure_before: float) -> float:
    async with asyncio.timeout(60.0):
        while (found := await figure(url, name)) <= figure_before:
            await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize("lane", ["on", "off"])
async def test_an_answer_that_is_not_awaited_is_charged_with_what_was_generated(serve, sim, tmp_path, lane):
    file = tmp_path / "keys.yaml"
    hashed = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
    limits = {"tokens_per_minute": 1_000_000}
    file.write_text(yaml.safe_dump({"keys": [{"name": "a", "hash": hashed, "limits": limits}]}))
    worker = await sim()
    gateway = await serve(
        "--worker", worker, "--set", f"server.fast_lane={lane}", "--set", f"server.client_keys.file={file}"
    )
    body = json.dumps({"model": "sim-model", "prompt": "Hi.", "max_tokens": 2000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer %b\r\n" % KEY.encode()
    request = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (head, len(body), body)

    async with connected(gateway.address) as client:
        await client.send(request)
        generated = await until_above(worker, "vllm:generation_tokens_total", 50)
    charged = await until_above(gateway.url, "kvroute_key_tokens_total", 0)

    assert generated / 3 < charged < 2000 + 10
