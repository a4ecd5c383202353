"""Lookups in Redis, with a real server if one is installed."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from pydantic import ValidationError
from tests.support.certificates import Authority
from tests.support.clocks import ManualClock
from tests.support.programs import program
from tests.support.sockets import free_port
from tests.support.waiting import until

from kvroute.blocks.chunks import ChunkScheme, ChunkSpace, PromptChunks, chunk_keys, chunk_names
from kvroute.blocks.keys import Tier
from kvroute.clock import Clock, SystemClock
from kvroute.index.chunk_index import ChunkHolder, ChunkIndex
from kvroute.lmcache.l2_redis import L2Answer, L2Reason, L2Target, RedisL2, object_name, targets_of
from kvroute.lmcache.options import L2Options

SCHEME = ChunkScheme(chunk_tokens=4)
MODEL = "/models/tiny"
ONE = ((0x01000100, 0),)
PROMPT = list(range(4000))
KEYS = chunk_keys(PROMPT, SCHEME)
NAMES = chunk_names(PROMPT, SCHEME)
LONG_MS = 10_000.0


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real server on a free port. The test chooses the port: Redis cannot choose one itself."""
    executable = program("redis-server", "valkey-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    argv = [executable, "--port", str(port), "--save", "", "--requirepass", "hunter2", "--dir", str(folder)]
    with (Path(folder) / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        yield f"redis://:hunter2@127.0.0.1:{port}/0"
        process.terminate()


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    client = redis.asyncio.Redis.from_url(redis_url)
    async with asyncio.timeout(30):
        while True:
            try:
                await client.flushdb()
                break
            except redis.exceptions.ConnectionError:
                await asyncio.sleep(0.02)
    yield client
    await client.aclose()


async def put(
    store: redis.asyncio.Redis, names: list[bytes], *, kv_rank: int = ONE[0][0], salt: str = ""
) -> None:
    if names:
        await store.mset({object_name(MODEL, kv_rank, 0, name, salt): b"kv" for name in names})


def l2_of(url: str, clock: Clock | None = None, **options: Any) -> RedisL2:
    chosen = {"redis_url": url, "timeout_ms": LONG_MS, **options}
    return RedisL2(L2Options.model_validate(chosen), clock or SystemClock())


TARGET = L2Target(ChunkHolder(Tier.L2, shared=True), SCHEME, MODEL, ONE)


def held(answer: L2Answer, target: L2Target = TARGET) -> list[int]:
    """Indexes of the prompt's chunks that the answer has."""
    return [place for place, key in enumerate(KEYS) if key in answer.chunks[target.holder]]


def test_objects_are_named_as_lmcache_names_them() -> None:
    """The names are from a Redis behind LMCache 0.5.6."""
    chunk = bytes.fromhex("6f95" + "00" * 30)

    assert object_name("/models/tiny", 16777472, 0, chunk, "") == f"/models/tiny@01000100@0@{chunk.hex()}"
    assert object_name("m", 16777472, 11, chunk, "t") == f"m@01000100@b@{chunk.hex()}@t"


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 80, 81, 400, 1000])
async def test_the_chunks_at_the_prompts_start_are_found(
    redis_url: str, store: redis.asyncio.Redis, count: int
) -> None:
    await put(store, NAMES[:count])
    l2 = l2_of(redis_url)

    answer = await l2.lookup(PromptChunks(PROMPT), "", [TARGET])

    assert held(answer) == list(range(count))
    assert answer.reason is None
    await l2.aclose()


async def test_the_password_may_be_given_apart_from_the_url(
    redis_url: str, store: redis.asyncio.Redis
) -> None:
    await put(store, NAMES[:3])
    plain = redis_url.replace(":hunter2@", "")
    right, wrong = l2_of(plain, redis_password="hunter2"), l2_of(redis_url, redis_password="other")
    none = l2_of(plain)

    answers = [await each.lookup(PromptChunks(PROMPT), "", [TARGET]) for each in (right, wrong, none)]

    assert held(answers[0]) == held(answers[1]) == [0, 1, 2]
    assert answers[2].reason is L2Reason.REFUSED
    for each in (right, wrong, none):
        await each.aclose()


async def test_missing_chunks_are_detected_and_later_ones_found(
    redis_url: str, store: redis.asyncio.Redis
) -> None:
    there = [0, 1, 3, 20, 21, 40]
    await put(store, [NAMES[place] for place in there])
    l2 = l2_of(redis_url)

    answer = await l2.lookup(PromptChunks(PROMPT), "", [TARGET])

    assert held(answer) == there
    await l2.aclose()


async def test_a_lookup_may_start_in_the_middle_of_the_prompt(
    redis_url: str, store: redis.asyncio.Redis
) -> None:
    await put(store, NAMES[:40])
    l2 = l2_of(redis_url)

    answer = await l2.lookup(PromptChunks(PROMPT), "", [TARGET], first_token=4 * 30 + 2)

    assert held(answer) == list(range(30, 40))
    await l2.aclose()


