"""The image in the place of production-stack's router: its Helm chart's container, its end-to-end script.

`tests/data/production_stack` says where the facts come from. Nothing here is that project's text.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.blackbox.test_discovery import PodApi, pod, pod_api
from tests.support.sockets import free_port, tcp_server
from tests.support.waiting import until
from tests.support.workers import scripted_worker

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "production_stack"
CHART = yaml.safe_load((DATA / "router_containers.yaml").read_text())
CONTAINERS = {name: spec for name, spec in CHART.items() if name not in ("env", "probes")}
MODEL = "facebook/opt-125m"
SESSION = "x-user-id"

# What the end-to-end script searches in the router's log.
routing_line = re.compile(
    r"Routing request ([^ ]*) with session id ([^ ]*) to ([^ ]*) at .*process time"
).search


def image() -> tuple[list[str], dict[str, str]]:
    """The image's entry point after `kvroute`, and its environment."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[-1])
    assert entry[0] == "kvroute"
    last = re.findall(r"^ENV (.*)$", text, re.MULTILINE)[-1]
    return entry[1:], dict(re.findall(r"(KVROUTE__\w+)=(\S+)", last))


@pytest.fixture
async def workers(sim) -> list[str]:
    """Two workers on two addresses of one port, as pods have them."""
    first = await sim("--model", MODEL, "--time-scale", "0", "--host", "127.0.0.1")
    port = httpx.URL(first).port
    return [
        first,
        await sim("--model", MODEL, "--time-scale", "0", "--host", "127.0.0.2", "--port", str(port)),
    ]


@asynccontextmanager
async def kubernetes(workers: Sequence[str]) -> AsyncIterator[PodApi]:
    pods = []
    for place, url in enumerate(map(httpx.URL, workers)):
        found: dict[str, Any] = pod(f"vllm-{place}", url.port or 80)
        found["status"]["podIP"] = url.host
        pods.append(found)
    async with pod_api(pods) as api:
        yield api


