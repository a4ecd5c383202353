"""The gateway's own endpoints."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.sockets import free_port, tcp_server

from kvroute.deploy.plan import PlannedProcess, ProcessPlan
from kvroute.deploy.processes import ChildSpec
from kvroute.deploy.up import ready_text
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

LONG = "It was the best of times, it was the worst of times. " * 40
CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": LONG}], "max_tokens": 4}


@pytest.fixture
def lane():
    """These tests are about what both lanes share."""
    return "fast lane"


@pytest.fixture
async def two(run_gateway):
    async with run_sim(SimOptions(time_scale=0)) as one, run_sim(SimOptions(time_scale=0)) as other:
        yield [one.url, other.url]


async def test_explain_foretells_the_next_request(run_gateway, two):
    async with run_gateway(two) as gateway:
        for turn in range(12):
            body = {**CHAT, "messages": [{"role": "user", "content": f"{turn % 5} {LONG}"}]}
            foretold = (await gateway.client.post("/v1/route/explain", json=body)).json()
            again = (await gateway.client.post("/v1/route/explain", json=body)).json()
            answer = await gateway.client.post("/v1/chat/completions", json=body)

            assert foretold["worker"] == again["worker"] == answer.headers["x-kvroute-worker"]
            assert foretold["reason"] == answer.headers["x-kvroute-reason"]
            assert {entry["worker"] for entry in foretold["ranking"]} == {"w0", "w1"}
            terms = foretold["ranking"][0]["terms_s"]
            assert terms["prefill"] > 0
            assert foretold["ranking"][0]["score_s"] == pytest.approx(
                max(terms.pop("wait"), terms.pop("load")) + sum(terms.values())
            )


async def test_explain_forwards_nothing_and_accounts_nothing(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        answer = await gateway.client.post("/v1/route/explain", json=CHAT)

        assert answer.json()["ranking"][0]["matched_tokens"] == 0
        assert all(request.method == "GET" for request in instant_sim.worker.received)
        assert (await gateway.client.get("/admin/index")).json()["blocks"] == 0


async def test_explain_names_workers_that_were_filtered_out(run_gateway, two):
    async with run_gateway(two) as gateway:
        drained = "w0"
        await gateway.client.post(f"/admin/workers/{drained}/drain")
        explained = (await gateway.client.post("/v1/route/explain", json=CHAT)).json()

    assert explained["filtered"] == [{"worker": drained, "filter": "draining"}]


async def test_decisions_are_kept_with_their_arithmetic_and_without_prompts(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        await gateway.client.post("/v1/chat/completions", json=CHAT)
        await gateway.client.post("/v1/chat/completions", json={**CHAT, "model": "nope"})
        answer = await gateway.client.get("/admin/decisions")

    refused, served = answer.json()["decisions"]
    assert served["status"] == 200
    assert served["ranking"][0]["terms_s"]["prefill"] > 0
    assert (refused["status"], refused["error"]) == (404, "model_not_found")
    assert "best of times" not in answer.text


async def test_a_second_turn_is_predicted_to_hit(run_gateway, two):
    async with run_gateway(two) as gateway:
        first = await gateway.client.post("/v1/chat/completions", json=CHAT)
        more = [
            *CHAT["messages"],
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Why?"},
        ]
        second = await gateway.client.post("/v1/chat/completions", json={**CHAT, "messages": more})

        assert second.headers["x-kvroute-worker"] == first.headers["x-kvroute-worker"]
        assert second.headers["x-kvroute-reason"] == "prefix_hit"
        assert gateway.metric("kvroute_predicted_hit_tokens_total") > 0
        assert gateway.metric("kvroute_reported_cached_tokens_total") > 0
        assert gateway.metric("kvroute_worker_index_blocks") > 0


async def test_the_request_that_up_prints_hits_when_it_is_sent_again(run_gateway, two, tmp_path):
    child = ChildSpec("gateway", (), {}, tmp_path / "log")
    planned = PlannedProcess(child, "http://127.0.0.1:8080", "http://127.0.0.1:8080/health", 1.0)
    plan = ProcessPlan((), planned, "sim-model", True, None, tmp_path)
    (curl,) = (line for line in ready_text(plan).splitlines() if "curl" in line)
    async with run_gateway(two) as gateway:
        reasons = []
        for _ in range(2):
            answer = await gateway.client.post("/v1/chat/completions", content=shlex.split(curl)[-1])
            reasons.append(answer.headers["x-kvroute-reason"])

    assert reasons == ["prefix_miss", "prefix_hit"]


async def test_a_restarted_worker_has_lost_its_part(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url], fleet={"health": {"metrics_interval_s": 0.05}}) as gateway:
        await gateway.client.post("/v1/chat/completions", json=CHAT)
        assert gateway.metric("kvroute_worker_index_blocks") > 0

        await instant_sim.restart()

        await gateway.until(lambda: gateway.metric("kvroute_worker_index_blocks") == 0)


async def test_metrics_are_valid_and_bounded(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        await gateway.client.post("/v1/chat/completions", json=CHAT)
        await gateway.client.post("/v1/chat/completions", json={**CHAT, "model": "secret-name"})
        await gateway.client.post("/v1/chat/completions", content=b"{")
        answer = await gateway.client.get("/metrics")

    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    ours = {name for name in families if name.startswith("kvroute_")}
    assert {
        "kvroute_requests",
        "kvroute_request_duration_seconds",
        "kvroute_time_to_first_byte_seconds",
        "kvroute_requests_in_flight",
        "kvroute_routing_duration_seconds",
        "kvroute_prompt_tokens",
        "kvroute_predicted_hit_tokens",
        "kvroute_worker_state",
        "kvroute_index_blocks",
        "kvroute_index_bytes",
        "kvroute_request_body_bytes",
        "kvroute_streams_aborted",
        "kvroute_build_info",
    } <= ours
    assert "secret-name" not in answer.text
    statuses = {
        s.labels["status"]: s.value for s in families["kvroute_requests"].samples if s.name.endswith("_total")
    }
    assert statuses == {"200": 1, "404": 1, "400": 1}


@asynccontextmanager
async def server_that_answers(pages: dict[str, tuple[int, bytes]]) -> AsyncIterator[str]:
    """A server that is no healthy vLLM; it answers other paths with 404."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status, body = pages.get(head.split()[1].decode(), (404, b""))
        writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\n" % status)
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with tcp_server(answer) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("pages", "cause"),
    [
        (None, "Worker w0 is unhealthy: connection refused."),
        ({}, "Worker w0 is unhealthy: /health answered 404: is this a vLLM server?"),
        (
            {"/health": (200, b""), "/v1/models": (200, b"<html>")},
            "Worker w0 is healthy, but has not reported its models: /v1/models is not a model list: is this "
            "a vLLM server?",
        ),
        (
            {"/health": (200, b""), "/v1/models": (401, b"")},
            "Worker w0 is healthy, but has not reported its models: /v1/models answered 401: the worker "
            "wants an API key (fleet.worker_api_key).",
        ),
    ],
)
async def test_a_503_names_the_worker_and_its_answer(run_gateway, pages, cause):
    async with AsyncExitStack() as stack:
        if pages is None:
            url = f"http://127.0.0.1:{free_port()}"
        else:
            url = await stack.enter_async_context(server_that_answers(pages))
        gateway = await stack.enter_async_context(run_gateway([url], wait=False))
        await gateway.until(lambda: gateway.runtime.fleet.problems() == [cause])
        answer = await gateway.client.post("/v1/chat/completions", json=CHAT)

    assert answer.status_code == 503
    assert answer.json()["error"]["message"].endswith(cause)


