from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.fleet.discovery.conftest import inference_pool
from tests.support.clocks import QuickClock
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.fleet.discovery.base import Discoverer, ShrinkLimits
from kvroute.fleet.discovery.kubernetes import KubernetesDiscovery
from kvroute.fleet.discovery.kubernetes_api import access_of
from kvroute.fleet.discovery.registry import sources_of
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.options import FleetOptions, KubernetesOptions
from kvroute.fleet.worker import Ejection, HealthState, WorkerSpec

CERTIFICATE = Path(__file__).parents[2] / "data" / "tls" / "localhost.pem"


def source_of(url: str, clock: SystemClock | None = None, **settings: Any) -> KubernetesDiscovery:
    options = {"enabled": True, "api_url": url, "namespace": "llm", **settings}
    source = KubernetesDiscovery.configured(
        FleetOptions.model_validate({"kubernetes": options}), clock or QuickClock(0.001)
    )
    assert source is not None
    return source


class Watching:
    """A source being watched: what it found last."""

    def __init__(self, source: KubernetesDiscovery) -> None:
        self.source = source
        self.sets: list[tuple[WorkerSpec, ...]] = []

    @property
    def ids(self) -> list[str]:
        """Draining ones with a star; empty before the first set."""
        return [spec.id + "*" * spec.draining for spec in self.sets[-1]] if self.sets else []

    async def sees(self, *ids: str) -> None:
        try:
            await until(lambda: bool(self.sets) and self.ids == list(ids))
        except TimeoutError:
            pytest.fail(f"expected {ids}, it found {self.sets}")


@asynccontextmanager
async def watching(source: KubernetesDiscovery) -> AsyncIterator[Watching]:
    seen = Watching(source)

    async def follow() -> None:
        async with aclosing(source.watch()) as found:
            async for specs in found:
                seen.sets.append(specs)

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        if task.done():
            await task  # it never ends by itself: show why it did
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# List, then watch


async def test_pods_of_the_selector_are_listed_and_then_watched(api, pod):
    api.put(pod("b", "10.0.0.2"), pod("a"), pod("other", labels={"app": "redis"}))

    async with watching(source_of(api.url, selector="app=vllm")) as seen:
        await seen.sees("a", "b")
        assert [spec.url for spec in seen.sets[0]] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        api.put(pod("c", "10.0.0.3"), pod("another", labels={"app": "redis"}))
        await seen.sees("a", "b", "c")
        api.delete("b")
        await seen.sees("a", "c")

    assert api.lists == 1
    assert seen.source.errors == 0


async def test_an_empty_namespace_is_a_set_without_workers(api):
    async with watching(source_of(api.url)) as seen:
        await seen.sees()


async def test_a_long_list_comes_page_by_page(api, pod):
    api.page = 2
    api.put(*(pod(f"p{number}", f"10.0.0.{number}") for number in range(5)))

    async with watching(source_of(api.url)) as seen:
        await seen.sees("p0", "p1", "p2", "p3", "p4")

    assert [params.get("continue") for params in api.asked[:3]] == [None, "2", "4"]


async def test_an_event_that_changes_nothing_about_workers_is_not_a_set(api, pod):
    api.put(pod("a"))
    async with watching(source_of(api.url)) as seen:
        await seen.sees("a")
        api.put(pod("a", annotations={"touched": "yes"}))
        api.put(pod("b", "10.0.0.2"))
        await seen.sees("a", "b")

    assert len(seen.sets) == 2


async def test_a_pod_that_came_back_elsewhere_has_its_new_address(api, pod):
    api.put(pod("a"))
    async with watching(source_of(api.url)) as seen:
        await seen.sees("a")
        api.delete("a")
        api.put(pod("a", "10.9.9.9"))
        await until(lambda: [spec.url for spec in seen.sets[-1]] == ["http://10.9.9.9:8000"])


async def test_names_with_odd_line_separators_are_not_the_end_of_an_event(api, pod):
    """U+0085 ends a line for Python's text, not for JSON."""
    async with watching(source_of(api.url)) as seen:
        await seen.sees()
        api.put(pod("a", annotations={"note": "one\x85two\u2028three"}))
        await seen.sees("a")

    assert seen.source.errors == 0


# Readiness and termination


