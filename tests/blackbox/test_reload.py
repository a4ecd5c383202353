"""The configuration of a running gateway changes: all or nothing, and no request is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from tests.support.waiting import until

CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8}
DEADLINE_S = 60.0
ADMIN_KEY = "admin-key-of-the-test"


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False)


def write(file: Path, workers: list[str], more: str = "") -> None:
    """Replace the file at once, as a ConfigMap does."""
    new = file.with_suffix(".new")
    listed = "".join(f"    - {url}\n" for url in workers)
    new.write_text(f"admin:\n  api_key: {ADMIN_KEY}\nfleet:\n  workers:\n{listed}{more}")
    new.rename(file)


async def in_force(url: str) -> dict:
    async with client_of(url) as client:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return (await client.get("/admin/config", headers=headers)).json()


async def strategy_of(url: str) -> str:
    async with client_of(url) as client:  # with several processes each connection may reach another one
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        return answer.headers["x-kvroute-strategy"]


async def until_strategy(url: str, name: str, *, times: int = 1) -> None:
    """Wait until `times` new connections in a row are served with the strategy."""
    seen = 0
    async with asyncio.timeout(DEADLINE_S):
        while seen < times:
            seen = seen + 1 if await strategy_of(url) == name else 0


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "kvroute.yaml"


@pytest.mark.parametrize("lane", ["on", "off"])
async def test_reloads_under_load_lose_no_request(serve, sim, file, lane):
    workers = [await sim("--time-scale", "0.02") for _ in range(2)]
    write(file, workers)
    gateway = await serve("-c", str(file), "--set", f"server.fast_lane={lane}", workers=2)
    stop, statuses, strategies = False, [], set()

    async def load(streamed: bool) -> None:
        async with client_of(gateway.url) as client:
            while not stop:
                answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": streamed})
                statuses.append(answer.status_code)
                strategies.add(answer.headers.get("x-kvroute-strategy"))
                assert not streamed or "[DONE]" in answer.text, answer.text

    clients = [asyncio.create_task(load(number % 2 == 0)) for number in range(8)]
    for number in range(10):
        strategy = ("roundrobin", "prefixaware")[number % 2]
        write(
            file,
            workers if number % 3 else workers[:1],
            f"routing:\n  strategy: {strategy}\nupstream:\n  keepalive_s: {3 + number % 2}\n",
        )
        gateway.process.send_signal(signal.SIGHUP)
        await until_strategy(gateway.url, strategy)
    stop = True
    await asyncio.gather(*clients)

    assert set(statuses) == {200}
    assert strategies >= {"roundrobin", "prefixaware"}
    assert "Traceback" not in gateway.log
    assert "unhealthy" not in gateway.log
    assert await gateway.stop() == 0


async def test_an_invalid_file_is_refused_with_its_line_and_the_old_one_stays(serve, sim, file):
    workers = [await sim("--time-scale", "0")]
    write(file, workers, "routing:\n  strategy: roundrobin\n")
    gateway = await serve("-c", str(file), workers=1)
    before = await in_force(gateway.url)
    write(file, workers, "routing:\n  strategy: prefixaware\nretries:\n  budget_percent: 700\n")
    gateway.process.send_signal(signal.SIGHUP)
    line = await gateway.logged("the configuration is refused")
    after = await in_force(gateway.url)

    assert "retries.budget_percent" in line
    assert "kvroute.yaml:" in line
    assert await strategy_of(gateway.url) == "roundrobin"
    assert before["in_force"]["last_refused"] is None
    assert "retries.budget_percent" in after["in_force"]["last_refused"]["problems"][0]
    assert {**after["in_force"], "last_refused": None} == before["in_force"]
    assert after["in_force"]["source"] == str(file)
    assert ADMIN_KEY not in str(after)


async def test_a_change_that_needs_a_restart_is_refused_by_name_and_nothing_is_applied(serve, sim, file):
    workers = [await sim("--time-scale", "0")]
    write(file, workers, "routing:\n  strategy: roundrobin\n")
    gateway = await serve("-c", str(file), workers=1)
    write(file, workers, "routing:\n  strategy: prefixaware\nserver:\n  keep_alive_s: 5\n")
    gateway.process.send_signal(signal.SIGHUP)
    line = await gateway.logged("the configuration is refused")

    assert "server.keep_alive_s: cannot change while the gateway runs" in line
    assert await strategy_of(gateway.url) == "roundrobin"


async def test_a_changed_file_is_loaded_without_a_signal(serve, sim, file):
    workers = [await sim("--time-scale", "0")]
    poll = "server:\n  config_poll_s: 0.05\n"
    write(file, workers, poll)
    gateway = await serve("-c", str(file), workers=1)
    write(file, workers, f"{poll}routing:\n  strategy: roundrobin\n")

    await until_strategy(gateway.url, "roundrobin")
    assert "changed: routing.strategy" in await gateway.logged("loaded again")


async def test_a_raised_limit_starts_a_request_that_waits(serve, sim, file):
    workers = [await sim("--time-scale", "100")]
    write(file, workers, "admission:\n  max_concurrent: 1\n  max_wait_s: 600\n")
    gateway = await serve("-c", str(file), workers=1)

    async with client_of(gateway.url) as client:

        async def shows(text: str) -> bool:
            return text in (await client.get("/metrics")).text

        waiting = 'kvroute_queue_waiting{key="-",model="sim-model"} '
        asking = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(2)]
        await until(lambda: shows(waiting + "1.0"), within_s=DEADLINE_S)
        write(file, workers, "admission:\n  max_concurrent: 2\n  max_wait_s: 600\n")
        gateway.process.send_signal(signal.SIGHUP)
        await until(lambda: shows(waiting + "0.0"), within_s=DEADLINE_S)
        await until(lambda: shows("kvroute_requests_in_flight 2.0"), within_s=DEADLINE_S)
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)


async def test_all_processes_apply_a_change_and_a_replaced_one_has_it(serve, sim, file):
    workers = [await sim("--time-scale", "0")]
    write(file, workers, "routing:\n  strategy: session\n")
    gateway = await serve("-c", str(file), "--processes", "2", workers=2)
    write(file, workers, "routing:\n  strategy: roundrobin\n")
    gateway.process.send_signal(signal.SIGHUP)
    await until_strategy(gateway.url, "roundrobin", times=20)
    write(file, workers, "routing:\n  strategy: nothing\n")
    gateway.process.send_signal(signal.SIGHUP)
    await gateway.logged("the configuration is refused")
    line = next(line for line in gateway.lines if "process 1 of 2 has pid" in line)
    os.kill(int(line.split("has pid ")[1].split('"')[0]), signal.SIGKILL)
    await until(
        lambda: sum("process 1 of 2 has pid" in line for line in gateway.lines) >= 2, within_s=DEADLINE_S
    )

    await until_strategy(gateway.url, "roundrobin", times=20)
    write(file, workers, "routing:\n  strategy: session\n")  # the replaced process can read session keys, too
    gateway.process.send_signal(signal.SIGHUP)
    await until_strategy(gateway.url, "session", times=20)
    assert await gateway.stop() == 0
