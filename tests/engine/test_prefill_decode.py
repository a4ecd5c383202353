"""Three real engines, one of which does prefill and decode: every answer, prediction and fault.

    PREFILL_DECODE_REQUESTS=50 .venv/bin/pytest -m engine -s tests/engine/test_prefill_decode.py

Fifty requests of each of the six kinds take a quarter of an hour on two idle cores.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.engine.endpoints import ADMIN_KEY

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import EngineVenv, install_nixl, separate_environment
from kvroute.deploy.plan import Engine, HostFacts, ProcessPlan, UpSpec, plan_up, port_count
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess
from kvroute.deploy.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(3600),
]

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"x": {}}}},
    }
]
MODEL = "tiny"
BLOCK, THRESHOLD = 32, 512
WORKERS = ("prefill-0", "decode-0", "worker-0")
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}
REQUESTS = int(os.environ.get("PREFILL_DECODE_REQUESTS", "6"))
"""Requests of each kind."""
PREDICTED = ("hit-tokens", "prefill-hit-tokens", "moved-tokens")


@dataclass(frozen=True)
class Sources:
    """Where a worker has its prompt tokens from, since its start."""

    computed: int
    cached: int
    fetched: int

    def __sub__(self, other: Sources) -> Sources:
        return Sources(
            self.computed - other.computed, self.cached - other.cached, self.fetched - other.fetched
        )


@dataclass
class Stack:
    """A prefill worker, a decode worker and one for both, with a gateway, as `kvroute up` starts them.

    `worker-0` has vLLM's own `kv_load_failure_policy` (`fail`), the others have that of `kvroute up`
    (`recompute`).
    """

    plan: ProcessPlan
    processes: dict[str, ChildProcess]
    http: httpx.AsyncClient

    @property
    def alive(self) -> list[str]:
        return [name for name in WORKERS if self.processes[name].running]

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

    async def ask_worker(self, name: str, body: dict[str, Any]) -> httpx.Response:
        answer = await self.http.post(self.url(name) + CHAT, json=body)
        assert answer.status_code == 200, answer.text
        return answer

    async def sources(self, name: str) -> Sources:
        page = (await self.http.get(f"{self.url(name)}/metrics")).text
        found = dict(
            re.findall(
                r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$', page, re.MULTILINE
            )
        )
        names = ("local_compute", "local_cache_hit", "external_kv_transfer")
        return Sources(*(int(float(found.get(name, 0))) for name in names))

    async def until_no_block_is_kept(self) -> float:
        """Wait until no worker holds blocks for a request. Returns the seconds that it took.

        The limit is far below the lease of 30 s, after which the engine frees blocks itself.
        """
        began = time.monotonic()
        async with asyncio.timeout(10):
            for name in self.alive:
                while await self.metric(name, "vllm:kv_cache_usage_perc") > 0:
                    await asyncio.sleep(0.02)
        return time.monotonic() - began

    async def until_not_routable(self, name: str) -> None:
        """Wait until the gateway sends nothing to this worker any more."""
        async with asyncio.timeout(30):
            while True:
                ready = (await self.http.get(f"{self.plan.gateway.url}/ready")).json()
                if ready["workers"][name] == "unhealthy":
                    return
                await asyncio.sleep(0.05)

    async def explained(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post(f"{self.plan.gateway.url}/v1/route/explain", json=body)
        explained: dict[str, Any] = answer.json()
        return explained

    async def drain(self, name: str, *, on: bool) -> None:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        url = f"{self.plan.gateway.url}/admin/workers/{name}/drain"
        answer = await self.http.request("POST" if on else "DELETE", url, headers=headers)
        assert answer.status_code == 200, answer.text

    async def restart(self, name: str) -> None:
        """Start a worker that was killed, and wait until the gateway routes to it and knows its cache."""
        planned = next(worker for worker in self.plan.workers if worker.child.name == name)
        await self.processes[name].start()
        await self.processes[name].wait_ready(planned.ready_url, timeout_s=300)
        await self.until_ready()

    async def introduce_pairs(self) -> None:
        """Let each pair move a prompt: the first connection of two agents can take longer than a request."""
        text = texts_of(self.plan.model_folder)
        for other in WORKERS:
            await self.drain(other, on=True)
            async with asyncio.timeout(120):
                attempt = 0
                while True:
                    body = greedy_chat(MODEL, text(f"without {other} {attempt}", 620))
                    if "x-kvroute-prefill-worker" in (await self.ask(body)).headers:
                        break
                    attempt += 1
            await self.drain(other, on=False)
        await self.until_ready()

    async def until_cold(self, name: str) -> None:
        """Empty a worker's cache. It says so with its next step."""
        answer = await self.http.post(f"{self.url(name)}/reset_prefix_cache")
        assert answer.json() == {"success": True}
        await self.ask_worker(name, greedy_chat(MODEL, "", max_tokens=1))

    async def reset(self, *, without: str = "") -> list[str]:
        """Bring the stack back to its known state: nothing drained, all caches empty. Returns what differs
        from it. `without` leaves out "drains" or "caches"."""
        for name in WORKERS:
            await self.ask_worker(name, CANARY)
        await self.until_no_block_is_kept()
        for name in WORKERS:
            if without != "drains":
                await self.drain(name, on=False)
            if without != "caches":
                await self.until_cold(name)
        ready = (await self.http.get(f"{self.plan.gateway.url}/ready")).json()
        found = [f"{name} is {is_now}" for name, is_now in ready["workers"].items() if is_now != "healthy"]
        for name in WORKERS:
            before = await self.sources(name)
            await self.ask_worker(name, CANARY)
            if cached := (await self.sources(name) - before).cached:
                found.append(f"{cached} tokens of an earlier prompt are cached by {name}")
            await self.until_cold(name)
        return found

    async def until_ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                ready = (await self.http.get(f"{self.plan.gateway.url}/ready")).json()
                states = ready["workers"]
                if all(states[name] in ("healthy", "draining") for name in self.alive) and not ready["notes"]:
                    return
                await asyncio.sleep(0.05)