async def test_a_pod_joins_once_ready_and_drains_from_then_on(api, pod):
    api.put(pod("a", ready=False))
    async with watching(source_of(api.url)) as seen:
        await seen.sees()
        api.put(pod("a"))
        await seen.sees("a")
        api.put(pod("a", ready=False))
        await seen.sees("a*")
        api.put(pod("a"))
        await seen.sees("a")
        api.put(pod("a", terminating=True))
        await seen.sees("a*")
        api.put(pod("a", terminating=True, ready=False))
        api.delete("a")
        await seen.sees()


@pytest.mark.parametrize(
    "state", [{"terminating": True}, {"ip": None}, {"phase": "Succeeded"}, {"phase": "Failed"}]
)
async def test_pods_that_cannot_serve_do_not_join(state, api, pod):
    api.put(pod("a", **state), pod("b", "10.0.0.2"))

    async with watching(source_of(api.url)) as seen:
        await seen.sees("b")


async def test_readiness_can_be_left_to_kvroutes_own_probes(api, pod):
    api.put(pod("a", ready=False))
    async with watching(source_of(api.url, require_ready=False)) as seen:
        await seen.sees("a")
        api.put(pod("a", ready=False, terminating=True))
        await seen.sees("a*")


async def test_a_new_pod_of_a_drained_ones_name_and_address_has_to_get_ready_itself(api, pod):
    api.put(pod("a"))
    async with watching(source_of(api.url)) as seen:
        await seen.sees("a")
        api.delete("a")
        await seen.sees()
        api.put(pod("a", ready=False))
        api.put(pod("b", "10.0.0.2"))
        await seen.sees("b")


# Trouble


async def test_the_next_watch_continues_from_a_bookmark(api, pod):
    api.put(pod("a"))
    async with watching(source_of(api.url)) as seen:
        await seen.sees("a")
        await until(lambda: api.watches == 1)
        api.bookmark()
        api.forget_history()  # so that only the bookmark's version is good enough
        api.end_watches()
        await until(lambda: len(api.asked) == 3 and api.watches == 1)
        api.put(pod("b", "10.0.0.2"))
        await seen.sees("a", "b")

    assert api.lists == 1
    assert int(api.asked[2]["resourceVersion"]) == int(api.asked[1]["resourceVersion"]) + 50
    assert all(params["allowWatchBookmarks"] == "true" for params in api.asked[1:])


@pytest.mark.parametrize("status", [False, True], ids=["as an event", "as a status"])
async def test_410_gone_means_a_new_list(status, api, pod, caplog):
    api.put(pod("a"))
    async with watching(source_of(api.url)) as seen:
        await seen.sees("a")
        await until(lambda: api.watches == 1)
        # A change while no client watches, which the server then no longer has:
        api.fails_watches = (410, "too old") if status else None
        api.objects.pop("a")
        api.objects["b"] = pod("b", "10.0.0.2")
        api.version += 10
        api.forget_history()
        with caplog.at_level(logging.INFO):
            api.cut()
            await seen.sees("b")
            api.fails_watches = None
            await until(lambda: api.watches == 1)
        api.put(pod("c", "10.0.0.3"))
        await seen.sees("b", "c")

    assert "too old; listing again" in caplog.text
    assert api.lists >= 2


async def test_410_while_watching_means_a_new_list(api, pod):
    api.put(pod("a"))
    async with watching(source_of(api.url)) as seen:
        await seen.sees("a")
        await until(lambda: api.watches == 1)
        api.send(b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}')
        await until(lambda: api.lists == 2)


async def test_a_broken_connection_is_resumed_where_it_broke(api, pod, caplog):
    api.put(pod("a"))
    async with watching(source_of(api.url)) as seen:
        await seen.sees("a")
        await until(lambda: api.watches == 1)
        with caplog.at_level(logging.INFO):
            api.cut()
            api.put(pod("b", "10.0.0.2"))
            await seen.sees("a", "b")
            await until(lambda: "answers again" in caplog.text)

    assert api.lists == 1
    assert seen.source.errors == 1
    assert len(seen.sets) == 2  # no worker left in between


async def test_while_the_server_is_away_the_last_known_set_stays(fake_api, serving, pod, caplog):
    fake_api.put(pod("a"))
    clock = QuickClock(0.001)
    async with serving(fake_api):
        port = urlsplit(fake_api.url).port
        running = watching(source_of(fake_api.url, clock, backoff_max_s=3))
        seen = await running.__aenter__()
        await seen.sees("a")
        await until(lambda: fake_api.watches == 1)
    try:
        await until(lambda: seen.source.errors >= 8)
        assert len(seen.sets) == 1
        fake_api.put(pod("b", "10.0.0.2"))
        async with serving(fake_api, port=port):
            await seen.sees("a", "b")
    finally:
        await running.__aexit__(None, None, None)

    # Doubling from half a second to the longest pause, each a little shorter at random.
    for pause, full in zip(clock.slept, [0.5, 1.0, 2.0, 3.0, 3.0, 3.0], strict=False):
        assert 0.8 * full <= pause <= full
    warnings = [record for record in caplog.records if "the known workers stay" in record.message]
    assert 1 <= len(warnings) <= 2  # one for the break, one for the refusals: not one for each


