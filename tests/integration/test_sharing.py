"""Several gateways that act as one: real processes and a real Redis in front of simulated workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.cache_servers import ReportingServer
from tests.support.certificates import Authority
from tests.support.gateways import Gateway, all_alive, enter, gateway
from tests.support.programs import program
from tests.support.redis import RedisServer, redis_server
from tests.support.sockets import free_port
from tests.support.waiting import until

from kvroute.blocks.keys import BLOCK_BYTES
from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

MODEL = "sim-model"
DEADLINE_S = 60.0


@asynccontextmanager
async def sims(number: int, time_scale: float = 0.02) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        options = SimOptions(time_scale=time_scale)
        yield [(await stack.enter_async_context(run_sim(options))).url for _ in range(number)]


def words(rng: random.Random, number: int) -> str:
    return " ".join(f"{rng.getrandbits(40):x}" for _ in range(number))


async def chat(to: Gateway, content: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return await to.client.post("/v1/chat/completions", json=body)


class Conversations:
    """24 conversations at one time, whose turns chance deals between gateways."""

    def __init__(self, gateways: Sequence[Gateway], turns: int) -> None:
        self._gateways = gateways
        self._turns = turns
        self._rng = random.Random(11)
        self.done = 0
        self.failed: list[str] = []
        self.per_worker: Counter[str] = Counter()
        self.stayed: list[bool] = []
        """For each follow-up, by time: whether it came to the worker of the turn before."""

    async def run(self) -> None:
        await asyncio.gather(*(self._converse(number) for number in range(24)))

    async def _converse(self, number: int) -> None:
        rng, messages, last = random.Random(number), list[dict[str, str]](), None
        # Not all at one moment: after a burst of prompts it costs less to compute a short prompt elsewhere.
        await asyncio.sleep(number / 12)
        for _ in range(self._turns):
            messages.append({"role": "user", "content": words(rng, 60)})
            to = self._rng.choice(self._gateways)
            answer = await to.client.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 4}
            )
            self.done += 1
            if answer.status_code != 200:
                self.failed.append(answer.text)
                continue
            worker = answer.headers["x-kvroute-worker"]
            self.per_worker[worker] += 1
            if last is not None:
                self.stayed.append(worker == last)
            last = worker
            messages.append(answer.json()["choices"][0]["message"])
            # A person reads the answer first. On a busy machine a message between gateways can need 0.1 s.
            await asyncio.sleep(0.4 + rng.random() * 0.4)


@pytest.mark.heavy
async def test_turns_dealt_by_chance_between_two_gateways_stay_on_their_worker():
    async with redis_server() as server, sims(3) as workers, AsyncExitStack() as stack:
        both = await enter(stack, *(gateway(name, server.url, workers) for name in ("g1", "g2")))
        before = Conversations(both, turns=12)
        await before.run()

        meanwhile = Conversations(both, turns=25)
        running = asyncio.create_task(meanwhile.run())
        await until(lambda: meanwhile.done >= 48, within_s=DEADLINE_S)
        await server.kill()

        async def both_are_alone() -> bool:
            return all([await each.notes() for each in both])

        await until(both_are_alone, within_s=DEADLINE_S)
        await server.start()
        await until(lambda: all_alive(both), within_s=10)
        since = len(meanwhile.stayed)
        await running
        after = meanwhile.stayed[since:]

    assert before.failed == meanwhile.failed == []
    assert sum(before.stayed) / len(before.stayed) >= 0.98
    assert max(before.per_worker.values()) / (sum(before.per_worker.values()) / 3) <= 1.3
    assert len(after) > 50
    assert sum(after) / len(after) >= 0.98


async def test_drains_travel_and_a_gateway_that_joins_has_history_loads_and_drains():
    long_answer = {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with redis_server() as server, sims(3, time_scale=2) as workers, AsyncExitStack() as stack:
        (one,) = await enter(stack, gateway("g1", server.url, workers))
        prompt = words(random.Random(1), 300)
        assert (await chat(one, prompt)).status_code == 200
        (decision,) = (await one.answer("/admin/decisions"))["decisions"]
        assert decision["member"] == "g1/0"
        await one.client.post("/admin/workers/w2/drain")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], **long_answer}
        async with one.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            chunks = answer.aiter_raw()
            await anext(chunks)

            late = await stack.enter_async_context(gateway("g2", server.url, workers))

            assert await late.knows(prompt)
            assert (await one.in_flight(), await late.in_flight()) == (1, 1)
            assert (await late.answer("/admin/workers/w2"))["state"] == "draining"
            assert (await late.members())["g1/0"]["state"] == "alive"

        async def is_over() -> bool:
            return await late.in_flight() == 0

        await until(is_over, within_s=DEADLINE_S)
        await late.client.delete("/admin/workers/w2/drain")

        async def is_back() -> bool:
            return bool((await one.answer("/admin/workers/w2"))["state"] == "healthy")

        await until(is_back, within_s=DEADLINE_S)


async def test_the_requests_of_a_killed_gateway_count_for_three_seconds_at_most():
    async with redis_server() as server, sims(2, time_scale=5) as workers, AsyncExitStack() as stack:
        one, other = await enter(stack, *(gateway(name, server.url, workers) for name in ("g1", "g2")))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 400}
        async with one.client.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True, "ignore_eos": True}
        ) as answer:
            chunks = answer.aiter_raw()
            await anext(chunks)

            async def is_seen() -> bool:
                return await other.in_flight() == 1

            await until(is_seen, within_s=DEADLINE_S)
            one.process.send_signal(signal.SIGKILL)
            await one.process.wait()

            async def is_gone() -> bool:
                return await other.in_flight() == 0

            await until(is_gone, within_s=3)
        assert (await other.members())["g1/0"]["state"] == "silent"


_HAPROXY = """
defaults
  mode http
  retries 3
  option redispatch
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend clients
  bind 127.0.0.1:{port}
  default_backend gateways
