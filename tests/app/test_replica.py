from __future__ import annotations

import asyncio
import socket

import uvloop

from kvroute.app.replica import Replica
from kvroute.blocks.keys import PromptKeys, block_keys
from kvroute.clock import SystemClock
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.worker import WorkerFacts, WorkerId, WorkerSpec
from kvroute.replicas.mesh import GATHER_S
from kvroute.replicas.messages import EndedRequests, SessionForgotten
from kvroute.routing.router import Router
from kvroute.routing.strategy import RouteQuery


class Published:
    """A mesh that keeps what is published."""

    def __init__(self) -> None:
        self.messages: list = []
        self.arrived = asyncio.Event()

    def publish(self, *messages) -> None:
        self.messages += messages

    def flush(self) -> None:
        self.arrived.set()


def test_answers_that_have_arrived_are_read_before_dispatches_are_published():
    """The timer is due in an iteration of uvloop that has polled the sockets before the answer came."""

    async def work() -> list:
        clock, fleet, mesh = SystemClock(), Fleet(), Published()
        fleet.apply("test", [WorkerSpec(WorkerId("w0"), "http://w0")])
        (worker,) = fleet.workers()
        fleet.update_facts(worker, WorkerFacts(frozenset(["m"])))
        fleet.mark_healthy(worker, 0.0)
        replica = Replica(0, mesh, None, generation=0)
        router = Router(observer=replica.own)
        health = HealthMonitor.__new__(HealthMonitor)  # no message reaches it
        replica.attach_services(fleet, router, health, clock, None, None, None)
        prompts = (PromptKeys(block_keys(b"hello " * 100), 100, 16.0),)
        query = RouteQuery("m", clock.now(), prompts, 100)
        decision = router.decide(query, fleet.view("m"))
        loop, (own, far), (own_answer, far_answer) = asyncio.get_running_loop(), *_pairs()

        def request() -> None:
            own.recv(1)
            dispatch = router.dispatch(query, decision, decision.ranking[0], clock.now())
            loop.add_reader(own_answer, lambda: (own_answer.recv(1), dispatch.finish(clock.now())))
            while clock.now() < query.now + 3 * GATHER_S:
                pass  # the process is busy, or the kernel runs others
            far_answer.send(b"a")

        loop.add_reader(own, request)
        far.send(b"r")
        async with asyncio.timeout(30):
            await mesh.arrived.wait()
        for each in (own, own_answer):
            loop.remove_reader(each)
        for each in (own, far, own_answer, far_answer):
            each.close()
        return mesh.messages

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        messages = runner.run(work())

    assert [type(message) for message in messages] == [EndedRequests]


def test_a_state_that_is_asked_for_starts_no_second_series_of_messages():
    async def work() -> int:
        loop, timers = asyncio.get_running_loop(), []
        call_later = loop.call_later

        def counted(*arguments):
            timers.append(call_later(*arguments))
            return timers[-1]

        loop.call_later = counted
        clock, fleet = SystemClock(), Fleet()
        replica = Replica(0, Published(), None, generation=0)
        health = HealthMonitor.__new__(HealthMonitor)  # no message reaches it
        router = Router(observer=replica.own)
        replica.attach_services(fleet, router, health, clock, None, None, None)
        for number in range(5):
            replica.publish(SessionForgotten(str(number)))
            replica.state()
        replica.publish(SessionForgotten("last"))
        return sum(not timer.cancelled() for timer in timers)

    assert asyncio.run(work()) == 1


def _pairs():
    for _ in range(2):
        pair = socket.socketpair()
        for each in pair:
            each.setblocking(False)
        yield pair
