"""LMCache's own worker classes and its own benchmark against our controller."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import until

from kvroute.blocks.chunks import PromptChunks, chunk_keys
from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import EngineVenv, separate_environment
from kvroute.deploy.prepare import free_ports
from kvroute.index.map_trust import MapTrust
from kvroute.index.snapshot import CopyableChunkIndex
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.listeners import ControllerSockets
from kvroute.lmcache.options import ControllerOptions
from kvroute.replicas.cache_reports import CacheReports

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

WORKER = Path(__file__).with_name("lmcache_worker.py")
BENCHMARK = Path(__file__).with_name("lmcache_benchmark.py")
CHUNK = 64
DEADLINE_S = 120.0
MIXES = (
    "admit:100",
    "p2p_lookup:100",
    "admit:70,evict:25,heartbeat:5",
)
MIXED = "admit:35,evict:29,heartbeat:1,p2p_lookup:35"


@dataclass(slots=True)
class Worker:
    """LMCache's worker in a process of the engine's Python."""

    process: asyncio.subprocess.Process
    held: set[int]
    frozen: list[bool]

    async def do(self, what: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        keys = arguments.get("keys", ())
        self.held.update(keys) if what == "admit" else self.held.difference_update(keys)
        return (await self.next_line("answer"))["answer"]

    async def next_line(self, key: str) -> dict[str, Any]:
        """The next line with `key`; records the lines about freezing before it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := await self.process.stdout.readline():
                if not line.startswith(b"{"):
                    continue
                line_values: dict[str, Any] = json.loads(line)
                if "frozen" in line_values:
                    self.frozen.append(line_values["frozen"])
                if key in line_values:
                    return line_values
        raise AssertionError(f"the worker ended with {await self.process.wait()}")


class Serving:
    """A controller with its index and sockets. Slots are numbered as instances are named: `w0` has slot 0.

    `others` get its reports as from another gateway.
    """

    def __init__(self, *others: Serving, **options: Any) -> None:
        self.index = CopyableChunkIndex()
        self.others = others
        addresses = dict.fromkeys(("pull", "reply", "heartbeat"), "127.0.0.1:0")
        self.options = ControllerOptions(**{**addresses, "chunk_tokens": CHUNK, **options})
        self.controller = Controller(self.index, SystemClock(), self.options)
        self.reports = CacheReports(self.index, None, self.controller, self, "one", SystemClock())
        self.sockets = ControllerSockets(self.controller, SystemClock(), self.options, self.reports)
        for slot in range(2):
            self.controller.add_slot(slot, f"w{slot}")

    # `ReportChannel`

    @property
    def reporting_peers(self) -> list[str]:
        return []

    def publish(self, message: Any) -> None:
        for other in self.others:
            other.reports.handlers[type(message)]("one", message)

    def send(self, peer: str, *messages: Any) -> bool:
        return False

    async def has_room(self) -> None: ...

    def believed(self, worker: str) -> set[int]:
        known = self.controller._roster.by_name.get(worker)
        ranks = known.instance.ranks.values() if known else ()
        return {key for rank in ranks for place in rank.locations.values() for key in place.keys}

    def matched(self, tokens: list[int], slot: int) -> int:
        return self.index.match(PromptChunks(tokens), "", {}).get(slot, (0, 0))[0]


@asynccontextmanager
async def serving(*others: Serving, **options: Any) -> AsyncIterator[Serving]:
    made = Serving(*others, **options)
    async with listening(made):
        yield made


@asynccontextmanager
async def listening(made: Serving) -> AsyncIterator[None]:
    running = asyncio.create_task(made.sockets.run())
    await made.sockets.wait_until_serving()
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start_worker(forged_venv: EngineVenv) -> AsyncIterator[StartWorker]:
    async with AsyncExitStack() as stack:

        async def start(to: Serving, name: str, seed: str = "0") -> Worker:
            env = {**separate_environment(os.environ), "PYTHONHASHSEED": seed}
            (port,) = free_ports(1)
            process = await asyncio.create_subprocess_exec(
                *(str(forged_venv.python), str(WORKER), to.sockets.pull, to.sockets.reply, str(port), name),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=env,
            )

            async def end() -> None:
                if process.returncode is None:
                    process.kill()
                await process.wait()

            stack.push_async_callback(end)
            worker = Worker(process, set(), [])
            await worker.next_line("ready")
            await until(lambda: name in to.controller._roster.by_name, within_s=DEADLINE_S)
            return worker

        yield start


async def test_a_worker_registers_stores_evicts_and_leaves(start_worker: StartWorker) -> None:
    prompt = [2000 + place for place in range(601)]
    async with serving() as to:
        first, second = await start_worker(to, "w0"), await start_worker(to, "w1")

        # Its names for the chunks are ours.
        theirs = await first.do("chunks", tokens=prompt)
        assert theirs == chunk_keys(prompt, to.controller.scheme)

        await first.do("admit", keys=theirs)
        await second.do("admit", keys=theirs[:3])
        await until(lambda: to.controller.counts.operations == 12, within_s=DEADLINE_S)
        assert (to.matched(prompt, 0), to.matched(prompt, 1)) == (9 * CHUNK, 3 * CHUNK)

        await first.do("evict", keys=theirs[5:])
        await until(lambda: to.controller.counts.operations == 16, within_s=DEADLINE_S)
        assert to.matched(prompt, 0) == 5 * CHUNK
        assert to.believed("w0") == first.held
        assert to.controller.trust(0) is to.controller.trust(1) is MapTrust.WHOLE

        await first.do("leave")
        await until(lambda: "w0" not in to.controller._roster.by_name, within_s=DEADLINE_S)
        assert to.matched(prompt, 0) == 0
        assert to.controller.counts.failed == to.controller.counts.unreadable == 0