async def test_a_server_that_is_not_there_at_the_start_is_waited_for(fake_api, serving, pod):
    fake_api.put(pod("a"))
    async with serving(fake_api):
        port = urlsplit(fake_api.url).port
    async with watching(source_of(fake_api.url)) as seen:
        await until(lambda: seen.source.errors >= 2)
        assert seen.sets == []  # an unknown set is not an empty set
        async with serving(fake_api, port=port):
            await seen.sees("a")


async def test_a_refusal_is_logged_with_the_servers_reason_but_not_the_token(api, tmp_path, caplog):
    (tmp_path / "token").write_text("very-secret")
    api.fails = (403, 'pods is forbidden: User "system:serviceaccount:llm:gw" cannot list resource')
    async with watching(source_of(api.url, token_file=tmp_path / "token")) as seen:
        await until(lambda: seen.source.errors >= 3)

    assert caplog.text.count("answered 403: pods is forbidden") == 1
    assert "very-secret" not in caplog.text


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"type":"ADDED"}', b'{"type":"?","object":{}}'])
async def test_an_event_that_makes_no_sense_is_counted_and_ends_in_a_working_watch(line, api, pod):
    async with watching(source_of(api.url)) as seen:
        await seen.sees()
        await until(lambda: api.watches == 1)
        api.send(line)
        await until(lambda: seen.source.errors >= 1)
        api.log.pop()
        api.put(pod("a"))
        await seen.sees("a")


async def test_watches_that_end_immediately_are_retried_with_a_backoff(api, pod):
    clock = QuickClock(0.001)
    async with watching(source_of(api.url, clock)) as seen:
        await seen.sees()
        for _ in range(4):
            await until(lambda: api.watches == 1)
            api.end_watches()
            await until(lambda: api.watches == 0)
        await until(lambda: len(clock.slept) >= 4)

    assert clock.slept[3] >= 0.8 * 4.0
    assert seen.source.errors == 0


async def test_a_watch_that_falls_silent_is_given_up_a_little_after_its_time(api, pod):
    """A connection may break without a word. The fake server never ends a watch by itself."""
    async with watching(source_of(api.url, watch_s=1, timeout_s=0.1)) as seen:
        await until(lambda: len(api.asked) == 3)
        api.put(pod("a"))
        await seen.sees("a")

    assert api.asked[1]["timeoutSeconds"] == "1"
    assert api.lists == 1
    assert seen.source.errors >= 1


async def test_all_objects_are_listed_again_periodically(api, pod):
    clock = QuickClock(0.001)
    api.put(pod("a"))
    async with watching(source_of(api.url, clock, resync_s=600)) as seen:
        await seen.sees("a")
        await until(lambda: api.watches == 1)
        del api.objects["a"]  # without an event
        clock.ahead_s += 601
        api.end_watches()
        await seen.sees()

    assert api.lists == 2


# Who we are


async def test_a_rotated_token_is_read_again(api, pod, tmp_path):
    token = tmp_path / "token"
    token.write_text("first\n")
    api.tokens = {"first"}
    api.put(pod("a"))
    async with watching(source_of(api.url, token_file=token)) as seen:
        await seen.sees("a")
        await until(lambda: api.watches == 1)
        api.tokens = {"second"}
        api.cut()
        await until(lambda: seen.source.errors >= 2)  # the break, and 401
        token.write_text("second\n")
        api.put(pod("b", "10.0.0.2"))
        await seen.sees("a", "b")

    assert api.refused >= 1


async def test_the_servers_certificate_is_checked_against_the_ca_file_as_it_is_now(
    fake_api, serving, pod, tmp_path, clock
):
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE)
    ca = tmp_path / "ca.crt"
    fake_api.put(pod("a"))
    # This one waits after its first failure: httpx leaks a connection that is cancelled in its handshake.
    async with serving(fake_api, tls=tls), watching(source_of(fake_api.url, clock)) as untrusting:
        await until(lambda: untrusting.source.errors >= 1)
        async with watching(source_of(fake_api.url, ca_file=ca)) as seen:
            await until(lambda: seen.source.errors >= 1)  # there is no such file yet
            ca.write_bytes(CERTIFICATE.read_bytes())
            await seen.sees("a")

        assert untrusting.sets == []


