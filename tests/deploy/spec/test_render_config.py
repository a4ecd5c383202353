from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvroute.config.loading import load
from kvroute.deploy.render.config import render_config

ROUTING = "spec.intelligentRoutingSpec"


@pytest.fixture
def loaded(plan, tmp_path: Path):
    """A document -> the configuration that the gateway would have."""

    def make(document):
        file = tmp_path / "kvroute.yaml"
        file.write_text(render_config(plan(document))["kvroute.yaml"])
        return load(file=file).config

    return make


def test_it_loads_and_has_the_workers_of_this_host(own, loaded):
    config = loaded(own())

    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)
    assert [(worker.id, worker.url) for worker in config.fleet.workers] == [
        ("demo-a", "http://127.0.0.1:8000"),
        ("demo-b", "http://127.0.0.1:8001"),
    ]
    assert config.routing.strategy == "prefixaware"


@pytest.mark.parametrize(
    ("block", "strategy"),
    [
        (None, "roundrobin"),
        ({"routingStrategy": "session"}, "roundrobin"),
        ({"enabled": True}, "prefixaware"),
        ({"enabled": True, "routingStrategy": "session"}, "session"),
        ({"enabled": True, "routingStrategy": "roundrobin"}, "roundrobin"),
    ],
)
def test_the_strategy_is_the_specs_once_routing_is_on(block, strategy, own, loaded):
    assert loaded(own({ROUTING: block})).routing.strategy == strategy


@pytest.mark.parametrize("strategy", ["session", "prefixaware", "kvaware"])
def test_session_keys_and_options_reach_the_strategy(strategy, own, loaded):
    routing = {"sessionKeys": ["cookie:sid"], "options": {"session": {"epsilon": 0.75}}}
    config = loaded(own({f"{ROUTING}.routingStrategy": strategy, "x-kvroute.routing": routing}))

    assert config.routing.session.keys == ("cookie:sid",) or list(config.routing.session.keys) == [
        "cookie:sid"
    ]
    assert config.routing.session.epsilon == 0.75


def test_request_limits_bound_each_worker_and_the_gateway(hyperpod, loaded):
    limits = {"maxConcurrentRequests": 8, "maxQueueSize": 2}
    config = loaded(hyperpod({"spec.worker.requestLimits": limits, "spec.replicas": 3}))

    assert config.upstream.max_connections == 8
    assert config.server.max_in_flight == 30


def test_a_model_may_be_requested_by_its_folder_as_on_hyperpod(hyperpod, loaded):
    assert loaded(hyperpod()).fleet.aliases == {"/opt/ml/model": "demo-model"}


def test_any_other_setting_is_taken_over(own, loaded):
    settings = {"server": {"port": 9000, "keep_alive_s": 5}, "logging": {"level": "debug"}}
    config = loaded(own({"x-kvroute.gateway.settings": settings}))

    assert (config.server.port, config.server.host, config.server.keep_alive_s) == (9000, "127.0.0.1", 5)
    assert config.logging.level == "debug"


@pytest.mark.parametrize(
    ("given", "workers"), [({}, 1), ({"spec.InitialReplicaCount": 3}, 3), ({"spec.replicas": 0}, 0)]
)
def test_the_number_of_replicas_is_the_first_that_is_set_or_one(given, workers, hyperpod, plan):
    text = render_config(plan(hyperpod(given)))["kvroute.yaml"]

    assert len(yaml.safe_load(text)["fleet"]["workers"]) == workers