async def test_ready_names_the_cause_of_each_worker_that_gets_no_requests(run_gateway, instant_sim):
    dead = f"http://127.0.0.1:{free_port()}"
    async with run_gateway([instant_sim.url, dead], wait=False) as gateway:
        await gateway.until_healthy(1)
        await gateway.until(lambda: "refused" in str(gateway.runtime.fleet.problems()))
        answer = await gateway.client.get("/ready")

    assert answer.status_code == 200
    assert answer.json()["notes"] == ["Worker w1 is unhealthy: connection refused."]


async def test_hostile_names_add_no_series(run_gateway, instant_sim, tmp_path):
    """10,000 model names and 10,000 keys of a client must not become labels."""
    async with run_gateway([instant_sim.url], server={"api_keys": ["k1"]}) as gateway:
        url = httpx.URL(gateway.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)

        async def status(key: str, model: str) -> bytes:
            body = json.dumps({"model": model, "prompt": "x"})
            head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write((head + body).encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            return answer.split()[1]

        def series() -> set[tuple[str, str]]:
            found = gateway.runtime.metrics.registry.collect()
            return {(s.name, str(s.labels)) for family in found for s in family.samples}

        assert [await status("k1", "no-model"), await status("no-key", "m")] == [b"404", b"401"]
        before = series()
        for number in range(10_000):
            assert await status("k1", f"model-{number}") == b"404"
            assert await status(f"key-{number}", "m") == b"401"

        assert series() == before
        assert gateway.metric("kvroute_requests_total", model="other", status="404") == 10_001
        assert gateway.metric("kvroute_requests_total", model="-", status="401") == 10_001
        writer.close()


async def test_the_tasks_of_the_gateway_are_counted(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        before = gateway.metric("kvroute_tasks")
        more = asyncio.create_task(asyncio.Event().wait())

        assert gateway.metric("kvroute_tasks") == before + 1
        more.cancel()


async def test_promtool_finds_nothing_wrong_with_the_metrics(run_gateway, two, system_program):
    async with run_gateway(two, metrics={"compat": "none"}) as gateway:
        await gateway.client.post("/v1/chat/completions", json=CHAT)
        page = (await gateway.client.get("/metrics")).content
    promtool = await asyncio.create_subprocess_exec(
        system_program("promtool"), "check", "metrics", stdin=-1, stdout=-1, stderr=-2
    )

    said, _ = await promtool.communicate(page)

    ours = [line for line in said.decode().splitlines() if line.startswith("kvroute_")]
    assert ours == []
    assert b"error" not in said


async def test_docs_list_every_endpoint(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        schema = (await gateway.client.get("/openapi.json")).json()
        again = (await gateway.client.get("/openapi.json")).json()
        page = await gateway.client.get("/docs")

    assert schema == again
    assert set(ENDPOINTS) <= set(schema["paths"])
    assert {"/health", "/ready", "/metrics", "/v1/models", "/admin/workers", "/v1/route/explain"} <= set(
        schema["paths"]
    )
    assert page.status_code == 200
    assert "/v1/chat/completions" in page.text
    assert "<script" not in page.text
    assert "//" not in page.text  # no other host


async def test_unknown_paths_and_methods_are_openai_errors(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        missing = await gateway.client.get("/v2/nothing")
        wrong = await gateway.client.get("/v1/chat/completions")
        invalid = await gateway.client.get("/admin/decisions?limit=x")

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert (invalid.status_code, invalid.json()["error"]["param"]) == (400, "limit")


async def test_keys_guard_inference_and_are_not_shown_to_workers(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url], server={"api_keys": ["k1"]}) as gateway:
        assert (await gateway.client.post("/v1/chat/completions", json=CHAT)).status_code == 401
        assert (await gateway.client.get("/v1/models")).status_code == 401
        assert (await gateway.client.post("/v1/route/explain", json=CHAT)).status_code == 401
        answer = await gateway.client.post(
            "/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer k1"}
        )
        assert (await gateway.client.get("/health")).status_code == 200

    assert answer.status_code == 200
    forwarded = [request for request in instant_sim.worker.received if request.method == "POST"][-1]
    assert b"authorization" not in {key.lower() for key, _ in forwarded.headers}


async def test_the_workers_own_key_replaces_the_gateways(run_gateway, instant_sim):
    async with run_gateway(
        [instant_sim.url], server={"api_keys": ["k1"]}, fleet={"worker_api_key": "w1"}
    ) as gateway:
        await gateway.client.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer k1"})

    forwarded = [request for request in instant_sim.worker.received if request.method == "POST"][-1]
    assert (b"authorization", b"Bearer w1") in forwarded.headers


async def test_without_keys_the_clients_authorization_travels_on(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        await gateway.client.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer mine"})

    forwarded = [request for request in instant_sim.worker.received if request.method == "POST"][-1]
    assert (b"authorization", b"Bearer mine") in forwarded.headers


async def test_too_large_and_too_many_have_different_errors(run_gateway):
    async with (
        run_sim(SimOptions(fixed_s=30)) as sim,
        run_gateway([sim.url], server={"max_body_bytes": 5000, "max_in_flight": 1}) as gateway,
    ):
        large = await gateway.client.post("/v1/chat/completions", content=b"x" * 5001)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")

        async def chunks():
            for _ in range(10):
                yield b"y" * 1000

        unannounced = await gateway.client.post("/v1/chat/completions", content=chunks())
        assert unannounced.status_code == 413

        running = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=CHAT))
        await gateway.until(lambda: gateway.runtime.plane.entry_control.in_flight == 1)
        second = await gateway.client.post("/v1/chat/completions", json=CHAT)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_missing_model_means_the_only_one(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        answer = await gateway.client.post("/v1/chat/completions", json={"messages": CHAT["messages"]})

        assert answer.status_code == 200


async def test_models_have_pools_of_their_own(run_gateway):
    async with (
        run_sim(SimOptions(time_scale=0, models=("a/one",))) as one,
        run_sim(SimOptions(time_scale=0, models=("two",))) as two,
        run_gateway([one.url, two.url]) as gateway,
    ):
        answers = [
            await gateway.client.post("/v1/completions", json={"model": model, "prompt": "x"})
            for model in ("a/one", "two")
        ]
        missing = await gateway.client.post("/v1/completions", json={"prompt": "x"})
        card = await gateway.client.get("/v1/models/a/one")

    assert [answer.headers["x-kvroute-worker"] for answer in answers] == ["w0", "w1"]
    assert missing.status_code == 400
    assert "a/one" in missing.json()["error"]["message"]
    assert card.json()["id"] == "a/one"


async def test_workers_are_added_drained_and_removed(run_gateway, two):
    first, second = two
    async with run_gateway([first]) as gateway:
        added = await gateway.client.post("/admin/workers", json={"url": second, "id": "late"})
        await gateway.until_healthy(2)
        drained = await gateway.client.post("/admin/workers/late/drain?wait_s=5")
        states = {w["id"]: w["state"] for w in (await gateway.client.get("/admin/workers")).json()["workers"]}
        back = await gateway.client.delete("/admin/workers/late/drain")
        one = await gateway.client.get("/admin/workers/late")
        removed = await gateway.client.delete("/admin/workers/late")
        after_removal = await gateway.client.get("/admin/workers/late")
        wrong = await gateway.client.post("/admin/workers", json={"url": "not a url"})
        unknown = await gateway.client.post("/admin/workers", json={"url": second, "colour": "red"})

        assert added.status_code == 201
        assert drained.json() == {"worker": "late", "running_requests": 0, "drained": True}
        assert states["late"] == "draining"
        assert back.json()["state"] == "healthy"
        assert one.json()["capacity_tokens"] == 1_200_000
        assert removed.json()["removed"] == "late"
        assert after_removal.status_code == 404
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "url")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "colour")