backend gateways
  balance roundrobin
  option httpchk GET /ready
  timeout check 10s
  default-server check inter 500ms fall 3 rise 1
"""


@asynccontextmanager
async def haproxy(ports: Sequence[int], folder: Path) -> AsyncIterator[str]:
    """The URL of an HAProxy in front of the gateways."""
    port = free_port()
    servers = [f"  server g{number} 127.0.0.1:{each}\n" for number, each in enumerate(ports)]
    file = folder / "haproxy.cfg"
    file.write_text(_HAPROXY.format(port=port) + "".join(servers))
    process = await asyncio.create_subprocess_exec(program("haproxy"), "-f", str(file), "-db")
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        async with httpx.AsyncClient(trust_env=False) as client:
            try:
                return (await client.get(f"{url}/ready")).status_code == 200
            except httpx.TransportError:
                return False

    try:
        await until(answers, within_s=DEADLINE_S)
        yield url
    finally:
        process.terminate()
        await process.wait()


ANSWER_TOKENS = 8


class SentTurns:
    """The reference: how much of each conversation each worker got, by the answers that clients received.

    Counts are messages. A request that failed with its gateway may have reached any worker: `uncertain`.
    """

    def __init__(self) -> None:
        self.sent: dict[tuple[str, int], int] = {}
        self.uncertain: dict[int, int] = {}

    def answered(self, worker: str, conversation: int, messages: int) -> None:
        self.sent[worker, conversation] = messages

    def failed(self, conversation: int, messages: int) -> None:
        self.uncertain[conversation] = messages

    def bounds(self, worker: str, conversation: int, messages: int) -> tuple[int, int]:
        """Of how many of the conversation's `messages` the worker has got the tokens, at least and at most.

        The answer to a worker's last prompt counts, too. The last message of a failed request was another one
        in its repetition.
        """
        known = self.sent.get((worker, conversation), 0)
        possible = max(known + 1 if known else 0, self.uncertain.get(conversation, 1) - 1)
        return known, min(possible, messages)


async def test_a_killed_gateway_of_three_fails_its_own_requests_only(tmp_path):
    """At the end the history of each gateway is the reference's, and its map what the workers hold."""
    ports = [free_port() for _ in range(3)]
    kvaware = ("routing.strategy=kvaware", "server.allow_strategy_header=true", "tokens.timeout_ms=10000")
    settings = [word for each in kvaware for word in ("--set", each)]
    async with redis_server() as server, sims(3, time_scale=0.5) as workers, AsyncExitStack() as stack:

        def start(number: int) -> Any:
            return gateway(f"g{number}", server.url, workers, *settings, port=ports[number])

        running = await enter(stack, *map(start, range(3)))
        url = await stack.enter_async_context(haproxy(ports, tmp_path))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False)
        )
        clock = asyncio.get_running_loop().time
        failed_began: list[float] = []
        is_over, done = False, 0
        conversations: list[list[dict[str, str]]] = [[] for _ in range(12)]
        reference = SentTurns()

        async def converse(number: int) -> None:
            nonlocal done
            rng, messages = random.Random(number), conversations[number]
            while not is_over:
                messages.append({"role": "user", "content": words(rng, 40)})
                began = clock()
                body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS}
                try:
                    answer = await client.post("/v1/chat/completions", json=body)
                    is_good = answer.status_code == 200
                except httpx.TransportError:
                    is_good = False
                done += is_good
                if is_good:
                    reference.answered(answer.headers["x-kvroute-worker"], number, len(messages))
                    messages.append(answer.json()["choices"][0]["message"])
                else:
                    reference.failed(number, len(messages))
                    messages.pop()
                    failed_began.append(began)

        load = [asyncio.create_task(converse(number)) for number in range(12)]
        killed_at: list[float] = []
        for number in range(3):
            target = done + 60
            await until(lambda target=target: done >= target, within_s=DEADLINE_S)
            running[number].process.kill()
            await running[number].process.wait()  # until then it is in flight there
            killed_at.append(clock())
            survivors = [each for each in running if each is not running[number]]

            async def is_silent(name: str = f"g{number}/0", survivors: Any = survivors) -> bool:
                found = [await each.members() for each in survivors]
                return all(members[name]["state"] == "silent" for members in found)

            await until(is_silent, within_s=3)
            running[number] = await stack.enter_async_context(start(number))
        target = done + 60
        await until(lambda: done >= target, within_s=DEADLINE_S)
        is_over = True
        await asyncio.gather(*load)

        async def is_idle() -> bool:
            return sum([await each.in_flight() for each in running]) == 0

        async def maps_are_whole() -> bool:
            notes = [note for each in running for note in (await each.answer("/ready"))["notes"]]
            return not [note for note in notes if "kvaware" in note]

        await until(is_idle, within_s=DEADLINE_S)
        await until(maps_are_whole, within_s=DEADLINE_S)
        histories = [
            await asyncio.gather(*(explained(each, c, "prefixaware") for c in conversations))
            for each in running
        ]
        bounds = {
            (number, f"w{worker}"): [
                await tokens_of(running[0], messages[:count])
                for count in reference.bounds(f"w{worker}", number, len(messages))
            ]
            for number, messages in enumerate(conversations)
            for worker in range(3)
        }
        maps = [
            await asyncio.gather(*(explained(each, c, "kvaware") for c in conversations)) for each in running
        ]
        cached = await asyncio.gather(*(cached_tokens(workers, c) for c in conversations))

    assert len(failed_began) <= 3 * 12
    assert all(any(0 <= at - began < 5 for at in killed_at) for began in failed_began), (
        "it began after a kill"
    )
    for history in histories:
        for number, (_, ranking) in enumerate(history):
            assert max(row["matched_tokens"] for row in ranking.values()) > 0
            for worker, row in ranking.items():
                least, most = bounds[number, worker]
                # Matches are whole blocks of the engine (16 tokens), and never a prompt's last token. The
                # history has whole blocks of bytes, and at most as many tokens as bytes.
                assert least - BLOCK_BYTES - 17 <= row["matched_tokens"] <= most + 17, worker
    for seen in maps:
        assert [{name: row["tiers"]["gpu"] for name, row in ranking.items()} for _, ranking in seen] == cached


