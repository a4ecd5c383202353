"""The black-box tests themselves: they run a real gateway and import nothing of kvroute."""

import ast
from pathlib import Path

import httpx
import pytest
from tests.support.workers import scripted_worker


def test_nothing_here_imports_kvroute():
    imported = set()
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])

    assert "kvroute" not in imported
    assert "asyncio" in imported


async def test_a_gateway_relays_a_chat_and_ends_with_zero(serve, sim):
    gateway = await serve("--worker", await sim("--time-scale", "0"))
    message = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}]}

    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        answer = await client.post(f"{gateway.url}/v1/chat/completions", json=message)

    assert answer.status_code == 200
    assert answer.json()["choices"]
    assert await gateway.stop() == 0


@pytest.mark.parametrize("count", [1, 2])
async def test_each_process_knows_its_workers_before_it_accepts_connections(run, count):
    async with scripted_worker() as worker:
        worker.may_pass_probes.clear()
        gateway = await run(
            "serve", "--port", "0", "--worker", worker.url, "--processes", str(count),
            "--set", "logging.level=debug",
        )  # fmt: skip
        await gateway.logged("are in huge pages", count)  # almost the last step of the start
        worker.may_pass_probes.set()
        opened = "listens on" if count == 1 else "accepts connections"
        await gateway.logged(opened, count)

        healthy, known = 0, []
        for line in gateway.lines:
            healthy += "is healthy" in line
            if opened in line:
                known.append(healthy)
        assert known[0] >= 1
        assert known[-1] == count
