from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.fleet.discovery.base import Discoverer, ShrinkLimits
from kvroute.fleet.discovery.dns import DnsDiscovery, of_family, system_addresses
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.options import DnsOptions

NOBODY = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class FakeNames(dict[str, "list[str] | OSError"]):
    """Answers by host; a host that is not there hangs."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        if host not in self:
            await asyncio.get_running_loop().create_future()
        answer = self[host]
        if isinstance(answer, OSError):
            raise answer
        return answer


def looking_up(names: FakeNames, clock: Any, *places: str, **options: Any) -> DnsDiscovery:
    options = {"names": places or ("vllm:8000",), "interval_s": 5, "keep_s": 60, **options}
    return DnsDiscovery(DnsOptions(**options), clock, names)


class Sets(list[list[str]]):
    """Follows a source in the background."""

    async def follow(self, source: DnsDiscovery) -> None:
        async with aclosing(source.watch()) as found:
            async for specs in found:
                self.append([spec.url for spec in specs])


async def test_names_give_workers_their_roles(clock):
    names = FakeNames(both=["10.0.0.1"], prefill=["10.0.0.2"], decode=["10.0.0.3", "10.0.0.1"])
    source = looking_up(
        names, clock, "both:8000", prefill_names=("prefill:8000",), decode_names=("decode:8000",)
    )

    async with aclosing(source.watch()) as found:
        specs = await anext(found)

    assert [(spec.url, spec.role) for spec in specs] == [
        ("http://10.0.0.1:8000", None),
        ("http://10.0.0.2:8000", "prefill"),
        ("http://10.0.0.3:8000", "decode"),
    ]


async def test_every_address_is_a_worker_and_changes_are_followed(clock, running):
    names, sets = FakeNames(vllm=["10.0.0.2", "10.0.0.1", "10.0.0.1"]), Sets()
    source = looking_up(names, clock)
    running(sets.follow(source))
    await clock.settle()
    assert sets == [["http://10.0.0.1:8000", "http://10.0.0.2:8000"]]

    names["vllm"] = ["10.0.0.1", "10.0.0.2"]  # in another order
    await clock.advance(5)
    assert len(sets) == 1
    names["vllm"] = ["10.0.0.2", "10.0.0.3"]
    await clock.advance(4.9)
    assert len(sets) == 1
    await clock.advance(0.1)

    assert sets[1:] == [["http://10.0.0.2:8000", "http://10.0.0.3:8000"]]
    assert source.errors == 0


async def test_several_names_with_their_own_ports_are_one_set(clock, running):
    names = FakeNames(a=["10.0.0.1"], b=["fd00::1"], c=["10.0.0.1"])
    sets = Sets()
    running(sets.follow(looking_up(names, clock, "a:1", "b:2", "c:1", scheme="https")))
    await clock.settle()

    assert sets == [["https://10.0.0.1:1", "https://[fd00::1]:2"]]


async def test_the_last_addresses_stay_for_their_time_when_lookups_fail(clock, running, caplog):
    names, sets = FakeNames(a=["10.0.0.1"], b=["10.0.0.2"]), Sets()
    source = looking_up(names, clock, "a:1", "b:1")
    running(sets.follow(source))
    await clock.settle()

    names["a"] = NOBODY
    await clock.advance(5 + 55)
    assert len(sets) == 1
    assert source.errors == 12
    await clock.advance(5)

    assert sets[1:] == [["http://10.0.0.2:1"]]
    assert caplog.text.count("the known addresses stay") == 1
    assert caplog.text.count("a:1 could not be resolved for 60 s: its workers leave") == 1
    names["a"] = ["10.0.0.3"]
    await clock.advance(5)
    assert sets[2:] == [["http://10.0.0.3:1", "http://10.0.0.2:1"]]


async def test_a_name_that_resolves_again_has_its_full_time_again(clock, running):
    names, sets = FakeNames(vllm=["10.0.0.1"]), Sets()
    running(sets.follow(looking_up(names, clock)))
    await clock.settle()

    for _ in range(3):
        names["vllm"] = NOBODY
        await clock.advance(50)
        names["vllm"] = ["10.0.0.1"]
        await clock.advance(5)

    assert len(sets) == 1


async def test_a_lookup_that_hangs_has_failed_and_is_not_started_twice():
    names = FakeNames()
    source = looking_up(names, SystemClock(), timeout_s=0.01, interval_s=0.001)
    sets = Sets()
    task = asyncio.create_task(sets.follow(source))
    await until(lambda: source.errors >= 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert names.asked == ["vllm"]
    assert sets == [[]]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("family", "addresses"),
    [("auto", ("10.0.0.1",)), ("ipv4", ("10.0.0.1",)), ("ipv6", ("fd00::1",))],
)
def test_a_worker_with_two_addresses_is_one_worker(family, addresses):
    assert of_family(["fd00::1", "10.0.0.1"], family) == addresses


def test_only_auto_falls_back_to_ipv6():
    assert of_family(["fd00::1"], "auto") == ("fd00::1",)
    assert of_family(["fd00::1"], "ipv4") == ()


async def test_a_name_without_an_address_of_the_family_has_failed(clock, running, caplog):
    source = looking_up(FakeNames(vllm=["fd00::1"]), clock, family="ipv4")
    running(Sets().follow(source))
    await clock.settle()

    assert source.errors == 1
    assert "has no ipv4 address" in caplog.text


async def test_the_systems_resolver_is_used():
    assert set(await system_addresses("localhost")) <= {"127.0.0.1", "::1"}
    with pytest.raises(OSError):
        await system_addresses("no such name")


@pytest.mark.parametrize("name", ["vllm", "vllm:", "vllm:0", "vllm:70000", "http://vllm:1", ":1", "a b:1"])
def test_a_name_is_host_and_port(name):
    with pytest.raises(ValidationError, match="host:port"):
        DnsOptions(names=(name,))


async def test_far_fewer_addresses_cause_an_earlier_lookup_and_are_accepted_when_repeated(clock, running):
    addresses = [f"10.0.0.{number}" for number in range(1, 6)]
    names, fleet = FakeNames(vllm=addresses), Fleet()
    source = looking_up(names, clock)
    discoverer = Discoverer(fleet, {"dns": source}, clock, ShrinkLimits(confirm_s=12))
    running(discoverer.run())
    await clock.settle()
    for worker in fleet.workers():
        fleet.mark_healthy(worker, 0.0)

    names["vllm"] = addresses[:2]
    await clock.advance(5)
    assert (len(fleet.workers()), discoverer.kept()) == (5, {"dns": 3})
    asked = len(names.asked)
    await clock.advance(11)
    assert len(names.asked) == asked + 5
    assert len(fleet.workers()) == 5
    await clock.advance(2)

    assert [worker.id for worker in fleet.workers()] == ["10.0.0.1:8000", "10.0.0.2:8000"]


async def test_a_failed_lookup_does_not_confirm_the_doubted_set(clock, running):
    addresses = [f"10.0.0.{number}" for number in range(1, 6)]
    names, fleet = FakeNames(vllm=addresses), Fleet()
    discoverer = Discoverer(fleet, {"dns": looking_up(names, clock)}, clock, ShrinkLimits(confirm_s=12))
    running(discoverer.run())
    await clock.settle()
    for worker in fleet.workers():
        fleet.mark_healthy(worker, 0.0)
    names["vllm"] = addresses[:2]
    await clock.advance(5)

    names["vllm"] = NOBODY
    await clock.advance(50)

    assert (len(fleet.workers()), discoverer.kept()) == (5, {"dns": 3})
