"""The faults of the chaos run: each breaks something, and has mended it when it returns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from itertools import cycle
from random import Random
from typing import Final

import httpx

from chaos_hostile import hostile_messages, members
from chaos_setting import LOADED, PROCESSES, REFUSED, WORKERS, Killed, Setting, error_code, has_sockets, until
from chaos_traffic import MODEL, words

PERIOD_S = 5.0
LASTS_S = 3.0
"""A fault ends this long after its beginning; a killed process needs up to a second more to start."""
REPEATS_S = (0.0, 0.5, 1.0)
"""OpenAI's clients repeat a request that ends in 502 twice, after these pauses."""
REFUSED_BODY = "request_lost_workers"
PROBED_PATHS = ("/metrics", "/v1/models", "/is_", "/version", "/kv_event_sources", "/health")
MANY_S = 60.0
"""For conditions of a machine that may be very busy."""

Break = Callable[[Setting, int], Awaitable[None]]


async def kill(made: Setting, worker: int) -> None:
    await made.workers[worker].kill()
    await asyncio.sleep(LASTS_S / 3)
    began = asyncio.get_running_loop().time()
    await made.start_worker(worker)
    await asyncio.sleep(max(0.0, began + 2 * LASTS_S / 3 - asyncio.get_running_loop().time()))


async def hang(made: Setting, worker: int) -> None:
    made.workers[worker].send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(LASTS_S)
    finally:
        made.workers[worker].send_signal(signal.SIGCONT)


async def reset(made: Setting, worker: int) -> None:
    for after in (0, 3, 9, None):
        await made.fault(worker, kind="reset", count=1, after_chunks=after)
        await asyncio.sleep(LASTS_S / 4)
    await made.no_fault(worker)


async def slow(made: Setting, worker: int) -> None:
    await made.fault(worker, kind="slow", count=None, delay_s=1.5)
    await asyncio.sleep(LASTS_S)
    await made.no_fault(worker)


async def errors(made: Setting, worker: int) -> None:
    await made.fault(worker, kind="status", count=None, status=500 if worker % 2 else 503)
    await asyncio.sleep(LASTS_S)
    await made.no_fault(worker)


async def lose_events(made: Setting, worker: int) -> None:
    await made.fault(worker, kind="drop_events", count=None)
    await asyncio.sleep(LASTS_S)
    await made.no_fault(worker)


async def flap(made: Setting, worker: int) -> None:
    made.write_workers(without=worker)
    await asyncio.sleep(LASTS_S)
    made.write_workers()


async def reload(made: Setting, worker: int) -> None:
    """Other keys; then a configuration with another strategy, an invalid one, and a valid one again."""
    made.write_keys()
    made.write_config(strategy="roundrobin")
    await made.reload(LOADED)
    await asyncio.sleep(LASTS_S / 3)
    made.write_invalid_config()
    await made.reload(REFUSED)
    await asyncio.sleep(LASTS_S / 3)
    made.write_config()
    await made.reload(LOADED)


async def redis_away(made: Setting, worker: int) -> None:
    await made.redis.kill()
    await asyncio.sleep(LASTS_S)
    await made.redis.start()


async def kill_process(made: Setting, worker: int) -> None:
    loop = asyncio.get_running_loop()
    killed = Killed(loop.time())
    made.kills.append(killed)
    pid = made.process_ids()[worker % PROCESSES]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    # A process needs a core to end, and its listening sockets accept connections until then.
    while has_sockets(pid):  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(0.01)
    killed.gone_s = loop.time()
    await asyncio.sleep(max(0.0, killed.at_s + LASTS_S - loop.time()))


async def poison(made: Setting, worker: int) -> None:
    """A body that kills the worker that reads it, and a client that repeats it."""
    await _poison(made, 0.0)


async def slow_death(made: Setting, worker: int) -> None:
    """A body that kills its worker after a second."""
    await _poison(made, 1.0)


async def _poison(made: Setting, delay_s: float) -> None:
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    lethal = Killed(began)
    made.lethal.append(lethal)
    marker = f"poison-{len(made.lethal)}"
    for worker in range(WORKERS):
        await made.fault(worker, kind="kill", count=None, marker=marker, delay_s=delay_s)
    body = {
        "model": MODEL,
        "prompt": f"{marker} {words(Random(marker), 40)}",
        "max_tokens": 8,
        "request_id": marker,
    }
    answers = []
    for pause_s in REPEATS_S:
        await asyncio.sleep(pause_s)
        answer = await made.ask(body)
        answers.append((answer.status_code, error_code(answer)))
    if any(status != 502 for status, _ in answers) or answers[-1][1] != REFUSED_BODY:
        made.problems.append(f"{marker} was answered with {answers}")
    dead = []
    for worker in range(WORKERS):
        try:
            await made.no_fault(worker)
        except httpx.TransportError:
            await made.workers[worker].kill()
            dead.append(worker)
    await asyncio.gather(*(made.start_worker(worker) for worker in dead))
    lethal.gone_s = loop.time()
    await asyncio.sleep(max(0.0, began + LASTS_S - loop.time()))


