"""Which address Envoy gets for a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager

import pytest
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.epp.endpoints import Endpoints
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerId, WorkerSpec


class Names:
    """A resolver whose answers a test sets."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        try:
            return self.addresses[host]
        except KeyError:
            raise OSError("no such name") from None


def fleet_of(*urls: str) -> Fleet:
    fleet = Fleet()
    fleet.apply("static", [WorkerSpec(WorkerId(url), url) for url in urls])
    return fleet


@asynccontextmanager
async def resolving(endpoints: Endpoints):
    task = asyncio.create_task(endpoints.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://10.0.0.1:8000/path", None),
        ("http://name:8000", None),
    ],
)
def test_addresses_are_ip_and_port(url, address):
    fleet = fleet_of(url)

    assert Endpoints(fleet, SystemClock(), 10.0).of(fleet.workers()[0]) == address


async def test_names_are_resolved_again_and_the_last_known_address_stays(caplog):
    names, fleet = Names(), fleet_of("http://name:8000", "http://other:8000")
    names.addresses["name"] = ["10.0.0.7"]
    endpoints = Endpoints(fleet, SystemClock(), 0.01, names.resolve)
    named, other = fleet.workers()
    async with resolving(endpoints):
        await until(lambda: endpoints.of(named) == "10.0.0.7:8000")
        await until(lambda: "http://other" not in caplog.text and "other:8000" in caplog.text)
        names.addresses["name"] = ["10.0.0.8"]
        await until(lambda: endpoints.of(named) == "10.0.0.8:8000")
        del names.addresses["name"]
        await until(lambda: caplog.text.count("name:8000") == 1)

        assert endpoints.of(named) == "10.0.0.8:8000"
        assert endpoints.of(other) is None
        fleet.apply("static", [WorkerSpec(WorkerId("late"), "http://late:1")])
        names.addresses["late"] = ["::1", "10.0.0.9"]
        await until(lambda: endpoints.of(fleet.get("late")) == "[::1]:1")
        assert endpoints.of(named) is None  # it has left


async def test_a_name_that_cannot_exist_does_not_end_the_look_ups():
    fleet = fleet_of(f"http://{'x' * 64}.example:8000", "http://localhost:8000")
    endpoints = Endpoints(fleet, SystemClock(), 1.0)
    local = fleet.get(WorkerId("http://localhost:8000"))
    async with resolving(endpoints):
        await until(lambda: endpoints.of(local) is not None)
        fleet.apply("static", [WorkerSpec(WorkerId("late"), "http://localhost:8001")])
        (late,) = fleet.workers()
        await until(lambda: endpoints.of(late) is not None)
