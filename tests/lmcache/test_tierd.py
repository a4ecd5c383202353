"""The gateway follows real daemons, and knows which chunks the workers find there."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from kvroute.blocks.chunks import BUILTIN, ChunkScheme, PromptChunks, chunk_keys
from kvroute.clock import SystemClock
from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.options import LMCacheOptions, TierdSourceOptions
from kvroute.lmcache.tierd import ClassicWorker, StoredKind, StoredPart, TierdFollower, TierdPool, kind_of
from kvroute.tierd.daemon import RunningTierd, run_tierd
from kvroute.tierd.options import GB, TierdOptions
from kvroute.tierd.pool import PAGE_BYTES

MODEL, CHUNK = "/models/small", 4
SCHEME = ChunkScheme(BUILTIN, CHUNK, 7)
SLOT = 1
_NUMBERS = itertools.count()
Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """`(pages=..., port=...)` -> a daemon in this process; ended with the test."""
    async with asyncio.timeout(60), AsyncExitStack() as stack:

        async def run(
            *, pages: int = 16, port: int = 0, **values: Any
        ) -> tuple[RunningTierd, AsyncExitStack]:
            name = f"kvroute_follow_{os.getpid()}_{next(_NUMBERS)}"
            for path in (name, f".{name}.kept", f".{name}.guard"):
                stack.callback((Path("/dev/shm") / path).unlink, missing_ok=True)
            options = {"port": port, "shared_memory_name": name, "size_gb": pages * PAGE_BYTES / GB, **values}
            own = await stack.enter_async_context(AsyncExitStack())
            daemon = await own.enter_async_context(
                run_tierd(TierdOptions.model_validate(options), SystemClock())
            )
            return daemon, own

        yield run


def name(tokens: Sequence[int], *, rank: int = 0, world: int = 1, tag: str = "") -> str:
    """LMCache's name of the last chunk of these tokens, which need not be full."""
    full = len(tokens) // CHUNK * CHUNK
    key = (
        chunk_keys(tokens, SCHEME)[-1]
        if full == len(tokens)
        else PromptChunks(tokens[:-1], tokens[-1]).tail(SCHEME)[1]
    )  # type: ignore[index]
    return f"{MODEL}@{world}@{rank}@{key:x}@bfloat16" + (f"@kvroute%{tag}" if tag else "")


def names(tokens: Sequence[int], **more: Any) -> list[str]:
    """The names of all chunks of a prompt, as LMCache stores them with `save_unfull_chunk`."""
    ends = [*range(CHUNK, len(tokens), CHUNK), len(tokens)]
    return [name(tokens[:end], **more) for end in ends]


class FastClock(SystemClock):
    """A second takes 20 ms."""

    def now(self) -> float:  # type: ignore[override]
        return 50 * time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 50)


