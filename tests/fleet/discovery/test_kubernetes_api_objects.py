from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError
from tests.fleet.discovery.conftest import inference_pool

from kvroute.errors import DiscoveryError
from kvroute.fleet.discovery import kubernetes_api
from kvroute.fleet.discovery.kubernetes_api import (
    FoundWorker,
    ObjectReader,
    PoolTarget,
    by_name,
    read_endpoint_slice,
    read_pod,
    read_pool,
)
from kvroute.fleet.options import KubernetesOptions
from kvroute.fleet.worker import WorkerId, WorkerSpec

READER = ObjectReader("http", role_label="role", model_label="example.com/model")


def slice_of(*endpoints: dict[str, Any], **fields: Any) -> dict[str, Any]:
    item = {
        "metadata": {"name": "s", "labels": {}},
        "addressType": "IPv4",
        "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": 8000}],
        "endpoints": list(endpoints),
    }
    return {**item, **fields}


# Pages


def page(*items: bytes, metadata: bytes = b'"metadata":{}') -> bytes:
    return b'{%b,"items":[%b]}' % (metadata, b",".join(items))


@pytest.mark.parametrize(
    "text",
    [
        page(*[b"{}"] * 700_000),
        page(*[b"1"] * 1_400_000),
        page(*[b'{"metadata":{"name":"a"}}'] * 10_001),
        page(metadata=b",".join([b'"metadata":{}'] * 700_000)),
        page(metadata=b",".join([b'"metadata":1'] * 700_000)),
    ],
    ids=["tiny", "numbers", "pods", "metadata", "metadata of another type"],
)
async def test_a_page_of_too_many_objects_is_not_decoded(text, monkeypatch):
    """The loop would wait for all of them."""
    monkeypatch.setattr(kubernetes_api, "_decode_page", None)

    with pytest.raises(DiscoveryError, match="10000 objects"):
        await kubernetes_api._read_page(text, [])


async def test_a_list_of_too_many_objects_is_given_up_whatever_its_pages():
    items: list[Any] = [{}] * 6000

    with pytest.raises(DiscoveryError, match="10000 objects"):
        await kubernetes_api._read_page(page(*[b"{}"] * 4001), items)


async def test_others_have_turns_while_a_page_is_read(monkeypatch):
    """One for each 256 KiB, and one for each object that is larger."""
    pods = [b'{"metadata":{"name":"%d"},"spec":"%b"}' % (n, b"x" * 60_000) for n in range(100)]
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(take_turns())
    items: list[Any] = []
    await kubernetes_api._read_page(page(*pods), items)
    other.cancel()

    assert len(items) == 100
    assert turns >= 6_000_000 // 262_144 // 2


def test_a_slice_has_at_most_as_many_endpoints_as_kubernetes_allows():
    many = [{"addresses": [f"10.0.{n // 250}.{n % 250}"]} for n in range(1001)]

    assert len(read_endpoint_slice(slice_of(*many[:1000]), READER).workers) == 1000
    reading = read_endpoint_slice(slice_of(*many), READER)
    assert not reading.workers
    assert "1000 endpoints" in reading.trouble


# Pods


@pytest.mark.parametrize(
    ("wanted", "ports", "url"),
    [
        ("http", None, "http://10.0.0.1:8000"),
        ("metrics", None, "http://10.0.0.1:9"),
        (8123, None, "http://10.0.0.1:8123"),
        (8123, [], "http://10.0.0.1:8123"),
    ],
)
def test_a_port_is_named_or_numbered(wanted, ports, url, pod):
    (found,) = read_pod(pod("a", ports=ports), ObjectReader(wanted)).workers

    assert found.url == url


def test_an_unknown_port_name_is_trouble(pod):
    reading = read_pod(pod("a"), ObjectReader("grpc"))

    assert reading.workers == ()
    assert "pod a" in reading.trouble
    assert "'grpc'" in reading.trouble


