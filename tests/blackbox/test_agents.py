"""Agents stay on the worker that has their conversation: 24 sessions at once on four workers, defaults.

Bodies have the shapes of Claude Code, Codex and opencode: tools and a system prompt first, then the turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

MODEL = "sim-model"
ADMIN_KEY = "admin-secret-0123"
SESSIONS, TURNS, WORKERS = 24, 6, 4
WORDS = ["the", "worker", "reads", "a", "file", "and", "writes", "what", "it", "found", "there", "into", "it"]
pytestmark = pytest.mark.timeout(300)


def text(seed: str, characters: int) -> str:
    """Words that depend on the seed alone, about `characters` long."""
    rng = random.Random(hashlib.sha256(seed.encode()).digest())
    words: list[str] = [seed]
    while characters > 0:
        words.append(rng.choice(WORDS))
        characters -= len(words[-1]) + 1
    return " ".join(words)


@dataclass
class Agent:
    """One session. `shared` is what all agents have in common, `own` what only this one has."""

    shared: str
    own: str
    number: int
    id: str = ""
    turn: int = 0
    answers: list[str] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = str(uuid.UUID(hashlib.md5(f"{self.own} {self.number}".encode()).hexdigest()))

    def asked(self, turn: int) -> str:
        return text(f"{self.id} asks {turn}", 3_000)


def claude_code(agent: Agent) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The first block differs each time; `cache_control` moves to the newest blocks."""
    mark = {"cache_control": {"type": "ephemeral"}}
    digits = hashlib.sha256(f"{agent.id} {agent.turn}".encode()).hexdigest()[:5]
    billing = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={digits};"
    messages: list[dict[str, Any]] = []
    for turn in range(agent.turn + 1):
        content: list[dict[str, Any]] = [{"type": "text", "text": agent.asked(turn)}]
        if turn:
            result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": agent.asked(turn)}
            messages.append({"role": "assistant", "content": [
                {"type": "text", "text": agent.answers[turn - 1]},
                {"type": "tool_use", "id": f"toolu_{turn}", "name": "Read", "input": {"path": f"/{turn}"}},
            ]})  # fmt: skip
            content = [result]
        if turn >= agent.turn - 1:
            content[-1] = {**content[-1], **mark}
        messages.append({"role": "user", "content": content})
    user = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": agent.id})
    return "/v1/messages?beta=true", {"x-claude-code-session-id": agent.id}, {
        "model": MODEL, "messages": messages, "max_tokens": 16, "metadata": {"user_id": user},
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent.", **mark},
            {"type": "text", "text": agent.own, **mark},
        ],
        "tools": [{"name": "Read", "description": agent.shared, "input_schema": {"type": "object"}}],
    }  # fmt: skip


def codex(agent: Agent) -> tuple[str, dict[str, str], dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for turn in range(agent.turn + 1):
        if turn:
            items += [
                {"type": "message", "role": "assistant", "content": [
                    {"type": "output_text", "text": agent.answers[turn - 1]}
                ]},
                {"type": "function_call", "call_id": f"call_{turn}", "name": "shell", "arguments": "{}"},
                {"type": "function_call_output", "call_id": f"call_{turn}", "output": agent.asked(turn)},
            ]  # fmt: skip
        else:
            items.append({"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": agent.own}, {"type": "input_text", "text": agent.asked(0)}
            ]})  # fmt: skip
    return "/v1/responses", {"session-id": agent.id}, {
        "model": MODEL, "instructions": "You are an agent.", "input": items, "store": False,
        "max_output_tokens": 16, "prompt_cache_key": agent.id,
        "tools": [{"type": "function", "name": "shell", "description": agent.shared, "parameters": {}}],
    }  # fmt: skip