def test_in_a_pod_everything_comes_from_the_service_account(tmp_path):
    (tmp_path / "namespace").write_text("llm\n")
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}

    access = access_of(KubernetesOptions(), environ, tmp_path)
    other = access_of(KubernetesOptions(namespace="b", ca_file=Path("/ca")), environ, tmp_path)
    six = access_of(KubernetesOptions(), {"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path)

    assert (access.url, access.namespace) == ("https://10.96.0.1:6443", "llm")
    assert (access.token_file, access.ca_file) == (tmp_path / "token", tmp_path / "ca.crt")
    assert (other.namespace, other.ca_file) == ("b", Path("/ca"))
    assert six.url == "https://[fd00::1]:443"


def test_outside_a_cluster_the_error_names_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="not a pod") as caught:
        access_of(KubernetesOptions(), {}, tmp_path)
    assert caught.value.path == "fleet.kubernetes.api_url"

    with pytest.raises(ConfigError) as caught:
        access_of(KubernetesOptions(api_url="https://api"), {}, tmp_path)
    assert caught.value.path == "fleet.kubernetes.namespace"


def test_no_token_of_this_cluster_goes_to_another_ones_server(tmp_path):
    access = access_of(KubernetesOptions(api_url="https://api", namespace="x"), {}, tmp_path)

    assert (access.token_file, access.ca_file) == (None, None)


# Objects that cannot be used


async def test_a_pod_without_the_port_is_left_out_and_logged_once(api, pod, caplog):
    api.put(pod("a", ports=[]), pod("b", "10.0.0.2"))
    async with watching(source_of(api.url)) as seen:
        await seen.sees("b")
        api.put(pod("a", ports=[], annotations={"touched": "yes"}))
        api.put(pod("c", "10.0.0.3"))
        await seen.sees("b", "c")
        api.put(pod("a"))
        await seen.sees("a", "b", "c")

    assert caplog.text.count("no container of the pod a has a port named 'http'") == 1
    assert seen.source.errors == 1


async def test_endpoint_slices_of_a_service_are_watched(fake_api, serving):
    def slice_of(*endpoints: Any) -> dict[str, Any]:
        labels = {"kubernetes.io/service-name": "vllm"}
        return {
            "metadata": {"name": "vllm-x", "labels": labels},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8000}],
            "endpoints": list(endpoints),
        }

    def endpoint(name: str, address: str, **conditions: bool) -> dict[str, Any]:
        target = {"kind": "Pod", "name": name}
        return {"addresses": [address], "conditions": conditions, "targetRef": target}

    fake_api.collection = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
    fake_api.put(slice_of(endpoint("a", "10.0.0.1", ready=True), endpoint("b", "10.0.0.2", ready=False)))
    settings = {"resource": "endpointslices", "selector": "kubernetes.io/service-name=vllm"}
    async with serving(fake_api), watching(source_of(fake_api.url, **settings)) as seen:
        await seen.sees("a")
        fake_api.put(
            slice_of(
                endpoint("a", "10.0.0.1", ready=False, serving=True, terminating=True),
                endpoint("b", "10.0.0.2", ready=True),
            )
        )
        await seen.sees("a*", "b")
        fake_api.put(slice_of(endpoint("b", "10.0.0.2", ready=True)))
        await seen.sees("b")


# InferencePools


async def test_a_pool_names_the_pods_and_their_ports(api, pools, pod):
    pools.put(inference_pool("chat", {"app": "vllm"}, 8000), inference_pool("other", {"app": "redis"}, 6379))
    api.put(pod("a"), pod("b", "10.0.0.2"), pod("other", labels={"app": "redis"}))

    async with watching(source_of(api.url, pool="chat")) as seen:
        await seen.sees("a", "b")
        assert [spec.url for spec in seen.sets[-1]] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        api.put(pod("c", "10.0.0.3"))
        await seen.sees("a", "b", "c")

    assert (pools.lists, api.lists, seen.source.errors) == (1, 1, 0)