async def explained(
    at: Gateway, messages: list[dict[str, str]], strategy: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The tokens of a conversation, and the ranking by worker, as this gateway sees them."""
    body, header = {"model": MODEL, "messages": messages}, {"x-kvroute-strategy": strategy}
    answer = (await at.client.post("/v1/route/explain", json=body, headers=header)).json()
    return answer["prompt_tokens"], {row["worker"]: row for row in answer["ranking"]}


async def tokens_of(at: Gateway, messages: list[dict[str, str]]) -> int:
    return (await explained(at, messages, "kvaware"))[0] if messages else 0


async def cached_tokens(workers: Sequence[str], messages: list[dict[str, str]]) -> dict[str, int]:
    """Worker -> tokens of the conversation that it has cached, as its own answer says."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    found = {}
    for number, url in enumerate(workers):
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False) as client:
            usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
        found[f"w{number}"] = usage["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_a_gateway_starts_without_redis_and_joins_later():
    server = RedisServer()
    async with sims(2) as workers, AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(gateway(name, server.url, workers)) for name in ("g1", "g2")
        ]
        one, other = running
        assert "cannot be reached" in (await one.notes())[0]
        prompt = words(random.Random(2), 300)
        assert (await chat(one, prompt)).status_code == 200

        await server.start()
        stack.push_async_callback(server.kill)
        await until(lambda: all_alive(running), within_s=DEADLINE_S)

        assert await one.notes() == []
        await until(lambda: other.knows(prompt), within_s=DEADLINE_S)

        server.pause()

        async def is_noted() -> bool:
            return "does not deliver" in " ".join(await one.notes())

        await until(is_noted, within_s=DEADLINE_S)
        assert (await chat(one, "Hello?")).status_code == 200
        server.proceed()
        await until(lambda: all_alive(running), within_s=DEADLINE_S)