def test_a_sidecar_may_have_the_port_and_a_plain_init_container_not(pod):
    item = pod("a", ports=[])
    sidecar = {"name": "proxy", "ports": [{"name": "http", "containerPort": 80}], "restartPolicy": "Always"}
    item["spec"]["initContainers"] = [{"ports": [{"name": "http", "containerPort": 1}]}, sidecar]

    (found,) = read_pod(item, READER).workers

    assert found.url == "http://10.0.0.1:80"


def test_an_ipv6_address_is_bracketed_and_the_scheme_is_as_configured(pod):
    (found,) = read_pod(pod("a", "fd00::1"), ObjectReader(1, "https")).workers

    assert found.url == "https://[fd00::1]:1"


@pytest.mark.parametrize(
    ("labels", "annotations", "models"),
    [
        ({}, {}, ()),
        ({"example.com/model": "llama"}, {}, ("llama",)),
        (
            {"example.com/model": "Qwen-Qwen3"},
            {"example.com/model": "Qwen/Qwen3, lora"},
            ("Qwen/Qwen3", "lora"),
        ),
    ],
)
def test_models_come_from_the_label_or_the_annotation_of_its_key(labels, annotations, models, pod):
    (found,) = read_pod(pod("a", labels=labels, annotations=annotations), READER).workers

    assert found.spec(draining=False) == WorkerSpec(WorkerId("a"), "http://10.0.0.1:8000", models)


def test_a_role_is_read_and_may_be_a_condition(pod):
    decoding, plain = pod("a", labels={"role": "decode"}), pod("b")
    only = ObjectReader("http", role_label="role", roles=("decode", "both"))

    assert [found.role for found in read_pod(decoding, READER).workers] == ["decode"]
    assert [found.role for found in read_pod(plain, READER).workers] == [None]
    assert [found.role for found in read_pod(decoding, only).workers] == ["decode"]
    assert read_pod(plain, only).workers == ()
    assert read_pod(pod("c", ports=[]), only).trouble == ""  # not ours, so not our trouble


@pytest.mark.parametrize("item", [{}, {"metadata": None, "status": {"podIP": "1.1.1.1"}, "spec": []}])
def test_an_object_with_parts_missing_breaks_nothing(item):
    read_pod(item, READER)
    read_endpoint_slice(item, READER)
    read_endpoint_slice({**item, "endpoints": [{}, {"addresses": []}, None]}, ObjectReader(1))


# EndpointSlices


def test_an_endpoint_is_named_after_its_pod_or_its_place():
    named = {"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": "a"}}
    outside = {"addresses": ["10.0.0.2", "10.0.0.9"]}
    node = {"addresses": ["10.0.0.3"], "targetRef": {"kind": "Node", "name": "n"}}

    found = read_endpoint_slice(slice_of(named, outside, node), READER).workers

    assert [(each.name, each.url) for each in found] == [
        ("a", "http://10.0.0.1:8000"),
        ("10.0.0.2:8000", "http://10.0.0.2:8000"),
        ("10.0.0.3:8000", "http://10.0.0.3:8000"),
    ]


@pytest.mark.parametrize(
    ("conditions", "ready", "terminating"),
    [
        ({}, True, False),
        ({"ready": None}, True, False),
        ({"ready": False}, False, False),
        ({"ready": False, "serving": True, "terminating": True}, False, True),
        ({"ready": True, "terminating": True}, True, True),  # publishNotReadyAddresses
    ],
)
def test_conditions_of_an_endpoint(conditions, ready, terminating):
    endpoint = {"addresses": ["10.0.0.1"], "conditions": conditions}

    (found,) = read_endpoint_slice(slice_of(endpoint), READER).workers

    assert (found.is_ready, found.is_terminating) == (ready, terminating)


def test_a_slice_without_the_port_is_trouble_unless_it_is_empty():
    endpoint = {"addresses": ["10.0.0.1"]}

    assert "EndpointSlice s" in read_endpoint_slice(slice_of(endpoint), ObjectReader("grpc")).trouble
    assert read_endpoint_slice(slice_of(), ObjectReader("grpc")).trouble == ""
    assert read_endpoint_slice(slice_of(endpoint), ObjectReader(99)).workers[0].url == "http://10.0.0.1:99"


def test_names_instead_of_addresses_are_left_to_dns():
    assert not read_endpoint_slice(
        slice_of({"addresses": ["db.example.com"]}, addressType="FQDN"), READER
    ).workers


