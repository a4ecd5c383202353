from __future__ import annotations

import json

import pytest

from kvroute.deploy.l2.backend import L2Location, Scope, has_password, masked, parse_address
from kvroute.deploy.l2.registry import BACKENDS, backend_named
from kvroute.deploy.spec.extension import Extension

# What LMCache 0.5.6 takes for each adapter type, besides `type`, `shared` and `eviction`.
ADAPTER_FIELDS = {
    "resp": {"host", "port", "num_workers", "username", "password", "max_capacity_gb"},
    "valkey": {"startup_nodes", "cluster_mode", "username", "password", "database_id", "tls_enable"},
    "fs": {"base_path", "relative_tmp_dir", "read_ahead_size", "use_odirect"},
    "s3": {"s3_endpoint", "s3_region", "max_capacity_gb"},
    "sagemaker-hyperpod": {"url", "bucket", "shared_memory_name"},
}
EXTENSION = Extension.model_validate(
    {
        "l2": {
            "sizeGb": 2.0,
            "s3": {"endpoint": "s3://b.s3.eu-central-1.amazonaws.com", "region": "eu-central-1"},
        }
    }
)


def tier(name: str, url: str | None = None, *, on_hyperpod: bool = False, host: str = "cache"):
    return backend_named(name).tier(L2Location(url, EXTENSION, host, on_hyperpod))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backends_adapter_is_json_that_lmcache_takes(name):
    adapter = tier(name).adapter

    assert json.loads(json.dumps(adapter)) == adapter
    fields = set(adapter) - {"type", "shared"}
    assert fields <= ADAPTER_FIELDS.get(str(adapter["type"]), fields)
    assert isinstance(adapter["shared"], bool)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_without_a_classic_form_has_no_remote_url(name):
    assert bool(tier(name).remote_url) == BACKENDS[name].has_classic


@pytest.mark.parametrize("name", ["redis", "valkey"])
def test_our_own_store_is_bounded_and_evicts_the_least_used(name):
    (service,) = tier(name).services
    command = list(service.command)

    assert command[command.index("--maxmemory") + 1] == "2048mb"
    assert command[command.index("--maxmemory-policy") + 1] == "allkeys-lru"
    assert command[command.index("--appendonly") + 1] == "no"
    assert service.scope is Scope.ONCE


@pytest.mark.parametrize("name", ["redis", "valkey", "mooncake"])
def test_a_url_means_that_nothing_comes_up_by_itself(name):
    assert tier(name, f"{name}://elsewhere:7000").services == ()
    assert "elsewhere" in json.dumps(dict(tier(name, f"{name}://elsewhere:7000").adapter))


def test_a_valkey_url_contains_database_login_and_tls():
    adapter = tier("valkey", "valkeys://me:secret@elsewhere:7000/3").adapter

    assert adapter["startup_nodes"] == "elsewhere:7000"
    assert (adapter["username"], adapter["password"], adapter["database_id"], adapter["tls_enable"]) == (
        "me",
        "secret",
        3,
        True,
    )


def test_the_daemon_of_a_hyperpod_node_has_the_nodes_address():
    own, theirs = tier("tieredstorage", host="tierd"), tier("tieredstorage", on_hyperpod=True)

    assert own.adapter["url"] == "sagemaker-hyperpod://tierd:9200"
    assert [service.scope for service in own.services] == [Scope.PER_NODE]
    assert own.services[0].shares_memory
    assert theirs.adapter["url"] == "sagemaker-hyperpod://$(NODE_IP):9200"
    assert theirs.adapter["shared_memory_name"] == "ai_toolkit_cache"
    assert theirs.host_paths == ("/dev/shm/ai_toolkit_cache",)
    assert theirs.needs_node_ip
    assert theirs.services == ()


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("redis://cache:7000", "cache", 7000),
        ("redis://cache", "cache", 6379),
        ("cache:7000", "cache", 7000),
        ("redis:redis.default.svc.cluster.local:6379", "redis.default.svc.cluster.local", 6379),
        ("redis://[::1]:7000", "::1", 7000),
    ],
)
def test_addresses_are_read_in_every_form_that_is_about(url, host, port):
    address = parse_address(url, schemes=("redis",), default_port=6379)

    assert (address.host, address.port) == (host, port)


@pytest.mark.parametrize(
    "url",
    [
        "http://cache",
        "redis://",
        "redis://cache:x",
        "redis://cache:99999",
        "redis://cache/x",
        "rediss://c",
        "redis://c/1",
    ],
)
def test_an_invalid_redis_address_is_reported_without_its_password(url):
    with_login = url.replace("://", "://user:hunter2@")

    problem = BACKENDS["redis"].url_problem(with_login)

    assert problem
    assert "hunter2" not in problem


@pytest.mark.parametrize(("name", "url"), [("valkey", "redis://x"), ("mooncake", "mooncake://x")])
def test_addresses_of_other_stores_are_checked_as_well(name, url):
    assert BACKENDS[name].url_problem(url)


def test_a_folder_must_be_absolute():
    extension = Extension.model_validate({"l2": {"fs": {"path": "cache"}}})

    assert [path for path, _ in BACKENDS["fs"].missing(extension, None)] == [
        ("x-kvroute", "l2", "fs", "path")
    ]


@pytest.mark.parametrize(
    ("text", "has_one"),
    [
        ("redis://:hunter2@cache:1", True),
        ("redis://me:hunter2@cache:1/x", True),
        ("redis://me:hun/ter2@cache", True),
        ("me:hunter2@cache:1", True),
        ("redis:me:hunter2@cache:1", True),
        ("me:hunter2@redis://cache", True),
        ("redis://me@cache:1", False),
        ("redis://cache:1", False),
        ("cache:1", False),
    ],
)
def test_a_login_is_masked_at_every_place(text, has_one):
    assert has_password(text) == has_one
    for secret in ("hunter2", "hun/ter2", "ter2"):
        assert secret not in masked(f"got {text!r}")
    assert "cache" in masked(text)
    assert "hunter2" not in BACKENDS["redis"].url_problem(text)
