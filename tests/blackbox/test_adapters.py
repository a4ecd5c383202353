"""LoRA adapters get key spaces of their own in LMCache, by `cache_salt` and `lmcache.tag.*`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.blackbox.conftest import StartServe
from tests.support.workers import ScriptedWorker, scripted_worker

ADAPTERS = {"ada": "/adapters/ada-1", "org/bob": "/adapters/bob-1"}
SALT = re.compile(r"[^@/\\\0]{1,128}")
PROMPT = "A prompt that several models share. " * 20


JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


def cards(roots: dict[str, str]) -> list[dict[str, Any]]:
    """The models of a vLLM server with two LoRA adapters, which it has loaded from `roots`."""
    base = {"id": "base", "object": "model", "root": "/models/base", "parent": None}
    adapters = [
        {"id": name, "object": "model", "root": root, "parent": "base"} for name, root in roots.items()
    ]
    return [base, *adapters]


@contextlib.asynccontextmanager
async def adapter_worker(roots: dict[str, str] | None = None) -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker(*cards(ADAPTERS if roots is None else roots)) as worker:
        worker.answer = JSON
        yield worker


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with adapter_worker() as worker:
        yield worker


async def post(url: str, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.post(url + path, content=content, headers={"content-type": "application/json"})


async def sent(url: str, worker: ScriptedWorker, path: str, body: Any) -> bytes:
    """What the worker got."""
    worker.requests.clear()
    answer = await post(url, path, body)
    assert answer.status_code == 200, answer.text
    (got,) = worker.bodies
    return got


def tag(body: dict[str, Any]) -> str:
    (value,) = [v for k, v in (body.get("kv_transfer_params") or {}).items() if k.startswith("lmcache.tag.")]
    assert isinstance(value, str)
    return value


GENERATING = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5},
}


@pytest.mark.parametrize("fast_lane", ["true", "false"])
async def test_an_adapter_gets_a_salt_and_a_tag_and_nothing_else_changes(
    serve: StartServe, worker: ScriptedWorker, fast_lane: str
) -> None:
    gateway = await serve("--worker", worker.url, "--set", f"server.fast_lane={fast_lane}")
    spaces = set()
    for path, model in itertools.product(GENERATING, ADAPTERS):
        body = {"model": model, **GENERATING[path], "stream": False, "x": [1.0, "\u2028"]}
        got = json.loads(await sent(gateway.url, worker, path, body))

        salt = got.pop("cache_salt")
        assert SALT.fullmatch(salt)
        assert SALT.fullmatch(tag(got))
        spaces |= {salt, tag(got)}
        del got["kv_transfer_params"]
        assert got == body
    assert len(spaces) >= len(ADAPTERS)


async def test_requests_for_the_base_model_stay_byte_for_byte(
    serve: StartServe, worker: ScriptedWorker
) -> None:
    gateway = await serve("--worker", worker.url)
    more: list[dict[str, Any]] = [
        {},
        {"cache_salt": "tenant"},
        {"kv_transfer_params": {"lmcache.tag.a": "1"}},
    ]
    for path, members in itertools.product(GENERATING, more):
        body = json.dumps({"model": "base", **GENERATING[path], **members}, indent=1).encode()
        assert await sent(gateway.url, worker, path, body) == body
    for path, fields in GENERATING.items():
        body = json.dumps(fields).encode()  # the fleet's only model
        assert await sent(gateway.url, worker, path, body) == body

    got = await sent(gateway.url, worker, "/v1/completions", {"model": "ada", "prompt": PROMPT})
    assert b"cache_salt" in got


async def test_clients_salts_and_tags_are_part_of_the_key_space(
    serve: StartServe, worker: ScriptedWorker
) -> None:
    gateway = await serve("--worker", worker.url)
    path, spaces = "/v1/completions", set()
    for members in (
        {},
        {"cache_salt": "tenant-1"},
        {"cache_salt": "tenant-2"},
    ):
        body = {"model": "ada", "prompt": PROMPT, **members}
        got = json.loads(await sent(gateway.url, worker, path, body))
        assert got["cache_salt"] != members.get("cache_salt")
        spaces.add((got["cache_salt"], tag(got)))
    assert len(spaces) == 3

    own = {"lmcache.tag.user": "u", "lmcache.skip_save": True, "lmcache.other": {"a": [1]}}
    body = {"model": "ada", "kv_transfer_params": own, "prompt": PROMPT}
    got = json.loads(await sent(gateway.url, worker, path, body))
    params = got["kv_transfer_params"]
    assert own.items() <= params.items()
    (added,) = set(params) - set(own)
    assert added.startswith("lmcache.tag.")


async def test_of_members_with_one_name_the_last_one_counts(
    serve: StartServe, worker: ScriptedWorker
) -> None:
    gateway = await serve("--worker", worker.url)
    body = b'{"model":"base","prompt":"p","cache_salt":"a","model":"ada","cache_salt":"b"} '
    got = json.loads(await sent(gateway.url, worker, "/v1/completions", body))
    plain = json.loads(
        await sent(gateway.url, worker, "/v1/completions", b'{"model":"ada","prompt":"p","cache_salt":"b"}')
    )
    assert got == plain
    assert got["model"] == "ada"
    assert got["cache_salt"] not in ("a", "b")


async def test_two_gateways_choose_the_same_key_space_and_another_revision_gets_another(
    serve: StartServe, worker: ScriptedWorker
) -> None:
    body = {"model": "ada", "prompt": PROMPT, "cache_salt": "tenant"}
    one = await serve("--worker", worker.url)
    two = await serve("--worker", worker.url, "--set", "fleet.health.models_interval_s=0.1",
                      "--set", "fleet.health.interval_s=0.1")  # fmt: skip
    first = await sent(one.url, worker, "/v1/completions", body)
    assert await sent(two.url, worker, "/v1/completions", body) == first

    worker.cards = cards(ADAPTERS | {"ada": "/adapters/ada-2"})
    async with asyncio.timeout(60):
        while (got := await sent(two.url, worker, "/v1/completions", body)) == first:
            pass
    assert json.loads(got)["cache_salt"] != json.loads(first)["cache_salt"]
    assert tag(json.loads(got)) != tag(json.loads(first))


async def test_during_a_rolling_update_each_worker_gets_the_key_space_of_its_revision(
    serve: StartServe,
) -> None:
    async with adapter_worker() as old, adapter_worker({"ada": "/adapters/ada-2"}) as new:
        gateway = await serve(
            "--worker", old.url, "--worker", new.url, "--set", "routing.strategy=roundrobin"
        )
        for _ in range(4):
            assert (await post(gateway.url, "/v1/completions", {"model": "ada", "prompt": PROMPT})).is_success
        salts = [{json.loads(body)["cache_salt"] for body in worker.bodies} for worker in (old, new)]
        assert [len(each) for each in salts] == [1, 1]
        assert salts[0] != salts[1]
        by_worker = dict(zip((old.url, new.url), salts, strict=True))

        old.refuses_posts = True  # the gateway tries the next worker, with the salt of that worker's adapter
        new.requests.clear()
        for _ in range(2):
            assert (await post(gateway.url, "/v1/completions", {"model": "ada", "prompt": PROMPT})).is_success
        assert {json.loads(body)["cache_salt"] for body in new.bodies} == by_worker[new.url]


async def test_an_alias_of_an_adapter_is_replaced_and_isolated(
    serve: StartServe, worker: ScriptedWorker
) -> None:
    gateway = await serve("--worker", worker.url, "--set", "fleet.aliases={friendly: org/bob}")
    aliased = await sent(gateway.url, worker, "/v1/completions", {"model": "friendly", "prompt": PROMPT})
    plain = await sent(gateway.url, worker, "/v1/completions", {"model": "org/bob", "prompt": PROMPT})
    assert json.loads(aliased) == json.loads(plain)
    assert "cache_salt" in json.loads(aliased)


async def test_a_request_that_cannot_be_isolated_is_refused(
    serve: StartServe, worker: ScriptedWorker
) -> None:
    gateway = await serve("--worker", worker.url)
    for body in (
        b'{"model": "ada", "prompt": "p", "temperature": NaN}',  # Python's json takes it
        {"model": "ada", "prompt": "p", "cache_salt": 5},
        {"model": "ada", "prompt": "p", "kv_transfer_params": [1]},
    ):
        answer = await post(gateway.url, "/v1/completions", body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["message"]
    assert worker.bodies == []


async def test_a_client_cannot_write_into_an_adapters_key_space(
    serve: StartServe, worker: ScriptedWorker
) -> None:
    gateway = await serve("--worker", worker.url)
    victim = json.loads(
        await sent(gateway.url, worker, "/v1/completions", {"model": "ada", "prompt": PROMPT})
    )
    worker.requests.clear()
    for members in (
        {"cache_salt": victim["cache_salt"]},
        {"kv_transfer_params": victim["kv_transfer_params"]},
    ):
        answer = await post(gateway.url, "/v1/completions", {"model": "base", "prompt": PROMPT, **members})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in members
    assert worker.bodies == []


async def test_pooling_takes_the_salt_and_counting_tokens_nothing(
    serve: StartServe, worker: ScriptedWorker
) -> None:
    gateway = await serve("--worker", worker.url)
    got = json.loads(await sent(gateway.url, worker, "/v1/embeddings", {"model": "ada", "input": PROMPT}))
    assert SALT.fullmatch(got.pop("cache_salt"))
    assert got == {"model": "ada", "input": PROMPT}
    for path, body in (
        ("/tokenize", {"model": "ada", "prompt": PROMPT}),
        ("/v1/messages/count_tokens", {"model": "ada", "messages": []}),
    ):
        plain = json.dumps(body).encode()
        assert await sent(gateway.url, worker, path, plain) == plain