async def test_the_configuration_is_shown_without_secrets(run_gateway, instant_sim):
    async with run_gateway(
        [instant_sim.url], server={"api_keys": ["hidden-key"]}, admin={"api_key": "hidden-too"}
    ) as gateway:
        refused = await gateway.client.get("/admin/config")
        client = await gateway.client.get("/admin/config", headers={"authorization": "Bearer hidden-key"})
        answer = await gateway.client.get("/admin/config", headers={"authorization": "Bearer hidden-too"})

    assert (refused.status_code, client.status_code) == (401, 401)
    assert gateway.metric("kvroute_requests_rejected_total", code="invalid_admin_key") == 2
    assert answer.json()["routing"]["strategy"] == "prefixaware"
    assert "hidden" not in answer.text


async def test_sessions_stick_and_can_be_forgotten(run_gateway, two):
    async with run_gateway(two, routing={"strategy": "session"}) as gateway:
        answers = [
            await gateway.client.post("/v1/chat/completions", json=CHAT, headers={"x-session-id": "s"})
            for _ in range(5)
        ]
        forgotten = await gateway.client.delete("/sessions/s")
        again = await gateway.client.delete("/sessions/s")

    assert len({answer.headers["x-kvroute-worker"] for answer in answers}) == 1
    assert {answer.headers["x-kvroute-reason"] for answer in answers} == {"session"}
    assert (forgotten.json()["forgotten"], again.json()["forgotten"]) == (True, False)