def texts_of(model: Path) -> Callable[[str, int], str]:
    """`(seed, words)` -> a text of about that many tokens."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    known = sorted(entry.replace("Ġ", " ") for entry in vocabulary if re.fullmatch("Ġ[a-z]{4,}", entry))
    return lambda seed, words: "".join(random.Random(seed).choices(known, k=words))


def greedy_chat(model: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "temperature": 0, "max_tokens": 12}
    return {**body, "messages": [{"role": "user", "content": text}], **more}


CANARY = greedy_chat(MODEL, "all that was asked before is forgotten " * 20, max_tokens=1)


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


@asynccontextmanager
async def started(real: EngineVenv, forged: EngineVenv, folder: Path) -> AsyncIterator[Stack]:
    await install_nixl(real, report=print, clock=SystemClock())
    (gateway_port,) = free_ports(1)
    spec = UpSpec(
        engine=Engine.VLLM,
        model=MODEL,
        workers=1,
        prefill_workers=1,
        decode_workers=1,
        port=gateway_port,
        strategy="kvaware",
        state_dir=folder,
        engine_venv=real.path,
    )
    environ = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "KVROUTE__ADMIN__API_KEY": ADMIN_KEY,
        "KVROUTE__ROUTING__PREFILL_DECODE__THRESHOLD_TOKENS": str(THRESHOLD),
        # The engines keep the cores busy: a prompt that is tokenized late is not decided by the map.
        "KVROUTE__TOKENS__TIMEOUT_MS": "5000",
    }
    # These engines have the worker process of vLLM on CPU, as with `kvroute up`.
    environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    cores = tuple(sorted(os.sched_getaffinity(0)))
    facts = HostFacts(
        environ,
        separate_environment(environ),
        cores,
        (),
        free_ports(port_count(spec, ())),
        (str(forged.script("vllm")),),
    )
    plan = plan_up(spec, facts)
    assert plan.tiny_model is not None
    write_tiny_model(plan.tiny_model, plan.model_folder)
    planned = {each.child.name: each for each in (*plan.workers, plan.gateway)}
    failing = planned["worker-0"].child
    argv = tuple(word.replace('"recompute"', '"fail"') for word in failing.argv)
    children = {name: each.child for name, each in planned.items()}
    children["worker-0"] = dataclasses.replace(failing, argv=argv)
    processes = {name: ChildProcess(child, SystemClock()) for name, child in children.items()}
    try:
        for name in (*WORKERS, plan.gateway.child.name):
            await processes[name].start()
        for name, each in planned.items():
            await processes[name].wait_ready(each.ready_url, timeout_s=300)
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as http:
            running = Stack(plan, processes, http)
            await running.until_ready()
            await running.introduce_pairs()
            yield running
    finally:
        await asyncio.gather(*(each.stop() for each in processes.values() if each.running))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(
    engine_venv: EngineVenv, forged_venv: EngineVenv, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    async with started(engine_venv, forged_venv, tmp_path_factory.mktemp("up")) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="session")
async def stack(shared: Stack) -> AsyncIterator[Stack]:
    """With empty caches and no worker drained, and left so."""
    yield shared
    assert await shared.reset() == []


@pytest_asyncio.fixture(loop_scope="session")
async def own_stack(engine_venv: EngineVenv, forged_venv: EngineVenv, tmp_path: Path) -> AsyncIterator[Stack]:
    """For a test that kills a worker."""
    async with started(engine_venv, forged_venv, tmp_path) as stack:
        yield stack


@pytest.mark.parametrize("left_out", ["drains", "caches"])
async def test_the_check_of_the_stack_fails_when_one_reset_is_left_out(stack: Stack, left_out: str) -> None:
    await stack.drain("worker-0", on=True)

    assert await stack.reset(without=left_out)

    assert await stack.reset() == []


@pytest.fixture(scope="module")
def text(model_folder: Path) -> Any:
    return texts_of(model_folder)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return greedy_chat(MODEL, text, **more)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "streamed": {"stream": True},
    "two answers": {"n": 2, "temperature": 1, "top_k": 1},  # greedy sampling takes no n
    "tools": {"tools": TOOLS},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "guided": {"response_format": {"type": "json_object"}, "max_tokens": 30},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_are_those_of_one_worker_and_predictions_of_both_legs_are_exact(
    stack: Stack, text: Any, kind: str
) -> None:
    """One at a time. Every third prompt is unknown; of the others one worker knows the first half."""
    total, moved, judged = 0, 0, 0
    answers = KINDS[kind].get("n", 1)
    for number in range(REQUESTS):
        half = text(f"{kind} half {number}", 600)
        if number % 3:
            known_to = ("prefill-0", "decode-0")[number % 3 - 1]
            known = chat(half, max_tokens=1)
            await stack.ask_worker(known_to, known)
            await until_held(stack, known, known_to)
        body = chat(half + text(f"{kind} {number}", 620 if number % 3 else 20 + number % 40), **KINDS[kind])
        before = {name: await stack.sources(name) for name in WORKERS}
        answer = await stack.ask(body)
        after = {name: await stack.sources(name) for name in WORKERS}
        grown = {name: after[name] - before[name] for name in WORKERS}
        alone = await stack.ask_worker("prefill-0", body)

        first, second = answer.headers["x-kvroute-prefill-worker"], answer.headers["x-kvroute-worker"]
        assert (first in ("prefill-0", "worker-0"), second in ("decode-0", "worker-0")) == (True, True)
        assert first != second
        assert choices(answer) == choices(alone)
        assert "remote_" not in answer.text
        total += await prompt_tokens(stack, body)
        moved += grown[second].fetched
        if answer.headers["x-kvroute-reason"] == "kv_approximate":
            continue
        judged += 1
        header = {name: int(answer.headers[f"x-kvroute-{name}"]) for name in PREDICTED}
        held = header["prefill-hit-tokens"]
        assert abs(grown[first].cached - held) < BLOCK
        assert abs(grown[first].computed - (header["moved-tokens"] + header["hit-tokens"] - held)) < BLOCK
        if answers == 1:  # a second answer may find the blocks of the first one
            assert abs(grown[second].fetched - header["moved-tokens"]) < BLOCK
            assert abs(grown[second].cached - header["hit-tokens"]) < BLOCK
            assert grown[second].computed <= 1

    audit = await predictions(stack)
    print(
        f"{kind}: {REQUESTS} requests with {total} prompt tokens, {moved} of them by transfer; {judged} "
        f"decided by the map, all exact; predictions since the start: {audit}"
    )
    assert judged >= 0.8 * REQUESTS
    await stack.until_no_block_is_kept()


async def until_held(stack: Stack, body: dict[str, Any], name: str) -> None:
    """Wait until the map knows that the worker holds the prompt: events travel on their own."""
    async with asyncio.timeout(30):
        while True:
            explained = await stack.explained(body)
            held = {row["worker"]: row["matched_tokens"] for row in explained["ranking"]}
            if "handover" in explained:
                held[explained["handover"]["prefill_worker"]] = explained["handover"]["matched_tokens"]
            if held.get(name, 0) >= 512:
                return
            await asyncio.sleep(0.05)


async def prompt_tokens(stack: Stack, body: dict[str, Any]) -> int:
    count = {**body, "max_tokens": 1, "stream": False, "n": 1}
    usage = (await stack.ask_worker("prefill-0", count)).json()["usage"]
    return int(usage["prompt_tokens"])


async def predictions(stack: Stack) -> dict[str, int]:
    """What the gateway's own audit has found, by outcome."""
    outcomes = ("exact", "over", "under")
    name = "kvroute_predictions_total"
    return {outcome: int(await stack.metric("gateway", name, outcome=outcome)) for outcome in outcomes}