async def test_salts_and_ranks_are_part_of_the_name(redis_url: str, store: redis.asyncio.Redis) -> None:
    zero, one = 0x02000200, 0x02010201
    await put(store, NAMES[:5], kv_rank=zero, salt="t")
    await put(store, NAMES[:3], kv_rank=one, salt="t")
    two_ranks = L2Target(TARGET.holder, SCHEME, MODEL, ((zero, 0), (one, 0)))
    l2 = l2_of(redis_url)

    assert held(await l2.lookup(PromptChunks(PROMPT), "t", [two_ranks])) == [0, 1, 2]
    assert held(await l2.lookup(PromptChunks(PROMPT), "", [two_ranks])) == []
    await l2.aclose()


async def test_answers_are_cached_for_the_configured_time(redis_url: str, store: redis.asyncio.Redis) -> None:
    clock = ManualClock(0.0)
    await put(store, NAMES[:10])
    l2 = l2_of(redis_url, clock, remember_s=1.0)
    prompt = PromptChunks(PROMPT[:80])
    await l2.lookup(prompt, "", [TARGET])
    queried = l2.counts.objects_queried
    await store.flushdb()

    clock.time = 0.45
    assert held(await l2.lookup(prompt, "", [TARGET])) == list(range(10))
    assert l2.counts.objects_queried == queried
    assert l2.counts.cached_chunks > 0
    clock.time = 1.1
    assert held(await l2.lookup(prompt, "", [TARGET])) == []
    await l2.aclose()


async def test_no_answer_is_cached_if_so_configured(redis_url: str, store: redis.asyncio.Redis) -> None:
    await put(store, NAMES[:10])
    l2 = l2_of(redis_url, remember_s=0)
    await l2.lookup(PromptChunks(PROMPT), "", [TARGET])
    await store.flushdb()

    assert held(await l2.lookup(PromptChunks(PROMPT), "", [TARGET])) == []
    await l2.aclose()


async def test_the_answer_overrides_the_events(redis_url: str, store: redis.asyncio.Redis) -> None:
    await put(store, NAMES[:10])
    index = ChunkIndex()
    index.attach(0, TARGET.holder, [(SCHEME, MODEL)])
    index.store(TARGET.holder, ChunkSpace(SCHEME, MODEL), KEYS)
    l2, prompt = l2_of(redis_url), PromptChunks(PROMPT)

    answer = await l2.lookup(prompt, "", [TARGET])

    assert index.match(prompt, "", {}, answer.chunks) == {0: (0, 40)}
    await l2.aclose()


async def test_an_unreachable_redis_is_logged_once_and_without_its_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # no server listens here
        l2 = l2_of(f"redis://:hunter2@127.0.0.1:{unused.getsockname()[1]}/0")
        with caplog.at_level(logging.WARNING):
            answers = [await l2.lookup(PromptChunks(PROMPT), "", [TARGET]) for _ in range(3)]
    await l2.aclose()

    assert [(answer.reason, dict(answer.chunks)) for answer in answers] == [(L2Reason.UNREACHABLE, {})] * 3
    assert l2.counts.failures[L2Reason.UNREACHABLE] == 3
    assert len(caplog.records) == 1
    assert "hunter2" not in caplog.text
    assert "127.0.0.1" not in caplog.text


async def test_a_redis_that_answers_every_other_lookup_is_logged_twice_in_thirty_seconds(
    redis_url: str,
    store: redis.asyncio.Redis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock(0.0)
    l2 = l2_of(redis_url, clock, remember_s=0)
    exists = l2._client.exists

    async def fails(*_: object) -> None:
        raise redis.exceptions.ConnectionError

    with caplog.at_level(logging.INFO, "kvroute"):
        for _ in range(10):
            clock.time += 5.0
            monkeypatch.setattr(l2._client, "exists", fails)
            await l2.lookup(PromptChunks(PROMPT), "", [TARGET])
            await l2.lookup(PromptChunks(PROMPT[:2]), "", [TARGET])  # too short: Redis is not asked
            assert l2.notes() == ["L2: lookups in Redis fail: unreachable"]
            monkeypatch.setattr(l2._client, "exists", exists)
            await l2.lookup(PromptChunks(PROMPT), "", [TARGET])
            assert l2.notes() == []
    await l2.aclose()

    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2


async def test_a_wrong_password_is_a_refusal(redis_url: str, store: redis.asyncio.Redis) -> None:
    l2 = l2_of(redis_url.replace("hunter2", "hunter3"))

    answer = await l2.lookup(PromptChunks(PROMPT), "", [TARGET])

    assert answer.reason in (L2Reason.REFUSED, L2Reason.UNREACHABLE)
    await l2.aclose()


async def test_a_silent_redis_does_not_delay_a_request() -> None:
    never = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await never.wait()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    l2 = l2_of(f"redis://127.0.0.1:{port}/0", timeout_ms=20)

    answers = await asyncio.gather(
        *(l2.lookup(PromptChunks(PROMPT), "", [TARGET]) for _ in range(20))
    )  # more lookups than connections

    assert {answer.reason for answer in answers} == {L2Reason.DEADLINE}
    never.set()
    await l2.aclose()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (redis.exceptions.TimeoutError("reading from 10.0.0.1"), L2Reason.DEADLINE),
        (redis.exceptions.ConnectionError("10.0.0.1"), L2Reason.UNREACHABLE),
        (redis.exceptions.ResponseError("MOVED 3999 10.0.0.1"), L2Reason.REFUSED),
        (RuntimeError("10.0.0.1: read() called while another coroutine is waiting"), L2Reason.FAILED),
    ],
)
async def test_every_exception_of_the_client_becomes_a_reason(
    error: Exception, reason: L2Reason, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise error

    l2 = l2_of("redis://10.0.0.1:1/0")
    monkeypatch.setattr(l2._client, "exists", fails)

    answer = await l2.lookup(PromptChunks(PROMPT), "", [TARGET])

    assert (answer.reason, dict(answer.chunks), l2.counts.failures[reason]) == (reason, {}, 1)
    assert "10.0.0.1" not in caplog.text
    await l2.aclose()


async def test_a_lookup_that_is_cancelled_leaves_the_connection_usable(
    redis_url: str, store: redis.asyncio.Redis
) -> None:
    await put(store, NAMES[:100])
    l2 = l2_of(redis_url, connections=1)
    for _ in range(20):
        cut = asyncio.create_task(l2.lookup(PromptChunks(PROMPT), "x", [TARGET]))
        for _ in range(3):
            await asyncio.sleep(0)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)

    assert held(await l2.lookup(PromptChunks(PROMPT), "", [TARGET])) == list(range(100))
    await l2.aclose()


