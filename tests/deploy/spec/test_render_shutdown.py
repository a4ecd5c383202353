"""How long containers may take to end, and what makes updates and scale-downs lose nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kvroute.deploy.render.kubernetes import kubernetes_objects
from kvroute.deploy.render.plan import (
    DRAIN_S,
    GATEWAY_DELAY_S,
    NOTICE_S,
    engine_drains,
    gateway_stop_s,
    pre_stop,
    worker_grace_s,
)

SCALING = {"minReplicaCount": 1, "maxReplicaCount": 4}


def pod_of(plan: Any, kind: str) -> dict[str, Any]:
    component = {"Deployment": "demo-gateway", "StatefulSet": "demo-worker"}[kind]
    found = [
        each
        for objects in kubernetes_objects(plan).values()
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == (kind, component)
    ]
    spec: dict[str, Any] = found[0]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize(
    ("server", "seconds"),
    [
        ({}, 40),
        ({"shutdown_delay_s": 5, "drain_timeout_s": 120}, 135),
        ({"drain_timeout_s": 0.5, "host": "0.0.0.0"}, 11),
        ({"processes": 4}, 45),
    ],
)
def test_a_gateways_time_covers_delay_drain_and_cutting(server: dict[str, Any], seconds: int) -> None:
    assert gateway_stop_s(server) == seconds


@pytest.mark.parametrize(
    ("image", "drains"),
    [
        ("vllm/vllm-openai:latest", True),
        ("lmcache/vllm-openai:latest", True),
        ("vllm/vllm-openai:v0.32.0", True),
        ("registry.example:5000/mirror/vllm-openai:v0.19.1-cu130", True),
        ("registry.example:5000/mirror/vllm-openai:v0.18.0-cu130", False),  # planned as 0.11.1
        ("vllm/vllm-openai:v0.17.1", False),
        ("lmcache/vllm-openai:v0.3.9", False),  # LMCache's own version
        ("lmcache/vllm-openai:v0.5.6", True),
        ("example/vllm:latest", False),
        ("example/engine:v1.2", False),
        ("vllm/vllm-openai@sha256:abc", False),
    ],
)
def test_an_engine_drains_if_its_image_supports_it(own: Any, plan: Any, image: str, drains: bool) -> None:
    planned = plan(own({"spec.worker.image": image}))
    container = pod_of(planned, "StatefulSet")["containers"][0]

    assert engine_drains(planned) == drains
    assert ("--shutdown-timeout" in container["args"]) == drains
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (command == ["sleep", str(NOTICE_S)]) == drains


def test_the_users_own_shutdown_timeout_wins(own: Any, plan: Any) -> None:
    planned = plan(own({"spec.worker.args": ["--shutdown-timeout", "600"]}))
    pod = pod_of(planned, "StatefulSet")

    assert pod["containers"][0]["args"].count("--shutdown-timeout") == 1
    assert pod["terminationGracePeriodSeconds"] > NOTICE_S + 600


def test_grace_periods_cover_the_steps_before_them(own: Any, plan: Any) -> None:
    planned = plan(own())
    gateway = pod_of(planned, "Deployment")

    assert gateway["terminationGracePeriodSeconds"] > GATEWAY_DELAY_S + DRAIN_S
    assert worker_grace_s(planned) > NOTICE_S + DRAIN_S
    assert pod_of(planned, "StatefulSet")["terminationGracePeriodSeconds"] == worker_grace_s(planned)


def test_settings_of_the_gateway_lengthen_its_grace_period(own: Any, plan: Any) -> None:
    planned = plan(own({"x-kvroute.gateway.settings": {"server": {"drain_timeout_s": 900}}}))

    assert pod_of(planned, "Deployment")["terminationGracePeriodSeconds"] > 905


def test_an_autoscaled_workload_has_no_replica_count(own: Any, plan: Any) -> None:
    planned = plan(
        own({"spec.autoScalingSpec": SCALING, "spec.intelligentRoutingSpec.autoScalingSpec": SCALING})
    )
    objects = [each for part in kubernetes_objects(planned).values() for each in part]
    scaled = {
        (each["spec"]["scaleTargetRef"]["kind"], each["spec"]["scaleTargetRef"]["name"])
        for each in objects
        if "scaleTargetRef" in each.get("spec", {})
    }

    assert len(scaled) == 2
    for each in objects:
        if (each["kind"], each["metadata"]["name"]) in scaled:
            assert "replicas" not in each["spec"]


def test_the_wait_before_sigterm_ends_when_nothing_runs(own: Any, plan: Any) -> None:
    """The hook's program is run as it stands, with its waits shortened."""
    pages = iter(['vllm:num_requests_running{a="b"} 2.0\nvllm:num_requests_waiting{} 0.0\n'] * 2)

    class Worker(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            text = next(pages, "vllm:num_requests_running{} 0.0\nvllm:num_requests_waiting{} 0.0\n").encode()
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    asked: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Worker) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            port = {"name": "http", "containerPort": server.server_port}
            planned = plan(own({"spec.worker": {"image": "example/engine:1", "modelInvocationPort": port}}))
            _, option, program = pre_stop(planned)["exec"]["command"]
            program = program.replace(f"sleep({NOTICE_S})", "sleep(0)").replace("sleep(1)", "sleep(0.01)")
            done = subprocess.run([sys.executable, option, program], timeout=60)
        finally:
            server.shutdown()
            thread.join()

    assert done.returncode == 0
    assert asked == ["/metrics"] * 3