async def test_a_request_may_choose_its_strategy_where_that_is_allowed(run_gateway, two):
    header = {"x-kvroute-strategy": "roundrobin"}
    async with run_gateway(two) as gateway:
        ignored = await gateway.client.post("/v1/chat/completions", json=CHAT, headers=header)
    async with run_gateway(two, server={"allow_strategy_header": True}) as gateway:
        chosen = await gateway.client.post("/v1/chat/completions", json=CHAT, headers=header)
        wrong = await gateway.client.post(
            "/v1/chat/completions", json=CHAT, headers={"x-kvroute-strategy": "magic"}
        )

    assert ignored.headers["x-kvroute-strategy"] == "prefixaware"
    assert chosen.headers["x-kvroute-strategy"] == "roundrobin"
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-kvroute-strategy")


async def test_a_model_may_have_its_own_strategy(run_gateway, two):
    routing = {"models": {"sim-model": {"strategy": "roundrobin"}}}
    async with run_gateway(two, routing=routing) as gateway:
        answers = [await gateway.client.post("/v1/chat/completions", json=CHAT) for _ in range(4)]

    assert len({answer.headers["x-kvroute-worker"] for answer in answers}) == 2


async def test_version_names_the_gateway(run_gateway, instant_sim):
    async with run_gateway([instant_sim.url]) as gateway:
        assert set((await gateway.client.get("/version")).json()) == {"version"}
        assert (await gateway.client.get("/ping")).json() == {"status": "ok"}


