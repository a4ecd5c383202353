"""The black-box tests themselves: they run a real gateway and import nothing of kvroute."""

import ast
from pathlib import Path

import httpx


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