@asynccontextmanager
async def healthy(process: Any, url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway, once its probe passes, as the chart's startup probe demands."""
    probe = CHART["probes"]
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:

        async def passes() -> bool:
            assert process.process.returncode is None, process.log
            try:
                return (await client.get(probe["path"])).status_code == 200
            except httpx.TransportError:
                return False

        seconds = probe["initialDelaySeconds"] + probe["periodSeconds"] * probe["failureThreshold"]
        await until(passes, within_s=seconds * 2)  # twice: the machine of a test is slower
        yield client


@pytest.mark.parametrize("name", CONTAINERS)
async def test_the_charts_container_works_with_this_image(name, run, workers, tmp_path):
    spec = CONTAINERS[name]
    arguments, environ = image()
    port = free_port()
    dynamic = tmp_path / "dynamic.yaml"
    dynamic.write_text(yaml.safe_dump({"service_discovery": "static", "routing_logic": "roundrobin"}))
    words = {
        "HTTP_PORT": str(port),
        "WORKER_PORT": str(httpx.URL(workers[0]).port),
        "STATIC_BACKENDS": ",".join(workers),
        "STATIC_MODELS": f"{MODEL},{MODEL}",
        "DYNAMIC_FILE": str(dynamic),
        **{word: str(free_port()) for word in ("PULL_PORT", "REPLY_PORT", "BEAT_PORT")},
    }
    state = "/proc/none" if spec.get("has_no_state_folder") else str(tmp_path / "state")
    async with kubernetes(workers) as api:
        gateway = await run(
            *arguments,
            *(words.get(word, word) for word in spec["args"]),
            env={
                **environ,
                **CHART["env"],
                **spec.get("env", {}),
                "XDG_STATE_HOME": state,
                # Instead of the cluster's own API and service account.
                "KVROUTE__FLEET__KUBERNETES__API_URL": api.url,
            },
        )
        async with healthy(gateway, f"http://127.0.0.1:{port}") as client:

            async def engines() -> bool:
                return len((await client.get("/engines")).json()) == 2

            await until(engines, within_s=30)
            root = spec.get("root_path", "")
            body = {"model": MODEL, "prompt": "Hello!", "max_tokens": 4}
            answer = await client.post(f"{root}/v1/completions", json=body, headers={SESSION: "s1"})
            models = (await client.get(f"{root}/v1/models")).json()
            metrics = (await client.get("/metrics")).text

    assert answer.status_code == 200, answer.text
    assert [card["id"] for card in models["data"]] == [MODEL]
    assert answer.headers["x-kvroute-strategy"] == spec["strategy"]
    assert 'vllm:num_incoming_requests_total{model="facebook/opt-125m"} 1.0' in metrics
    assert "key-of-the-workers" not in gateway.log
    found = routing_line(gateway.log)
    assert found is not None
    assert found[2] == ("s1" if spec["strategy"] == "session" else "None")
    assert found[3] in workers


# --- the routing end-to-end script ------------------------------------------------------------------------


@asynccontextmanager
async def router(
    run: Any, workers: Sequence[str], logic: str, tmp_path: Path
) -> AsyncIterator[tuple[Any, Any]]:
    """The gateway with the script's command line, and a client; health, models and chat have answered."""
    port = free_port()
    gateway = await run(
        "vllm-router", "--port", str(port), "--service-discovery", "static",
        "--static-backends", ",".join(workers), "--static-models", f"{MODEL},{MODEL}",
        "--static-model-types", "chat,chat", "--log-stats", "--log-stats-interval", "10",
        "--engine-stats-interval", "10", "--request-stats-window", "10",
        "--prefill-model-labels", "prefill", "--decode-model-labels", "decode",
        "--static-model-labels", "prefill,decode", "--session-key", SESSION, "--routing-logic", logic,
        env={"XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    async with healthy(gateway, f"http://127.0.0.1:{port}") as client:

        async def is_ready() -> bool:
            models = (await client.get("/v1/models")).json()["data"]
            return bool(models) and len((await client.get("/engines")).json()) == len(workers)

        await until(is_ready, within_s=30)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 10, "temperature": 0.7}
        answer = await client.post(
            "/v1/chat/completions", json=body, headers={"authorization": "Bearer dummy"}
        )
        assert answer.status_code == 200
        yield gateway, client


async def places(gateway: Any, expected: int) -> dict[str, list[str]]:
    """Request id -> URLs of its workers in the order of the log, once `expected` lines are there.

    The script reads the file right after the last answer. A line is written before its request is sent, so
    only the pipe to this process takes time.
    """
    await until(lambda: sum("Routing request" in line for line in gateway.lines) >= expected, within_s=30)
    found: dict[str, list[str]] = defaultdict(list)
    for line in gateway.lines:
        if match := routing_line(line):
            found[match[1]].append(match[3])
    return found


async def complete(client: httpx.AsyncClient, request_id: str, prompt: str) -> None:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0.7, "max_tokens": 10}
    headers = {"authorization": "Bearer dummy", "x-request-id": request_id, SESSION: request_id}
    (await client.post("/v1/completions", json=body, headers=headers)).raise_for_status()


async def test_consecutive_requests_of_roundrobin_go_to_different_workers(run, workers, tmp_path):
    ids = [str(uuid.uuid4()) for _ in range(20)]
    async with router(run, workers, "roundrobin", tmp_path) as (gateway, client):
        for request_id in ids:
            await complete(client, request_id, f"This is request {request_id}.")
        found = await places(gateway, len(ids) + 1)

    order = [found[request_id] for request_id in ids]
    assert all(len(each) == 1 for each in order)
    assert all(one != other for one, other in pairwise(order))


async def test_each_session_stays_on_one_worker(run, workers, tmp_path):
    ids = [str(uuid.uuid4()) for _ in range(20)]
    async with router(run, workers, "session", tmp_path) as (gateway, client):
        for request_id in ids:
            for _ in range(5):
                await complete(client, request_id, "Hello!")
        found = await places(gateway, 5 * len(ids) + 1)
        sessions = {match[2] for line in gateway.lines if (match := routing_line(line))}

    assert sessions == {*ids, "None"}  # the chat has no session
    assert all(len(found[session]) == 5 and len(set(found[session])) == 1 for session in ids)
    assert len({found[session][0] for session in ids}) == 2


async def test_prefixaware_keeps_growing_and_shrinking_prompts_together(run, workers, tmp_path):
    def chunks(*words: str) -> str:
        return "".join(word * 128 for word in words)

    groups = [
        [chunks(*group[: end + 1]) for end in range(3)]
        for group in (
            ("1", "2", "3"),
            ("5", "6", "7"),
            ("8", "9", "10"),
            ("11", "12", "13"),
            ("14", "15", "16"),
        )
    ]
    groups.insert(1, [chunks("2", "3", "4"), chunks("2", "3"), chunks("2")])
    beginnings = [chunks(word) for word in ("1", "2", "5", "8", "11", "14")]
    ids = [str(uuid.uuid4()) for _ in groups]
    mixed = str(uuid.uuid4())
    async with router(run, workers, "prefixaware", tmp_path) as (gateway, client):
        for request_id, group in zip(ids, groups, strict=True):
            for prompt in group:
                for _ in range(5):
                    await complete(client, request_id, prompt)
        for prompt in beginnings:
            for _ in range(5):
                await complete(client, mixed, prompt)
        found = await places(gateway, 15 * len(groups) + 5 * len(beginnings) + 1)

    together = [set(found[request_id]) for request_id in ids]
    assert all(len(each) == 1 for each in together)
    assert set(found[mixed]) == set.union(*together)


async def test_both_legs_of_disaggregated_prefill_have_a_line(run, sim, tmp_path):
    prefill, decode = [await sim("--model", MODEL, "--time-scale", "0", "--nixl") for _ in range(2)]
    ids = [str(uuid.uuid4()) for _ in range(4)]
    async with router(run, [prefill, decode], "disaggregated_prefill", tmp_path) as (gateway, client):
        for request_id in ids:
            await complete(client, request_id, f"{request_id}: a long prompt for two workers. " * 100)
            await gateway.logged(f"Routing request {request_id} ", times=2)
        found = await places(gateway, 2 * len(ids))

    assert [found[request_id] for request_id in ids] == [[prefill, decode]] * len(ids)


async def test_the_worker_that_answers_has_a_line_if_the_prefill_worker_refuses(run, sim, tmp_path):
    async with scripted_worker({"id": MODEL, "object": "model"}) as broken:
        broken.answer = b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\n{}"
        decode = await sim("--model", MODEL, "--time-scale", "0", "--nixl")
        request_id = str(uuid.uuid4())
        async with router(run, [broken.url, decode], "disaggregated_prefill", tmp_path) as (gateway, client):
            await complete(client, request_id, "A long prompt for two workers. " * 100)
            await gateway.logged(f"Routing request {request_id} ", times=2)
            found = await places(gateway, 2)

    assert found[request_id] == [broken.url, decode]


async def test_kvaware_answers_and_logs_its_decisions(run, workers, tmp_path):
    request_id = str(uuid.uuid4())
    async with router(run, workers, "kvaware", tmp_path) as (gateway, client):
        await complete(client, request_id, "Hello!")
        found = await places(gateway, 2)

    assert found[request_id][0] in workers


async def test_a_changed_dynamic_file_changes_workers_strategy_session_key_and_aliases(
    run, workers, tmp_path
):
    port, file = free_port(), tmp_path / "dynamic.json"

    def write(**keys: Any) -> None:
        new = tmp_path / "new.json"
        new.write_text(json.dumps({"service_discovery": "static", **keys}))
        new.replace(file)

    one = {"static_backends": workers[0], "static_models": MODEL}
    two = {"static_backends": ",".join(workers), "static_models": f"{MODEL},{MODEL}"}
    write(**one)
    gateway = await run(
        "--port", str(port), "--routing-logic", "roundrobin", "--dynamic-config-json", str(file),
        env={
            "XDG_STATE_HOME": str(tmp_path),
            "KVROUTE__SERVER__CONFIG_POLL_S": "0.2",
            "KVROUTE__FLEET__KUBERNETES__API_URL": "http://127.0.0.1:9",
        },
    )  # fmt: skip
    async with healthy(gateway, f"http://127.0.0.1:{port}") as client:

        async def engines() -> int:
            return len((await client.get("/engines")).json())

        async def strategy() -> str:
            body = {"model": "an-alias", "prompt": "Hello!", "max_tokens": 4}
            answer = await client.post("/v1/completions", json=body, headers={"x-id": "s7"})
            return answer.headers.get("x-kvroute-strategy", "")

        async def has_changed() -> bool:
            return await engines() == 2 and await strategy() == "session"

        async def has_one_worker() -> bool:
            return await engines() == 1

        await until(has_one_worker, within_s=30)
        write(routing_logic="session", session_key="x-id", static_aliases=f"an-alias:{MODEL}", **two)
        await until(has_changed, within_s=30)
        await until(lambda: "with session id s7" in gateway.log, within_s=30)

        write(routing_logic="testing", **one)
        await gateway.logged("the configuration is refused, the old one stays in force: --routing-logic")
        write(routing_logic="roundrobin", service_discovery="k8s")
        await gateway.logged("fleet.kubernetes.enabled: cannot change while the gateway runs")
        assert await has_changed()
        file.write_text('{"service_discovery": "static" "routing_logic": "roundrobin"}')
        await gateway.logged(
            "the configuration is refused, the old one stays in force: --dynamic-config-json"
        )
        assert await has_changed()
        write(routing_logic="session", session_key="x-id", static_aliases=f"an-alias:{MODEL}", **one)
        await until(has_one_worker, within_s=30)
    assert await gateway.stop() == 0


async def test_a_static_worker_that_answers_500_gets_no_requests(run, workers, tmp_path):
    async def fails(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()

    port = free_port()
    async with tcp_server(fails) as failing:
        gateway = await run(
            "--port", str(port), "--service-discovery", "static", "--routing-logic", "roundrobin",
            "--static-backends", f"{workers[0]},http://127.0.0.1:{failing}",
            "--static-models", f"{MODEL},{MODEL}",
            "--static-model-types", "chat,chat", "--static-backend-health-checks",
            "--static-backend-health-check-interval", "1",
            env={"XDG_STATE_HOME": str(tmp_path)},
        )  # fmt: skip
        async with healthy(gateway, f"http://127.0.0.1:{port}") as client:

            async def has_one_engine() -> bool:
                return len((await client.get("/engines")).json()) == 1

            await until(has_one_engine, within_s=30)
            for number in range(4):
                await complete(client, f"r{number}", "Hello!")
            engines = (await client.get("/engines")).json()
        found = await places(gateway, 4)

    assert len(engines) == 1
    assert {url for urls in found.values() for url in urls} == {workers[0]}