async def back_pressure(made: Setting, worker: int) -> None:
    """All workers refuse what they cannot compute at once, half of them by requests and half by tokens."""
    for each in range(WORKERS):
        limit = {"max_queued_requests": made.sequences} if each % 2 else {"max_queued_tokens": 600}
        await made.fault(each, **limit)
    await asyncio.sleep(LASTS_S)
    for each in range(WORKERS):
        await made.fault(each, max_queued_requests=0, max_queued_tokens=0)


async def foreign_load(made: Setting, worker: int) -> None:
    """Requests that come to a worker from elsewhere."""
    random = Random(f"foreign-{len(made.faults)}")
    url = f"{made.url(worker)}/v1/completions"
    body = {"model": MODEL, "max_tokens": 400, "ignore_eos": True}
    asked = [
        asyncio.create_task(made.control.post(url, json={**body, "prompt": words(random, 100)}))
        for _ in range(12)
    ]
    await asyncio.sleep(LASTS_S)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def asleep(made: Setting, worker: int) -> None:
    """A worker is put to sleep, or paused, in the middle of its requests."""
    began, ended = ("sleep", "wake_up") if worker % 2 else ("pause", "resume")
    await made.control.post(f"{made.url(worker)}/{began}")
    await asyncio.sleep(LASTS_S)
    await made.control.post(f"{made.url(worker)}/{ended}")


async def hostile_redis(made: Setting, worker: int) -> None:
    """Somebody who has no key writes to Redis, and then a drain by the other gateway arrives all the same."""
    loop = asyncio.get_running_loop()
    began, sent = loop.time(), 0
    async with made.redis_client() as redis:
        channel, heard = await members(redis)
        if len(heard) <= PROCESSES:
            made.problems.append(f"{len(heard)} members write to the Redis")
        for message in hostile_messages(heard, Random(sent)):
            await redis.publish(channel, message)
            sent += 1
            await asyncio.sleep(0.002)
    await asyncio.sleep(max(0.0, began + LASTS_S - loop.time()))
    path = f"/admin/workers/w{worker}/drain"
    for method, is_draining in (("POST", True), ("DELETE", False)):
        answer = await made.control.request(method, f"{made.neighbour_url}{path}", headers=made.admin)
        answer.raise_for_status()

        async def has_arrived(wanted: bool = is_draining) -> bool:
            rows = (await made.control.get(f"{made.gateway_url}/admin/workers", headers=made.admin)).json()
            return any(
                row["id"] == f"w{worker}" and (row["state"] == "draining") is wanted
                for row in rows["workers"]
            )

        if await until(has_arrived, MANY_S) is None:
            made.problems.append(f"{method} of a drain at the other gateway has not arrived")


async def hostile_probes(made: Setting, worker: int) -> None:
    """A worker answers every probe with a gzip bomb or without an end; its requests are right."""
    for first, paths in (("bomb", PROBED_PATHS[:-1]), ("endless", PROBED_PATHS)):
        kinds = cycle((first, "endless" if first == "bomb" else "bomb"))
        for path, kind in zip(paths, kinds, strict=False):
            await made.fault(worker, kind=kind, count=None, path=path)
        await asyncio.sleep(LASTS_S / 2)
        await made.no_fault(worker)


FAULTS: Final[Mapping[str, Break]] = {
    "kill": kill,
    "hang": hang,
    "reset": reset,
    "slow first byte": slow,
    "5xx burst": errors,
    "event loss": lose_events,
    "discovery flap": flap,
    "config reload": reload,
    "redis away": redis_away,
    "gateway process killed": kill_process,
    "poison": poison,
    "slow death": slow_death,
    "back-pressure": back_pressure,
    "foreign load": foreign_load,
    "asleep": asleep,
    "hostile redis": hostile_redis,
    "hostile probes": hostile_probes,
}


async def break_things(made: Setting, seed: int, seconds: float, kinds: Mapping[str, Break]) -> None:
    """One fault every `PERIOD_S`, each kind once before one comes again."""
    random, loop = Random(seed), asyncio.get_running_loop()
    began, queue = loop.time(), list[str]()
    number = 0
    while (number + 1) * PERIOD_S <= seconds:
        queue = queue or random.sample(list(kinds), len(kinds))
        name, worker = queue.pop(), random.randrange(WORKERS)
        await asyncio.sleep(max(0.0, began + number * PERIOD_S + 0.5 - loop.time()))
        print(f"{loop.time() - began:6.1f} s  {name} (w{worker})", file=sys.stderr, flush=True)
        made.faults.append(name)
        await kinds[name](made, worker)
        made.ended_s = loop.time()
        number += 1