async def test_a_changed_pool_changes_the_workers(api, pools, pod):
    pools.put(inference_pool("chat", {"app": "vllm"}, 8000))
    api.put(pod("a"), pod("b", "10.0.0.2", labels={"tier": "new"}))
    async with watching(source_of(api.url, pool="chat")) as seen:
        await seen.sees("a", "b")
        pools.put(inference_pool("chat", {"app": "vllm", "tier": "new"}, 8000))
        await seen.sees("b")
        pools.put(inference_pool("chat", {"app": "vllm", "tier": "new"}, 8000, 8001))
        await seen.sees("b:8000", "b:8001")
        api.put(pod("c", "10.0.0.3", labels={"tier": "new"}))
        await seen.sees("b:8000", "b:8001", "c:8000", "c:8001")
        await until(lambda: api.watches == 1)  # the watches of earlier selectors have ended

    assert [params["labelSelector"] for params in api.asked if "watch" not in params] == [
        "app=vllm",
        "app=vllm,tier=new",
        "app=vllm,tier=new",
    ]


async def test_a_draining_worker_is_still_known_when_its_pool_changes(api, pools, pod):
    """It has been ready once, so it does not have to join again."""
    labels = {"tier": "new"}
    pools.put(inference_pool("chat", {"app": "vllm"}, 8000))
    api.put(pod("a", labels=labels), pod("b", "10.0.0.2", labels=labels))
    async with watching(source_of(api.url, pool="chat")) as seen:
        await seen.sees("a", "b")
        api.put(pod("a", ready=False, labels=labels))
        await seen.sees("a*", "b")
        pools.put(inference_pool("chat", {"app": "vllm", **labels}, 8000))
        await until(lambda: api.lists == 2)
        api.put(pod("c", "10.0.0.3", labels=labels))
        await seen.sees("a*", "b", "c")


async def test_a_pool_that_comes_later_is_waited_for(api, pools, pod, caplog):
    api.put(pod("a"))
    async with watching(source_of(api.url, pool="chat")) as seen:
        await seen.sees()
        await until(lambda: pools.watches == 1)
        pools.put(inference_pool("chat", {"app": "vllm"}, 8000))
        await seen.sees("a")

    assert caplog.text.count("there is no InferencePool chat in llm") == 1
    assert seen.source.errors == 1


async def test_without_the_definition_of_pools_the_reason_is_logged(api, pod, caplog):
    api.put(pod("a"))
    async with watching(source_of(api.url, pool="chat")) as seen:
        await until(lambda: seen.source.errors > 1)

    assert seen.sets == []
    assert caplog.text.count("/inferencepools: answered 404") == 1


# In the fleet


async def test_the_fleet_follows_a_pod_from_ready_to_deleted(api, pod, running):
    settings = {"enabled": True, "api_url": api.url, "namespace": "llm"}
    clock = QuickClock(0.001)
    sources = sources_of(FleetOptions.model_validate({"kubernetes": settings}), clock)
    fleet = Fleet()
    discoverer = Discoverer(fleet, sources, clock)
    api.put(pod("a"))
    running(discoverer.run())
    await until(lambda: len(fleet.workers()) == 1)
    worker = fleet.get("a")
    fleet.mark_healthy(worker, 0.0)

    api.put(pod("a", terminating=True))
    await until(lambda: worker.state is HealthState.DRAINING)
    assert fleet.workers() == (worker,)
    assert fleet.health(worker) is HealthState.HEALTHY

    api.delete("a")
    await until(lambda: fleet.workers() == ())
    assert discoverer.errors() == {"kubernetes": 0}


def answer_lists_with(api, objects):
    """Every list is `objects` from now on, and every watch must list again, as after a restart of the API
    server."""
    api.objects = objects
    api.version += 1
    api.forget_history()
    api.end_watches()


@pytest.fixture
async def fleet_of_four(api, pod, running):
    """A fleet that follows four healthy pods; the discoverer and its clock."""
    return await follow_four(api, pod, running)


async def follow_four(api, pod, running, **more):
    settings = {"enabled": True, "api_url": api.url, "namespace": "llm", **more}
    clock = QuickClock(0.001)
    fleet = Fleet()
    discoverer = Discoverer(
        fleet,
        sources_of(FleetOptions.model_validate({"kubernetes": settings}), clock),
        clock,
        ShrinkLimits(confirm_s=600),
    )
    api.put(*(pod(name, f"10.0.0.{number}") for number, name in enumerate("abcd", 1)))
    running(discoverer.run())
    await until(lambda: len(fleet.workers()) == 4 and api.watches == 1)
    for worker in fleet.workers():
        fleet.mark_healthy(worker, 0.0)
    return fleet, discoverer, clock