async def test_cold_prompts_arrive_by_transfer(stack: Stack, text: Any) -> None:
    await cold_prompts_arrive_by_transfer(stack, text)


@pytest.mark.full
async def test_engines_that_were_not_forked_hand_over_too(
    engine_venv: EngineVenv, tmp_path: Path, text: Any
) -> None:
    """Each is started by itself, with a compute process of its own, as a user's are."""
    async with started(engine_venv, engine_venv, tmp_path) as stack:
        await cold_prompts_arrive_by_transfer(stack, text)


async def cold_prompts_arrive_by_transfer(stack: Stack, text: Any) -> None:
    prompts, fetched = 0, 0
    for number in range(5):
        body = chat(text(f"cold {number}", 610 + number))
        before = {name: await stack.sources(name) for name in WORKERS}
        second = (await stack.ask(body)).headers["x-kvroute-worker"]
        fetched += (await stack.sources(second) - before[second]).fetched
        prompts += await prompt_tokens(stack, body)

    print(f"cold prompts: {fetched / prompts:.3f} of {prompts} tokens by transfer")
    assert fetched >= 0.95 * prompts


BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/completions": lambda words: {**GREEDY, "prompt": words},
    "/v1/responses": lambda words: {"model": MODEL, "input": words, "max_output_tokens": 12},
    "/v1/messages": lambda words: {**GREEDY, "messages": [{"role": "user", "content": words}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_every_api_hands_over(stack: Stack, text: Any, path: str, streamed: bool) -> None:
    before = {name: await stack.sources(name) for name in WORKERS}

    answer = await stack.ask({**BODIES[path](text(f"{path} {streamed}", 700)), "stream": streamed}, path)

    second = answer.headers["x-kvroute-worker"]
    assert answer.headers["x-kvroute-prefill-worker"] != second
    assert (await stack.sources(second) - before[second]).fetched >= 700
    await stack.until_no_block_is_kept()


async def test_short_follow_ups_stay_on_the_decode_worker(stack: Stack, text: Any) -> None:
    body = chat(text("a chat", 700))
    first = await stack.ask(body)
    prefill, decode = first.headers["x-kvroute-prefill-worker"], first.headers["x-kvroute-worker"]
    answer = first.json()
    await until_held(stack, body, decode)
    before = await stack.sources(prefill)

    for turn in range(5):
        body["messages"] += [
            answer["choices"][0]["message"],
            {"role": "user", "content": text(f"turn {turn}", 30)},
        ]
        response = await stack.ask(body)
        answer = response.json()
        assert "x-kvroute-prefill-worker" not in response.headers
        assert response.headers["x-kvroute-worker"] == decode
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 640

    assert await stack.sources(prefill) == before


async def test_clients_that_leave_leave_no_blocks(stack: Stack, text: Any) -> None:
    for number in range(8):
        body = chat(text(f"leaving {number}", 1500), stream=True, max_tokens=500)
        asked = asyncio.create_task(stack.ask(body))
        await asyncio.sleep(0.15 * number)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    print(f"clients left: no block kept after {await stack.until_no_block_is_kept():.2f} s")


@dataclass(frozen=True)
class Outcome:
    """How one request under load ended."""

    status: int
    streamed: bool
    text: str

    @property
    def failed(self) -> bool:
        return self.status != 200 or '"error"' in self.text

    @property
    def had_begun(self) -> bool:
        return self.streamed and self.text.startswith("data: {") and '"choices"' in self.text.split("\n")[0]


async def kill_under_load(
    stack: Stack, text: Any, name: str, label: str, *, tokens: int = 12
) -> list[Outcome]:
    """Four clients send prompts, every other one streamed; the worker is killed meanwhile."""
    asked = asyncio.Event()

    async def client(number: int) -> list[Outcome]:
        outcomes = []
        for turn in range(6):
            streamed = (number + turn) % 2 == 1
            body = chat(text(f"{label} {number} {turn}", 620), stream=streamed, max_tokens=tokens)
            if turn == 2:
                asked.set()
            answer = await stack.http.post(stack.plan.gateway.url + CHAT, json=body)
            outcomes.append(Outcome(answer.status_code, streamed, answer.text))
        return outcomes

    clients = [asyncio.create_task(client(number)) for number in range(4)]
    await asked.wait()
    stack.processes[name].kill()
    outcomes = [outcome for each in clients for outcome in await each]
    kept_s = await stack.until_no_block_is_kept()
    failed = [outcome for outcome in outcomes if outcome.failed]
    fallbacks = await stack.metric("gateway", "kvroute_handover_fallbacks_total")
    print(
        f"{label}: {len(outcomes)} requests, {len(failed)} failed; no block kept after {kept_s:.2f} s; "
        f"fallbacks since the start: {fallbacks:.0f}"
    )
    return outcomes


@pytest.mark.full
async def test_a_killed_prefill_worker_costs_no_request_with_recompute(own_stack: Stack, text: Any) -> None:
    await own_stack.drain("worker-0", on=True)

    outcomes = await kill_under_load(own_stack, text, "prefill-0", "prefill worker killed, recompute")

    assert not any(outcome.failed for outcome in outcomes)
    assert await own_stack.metric("gateway", "kvroute_handover_fallbacks_total") >= 1
    await own_stack.drain("worker-0", on=False)
    await own_stack.restart("prefill-0")


@pytest.mark.full
async def test_a_killed_decode_worker_costs_only_streams_that_had_begun(own_stack: Stack, text: Any) -> None:
    outcomes = await kill_under_load(own_stack, text, "decode-0", "decode worker killed", tokens=24)

    assert all(outcome.had_begun for outcome in outcomes if outcome.failed)


async def test_a_killed_prefill_worker_costs_no_request_without_recompute(
    own_stack: Stack, text: Any
) -> None:
    """Only `worker-0` is left for the second legs, and its engine does not compute lost prompts itself."""
    own_stack.processes["decode-0"].kill()
    await own_stack.processes["decode-0"].wait()
    # Until then it may get second legs of prompts that `worker-0` has computed. Nobody else could take their
    # blocks, so they stay until their lease of 30 s ends.
    await own_stack.until_not_routable("decode-0")

    outcomes = await kill_under_load(own_stack, text, "prefill-0", "prefill worker killed, no recompute")

    assert not any(outcome.failed for outcome in outcomes)