CHUNK = 16
PROMPT = random.Random(7).choices(range(10, 900), k=10 * CHUNK + 5)


def coordinator(port: int) -> tuple[str, ...]:
    """The options of a gateway that LMCache can report to."""
    options = {
        "routing.strategy": "kvaware",
        "tokens.timeout_ms": 10_000,
        "lmcache.coordinator.enabled": "true",
        "lmcache.coordinator.listen": f"127.0.0.1:{port}",
    }
    return tuple(part for name, value in options.items() for part in ("--set", f"{name}={value}"))


async def in_l1(at: Gateway, tokens: Sequence[int]) -> int:
    """Tokens of a prompt that this gateway places in the L1 of worker w0."""
    body = {"model": MODEL, "prompt": list(tokens), "max_tokens": 4}
    explained = (await at.client.post("/v1/route/explain", json=body)).json()
    (row,) = (row for row in explained["ranking"] if row["worker"] == "w0")
    return int((row["tiers"] or {}).get("l1", 0))


async def test_another_gateway_takes_over_the_reports_of_lmcache():
    """Its map is that of the gateway that has died, once LMCache's next report shows that none is missing."""
    ports = [free_port() for _ in range(3)]
    async with redis_server() as server, sims(1) as workers, AsyncExitStack() as stack:

        def start(number: int) -> Any:
            return gateway(f"g{number}", server.url, workers, *coordinator(ports[number]))

        one, two = await enter(stack, *map(start, range(2)))
        lmcache = ReportingServer("w0", f"127.0.0.1:{ports[0]}", CHUNK)
        await lmcache.beat()
        await lmcache.store(PROMPT)
        await lmcache.delete(PROMPT[: 2 * CHUNK])
        await lmcache.store(PROMPT[: 2 * CHUNK])

        def sees(at: Gateway, tokens: int, prompt: Sequence[int] = PROMPT) -> Any:
            async def seen() -> bool:
                return await in_l1(at, prompt) == tokens

            return seen

        await until(sees(one, 10 * CHUNK), within_s=DEADLINE_S)
        await until(sees(two, 10 * CHUNK), within_s=DEADLINE_S)
        one.process.send_signal(signal.SIGKILL)
        await one.process.wait()
        await until(sees(two, 0), within_s=3)
        assert "LMCache server 'w0': not_reporting" in (await two.answer("/ready"))["notes"]

        lmcache.coordinator = f"127.0.0.1:{ports[1]}"
        await lmcache.beat()  # 404
        await lmcache.beat()
        await until(sees(two, 10 * CHUNK), within_s=DEADLINE_S)
        (three,) = await enter(stack, start(2))
        await until(sees(three, 10 * CHUNK), within_s=DEADLINE_S)
        await lmcache.delete(PROMPT)
        for each in (two, three):
            await until(sees(each, 0), within_s=DEADLINE_S)
        await lmcache.store(PROMPT[: 4 * CHUNK])
        for each in (two, three):
            await until(sees(each, 4 * CHUNK), within_s=DEADLINE_S)
        assert lmcache.lost == 0

        await server.kill()  # the reports of this time are in no message
        await lmcache.store(PROMPT)
        await until(sees(two, 10 * CHUNK), within_s=DEADLINE_S)
        await until(sees(three, 0), within_s=DEADLINE_S)
        await server.start()

        async def is_whole_again() -> bool:
            await lmcache.beat()  # every 5 s in life
            return await in_l1(three, PROMPT) == 10 * CHUNK

        await until(is_whole_again, within_s=DEADLINE_S)


async def test_several_processes_of_two_gateways_share_everything():
    async with redis_server() as server, sims(2) as workers, AsyncExitStack() as stack:
        processes = ("--processes", "2")
        one, other = await enter(
            stack, *(gateway(name, server.url, workers, *processes) for name in ("g1", "g2"))
        )
        prompt = words(random.Random(3), 300)
        assert (await chat(one, prompt)).status_code == 200

        async def knows_everywhere() -> bool:
            known = []
            for _ in range(6):  # new connections, which reach both processes
                async with httpx.AsyncClient(base_url=other.client.base_url, trust_env=False) as client:
                    known.append(await Gateway("g2", other.process, client).knows(prompt))
            return all(known)

        await until(knows_everywhere, within_s=DEADLINE_S)
        assert {name for name in await one.members() if name.startswith("g2/")} == {"g2/0", "g2/1"}


