"""The metric of needed workers at a scrape, and the deletion costs that the gateway writes to pods."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import generate_latest
from tests.support.clocks import AdvancingClock
from tests.support.sockets import tcp_server
from tests.support.waiting import until

from kvroute.app.runtime import Runtime
from kvroute.app.scaling import ANNOTATION, Scaling
from kvroute.blocks.keys import BlockKey, PromptKeys
from kvroute.config.config import Config
from kvroute.errors import ConfigError
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker, WorkerId, WorkerSpec
from kvroute.metrics import Metrics
from kvroute.routing.router import Router
from kvroute.routing.strategy import RouteQuery


@dataclass
class PatchedPods:
    """An API server as far as patches of pods need one."""

    names: set[str]
    status: int = 200
    """The answer to a patch of a pod that exists."""
    refused: set[str] = field(default_factory=set)
    """Pods whose patches are answered with 403, whatever `status` is."""
    hangs: bool = False
    costs: dict[str, str] = field(default_factory=dict)
    patches: list[str] = field(default_factory=list)
    """The pods of all requests, in their order."""
    headers: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"(?im)^content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            method, path, _ = head.split(" ", 2)
            if method != "PATCH":  # the list of pods, for discovery
                self._answer(writer, 200, {"metadata": {"resourceVersion": "1"}, "items": []})
                continue
            name = path.rpartition("/")[2]
            assert path == f"/api/v1/namespaces/llm/pods/{name}"
            self.headers.append(head.lower())
            self.patches.append(name)
            if self.hangs:
                await asyncio.Event().wait()
            if name not in self.names:
                self._answer(writer, 404, {"kind": "Status", "code": 404})
            elif self.status != 200 or name in self.refused:
                status = 403 if name in self.refused else self.status
                self._answer(writer, status, {"kind": "Status", "message": "pods is forbidden"})
            else:
                self.costs[name] = json.loads(body)["metadata"]["annotations"][ANNOTATION]
                self._answer(writer, 200, {"kind": "Pod"})

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(text), text))


@dataclass
class Gateway:
    runtime: Runtime
    api: PatchedPods
    clock: AdvancingClock

    @property
    def workers(self) -> dict[str, Worker]:
        return {worker.id: worker for worker in self.runtime.fleet.workers()}

    def use(self, worker: str, blocks: int) -> None:
        """A prompt that only this worker holds is sent to it, and ends."""
        keys = [BlockKey(hash((worker, number)) & (2**63 - 1)) for number in range(blocks)]
        now = self.clock.now()
        router, fleet = self.runtime.router, self.runtime.fleet
        query = RouteQuery("m", now, (PromptKeys(keys, 16 * blocks, 16.0),), 16 * blocks)
        decision = router.decide(query, fleet.view("m"))
        candidate = next(each for each in decision.ranking if each.worker.id == worker)
        router.dispatch(query, decision, candidate, now).finish(now)

    async def round(self) -> None:
        writer = self.runtime._scaling.deletion_costs
        assert writer is not None
        await writer.write_due()

    def steer(self) -> None:
        writer = self.runtime._scaling.deletion_costs
        assert writer is not None
        writer.steer()

    def figures(self) -> str:
        return generate_latest(self.runtime.metrics.registry).decode()


def config_of(url: str, **deletion_cost: Any) -> Config:
    return Config.model_validate(
        {
            "fleet": {"kubernetes": {"enabled": True, "api_url": url, "namespace": "llm", "timeout_s": 5.0}},
            "scaling": {"deletion_cost": {"enabled": True, **deletion_cost}},
        }
    )


@asynccontextmanager
async def gateway_of(*workers: str, **deletion_cost: Any) -> AsyncIterator[Gateway]:
    """A gateway whose tasks do not run; tests call `round`."""
    api, clock = PatchedPods(set(workers)), AdvancingClock()
    async with tcp_server(api.serve) as port:
        runtime = Runtime(config_of(f"http://127.0.0.1:{port}", **deletion_cost), clock)
        specs = [WorkerSpec(WorkerId(name), f"http://{name}:8000", models=("m",)) for name in workers]
        runtime.fleet.apply("kubernetes", specs)
        for worker in runtime.fleet.workers():
            runtime.fleet.mark_healthy(worker, 0.0)
        try:
            yield Gateway(runtime, api, clock)
        finally:
            writer = runtime._scaling.deletion_costs
            assert writer is not None
            await writer.aclose()


async def test_the_worker_that_is_worth_least_gets_the_lowest_cost():
    async with gateway_of("a", "b", "c") as gateway:
        for worker, blocks in (("a", 50), ("b", 400), ("c", 100)):
            gateway.use(worker, blocks)
            gateway.use(worker, blocks)

        await gateway.round()

        costs = {worker: int(cost) for worker, cost in gateway.api.costs.items()}
        assert 0 < costs["a"] < costs["c"] < costs["b"]
        assert "content-type: application/merge-patch+json" in gateway.api.headers[0]
        assert f'kvroute_worker_deletion_cost{{worker="a"}} {float(costs["a"])}' in gateway.figures()
        assert 'kvroute_deletion_cost_patches_total{outcome="patched"} 3.0' in gateway.figures()


async def test_the_queued_prefill_of_a_worker_counts():
    async with gateway_of("a", "b") as gateway:
        gateway.workers["b"].load.reserve(gateway.clock.now(), 3.0, 1000)

        await gateway.round()

        assert gateway.api.costs == {"a": "0", "b": "3000"}


async def test_a_pod_is_patched_again_only_after_a_large_change():
    async with gateway_of("a", "b", min_change=0.5) as gateway:
        for worker in "aabb":
            gateway.use(worker, 100)
        await gateway.round()
        gateway.use("a", 1)
        await gateway.round()
        assert sorted(gateway.api.patches) == ["a", "b"]

        for _ in range(5):
            gateway.use("b", 100)
        await gateway.round()

        assert gateway.api.patches[2:] == ["b"]


async def test_a_round_patches_at_most_max_patches():
    async with gateway_of("a", "b", "c", max_patches=2) as gateway:
        await gateway.round()
        assert sorted(gateway.api.patches) == ["a", "b"]
        await gateway.round()
        assert sorted(gateway.api.patches) == ["a", "b", "c"]


async def test_workers_that_would_be_removed_get_less_traffic_until_the_load_needs_them(caplog):
    caplog.set_level(logging.INFO)
    async with gateway_of("a", "b", "c", surplus_share=0.5) as gateway:
        gateway.use("a", 100)
        gateway.use("a", 100)
        gateway.use("c", 100)
        await gateway.round()
        gateway.steer()

        assert {name: worker.share for name, worker in gateway.workers.items()} == {
            "a": 1.0,
            "b": 0.5,
            "c": 0.5,
        }
        assert 'kvroute_workers_surplus{model="m"} 2.0' in gateway.figures()
        assert "less traffic for b, c" in caplog.text

        for worker in gateway.workers.values():
            worker.load.reserve(gateway.clock.now(), 9000.0, 600)
        await gateway.clock.advance(60.0)
        gateway.steer()

        assert {worker.share for worker in gateway.workers.values()} == {1.0}
        assert "less traffic for no worker" in caplog.text


async def test_the_least_number_of_workers_keeps_its_traffic():
    async with gateway_of("a", "b", "c", min_workers=2) as gateway:
        await gateway.round()
        gateway.steer()

        assert sorted(worker.share for worker in gateway.workers.values()) == [0.25, 1.0, 1.0]


async def test_while_a_cost_is_unknown_nobody_gets_less_traffic():
    async with gateway_of("a", "b", "c") as gateway:
        gateway.api.refused.add("b")
        await gateway.round()
        gateway.steer()

        assert {worker.share for worker in gateway.workers.values()} == {1.0}

        gateway.api.refused.clear()
        await gateway.round()
        gateway.steer()

        assert sorted(worker.share for worker in gateway.workers.values()) == [0.25, 0.25, 1.0]


async def test_a_worker_that_is_no_pod_keeps_its_traffic():
    async with gateway_of("a", "b", "c") as gateway:
        gateway.api.names.remove("b")
        await gateway.round()
        gateway.steer()

        assert gateway.workers["b"].share == 1.0
        assert sorted(worker.share for worker in gateway.workers.values()) == [0.25, 1.0, 1.0]


async def test_with_a_share_of_one_nothing_is_steered():
    async with gateway_of("a", "b", surplus_share=1.0) as gateway:
        await gateway.round()
        gateway.steer()

        assert {worker.share for worker in gateway.workers.values()} == {1.0}
        assert "kvroute_workers_surplus{" not in gateway.figures()


async def test_a_ramp_after_an_ejection_goes_on():
    async with gateway_of("a", "b") as gateway:
        await gateway.round()
        ramping = gateway.workers["b"]
        gateway.runtime.fleet.mark_healthy(ramping, gateway.clock.now(), ramp_start=0.1, ramp_s=60.0)
        gateway.steer()

        assert ramping.share == 0.1


async def test_a_refusal_ends_the_round_is_counted_and_logged_once(caplog):
    async with gateway_of("a", "b") as gateway:
        gateway.api.status = 403
        for _ in range(3):
            await gateway.round()

        assert len(gateway.api.patches) == 3  # not both pods in each round
        assert 'kvroute_deletion_cost_patches_total{outcome="failed"} 3.0' in gateway.figures()
        (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert "pods is forbidden" in line.getMessage()

        gateway.api.status = 200
        await gateway.round()
        assert sorted(gateway.api.costs) == ["a", "b"]


async def test_a_pod_that_refuses_does_not_keep_the_others_from_being_written():
    async with gateway_of("a", "b", "c") as gateway:
        gateway.api.refused.add("a")
        for _ in range(2):
            await gateway.round()

        assert gateway.api.patches == ["a", "b", "c", "a"]
        assert sorted(gateway.api.costs) == ["b", "c"]


async def test_a_worker_that_is_no_pod_is_asked_for_once():
    async with gateway_of("a", "b") as gateway:
        gateway.api.names.remove("b")
        await gateway.round()
        await gateway.round()

        assert sorted(gateway.api.patches) == ["a", "b"]
        assert 'kvroute_deletion_cost_patches_total{outcome="absent"} 1.0' in gateway.figures()


async def test_a_pod_that_returns_under_its_name_is_written_again():
    async with gateway_of("a", "b") as gateway:
        await gateway.round()
        fleet, left = gateway.runtime.fleet, gateway.workers["b"].spec
        fleet.apply("kubernetes", [gateway.workers["a"].spec])
        fleet.apply("kubernetes", [gateway.workers["a"].spec, left])
        fleet.mark_healthy(gateway.workers["b"], 0.0)

        await gateway.round()

        assert gateway.api.patches[2:] == ["b"]


async def test_the_cache_of_a_worker_that_restarted_is_worth_nothing():
    async with gateway_of("a", "b") as gateway:
        gateway.use("a", 100)
        gateway.use("a", 100)
        fleet, worker = gateway.runtime.fleet, gateway.workers["a"]
        fleet.update_facts(worker, worker.facts, restarted=True)

        await gateway.round()

        assert gateway.api.costs == {"a": "0", "b": "0"}


async def test_a_server_that_does_not_answer_ends_the_round_at_the_deadline():
    async with gateway_of("a", "b") as gateway:
        gateway.api.hangs = True
        writer = gateway.runtime._scaling.deletion_costs
        assert writer is not None
        writer._api._timeout_s = 0.05

        await gateway.round()

        assert gateway.api.patches == ["a"]
        assert 'outcome="failed"} 1.0' in gateway.figures()


async def test_the_task_waits_until_it_has_seen_the_caches_in_use_and_ends_with_the_gateway():
    api, clock = PatchedPods({"a"}), AdvancingClock()
    async with tcp_server(api.serve) as port:
        url = f"http://127.0.0.1:{port}"
        runtime = Runtime(config_of(url, window_s=100.0, interval_s=10.0), clock)
        writer = runtime._scaling.deletion_costs
        assert writer is not None
        runtime.fleet.apply("static", [WorkerSpec(WorkerId("a"), "http://a:1", models=("m",))])
        runtime.fleet.mark_healthy(runtime.fleet.workers()[0], 0.0)
        (task,) = runtime._scaling.tasks()

        await clock.advance(99.0)
        assert api.patches == []
        await clock.advance(1.0)
        await until(lambda: api.patches == ["a"])

        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()


def test_deletion_costs_are_off_by_default_and_then_cost_a_dispatch_nothing():
    runtime = Runtime(Config())

    assert runtime.router.cache_value is None
    assert runtime._scaling.tasks() == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"fleet": {"kubernetes": {"enabled": False}}}, "needs fleet.kubernetes.enabled"),
        ({"routing": {"strategy": "roundrobin"}}, "needs routing.strategy prefixaware or kvaware"),
        ({"routing": {"strategy": "session"}}, "session reads no prompts"),
    ],
)
def test_deletion_costs_without_pods_or_prompts_are_refused(change, problem):
    data = {
        "fleet": {"kubernetes": {"enabled": True, "api_url": "http://api", "namespace": "llm"}},
        "scaling": {"deletion_cost": {"enabled": True}},
    }

    with pytest.raises(ValueError, match=f"scaling.deletion_cost.enabled: .*{problem}"):
        Config.model_validate(data | change)


def test_outside_a_cluster_the_api_server_must_be_named(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    data = {"fleet": {"kubernetes": {"enabled": True}}, "scaling": {"deletion_cost": {"enabled": True}}}

    with pytest.raises(ConfigError, match="api_url"):
        Runtime(Config.model_validate(data))


async def test_needed_workers_are_on_the_metrics_page_with_the_requests_in_the_queue():
    clock = AdvancingClock()
    runtime = Runtime(Config.model_validate({"scaling": {"target_utilisation": 0.5, "queue_s": 10.0}}), clock)
    runtime.fleet.apply(
        "static", [WorkerSpec(WorkerId("a"), "http://a:1", models=("m",), capacity_tokens=1000)]
    )
    (worker,) = runtime.fleet.workers()
    runtime.fleet.mark_healthy(worker, 0.0)
    worker.load.reserve(clock.now(), 5.0, 250)

    page = generate_latest(runtime.metrics.registry).decode()

    # 5 s of 10 s, and 250 of 1000 tokens: 0.75 workers, of which half may be used.
    assert 'kvroute_workers_needed{model="m"} 1.5' in page


def test_gateways_that_share_report_one_part_each_and_steer_by_the_whole():
    fleet, clock = Fleet(), AdvancingClock()
    fleet.apply("static", [WorkerSpec(WorkerId("a"), "http://a:1", models=("m",), capacity_tokens=1000)])
    fleet.mark_healthy(fleet.workers()[0], 0.0)
    fleet.workers()[0].load.reserve(clock.now(), 0.0, 600)
    metrics = Metrics()
    scaling = Scaling(Config(), fleet, Router(), metrics, clock, lambda: 3)
    whole = scaling._workers_needed()["m"]

    assert whole > 0
    assert f'kvroute_workers_needed{{model="m"}} {whole / 3}' in generate_latest(metrics.registry).decode()
