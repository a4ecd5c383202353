"""Who may register which address with the coordinator: its ASGI application, with senders of any address."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.support.clocks import ManualClock

from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.listeners import CoordinatorApp
from kvroute.lmcache.membership import ServedWorker
from kvroute.lmcache.options import LMCacheOptions
from kvroute.lmcache.registration import (
    MAX_SERVERS_PER_SENDER,
    RegistrationRefused,
    ServerAddresses,
    is_local_address,
)


class Rig:
    """A coordinator, and clients of it by address."""

    def __init__(self, **coordinator: Any) -> None:
        options = LMCacheOptions(coordinator={"chunk_tokens": 4, **coordinator})
        self.clock = ManualClock(0.0)
        self.coordinator = Coordinator(ChunkIndex(), self.clock, options)
        self.app = CoordinatorApp(self.coordinator, self.clock, options.coordinator)

    async def send(self, sender: str, method: str, path: str, body: object = None) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, client=(sender, 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as http:
            return await http.request(method, path, json=body)

    async def register(self, sender: str, name: str, ip: str | None = None) -> httpx.Response:
        body = {"instance_id": name, "ip": ip or sender, "http_port": 8080}
        return await self.send(sender, "POST", "/instances", body)

    def address_of(self, name: str) -> str:
        instance = self.coordinator.instance(name)
        return "" if instance is None else instance.address


def event(name: str, seq: int = 1) -> dict[str, Any]:
    return {
        "batches": [
            {
                "instance_id": name,
                "incarnation": 1,
                "seq": seq,
                "event_type": "store",
                "tier": "l1",
                "backend": "dram",
                "entries": [],
            }
        ]
    }


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_program_may_register_its_own_address_and_no_others(rig: Rig, caplog) -> None:
    assert (await rig.register("10.0.0.7", "a")).status_code == 200
    answer = await rig.register("10.0.0.7", "b", "169.254.169.254")

    assert answer.status_code == 403
    assert "lmcache.coordinator.servers" in answer.json()["error"]
    assert rig.address_of("b") == ""
    assert rig.app.refused == 1
    assert "refused a message of 10.0.0.7" in caplog.text


async def test_addresses_of_workers_and_listed_networks_may_be_registered_by_others() -> None:
    rig = Rig(servers=["10.9.0.0/16", "cache.internal"])
    rig.coordinator.worker_changed(ServedWorker("w", "10.0.0.2", (0,), frozenset()))

    for ip in ("10.0.0.2", "10.9.1.1", "cache.internal"):
        assert (await rig.register("10.0.0.7", f"of {ip}", ip)).status_code == 200
    assert (await rig.register("10.0.0.7", "c", "10.8.0.1")).status_code == 403


async def test_a_server_that_lives_is_not_replaced_from_another_address(rig: Rig) -> None:
    await rig.register("10.0.0.7", "a")

    assert (await rig.register("10.0.0.66", "a")).status_code == 409
    assert (await rig.send("10.0.0.66", "PUT", "/instances/a/heartbeat")).status_code == 409
    assert (await rig.send("10.0.0.66", "POST", "/events", event("a"))).status_code == 409
    assert (await rig.send("10.0.0.66", "DELETE", "/instances/a")).status_code == 409
    assert rig.address_of("a") == "10.0.0.7"
    assert (await rig.send("10.0.0.7", "PUT", "/instances/a/heartbeat")).status_code == 200
    assert (await rig.send("10.0.0.7", "POST", "/events", event("a"))).json()["applied"] == 1


async def test_an_id_is_free_again_when_the_heartbeats_of_its_server_have_ended(rig: Rig) -> None:
    await rig.register("10.0.0.7", "a")

    rig.clock.time += 31.0
    rig.coordinator.expire()

    assert (await rig.register("10.0.0.8", "a")).status_code == 200
    assert rig.address_of("a") == "10.0.0.8"


@pytest.mark.parametrize("how", ["registrations", "events"])
async def test_one_address_has_a_bounded_number_of_servers(rig: Rig, how: str) -> None:
    answers = []
    for number in range(MAX_SERVERS_PER_SENDER + 5):
        if how == "events":
            answers.append(await rig.send("10.0.0.66", "POST", "/events", event(f"s{number}")))
        else:
            answers.append(await rig.register("10.0.0.66", f"s{number}"))

    assert [answer.status_code for answer in answers].count(429) == 5
    assert len(rig.coordinator.instances()) == MAX_SERVERS_PER_SENDER
    assert (await rig.register("10.0.0.7", "a")).status_code == 200


@pytest.mark.parametrize(
    ("host", "sender", "is_local", "is_allowed"),
    [
        ("10.0.0.7", "10.0.0.7", False, True),
        ("10.0.0.7", "::ffff:10.0.0.7", False, True),
        ("fd00::1", "fd00:0:0::1", False, True),
        ("10.0.0.7", "127.0.0.1", True, True),  # a server of the gateway's machine, by its outward address
        ("10.0.0.7", "127.0.0.1", False, False),
        ("localhost", "127.0.0.1", False, True),
        ("127.0.0.1", "10.0.0.7", True, False),  # the gateway's own machine
        ("10.0.0.8", "10.0.0.7", True, False),
        ("metadata.internal", "10.0.0.7", False, False),
    ],
)
def test_an_address_is_the_senders_own(host: str, sender: str, is_local: bool, is_allowed: bool) -> None:
    addresses = ServerAddresses((), lambda host: is_local)

    if is_allowed:
        addresses.check(host, sender, ())
    else:
        with pytest.raises(RegistrationRefused):
            addresses.check(host, sender, ())


def test_only_addresses_of_this_machine_are_local() -> None:
    assert is_local_address("127.0.0.1")
    assert not is_local_address("192.0.2.1")  # reserved for documentation
    assert not is_local_address("no address")


@pytest.mark.parametrize("entry", ["10.0.0.0/99", "", "a b", "http://host/", "10.0.0.1/8"])
def test_an_entry_that_is_no_host_and_no_network_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="servers"):
        LMCacheOptions(coordinator={"servers": [entry]})