def test_targets_are_the_models_that_workers_may_read() -> None:
    from kvroute.lmcache.coordinator import Coordinator
    from kvroute.lmcache.membership import ServedWorker
    from kvroute.lmcache.options import LMCacheOptions
    from kvroute.wire.lmcache_server import CacheEvents, EventEntry, ObjectKey, ServerRegistration

    coordinator = Coordinator(ChunkIndex(), SystemClock(), LMCacheOptions(pools={"resp": "resp"}))
    coordinator.register(ServerRegistration("10.0.0.1", 8080, "a"))
    config = CacheEvents("a", 5, 1, "config", "l2", "resp")
    coordinator.admit(config)
    coordinator.apply(config)
    assert targets_of(coordinator, "resp") == []

    coordinator.worker_changed(ServedWorker("a", "10.0.0.1", (0,), frozenset({MODEL})))

    (pool,) = coordinator.pools()
    assert targets_of(coordinator, "resp") == [L2Target(pool.chunks.holder, ChunkScheme(), MODEL, ONE)]
    assert targets_of(coordinator, "s3") == []

    before = coordinator.changes
    key = ObjectKey("00" * 32, MODEL, ONE[0][0], 3)
    batch = CacheEvents("a", 5, 2, "store", "l2", "resp", [EventEntry(key)])
    coordinator.admit(batch)
    coordinator.apply(batch)
    assert coordinator.changes > before, "chunks have other parts than was thought"
    parts = [each.parts for each in targets_of(coordinator, "resp")]
    assert parts == [((ONE[0][0], 3),)]
    before = coordinator.changes
    coordinator.worker_left("a")
    assert coordinator.changes > before
    assert targets_of(coordinator, "resp") == []


@pytest.mark.parametrize("url", ["http://x", "redis://", "redis://host:port"])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be redis://"):
        L2Options.model_validate({"redis_url": url})


async def test_a_redis_with_tls_is_read_with_the_files(tmp_path: Path) -> None:
    executable = program("redis-server", "valkey-server")
    authority = Authority(tmp_path)
    own, server = authority.issue("own"), authority.issue("redis")
    port = free_port()
    argv = [executable, "--port", "0", "--tls-port", str(port), "--save", "", "--dir", str(tmp_path)]
    argv += ["--tls-cert-file", str(server.cert), "--tls-key-file", str(server.key)]
    argv += ["--tls-ca-cert-file", str(authority.file), "--tls-auth-clients", "yes"]
    files = {"ca_file": authority.file, "cert_file": own.cert, "key_file": own.key}
    stranger = Authority(tmp_path, "foreign")
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        good = l2_of(f"rediss://127.0.0.1:{port}", tls=files)
        bad = l2_of(f"rediss://127.0.0.1:{port}", tls={**files, "ca_file": stranger.file})
        try:

            async def answers() -> bool:
                assert process.poll() is None
                return (await good.lookup(PromptChunks(PROMPT), "", [TARGET])).reason is None

            await until(answers)
            assert (await bad.lookup(PromptChunks(PROMPT), "", [TARGET])).reason is L2Reason.UNREACHABLE
        finally:
            await good.aclose()
            await bad.aclose()
            process.terminate()


def test_files_for_a_redis_without_tls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="rediss://"):
        L2Options.model_validate({"redis_url": "redis://a", "tls": {"ca_file": tmp_path / "ca.pem"}})