async def test_an_empty_list_keeps_the_workers_and_is_requested_again(api, fleet_of_four, caplog):
    caplog.set_level("INFO")
    fleet, discoverer, _clock = fleet_of_four
    everything, lists = api.objects, api.lists

    answer_lists_with(api, {})
    await until(lambda: api.lists >= lists + 3)
    assert len(fleet.workers()) == 4
    assert discoverer.kept() == {"kubernetes": 4}
    assert "kubernetes no longer names 4 workers" in discoverer.notes()[0]

    answer_lists_with(api, everything)
    await until(lambda: discoverer.kept() == {"kubernetes": 0} and api.watches == 1)
    assert len(fleet.workers()) == 4
    assert discoverer.notes() == []
    assert discoverer.shrinks == {"kubernetes": 1}
    assert discoverer.errors() == {"kubernetes": 0}
    assert caplog.text.count("names 0 workers and omits 4 that answer") == 1
    assert "accepted again" in caplog.text


async def test_an_empty_list_that_is_repeated_long_enough_is_accepted(api, fleet_of_four, caplog):
    fleet, _discoverer, clock = fleet_of_four
    lists = api.lists

    answer_lists_with(api, {})
    await until(lambda: api.lists >= lists + 3)
    clock.ahead_s += 600

    await until(lambda: fleet.workers() == ())
    await until(lambda: api.watches == 1)  # and it continues to watch
    assert "has not named 4 workers for 600 s: they leave" in caplog.text


async def test_workers_missing_from_the_list_leave_when_they_stop_answering(api, fleet_of_four):
    fleet, _discoverer, _clock = fleet_of_four
    lists = api.lists

    answer_lists_with(api, {})
    await until(lambda: api.lists >= lists + 3)
    for worker in fleet.workers()[1:]:
        fleet.mark_unhealthy(worker, Ejection.REFUSED, "connection refused")

    await until(lambda: [worker.id for worker in fleet.workers()] == ["a"])


async def test_an_outage_of_the_api_server_confirms_nothing(api, fleet_of_four):
    fleet, discoverer, clock = fleet_of_four
    lists = api.lists
    answer_lists_with(api, {})
    await until(lambda: api.lists >= lists + 3)

    api.fails = (500, "etcd leader changed")
    await until(lambda: discoverer.errors()["kubernetes"] >= 1)  # no answer is in flight any more
    clock.ahead_s += 6000
    await until(lambda: discoverer.errors()["kubernetes"] >= 3)

    assert len(fleet.workers()) == 4


async def test_an_admin_removal_applies_immediately_even_while_a_set_is_doubted(api, fleet_of_four):
    fleet, _discoverer, _clock = fleet_of_four
    lists = api.lists
    answer_lists_with(api, {})
    await until(lambda: api.lists >= lists + 3)

    fleet.remove("b")

    assert [worker.id for worker in fleet.workers()] == ["a", "c", "d"]
    lists = api.lists
    await until(lambda: api.lists >= lists + 3)
    assert [worker.id for worker in fleet.workers()] == ["a", "c", "d"]


async def test_pods_deleted_in_a_scale_down_leave_as_they_are_deleted(api, pod, fleet_of_four):
    fleet, discoverer, _clock = fleet_of_four

    for number, name in enumerate("abcd", 1):
        api.put(pod(name, f"10.0.0.{number}", terminating=True))
    for name in "abcd":
        api.delete(name)

    await until(lambda: fleet.workers() == ())
    assert discoverer.shrinks == {}


async def test_workers_of_a_deleted_pool_leave_when_it_does_not_come_back(api, pools, pod, running, caplog):
    pools.put(inference_pool("chat", {"app": "vllm"}, 8000))
    fleet, discoverer, clock = await follow_four(api, pod, running, pool="chat")

    pools.delete("chat")
    await until(lambda: discoverer.kept() == {"kubernetes": 4})
    pools.put(inference_pool("chat", {"app": "vllm"}, 8000))
    await until(lambda: discoverer.kept() == {"kubernetes": 0} and api.watches == 1)
    assert len(fleet.workers()) == 4

    pools.delete("chat")
    await until(lambda: discoverer.kept() == {"kubernetes": 4})
    clock.ahead_s += 600

    await until(lambda: fleet.workers() == ())
    assert caplog.text.count("there is no InferencePool chat in llm") == 2