class Rig:
    """A follower of some daemons, and one slot whose worker has LMCache inside."""

    def __init__(self, *urls: str, ranks: int = 1, clock: Any = None, **options: Any) -> None:
        self.index = ChunkIndex()
        self.ranks = ranks
        self.http = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None))
        self.addresses = {"127.0.0.1": ["127.0.0.1"]}
        self.failed_lookups = 0
        self.follower = TierdFollower(
            self.index,
            SCHEME,
            lambda _: self.ranks,
            self.http,
            clock or SystemClock(),
            TierdSourceOptions(urls=list(urls), bucket="lmcache", **options),
            self.resolve,
        )
        self.follower.slots_changed([SLOT], frozenset({MODEL}))

    async def resolve(self, host: str) -> Sequence[str]:
        if host not in self.addresses:
            self.failed_lookups += 1
            raise OSError(host)
        return self.addresses[host]

    async def __aenter__(self) -> Rig:
        self.task = asyncio.create_task(self.follower.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.http.aclose()

    def found(self, tokens: Sequence[int], salt: str = "", gpu: int = 0) -> int:
        """Tokens in L2 that the slot finds of a prompt."""
        prompt = PromptChunks(tokens[:-1], tokens[-1])
        return self.index.match(prompt, salt, {SLOT: gpu}).get(SLOT, (0, 0))[1]

    async def until(self, claim: Callable[[], bool]) -> None:
        while not claim():
            await asyncio.sleep(0.002)
            assert not self.task.done(), self.task.exception()

    async def put(self, daemon: RunningTierd, names: Sequence[str]) -> None:
        for each in names:
            quoted = each.replace("%", "%25").replace("/", "%2F")
            answer = await self.http.put(f"{daemon.url}/v1/kv/lmcache/{quoted}", content=bytes(PAGE_BYTES))
            assert answer.status_code == 200, answer.text


async def test_what_a_worker_stored_is_found_by_an_equal_and_by_a_longer_prompt(start: Start) -> None:
    daemon, _ = await start()
    prompt = list(range(10, 20))  # two chunks, and two tokens more
    async with Rig(daemon.url) as rig:
        await rig.put(daemon, names(prompt))

        # All but the last token, which the engine computes.
        await rig.until(lambda: rig.found(prompt) == 9)

        assert rig.found([*prompt, 1]) == 8  # the chunk that is not full is another one
        assert rig.found(prompt[:8]) == 7  # the last chunk is full, and ends with the prompt
        assert rig.found(prompt[:9]) == 8
        assert rig.found(prompt, gpu=9) == 0
        assert rig.found(prompt, gpu=6) == 3
        assert rig.found([1, *prompt]) == 0
        assert rig.found(prompt, salt="kvroute-lora-1") == 0


async def test_an_adapters_chunks_are_its_own(start: Start) -> None:
    daemon, _ = await start()
    prompt = list(range(8))
    async with Rig(daemon.url) as rig:
        await rig.put(daemon, names(prompt, tag="kvroute-lora-1"))

        await rig.until(lambda: rig.found(prompt, "kvroute-lora-1") == 7)

        assert rig.found(prompt) == 0


async def test_an_evicted_chunk_is_not_found_any_more(start: Start) -> None:
    daemon, _ = await start(pages=2)
    old, new = list(range(8)), list(range(100, 108))
    async with Rig(daemon.url) as rig:
        await rig.put(daemon, names(old))
        await rig.until(lambda: rig.found(old) == 7)

        await rig.put(daemon, names(new))

        await rig.until(lambda: rig.found(new) == 7)
        assert rig.found(old) == 0
        assert rig.index.size().chunks == 2


async def test_a_chunk_counts_when_every_rank_has_stored_its_part(start: Start) -> None:
    """The parts may be with different daemons, which fetch them from each other."""
    first, _ = await start()
    second, _ = await start()
    prompt = list(range(4))
    async with Rig(first.url, second.url, ranks=2) as rig:
        await rig.put(first, names(prompt, rank=0, world=2))
        await rig.until(lambda: len(rig.follower.daemons[first.url].parts) == 1)
        assert rig.found(prompt) == 0

        await rig.put(second, names(prompt, rank=1, world=2))

        await rig.until(lambda: rig.found(prompt) == 3)


async def test_a_copy_with_another_daemon_outlives_the_first_one(start: Start) -> None:
    first, _ = await start(pages=1)
    second, _ = await start()
    prompt = list(range(4))
    async with Rig(first.url, second.url) as rig:
        await rig.put(first, names(prompt))
        await rig.put(second, names(prompt))
        await rig.until(lambda: all(each.parts for each in rig.follower.daemons.values()))

        await rig.put(first, names(list(range(50, 54))))  # evicts the first copy
        await rig.until(lambda: rig.found(list(range(50, 54))) == 3)
        assert rig.found(prompt) == 3


async def test_a_restarted_daemon_is_empty(start: Start) -> None:
    daemon, own = await start()
    prompt, other = list(range(4)), list(range(50, 54))
    async with Rig(daemon.url) as rig:
        await rig.put(daemon, names(prompt))
        await rig.until(lambda: rig.found(prompt) == 3)
        await own.aclose()

        again, _ = await start(port=daemon.port)
        await rig.put(again, names(other))

        await rig.until(lambda: rig.found(other) == 3)
        assert rig.found(prompt) == 0


async def test_a_daemon_that_does_not_answer_is_forgotten_after_a_while(start: Start) -> None:
    daemon, own = await start()
    prompt = list(range(4))
    async with Rig(daemon.url, clock=FastClock()) as rig:
        await rig.put(daemon, names(prompt))
        await rig.until(lambda: rig.found(prompt) == 3)

        await own.aclose()

        await rig.until(lambda: rig.found(prompt) == 0)
        assert rig.follower.daemons[daemon.url].failures > 1
        assert rig.follower.notes() == [f"tierd at {daemon.url}: its changes cannot be read (ConnectError)"]


async def test_the_daemons_are_the_addresses_of_the_name(start: Start) -> None:
    daemon, _ = await start()
    prompt = list(range(4))
    async with Rig(f"http://tierd:{daemon.port}", refresh_s=0.005) as rig:
        await rig.put(daemon, names(prompt))
        rig.addresses["tierd"] = ["127.0.0.1"]
        await rig.until(lambda: rig.found(prompt) == 3)

        del rig.addresses["tierd"]  # a resolver that fails changes nothing
        failed = rig.failed_lookups
        await rig.until(lambda: rig.failed_lookups > failed + 1)
        assert rig.found(prompt) == 3

        rig.addresses["tierd"] = []
        await rig.until(lambda: rig.found(prompt) == 0)
        assert not rig.follower.daemons


async def test_the_daemons_key_is_presented(start: Start) -> None:
    daemon, _ = await start(peers={"key": "k1"})
    async with Rig(daemon.url) as wrong:
        await wrong.until(lambda: bool(wrong.follower.notes()))
        assert wrong.follower.notes()[0].endswith("(HTTPStatusError 401)")
    async with Rig(daemon.url, key="k1") as right:
        await right.until(
            lambda: bool(right.follower.daemons) and right.follower.daemons[daemon.url].incarnation != ""
        )


async def test_a_worker_without_lmcache_inside_finds_nothing(start: Start) -> None:
    daemon, _ = await start()
    prompt = list(range(4))
    async with Rig(daemon.url, ranks=0, refresh_s=0.005) as rig:
        await rig.put(daemon, names(prompt))
        await rig.until(lambda: bool(rig.follower.pool.holders))
        assert rig.found(prompt) == 0

        rig.ranks = 1  # its instance registers

        await rig.until(lambda: rig.found(prompt) == 3)
        rig.follower.slot_removed(SLOT)
        assert rig.found(prompt) == 0


def kind(world: int, model: str = MODEL, dtype: str = "bfloat16") -> StoredKind:
    return StoredKind(model, world, dtype)


@pytest.mark.parametrize(
    ("ranks", "kinds", "is_mixed", "expected"),
    [
        (1, [kind(1), kind(4)], False, kind(1)),
        (4, [kind(1), kind(4)], False, kind(4)),
        (4, [kind(1)], False, kind(1)),  # MLA
        (4, [kind(1)], True, None),
        (1, [kind(4)], False, None),
        (1, [kind(1, dtype="half"), kind(1)], False, None),
        (1, [kind(1, model="/models/other")], False, None),
    ],
)
def test_a_worker_reads_objects_of_its_own_kind(
    ranks: int, kinds: list[StoredKind], is_mixed: bool, expected: StoredKind | None
) -> None:
    assert kind_of(ClassicWorker(frozenset({MODEL}), ranks), kinds, is_mixed=is_mixed) == expected


def test_a_worker_whose_model_is_unknown_reads_the_only_one() -> None:
    unknown = ClassicWorker(frozenset(), 1)

    assert kind_of(unknown, [kind(1)], is_mixed=False) == kind(1)
    assert kind_of(unknown, [kind(1), kind(1, model="m")], is_mixed=False) is None


def test_the_pool_is_what_the_parts_say() -> None:
    """Two daemons and two ranks: the chunk is in the index while both parts are with any daemon."""
    index = ChunkIndex()
    pool = TierdPool(index, SCHEME)
    parts = [StoredPart(kind(2), rank, 5) for rank in (0, 1)]
    for changes, chunks in (
        (("store", parts[0]), 0),
        (("store", parts[1]), 1),
        (("store", parts[1]), 1),
        (("remove", parts[1]), 1),
        (("remove", parts[0]), 0),
        (("remove", parts[0]), 0),
        (("store", parts[0]), 1),
        (("remove", parts[1]), 0),
    ):
        getattr(pool, changes[0])([changes[1]])
        assert index.size().chunks == chunks, changes


def test_options_that_cannot_work_are_refused() -> None:
    for url in ("tierd:9200", "http://tierd", "https://tierd:9200", "http://tierd:9200/v1", "http://u@t:1"):
        with pytest.raises(ValidationError, match="must be http://HOST:PORT"):
            TierdSourceOptions(urls=[url])
    with pytest.raises(ValidationError, match=r"set controller\.enabled too"):
        LMCacheOptions.model_validate({"tierd": {"urls": ["http://tierd:9200"]}})