@pytest.mark.parametrize("path", sorted(ENDPOINTS))
async def test_every_endpoint_is_relayed(run_gateway, instant_sim, path):
    bodies = {
        "/detokenize": {"tokens": [1]},
        "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 4},
        "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
        "/v1/chat/completions": {"messages": CHAT["messages"]},
        "/invocations": {"messages": CHAT["messages"]},
        "/v1/rerank": {"query": "q", "documents": ["a"]},
        "/rerank": {"query": "q", "documents": ["a"]},
        "/v2/rerank": {"query": "q", "documents": ["a"]},
        "/score": {"text_1": "a", "text_2": "b"},
        "/v1/score": {"text_1": "a", "text_2": "b"},
    }
    async with run_gateway([instant_sim.url]) as gateway:
        if "audio" in path:
            answer = await gateway.client.post(
                path, data={"model": "sim-model"}, files={"file": ("a.wav", b"RIFF")}
            )
        else:
            body = bodies.get(path, {"input": "x", "prompt": "x"})
            answer = await gateway.client.post(path, json={"model": "sim-model", **body})

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvroute-worker"]


async def test_series_of_a_worker_that_left_are_removed_after_a_while(run_gateway, two, monkeypatch):
    def shown(page: str) -> set[str]:
        samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
        return {sample.labels["worker"] for sample in samples if "worker" in sample.labels} & {"w0", "w1"}

    async with run_gateway(two) as gateway:
        for number in range(8):
            body = {**CHAT, "messages": [{"role": "user", "content": f"{number} {LONG}"}]}
            assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 200
        assert shown((await gateway.client.get("/metrics")).text) == {"w0", "w1"}

        assert (await gateway.client.delete("/admin/workers/w0")).is_success
        await gateway.until(lambda: len(gateway.runtime.fleet.workers()) == 1)
        assert shown((await gateway.client.get("/metrics")).text) == {"w0", "w1"}
        monkeypatch.setattr("kvroute.metrics.SERIES_KEPT_S", 0.0)
        assert shown((await gateway.client.get("/metrics")).text) == {"w1"}

        worker = {"id": "w0", "url": two[0]}
        assert (await gateway.client.post("/admin/workers", json=worker)).is_success
        await gateway.until_healthy(2)
        assert (await gateway.client.delete("/admin/workers/w1")).is_success
        await gateway.until(lambda: len(gateway.runtime.fleet.workers()) == 1)
        assert (await gateway.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert gateway.metric("kvroute_requests_total", worker="w0") == 1