async def test_a_worker_older_than_the_gateway_reports_all_its_chunks(start_worker: StartWorker) -> None:
    async with serving() as to:
        worker = await start_worker(to, "w0")
        await worker.do("admit", keys=list(range(1, 31)))
        await until(lambda: to.believed("w0") == worker.held, within_s=DEADLINE_S)
        addresses = {name: getattr(to.sockets, name) for name in ("pull", "reply", "heartbeat")}

    async with serving(**addresses) as again:
        await until(lambda: again.controller.counts.syncs_done == 1, within_s=DEADLINE_S)

        assert again.believed("w0") == worker.held
        assert again.controller.trust(0) is MapTrust.WHOLE
        # The worker continues when the controller ends the freeze.
        while worker.frozen[-1:] != [False]:
            await worker.next_line("frozen")
        await worker.do("admit", keys=[77])
        await until(lambda: again.believed("w0") == worker.held, within_s=DEADLINE_S)
        assert again.controller.counts.gaps == 0


async def test_another_gateway_takes_over_with_all_chunks(start_worker: StartWorker) -> None:
    """The addresses of the controller move to a gateway that has followed the reports."""
    prompt = [2000 + place for place in range(601)]
    ports = free_ports(3)
    addresses = {
        name: f"127.0.0.1:{port}" for name, port in zip(("pull", "reply", "heartbeat"), ports, strict=True)
    }
    two = Serving(**addresses)
    async with serving(two, **addresses) as one:
        worker = await start_worker(one, "w0")
        await worker.do("admit", keys=list(chunk_keys(prompt, one.controller.scheme)))
        await until(lambda: one.believed("w0") == worker.held, within_s=DEADLINE_S)
        assert two.believed("w0") == worker.held
        assert two.matched(prompt, 0) == 9 * CHUNK
    two.reports.on_peer_gone("one")
    assert two.matched(prompt, 0) == 0
    await worker.do("evict", keys=list(chunk_keys(prompt, one.controller.scheme))[8:])

    async with listening(two):
        await until(lambda: two.controller.trust(0) is MapTrust.WHOLE, within_s=30)

        assert two.believed("w0") == worker.held
        assert two.matched(prompt, 0) == 8 * CHUNK


async def test_a_lost_message_is_made_good_by_a_full_sync(start_worker: StartWorker) -> None:
    async with serving() as to:
        worker = await start_worker(to, "w0")
        await worker.do("admit", keys=list(range(1, 31)))
        await until(lambda: to.believed("w0") == worker.held, within_s=DEADLINE_S)

        await worker.do("lose", keys=[1, 2, 3])
        await worker.do("admit", keys=[99])
        await until(lambda: to.controller.counts.gaps == 1, within_s=DEADLINE_S)
        assert to.believed("w0") == {99}

        await until(lambda: to.controller.counts.syncs_done == 1, within_s=DEADLINE_S)
        assert to.believed("w0") == worker.held
        assert to.controller.trust(0) is MapTrust.WHOLE


async def test_a_worker_without_peer_to_peer_is_nobodys_peer(start_worker: StartWorker) -> None:
    async with serving() as to:
        worker = await start_worker(to, "w0")
        await worker.do("admit", keys=[1, 2])
        await until(lambda: to.believed("w0") == worker.held, within_s=DEADLINE_S)

        assert await (await start_worker(to, "w1")).do("lookup", hashes=[1, 2]) == [["", "", 0, ""]]


@pytest.mark.full
async def test_another_hash_seed_is_noticed(start_worker: StartWorker) -> None:
    async with serving() as to:
        worker = await start_worker(to, "w0", seed="7")
        for number in range(to.options.mismatch_prompts + 1):
            prompt = [number * 1000 + place for place in range(CHUNK)]
            to.controller.on_prompt_served(0, prompt)
            await worker.do("admit", keys=await worker.do("chunks", tokens=prompt))
        await until(lambda: _asks_for_sync_again(to), within_s=DEADLINE_S)

        assert "PYTHONHASHSEED must be 0" in to.controller.problems()[0]


def _asks_for_sync_again(to: Serving) -> bool:
    to.controller.on_prompt_served(0, [5] * CHUNK)
    return to.controller.counts.mismatches == 1


@pytest.mark.parametrize("mix", [*(pytest.param(mix, marks=pytest.mark.full) for mix in MIXES), MIXED])
async def test_lmcaches_benchmark_runs_without_an_error(mix: str, forged_venv: EngineVenv) -> None:
    async with serving() as to:
        ports = {name: getattr(to.sockets, name).rpartition(":")[2] for name in ("pull", "reply")}
        process = await asyncio.create_subprocess_exec(
            *(str(forged_venv.python), str(BENCHMARK)),
            *("--controller-host", "127.0.0.1", "--monitor-ports", json.dumps(ports)),
            *("--num-instances", "10", "--num-workers", "1", "--num-keys", "10000"),
            *("--batch-size", "100", "--duration", "2", "--operations", mix),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=separate_environment(os.environ),
        )
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
        report = output.decode()
        sent = re.search(r"Total Requests: (\d+)", report)
        assert process.returncode == 0
        assert sent is not None
        # All operations, and ten registrations and deregistrations.
        counts = to.controller.counts
        await until(lambda: counts.messages == int(sent[1]) + 20, within_s=DEADLINE_S)

        assert int(sent[1]) > 100
        assert sum(map(int, re.findall(r"Errors: (\d+)", report))) == 0
        assert len(re.findall(r"Errors: \d+", report)) == len(mix.split(","))
        assert counts.unreadable == counts.failed == counts.gaps == counts.duplicates == counts.unplaced == 0
        assert to.controller.gauges().instances == 0
