"""SIGTERM and start-up of the real process."""

import asyncio
import json
import os
import signal
import sys

import httpx
import pytest

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

STREAM = {
    "model": "sim-model",
    "messages": [{"role": "user", "content": "Hi."}],
    "stream": True,
    "max_tokens": 40,
    "ignore_eos": True,
}


async def start(*arguments: str) -> tuple[asyncio.subprocess.Process, str]:
    """A `kvroute serve` of its own on a free port, and its URL once it listens and has a worker."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvroute", "serve", "--port", "0", "--set", "logging.format=json", *arguments,
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    url, is_healthy = "", False
    async for line in process.stderr:
        message = json.loads(line)["message"]
        if "listens on" in message:
            url = message.rsplit(" ", 1)[1]
        is_healthy = is_healthy or "is healthy" in message  # before it listens, unless the probe takes long
        if url and is_healthy:
            break
    return process, url


async def rest_of(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    return (await process.stderr.read()).decode()


@pytest.mark.parametrize("lane", ["on", "off"])
async def test_sigterm_lets_streams_finish_and_exits_with_zero(lane):
    async with run_sim(SimOptions(time_scale=1)) as sim, httpx.AsyncClient(timeout=30) as client:
        process, url = await start("--worker", sim.url, "--set", f"server.fast_lane={lane}")
        async with client.stream("POST", f"{url}/v1/chat/completions", json=STREAM) as answer:
            chunks = answer.aiter_raw()
            received = await anext(chunks)
            process.send_signal(signal.SIGTERM)
            async for chunk in chunks:
                received += chunk
        log = await rest_of(process)

        assert received.endswith(b"data: [DONE]\n\n")
        assert await process.wait() == 0
        assert "shutting down: waiting for 1 requests" in log


@pytest.mark.parametrize("lane", ["on", "off"])
async def test_streams_beyond_the_limit_are_cut_with_an_error_event(lane):
    async with run_sim(SimOptions(fixed_s=0.5)) as sim, httpx.AsyncClient(timeout=30) as client:
        process, url = await start(
            "--worker", sim.url, "--set", "server.drain_timeout_s=0.2", "--set", f"server.fast_lane={lane}"
        )
        async with client.stream("POST", f"{url}/v1/chat/completions", json=STREAM) as answer:
            chunks = answer.aiter_raw()
            received = await anext(chunks)
            process.send_signal(signal.SIGTERM)
            async for chunk in chunks:
                received += chunk
        await rest_of(process)

        assert json.loads(received.rsplit(b"data: ", 1)[1])["error"]["code"] == "shutting_down"
        assert await process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_gateway_ends_immediately(number):
    async with run_sim(SimOptions(time_scale=0)) as sim:
        process, _ = await start("--worker", sim.url)
        process.send_signal(number)
        await rest_of(process)

        assert await process.wait() == 0


async def test_a_port_in_use_is_reported_with_exit_code_one():
    async with run_sim(SimOptions(time_scale=0)) as sim:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvroute", "serve", "--port", str(sim.port), "--worker", sim.url,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        log = await rest_of(process)

        assert await process.wait() == 1
        assert f"cannot listen on 127.0.0.1:{sim.port}: port {sim.port} is in use by another program" in log
        assert "--port" in log
        assert "Errno" not in log
        assert "Traceback" not in log
