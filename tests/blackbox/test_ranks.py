"""Data-parallel ranks: chosen and sent by every strategy, with a history per rank."""

from __future__ import annotations

from collections import defaultdict

import httpx
import pytest
from tests.support.engines import MODEL, fake_engine
from tests.support.tokenizing_workers import simulated_ranks
from tests.support.waiting import until

STRATEGIES = ["prefixaware", "session", "roundrobin", "kvaware"]


@pytest.fixture
def start(serve, processes):
    """`await start(count, **settings)` runs engines and a gateway before them: (client, engines)."""

    async def run(count: int, *arguments: str, **settings):
        engines = [await processes.enter_async_context(fake_engine(**settings)) for _ in range(count)]
        workers = [part for engine in engines for part in ("--worker", engine.url)]
        running = await serve(*workers, *arguments)
        client = httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False)
        return await processes.enter_async_context(client), engines

    return run


def turns(number: int, count: int) -> list[dict]:
    """The growing message lists of one conversation."""
    messages, found = [], []
    for turn in range(count):
        text = f"question {turn} of conversation {number} " * 30
        messages = [*messages, {"role": "user", "content": text}]
        found.append({"model": MODEL, "messages": messages, "max_tokens": 1})
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_every_strategy_sends_a_rank(start, strategy):
    client, engines = await start(2, "--strategy", strategy, ranks=2)

    for number in range(12):
        body = {"model": MODEL, "prompt": f"{number} " * 200, "max_tokens": 1}
        headers = {"x-session-id": f"session {number}"}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200

    given = [one.given_rank for engine in engines for one in engine.received]
    assert len(given) == 12
    assert set(given) == {"0", "1"}


@pytest.mark.parametrize("strategy", ["prefixaware", "session"])
async def test_a_conversation_stays_on_its_rank_and_every_turn_is_a_hit(start, strategy):
    client, engines = await start(1, "--strategy", strategy, ranks=4)
    chats = [turns(number, 4) for number in range(7)]

    for turn in range(4):
        for number, chat in enumerate(chats):
            headers = {"x-session-id": f"session {number}"}
            await client.post("/v1/chat/completions", json=chat[turn], headers=headers)

    received = engines[0].received
    by_chat = defaultdict(set)
    for place, one in enumerate(received):
        by_chat[place % 7].add(one.rank)
    assert all(len(ranks) == 1 for ranks in by_chat.values()), by_chat
    assert len({rank for ranks in by_chat.values() for rank in ranks}) > 1
    assert all(one.cached_tokens for one in received[7:])


async def test_prefixaware_predicts_what_the_chosen_rank_holds(start):
    client, engines = await start(1, ranks=2)
    predicted = []

    for body in [*turns(1, 3), *turns(2, 3), *turns(1, 3)]:
        answer = await client.post("/v1/chat/completions", json=body)
        predicted.append(int(answer.headers["x-kvroute-hit-tokens"]))

    found = [one.cached_tokens for one in engines[0].received]
    wrong = [(a, b) for a, b in zip(predicted, found, strict=True) if abs(a - b) > 48]
    assert not wrong, list(zip(predicted, found, strict=True))
    assert sum(found[6:]) > 1000


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_clients_own_rank_is_kept_and_predicted_as_that_rank(start, strategy):
    client, engines = await start(1, "--strategy", strategy, ranks=2)
    body = {"model": MODEL, "prompt": "The same prompt on one rank. " * 100, "max_tokens": 1}

    answers = []
    for rank in ("1", "1", "0", "0"):
        headers = {"X-Data-Parallel-Rank": rank}
        answers.append(await client.post("/v1/completions", json=body, headers=headers))

    assert [one.given_rank for one in engines[0].received] == ["1", "1", "0", "0"]
    if strategy == "prefixaware":
        hits = [int(answer.headers["x-kvroute-hit-tokens"]) for answer in answers]
        assert hits[0] == hits[2] == 0
        assert min(hits[1], hits[3]) > 500


async def test_the_server_of_one_node_counts_its_ranks_from_0(start):
    """`--data-parallel-hybrid-lb`: its metrics have the ranks of the whole deployment."""
    client, engines = await start(1, ranks=2, first_rank=2)

    for number in range(6):
        body = {"model": MODEL, "prompt": f"{number} " * 400, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    assert {one.given_rank for one in engines[0].received} == {"0", "1"}


async def test_a_rank_that_is_no_number_is_the_engines_choice(start):
    client, engines = await start(1, ranks=2)
    body = {"model": MODEL, "prompt": "Some prompt. " * 100, "max_tokens": 1}

    for _ in range(2):
        answer = await client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "any"})
        assert answer.status_code == 200

    assert [one.given_rank for one in engines[0].received] == ["any", "any"]


async def test_a_header_that_only_mentions_the_name_does_not_turn_the_rank_off(start):
    client, engines = await start(1, ranks=2)
    body = {"model": MODEL, "prompt": "Some prompt. " * 100, "max_tokens": 1}

    await client.post("/v1/completions", json=body, headers={"x-note": "x-data-parallel-rank: 9"})

    assert engines[0].received[0].given_rank in ("0", "1")


async def test_no_rank_is_sent_where_the_engine_does_not_read_it(start):
    client, engines = await start(1, ranks=2)

    for path, field in (("/v1/responses", "input"), ("/v1/embeddings", "input")):
        answer = await client.post(path, json={"model": MODEL, field: "Some prompt. " * 100})
        assert answer.status_code == 200

    assert [one.given_rank for one in engines[0].received] == [None, None]


async def test_workers_with_one_rank_get_no_header(start):
    client, engines = await start(2)
    body = {"model": MODEL, "prompt": "Some prompt. " * 100, "max_tokens": 1}

    await client.post("/v1/completions", json=body)

    assert [one.given_rank for engine in engines for one in engine.received] == [None]


async def test_processes_share_what_was_sent_to_which_rank(start):
    client, engines = await start(1, "--processes", "2", ranks=2)
    first = turns(1, 1)[0]
    await client.post("/v1/chat/completions", json=first, headers={"connection": "close"})

    for _ in range(12):  # other connections reach both processes
        await client.post("/v1/chat/completions", json=first, headers={"connection": "close"})

    received = engines[0].received
    misses = [one for one in received[1:] if not one.cached_tokens]
    assert len(misses) <= 1, received


async def test_kvaware_predicts_what_a_clients_own_rank_holds(serve, processes):
    worker = await processes.enter_async_context(simulated_ranks(2))
    running = await serve("--worker", worker.url, "--strategy", "kvaware")
    client = httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False)
    await processes.enter_async_context(client)
    body = {"model": "sim-model", "prompt": "The same prompt on one rank. " * 100, "max_tokens": 1}

    async def ask(rank: str) -> tuple[int, int]:
        answer = await client.post("/v1/completions", json=body, headers={"X-Data-Parallel-Rank": rank})
        details = answer.json()["usage"]["prompt_tokens_details"] or {}
        return int(answer.headers["x-kvroute-hit-tokens"]), details.get("cached_tokens") or 0

    async def is_exact() -> bool:
        return "no exact tokens" not in (await client.get("/ready")).text

    async def is_known() -> bool:
        predicted, found = await ask("1")
        return predicted == found > 500

    await until(is_exact, within_s=60)
    await ask("1")
    await until(is_known, within_s=60)

    assert await ask("0") == (0, 0)