def test_values_of_the_role_label_may_have_other_names(pod):
    reader = ObjectReader("http", role_label="model", meanings={"llama-prefill": "prefill"})

    found = [
        read_pod(pod("a", labels={"model": value}), reader).workers[0].role
        for value in ("llama-prefill", "other")
    ]

    assert found == ["prefill", "other"]


def test_a_slices_labels_are_its_endpoints_role_and_model():
    metadata = {"name": "s", "labels": {"role": "prefill", "example.com/model": "llama"}}
    reading = read_endpoint_slice(slice_of({"addresses": ["10.0.0.1"]}, metadata=metadata), READER)

    assert (reading.workers[0].role, reading.workers[0].models) == ("prefill", ("llama",))


def test_of_a_pod_in_several_slices_ipv4_and_the_serving_one_count():
    def found(url: str, *, ready: bool = True, terminating: bool = False) -> FoundWorker:
        return FoundWorker("a", url, ready, terminating)

    six, four = found("http://[fd00::1]:1"), found("http://10.0.0.1:1")
    ending, unready = found("http://10.0.0.2:1", terminating=True), found("http://10.0.0.0:1", ready=False)

    for order in ([six, ending, unready, four], [four, unready, ending, six]):
        assert by_name(order) == {"a": four}
    assert by_name([six]) == {"a": six}


# Nodes


def test_the_node_comes_from_the_pod_or_the_endpoint(pod):
    placed = pod("a")
    placed["spec"]["nodeName"] = "node-7"
    (found,) = read_pod(placed, READER).workers
    (end, nowhere) = read_endpoint_slice(
        slice_of({"addresses": ["10.0.0.1"], "nodeName": "node-8"}, {"addresses": ["10.0.0.2"]}), READER
    ).workers

    assert (found.node, end.node, nowhere.node) == ("node-7", "node-8", None)
    assert found.spec(draining=False).node == "node-7"


# InferencePools


def test_a_pools_labels_become_a_selector():
    reading = read_pool(inference_pool("chat", {"tier": "a", "app": "vllm"}, 8000, 8001))

    assert reading.target == PoolTarget("app=vllm,tier=a", (8000, 8001))
    assert reading.trouble == ""


@pytest.mark.parametrize(
    ("pool", "trouble"),
    [
        (inference_pool("chat", {}, 8000), "no matchLabels"),
        (inference_pool("chat", {"app": "vllm"}), "no targetPorts"),
        (inference_pool("chat", {"app": "vllm"}, 8000, appProtocol="kubernetes.io/h2c"), "HTTP/1.1"),
        ({"metadata": {"name": "chat"}}, "no matchLabels"),
        ({"metadata": {"name": "chat"}, "spec": {"selector": [], "targetPorts": {}}}, "no matchLabels"),
    ],
)
def test_a_pool_that_selects_nothing_is_trouble(pool, trouble):
    reading = read_pool(pool)

    assert reading.target is None
    assert "InferencePool chat" in reading.trouble
    assert trouble in reading.trouble


def test_each_target_port_of_a_pod_is_a_worker(pod):
    one = read_pod(pod("a", ports=[]), ObjectReader("http", target_ports=(8000,)))
    several = read_pod(pod("a", ports=[]), ObjectReader("http", target_ports=(8000, 8001)))

    assert [(found.name, found.url) for found in one.workers] == [("a", "http://10.0.0.1:8000")]
    assert [(found.name, found.url) for found in several.workers] == [
        ("a:8000", "http://10.0.0.1:8000"),
        ("a:8001", "http://10.0.0.1:8001"),
    ]


@pytest.mark.parametrize(
    ("also", "complaint"),
    [
        ({"selector": "app=vllm"}, "own selector"),
        ({"port": 8000}, "own port"),
        ({"resource": "endpointslices"}, "resource must be pods"),
    ],
)
def test_what_a_pool_decides_cannot_be_set_as_well(also, complaint):
    with pytest.raises(ValidationError, match=complaint):
        KubernetesOptions.model_validate({"pool": "chat", **also})