async def test_an_acl_user_needs_two_commands_on_the_fleets_channels_only():
    acl = ("--user", "gw", "on", ">secret-word", "resetchannels", "&kvroute:f1:*", "+publish", "+subscribe")
    async with redis_server(*acl) as server, sims(1) as workers, AsyncExitStack() as stack:
        url = f"redis://gw@127.0.0.1:{server.port}"
        secret = {"KVROUTE__SHARING__PASSWORD": "secret-word"}
        allowed = ("--set", "sharing.fleet=f1")
        await enter(stack, *(gateway(n, url, workers, *allowed, env=secret) for n in ("g1", "g2")))
        refused = await stack.enter_async_context(
            gateway("g3", url, workers, "--set", "sharing.fleet=f2", env=secret)
        )
        wrong = await stack.enter_async_context(
            gateway("g4", url, workers, *allowed, env={"KVROUTE__SHARING__PASSWORD": "wrong-word"})
        )

        assert "does not permit" in (await refused.notes())[0]
        assert "refuses the user or password" in (await wrong.notes())[0]
        assert "-word" not in "".join(refused.log + wrong.log)


async def test_redis_is_reached_over_tls(tmp_path):
    authority = Authority(tmp_path)
    files = authority.issue("redis")
    client = authority.issue("gateway")
    tls = ("--tls-cert-file", str(files.cert), "--tls-key-file", str(files.key))
    async with (
        redis_server(*tls, "--tls-ca-cert-file", str(authority.file), tls=True) as server,
        sims(1) as workers,
        AsyncExitStack() as stack,
    ):
        trusted = (
            *("--set", f"sharing.tls.ca_file={authority.file}"),
            *("--set", f"sharing.tls.cert_file={client.cert}", "--set", f"sharing.tls.key_file={client.key}"),
        )
        await enter(stack, *(gateway(n, server.url, workers, *trusted) for n in ("g1", "g2")))
        stranger = await stack.enter_async_context(gateway("g3", server.url, workers))

        assert "TLS certificate" in (await stranger.notes())[0]


async def test_without_a_key_only_drains_stay_in_their_gateway():
    no_key = {"KVROUTE__SHARING__KEY": ""}
    async with redis_server() as server, sims(2) as workers, AsyncExitStack() as stack:
        one, other = await enter(stack, *(gateway(n, server.url, workers, env=no_key) for n in ("g1", "g2")))
        await one.client.post("/admin/workers/w1/drain")
        prompt = words(random.Random(4), 300)
        assert (await chat(one, prompt)).status_code == 200

        await until(lambda: other.knows(prompt), within_s=DEADLINE_S)
        assert (await other.answer("/admin/workers/w1"))["state"] == "healthy"
        assert any("without sharing.key" in line for line in one.log)
        page = (await one.client.get("/metrics")).text
        assert re.search(r'kvroute_sharing_members\{process="0",state="alive"\} 1', page)
        assert re.search(r'kvroute_sharing_member_info\{epoch="\w{16}",member="g1/0",process="0"\} 1', page)


async def test_a_limit_of_a_key_holds_for_all_gateways_together(tmp_path):
    keys = tmp_path / "keys.json"
    hashed = "sha256:" + hashlib.sha256(b"team-key").hexdigest()
    keys.write_text(
        json.dumps({"keys": [{"name": "team", "hash": hashed, "limits": {"requests_per_minute": 1}}]})
    )
    file = ("--set", f"server.client_keys.file={keys}")
    key = {"authorization": "Bearer team-key"}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 4}
    async with redis_server() as server, sims(1) as workers, AsyncExitStack() as stack:
        both = await enter(stack, *(gateway(n, server.url, workers, *file) for n in ("g1", "g2")))

        async def ask(at: Gateway) -> int:
            return (await at.client.post("/v1/chat/completions", json=body, headers=key)).status_code

        assert await ask(both[0]) == 200

        async def is_refused() -> bool:
            return await ask(both[1]) == 429

        await until(is_refused, within_s=5)
        # Of the uses of one gateway, the other learns after 20 ms and the way through Redis.
        late = await stack.enter_async_context(gateway("g3", server.url, workers, *file))
        assert await ask(late) == 429