def opencode(agent: Agent) -> tuple[str, dict[str, str], dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": agent.own}]
    for turn in range(agent.turn + 1):
        if turn:
            call = {"id": f"call_{turn}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
            messages += [
                {"role": "assistant", "content": agent.answers[turn - 1], "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"call_{turn}", "content": agent.asked(turn)},
            ]
        else:
            messages.append({"role": "user", "content": agent.asked(0)})
    return "/v1/chat/completions", {"x-session-affinity": agent.id, "x-opencode-session": agent.id}, {
        "model": MODEL, "messages": messages, "max_tokens": 16,
        "tools": [{"type": "function", "function": {
            "name": "read", "description": agent.shared, "parameters": {"type": "object"}
        }}],
    }  # fmt: skip


SHAPES: dict[str, Callable[[Agent], tuple[str, dict[str, str], dict[str, Any]]]] = {
    "claude-code": claude_code,
    "codex": codex,
    "opencode": opencode,
}


def answer_of(body: dict[str, Any]) -> tuple[str, float]:
    """The text of an answer, and the share of its prompt that the engine had cached."""
    usage = body["usage"]
    if "choices" in body:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return body["choices"][0]["message"]["content"], cached / usage["prompt_tokens"]
    if "output" in body:
        cached = usage["input_tokens_details"]["cached_tokens"]
        return body["output"][0]["content"][0]["text"], cached / usage["input_tokens"]
    cached = usage.get("cache_read_input_tokens") or 0
    whole = cached + usage["input_tokens"] + (usage.get("cache_creation_input_tokens") or 0)
    return body["content"][0]["text"], cached / whole


async def turn_of(client: httpx.AsyncClient, agent: Agent, shape: str) -> None:
    path, headers, body = SHAPES[shape](agent)
    answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text[:300]
    said, cached = answer_of(answer.json())
    agent.workers.append(answer.headers["x-kvroute-worker"])
    agent.answers.append(said)
    agent.cached.append(cached)
    agent.turn += 1


async def all_at_once(gateway: Any, agents: list[Agent], shape: str) -> None:
    """Each agent asks again as soon as it has its answer."""

    async def session(client: httpx.AsyncClient, agent: Agent) -> None:
        for _ in range(TURNS):
            await turn_of(client, agent, shape)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(session(client, agent) for agent in agents))


def stayed(agents: list[Agent]) -> float:
    """The share of the follow-ups that went to the worker of the turn before."""
    pairs = [pair for agent in agents for pair in zip(agent.workers, agent.workers[1:], strict=False)]
    return sum(one == other for one, other in pairs) / len(pairs)


@pytest.fixture
def fleet(serve, sim):
    async def start(strategy: str):
        events = ("--events",) if strategy == "kvaware" else ()
        workers = await asyncio.gather(*(sim("--time-scale", "0.3", *events) for _ in range(WORKERS)))
        words = [word for url in workers for word in ("--worker", url)]
        return await serve(*words, "--strategy", strategy, "--set", f"admin.api_key={ADMIN_KEY}")

    return start


STAY = {"prefixaware": 0.97, "kvaware": 0.97, "session": 1.0}


@pytest.mark.parametrize("strategy", STAY)
async def test_each_turn_of_an_agent_goes_to_the_worker_of_the_turn_before(fleet, strategy):
    gateway = await fleet(strategy)
    same: dict[str, float] = {}
    for shape in SHAPES:
        agents = [
            Agent(text(f"{shape} tools {n}", 20_000), text(f"{shape} system {n}", 10_000), n)
            for n in range(SESSIONS)
        ]

        await all_at_once(gateway, agents, shape)

        same[shape] = stayed(agents)
        if same[shape] < STAY[strategy]:
            continue  # first what each agent gets
        served = Counter(worker for agent in agents for worker in agent.workers)
        hits = [share for agent in agents for share in agent.cached[1:]]
        assert sum(hits) / len(hits) > 0.85, (shape, served)
        if strategy != "session":
            assert min(served.values()) >= SESSIONS * TURNS / WORKERS / 2, (shape, served)
            assert len(served) == WORKERS
    assert min(same.values()) >= STAY[strategy], same


@pytest.mark.parametrize("shape", SHAPES)
async def test_agents_that_share_25_000_tokens_of_tools_stay_too(fleet, shape):
    gateway = await fleet("prefixaware")
    agents = [Agent(text("tools", 75_000), text(f"system {n}", 6_000), n) for n in range(SESSIONS)]

    await all_at_once(gateway, agents, shape)

    served = Counter(worker for agent in agents for worker in agent.workers)
    print(f"{shape}: requests by worker {sorted(served.values())}")
    assert stayed(agents) >= STAY["prefixaware"], served


async def test_a_session_that_was_compacted_stays_where_the_fleet_is_idle(fleet):
    """The new prompt shares nothing with the old one; only the session's id says where it belongs."""
    gateway = await fleet("prefixaware")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client:
        for number in range(8):
            agent = Agent(text(f"t {number}", 3_000), text(f"s {number}", 3_000), number)
            await turn_of(client, agent, "claude-code")
            agent.shared, agent.own, agent.turn = text(f"c {number}", 3_000), text(f"d {number}", 3_000), 0
            await turn_of(client, agent, "claude-code")

            assert agent.workers[0] == agent.workers[1]
            assert agent.cached[1] < 0.1


@pytest.mark.parametrize("strategy", STAY)
async def test_a_sub_agent_starts_where_the_agent_is_that_began_it(fleet, strategy):
    """Its prompt shares nothing with the other one's, and no worker has work: only the two ids say it."""
    gateway = await fleet(strategy)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client:
        main, subs = Agent("tools", text("main", 3_000), 0), []
        for number in range(1, 9):
            subs.append(Agent(text(f"t {number}", 3_000), text(f"s {number}", 3_000), number))

        async def ask(agent: Agent, parent: str) -> httpx.Response:
            _, _, body = opencode(agent)
            ids = {"x-dynamo-session-id": agent.id} | (
                {"x-dynamo-parent-session-id": parent} if parent else {}
            )
            explained = await client.post("/v1/route/explain", json=body, headers=ids)
            answer = await client.post("/v1/chat/completions", json=body, headers=ids)
            assert answer.status_code == 200, answer.text[:300]
            assert explained.json()["worker"] == answer.headers["x-kvroute-worker"]
            agent.workers.append(answer.headers["x-kvroute-worker"])
            agent.answers.append(answer_of(answer.json())[0])
            agent.turn += 1
            return explained

        await ask(main, "")
        first = [await ask(agent, main.id) for agent in subs]
        for agent in subs:
            await ask(agent, main.id)

        assert {worker for agent in subs for worker in agent.workers} == set(main.workers)
        admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        decisions = (await client.get("/admin/decisions", headers=admin)).json()["decisions"]
        kept = [entry for entry in decisions if entry.get("parent_worker")]
        if strategy != "session":
            assert all(each.json()["session_worker_is_parents"] for each in first)
            assert {entry["parent_worker"] for entry in kept} == set(main.workers)
            assert len(kept) == len(subs)  # the second turns have a session of their own


UUID = "0f7ac4b2-6d1e-4c8e-9a35-5f0b7f1c2d3e"
NAMED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "Claude Code's header": ({"X-Claude-Code-Session-Id": UUID}, {}),
    "Claude Code's metadata": ({}, {"metadata": {"user_id": json.dumps({"session_id": UUID})}}),
    "Claude Code's older metadata": ({}, {"metadata": {"user_id": f"user_ab_account__session_{UUID}"}}),
    "Codex": ({"session-id": UUID}, {}),
    "pi, older Codex": ({"session_id": UUID}, {}),
    "opencode": ({"x-opencode-session": UUID}, {}),
    "opencode's affinity": ({"x-session-affinity": UUID}, {}),
    "Dynamo": ({"x-dynamo-session-id": UUID}, {}),
    "smg": ({"x-smg-routing-key": UUID}, {}),
    "llm-d": ({"x-session-token": UUID}, {}),
    "conversation": ({}, {"conversation": UUID}),
    "conversation.id": ({}, {"conversation": {"id": UUID}}),
    "before the response before": ({"session-id": UUID}, {"previous_response_id": "NEW"}),
    "before the person": ({"session-id": UUID}, {"user": "NEW"}),
}
"""What clients name their session by. NEW is another text in each turn."""


async def test_each_name_of_a_session_keeps_it_on_its_worker(fleet):
    """All turns differ from their first character on, and no worker has work."""
    gateway = await fleet("session")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client:
        moved = {}
        for source, (headers, members) in NAMED.items():
            workers = []
            for turn in range(6):
                own = json.loads(json.dumps(members).replace("NEW", f"resp_{source} {turn}"))
                answer = await client.post(
                    "/v1/chat/completions",
                    headers=headers,
                    json={
                        "model": MODEL,
                        "messages": [{"role": "user", "content": f"{turn} {source}"}],
                        "max_tokens": 1,
                        **own,
                    },
                )
                assert answer.status_code == 200, answer.text
                workers.append(answer.headers["x-kvroute-worker"])
            if len(set(workers)) > 1:
                moved[source] = workers

    assert moved == {}
