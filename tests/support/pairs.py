"""Specs for an image with a known pair of vLLM and LMCache, in every mode and with every second tier."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import yaml

from kvroute.deploy.l2.registry import BACKENDS
from kvroute.deploy.render.lmcache import server_argv
from kvroute.deploy.render.plan import EndpointPlan, plan_endpoint
from kvroute.deploy.render.site import DeploymentSite, compose_site, kubernetes_site, local_site
from kvroute.deploy.spec.loading import read_spec
from kvroute.deploy.spec.source import FieldVerdict
from kvroute.deploy.spec.versions import Pair
from kvroute.routing.registry import STRATEGIES

MODES = (None, "mp", "classic")
S3 = {"endpoint": "s3://b.s3.eu-west-1.amazonaws.com", "region": "eu-west-1"}


def specs_of(pair: Pair) -> Iterator[dict[str, Any]]:
    """One spec for each mode, second tier and two strategies."""
    backends = (None, *BACKENDS)
    for mode, backend, strategy in itertools.product(MODES, backends, ("prefixaware", "kvaware")):
        yield {
            "apiVersion": "kvroute.dev/v1",
            "kind": "Endpoint",
            "metadata": {"name": "demo"},
            "spec": {
                "model": "Qwen/Qwen3-8B",
                "replicas": 2,
                "kvCacheSpec": {
                    "enableL1Cache": True,
                    "enableL2Cache": backend is not None,
                    **({"l2CacheSpec": {"l2CacheBackend": backend}} if backend is not None else {}),
                },
                "intelligentRoutingSpec": {"enabled": True, "routingStrategy": strategy},
                "worker": {
                    "image": f"vllm/vllm-openai:v{pair.vllm.name}",
                    "args": ["--max-model-len", "8192"],
                },
            },
            "x-kvroute": {
                "gpusPerWorker": 2,
                "lmcache": {
                    **({"mode": mode} if mode is not None else {}),
                    "servers": "per-worker" if strategy == "kvaware" else "per-node",
                },
                **({"l2": {"s3": S3}} if backend == "s3" else {}),
            },
        }


def plans_of(pair: Pair) -> Iterator[tuple[EndpointPlan, DeploymentSite]]:
    """The plans of all specs without a wrong field, each on this host, in compose and in Kubernetes.

    Without a mode in the spec, only one is wrong: Mooncake with an LMCache that has no server.
    """
    for document in specs_of(pair):
        reading = read_spec(yaml.safe_dump(document), strategies=frozenset(STRATEGIES))
        wrong = [each.text for each in reading.findings if each.verdict is FieldVerdict.WRONG]
        if wrong:
            assert "mode" in document["x-kvroute"]["lmcache"] or not pair.lmcache.has_server, wrong
            continue
        endpoint = plan_endpoint(reading.require("spec.yaml"))
        assert endpoint.versions.pair is pair
        for site in (local_site(endpoint), compose_site(endpoint, "gateway"), kubernetes_site(endpoint, 2)):
            yield endpoint, site


def server_commands(pair: Pair) -> list[tuple[str, ...]]:
    """All different command lines of LMCache's server that are rendered for the pair."""
    commands: dict[tuple[str, ...], None] = {}
    for endpoint, site in plans_of(pair):
        for server in site.servers:
            if endpoint.cache is not None:
                commands[server_argv(endpoint, endpoint.cache, server, site)] = None
    return list(commands)
