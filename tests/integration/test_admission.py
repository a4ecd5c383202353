"""Requests that wait in the gateway for a worker with a free permit."""

import asyncio
import hashlib
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.support.workers import scripted_worker

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

URL = "/v1/chat/completions"


def body(number: int = 0, **fields) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": f"number {number}"}], **fields}


def numbers(worker) -> list[int]:
    """The requests that a scripted worker got, in order."""
    return [int(json.loads(one)["messages"][0]["content"].split()[1]) for one in worker.bodies]


class Senders:
    """Requests in tasks, so that several are in flight."""

    def __init__(self, running, group: asyncio.TaskGroup) -> None:
        self._running, self.group = running, group

    def send(
        self, number: int, headers: dict[str, str] | None = None, **fields
    ) -> asyncio.Task[httpx.Response]:
        client = self._running.client
        return self.group.create_task(client.post(URL, json=body(number, **fields), headers=headers))

    async def waiting(self, count: int) -> None:
        await self._running.until(lambda: self._running.metric("kvroute_queue_waiting") == count)


@asynccontextmanager
async def busy_worker(running, worker):
    """The worker, with a limit of 1, is busy with request 0 (`first`) until the end of the block."""
    worker.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        senders = Senders(running, group)
        senders.first = senders.send(0)
        await running.until(lambda: len(worker.requests) == 1)
        yield senders
        worker.may_answer.set()


async def test_requests_above_the_limit_wait_and_are_served_in_order(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        async with busy_worker(running, raw_worker) as senders:
            sent = [senders.first]
            for number in (1, 2, 3):
                sent.append(senders.send(number))
                await senders.waiting(number)
            assert numbers(raw_worker) == [0]

        assert [task.result().status_code for task in sent] == [200] * 4
        assert numbers(raw_worker) == [0, 1, 2, 3]
        assert running.metric("kvroute_queue_waiting") == 0
        assert running.metric("kvroute_queue_wait_seconds_count", model="m", key="-") == 4
        assert running.metric("kvroute_requests_in_flight") == 0
        decisions = (await running.client.get("/admin/decisions")).json()["decisions"]
        assert sum("queue_wait_s" in entry for entry in decisions) == 3


async def test_header_and_body_give_the_priority_and_the_header_counts(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        async with busy_worker(running, raw_worker) as senders:
            senders.send(1, priority=5)
            senders.send(2)
            senders.send(3, priority=-5)
            senders.send(4, {"X-Vllm-Priority": "-7"}, priority=9)
            await senders.waiting(4)

        assert numbers(raw_worker) == [0, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("headers", "fields", "name"),
    [
        ({"X-Vllm-Priority": "high"}, {}, "X-Vllm-Priority"),
        ({}, {"priority": "1"}, "priority"),
        ({}, {"priority": 1.5}, "priority"),
    ],
)
async def test_a_priority_that_is_no_integer_is_refused(run_gateway, raw_worker, headers, fields, name):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        answer = await running.client.post(URL, json=body(**fields), headers=headers)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
        assert not raw_worker.requests


async def test_a_full_queue_answers_429_with_retry_after(run_gateway, raw_worker):
    admission = {"max_concurrent": 1, "max_waiting": 1}
    async with run_gateway([raw_worker.url], admission=admission) as running:
        async with busy_worker(running, raw_worker) as senders:
            sent = [senders.first]
            sent.append(senders.send(1))
            await senders.waiting(1)
            refused = await running.client.post(URL, json=body(2))

        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert [task.result().status_code for task in sent] == [200, 200]
        assert numbers(raw_worker) == [0, 1]
        assert running.metric("kvroute_queue_shed_total", model="m", key="-", cause="full") == 1


async def test_a_request_of_a_higher_class_displaces_one_from_a_full_queue(run_gateway, raw_worker):
    admission = {"max_concurrent": 1, "max_waiting": 1}
    async with run_gateway([raw_worker.url], admission=admission) as running:
        async with busy_worker(running, raw_worker) as senders:
            low = senders.send(1, priority=1)
            await senders.waiting(1)
            high = senders.send(2)
            displaced = await low

        assert (displaced.status_code, high.result().status_code) == (429, 200)
        assert displaced.json()["error"]["code"] == "queue_full"
        assert numbers(raw_worker) == [0, 2]
        assert running.metric("kvroute_queue_shed_total", cause="displaced") == 1


async def test_a_passed_deadline_is_answered_429_with_its_own_code(run_gateway, raw_worker):
    admission = {"max_concurrent": 1, "max_wait_s": 0.05}
    async with run_gateway([raw_worker.url], admission=admission) as running:
        async with busy_worker(running, raw_worker) as senders:
            first = senders.first
            late = await senders.send(1)

        assert late.status_code == 429
        assert late.json()["error"]["code"] == "queue_timeout"
        assert int(late.headers["retry-after"]) >= 1
        assert first.result().status_code == 200
        assert numbers(raw_worker) == [0]
        assert running.metric("kvroute_queue_shed_total", cause="deadline") == 1
        assert running.metric("kvroute_requests_in_flight") == 0


async def test_a_client_that_leaves_the_queue_leaves_nothing_behind(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        async with busy_worker(running, raw_worker) as senders:
            leaving = asyncio.create_task(running.client.post(URL, json=body(1)))
            await senders.waiting(1)
            leaving.cancel()
            await senders.waiting(0)
            await running.until(lambda: running.metric("kvroute_requests_in_flight") == 1)
            worker = running.runtime.fleet.get("w0")
            assert worker.load.in_flight == 1
            senders.send(2)
            await senders.waiting(1)

        assert numbers(raw_worker) == [0, 2]
        assert running.metric("kvroute_streams_aborted_total", by="client") == 1
        assert running.metric("kvroute_queue_shed_total") == 0
        assert worker.load.in_flight == 0


async def test_a_waiting_request_goes_to_the_worker_whose_permit_is_free(run_gateway, raw_worker):
    """The strategy prefers each worker for every second request, but one of them has no permit."""
    async with scripted_worker() as other:
        raw_worker.may_answer.clear()
        admission = {"max_concurrent_by_worker": {"w0": 1, "w1": 1}}
        routing = {"strategy": "roundrobin"}
        async with run_gateway([raw_worker.url, other.url], admission=admission, routing=routing) as running:
            async with asyncio.TaskGroup() as group:
                senders = Senders(running, group)
                sent = [senders.send(0) for _ in range(6)]
                await running.until(lambda: sum(task.done() for task in sent) == 5)
                raw_worker.may_answer.set()

            assert len(raw_worker.requests) == 1
            assert len(other.requests) == 5
            reasons = [task.result().headers["x-kvroute-reason"] for task in sent]
            assert "at_limit" in reasons


async def test_a_streamed_request_that_waited_is_relayed_as_a_stream(run_gateway):
    async with (
        run_sim(SimOptions(time_scale=0.02)) as sim,
        run_gateway([sim.url], admission={"max_concurrent": 1}) as running,
    ):
        streamed = body(0, stream=True, max_tokens=8) | {"model": "sim-model"}

        async def read() -> bytes:
            async with running.client.stream("POST", URL, json=streamed) as answer:
                return b"".join([chunk async for chunk in answer.aiter_raw()])

        answers = await asyncio.gather(*(read() for _ in range(4)))

        assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers)
        assert {answer.count(b"data: ") for answer in answers} == {answers[0].count(b"data: ")}
        assert running.metric("kvroute_queue_wait_seconds_count") == 4


LARGE = "x" * 1_200_000
"""Text of a body that a task reads in steps, before the request waits."""


async def test_a_large_body_waits_too_and_its_client_may_leave(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        async with busy_worker(running, raw_worker) as senders:
            leaving = asyncio.create_task(running.client.post(URL, json=body(1, padding=LARGE)))
            await senders.waiting(1)
            staying = senders.send(2, padding=LARGE)
            await senders.waiting(2)
            leaving.cancel()
            await senders.waiting(1)

        assert staying.result().status_code == 200
        assert numbers(raw_worker) == [0, 2]
        assert running.metric("kvroute_requests_in_flight") == 0
        assert running.metric("kvroute_streams_aborted_total", by="client") == 1


async def test_requests_that_compute_no_tokens_do_not_wait(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        async with busy_worker(running, raw_worker) as senders:
            senders.group.create_task(running.client.post("/tokenize", json={"model": "m", "prompt": "x"}))
            await running.until(lambda: len(raw_worker.requests) == 2)

        assert raw_worker.targets[1] == b"/tokenize"


async def test_a_session_keeps_its_order_although_a_later_request_is_more_urgent(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        async with busy_worker(running, raw_worker) as senders:
            for number, session, priority in ((1, "s", 5), (2, "s", -5), (3, "t", 0)):
                senders.send(number, {"x-session-id": session}, priority=priority)
                await senders.waiting(number)

        assert numbers(raw_worker) == [0, 3, 1, 2]


async def test_waiting_requests_get_503_when_their_last_worker_leaves(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        async with busy_worker(running, raw_worker) as senders:
            running_one = senders.first
            waiting = senders.send(1)
            await senders.waiting(1)
            await running.client.post("/admin/workers/w0/drain")
            answer = await waiting

        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_routable_worker"
        assert running_one.result().status_code == 200


async def test_a_stopping_gateway_serves_waiting_requests_while_it_drains(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        async with busy_worker(running, raw_worker) as senders:
            sent = [senders.first]
            sent.append(senders.send(1))
            await senders.waiting(1)
            running.server.should_exit = True

        assert [task.result().status_code for task in sent] == [200, 200]


async def test_a_gateway_that_is_cut_answers_waiting_requests_with_503(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        async with busy_worker(running, raw_worker) as senders:
            sent = [senders.first]
            sent.append(senders.send(1))
            await senders.waiting(1)
            assert running.runtime.plane.entry_control.cut() == 2

        assert [task.result().status_code for task in sent] == [503, 503]
        assert sent[1].result().json()["error"]["code"] == "shutting_down"
        assert running.metric("kvroute_queue_waiting") == 0


async def test_a_retry_counts_against_the_limit_of_its_worker(run_gateway, raw_worker):
    async with scripted_worker() as dead:
        dead.refuses_posts = True
        admission = {"max_concurrent": 1}
        async with run_gateway([raw_worker.url, dead.url], admission=admission) as running:
            raw_worker.may_answer.clear()
            async with asyncio.TaskGroup() as group:
                senders = Senders(running, group)
                sent = [senders.send(number) for number in range(2)]
                await running.until(lambda: len(raw_worker.requests) == 2)
                permits = running.runtime.plane.queue.permits
                worker = running.runtime.fleet.get("w0")
                assert permits.in_flight(worker) == 2
                assert not permits.has_free(worker)
                raw_worker.may_answer.set()

            assert [task.result().status_code for task in sent] == [200, 200]
            assert permits.in_flight(worker) == 0


async def test_a_key_has_the_priority_of_its_file_and_its_client_may_only_lower_it(
    run_gateway, raw_worker, tmp_path
):
    keys = [
        {"name": name, "hash": "sha256:" + hashlib.sha256(name.encode()).hexdigest(), "priority": priority}
        for name, priority in (("urgent", -5), ("usual", 0))
    ]
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    raw_worker.may_answer.clear()
    async with run_gateway(
        [raw_worker.url], admission={"max_concurrent": 1}, server={"client_keys": {"file": str(file)}}
    ) as running:
        async with asyncio.TaskGroup() as group:
            senders = Senders(running, group)

            def send(number: int, key: str, **fields):
                return senders.send(number, {"Authorization": f"Bearer {key}"}, **fields)

            send(0, "usual")
            await running.until(lambda: len(raw_worker.requests) == 1)
            send(1, "usual", priority=-100)
            send(2, "urgent", priority=3)
            send(3, "urgent", priority=-100)
            await senders.waiting(3)
            assert running.metric("kvroute_queue_waiting", key="urgent") == 2
            raw_worker.may_answer.set()

        assert numbers(raw_worker) == [0, 3, 1, 2]
        assert running.metric("kvroute_queue_wait_seconds_count", key="urgent") == 2


async def test_explain_shows_permits_and_waiting_requests(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 3}) as running:
        answer = (await running.client.post("/v1/route/explain", json=body())).json()

        assert answer["admission"] == {
            "waiting_requests": 0,
            "workers": {"w0": {"max_concurrent": 3, "requests_of_this_process": 0, "has_permit": True}},
        }


async def test_without_limits_no_request_passes_the_queue(run_gateway, raw_worker):
    async with run_gateway([raw_worker.url]) as running:
        await running.client.post(URL, json=body(priority="whatever"))

        assert running.runtime.plane.queue is None
        assert running.metric("kvroute_queue_wait_seconds_count") == 0
        assert len(raw_worker.requests) == 1


async def test_the_limit_of_a_full_worker_is_learned_from_its_metrics(run_gateway):
    options = SimOptions(max_sequences=2, answer_tokens=1000, time_scale=1)
    question = body(max_tokens=1000, ignore_eos=True) | {"model": "sim-model"}
    async with (
        run_sim(options) as sim,
        run_gateway(
            [sim.url],
            admission={"learn": True},
            fleet={"health": {"interval_s": 0.05, "metrics_interval_s": 0.05}},
        ) as running,
    ):
        permits = running.runtime.plane.queue.permits
        worker = running.runtime.fleet.get("w0")
        assert permits.limit(worker) is None
        sent = [asyncio.create_task(running.client.post(URL, json=question)) for _ in range(4)]
        await running.until(lambda: permits.limit(worker) == 2)
        sent.append(asyncio.create_task(running.client.post(URL, json=question)))
        await running.until(lambda: running.metric("kvroute_queue_waiting") == 1)
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
        await running.until(lambda: running.metric("kvroute_requests_in_flight") == 0)

        assert running.metric("kvroute_queue_waiting") == 0
        assert permits.in_flight(worker) == 0


async def test_requests_with_exact_tokens_wait_with_them(run_gateway):
    """The tokens are prepared in a task before the request waits; the map is read when it starts."""
    sections = {"routing": {"strategy": "kvaware"}, "tokens": {"timeout_ms": 10_000}}
    async with (
        run_sim(SimOptions(time_scale=0.02)) as sim,
        run_gateway([sim.url], admission={"max_concurrent": 1}, **sections) as running,
    ):
        await running.until(lambda: not running.runtime.cache_tracker.notes())
        chats = [body(number, max_tokens=4) | {"model": "sim-model"} for number in range(5)]
        answers = await asyncio.gather(*(running.client.post(URL, json=chat) for chat in chats))

        assert [answer.status_code for answer in answers] == [200] * 5
        assert running.metric("kvroute_exact_prompts_total") == 5
        assert running.metric("kvroute_queue_wait_seconds_count") == 5
        assert running.metric("kvroute_requests_in_flight") == 0


class NeverPrepared:
    """Prepares no tokens. Mutable: `asked` counts the requests that wait for them."""

    asked = 0

    def try_cached(self, _request, _model):
        return None

    async def prepare(self, _request, _model):
        self.asked += 1
        await asyncio.Event().wait()


async def test_a_full_queue_refuses_a_request_before_its_tokens_are_prepared(
    run_gateway, raw_worker, monkeypatch
):
    limits = {"max_concurrent": 1, "max_waiting": 1}
    async with (
        run_gateway([raw_worker.url], admission=limits) as running,
        busy_worker(running, raw_worker) as senders,
    ):
        senders.send(1)
        await senders.waiting(1)
        plane, preparer = running.runtime.plane, NeverPrepared()
        with monkeypatch.context() as patch:
            patch.setattr(plane, "_preparer", preparer)
            patch.setattr(plane.planner, "model_to_tokenize", lambda *_: "m")

            refused = await running.client.post(URL, json=body(2))

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert preparer.asked == 0
        assert running.metric("kvroute_queue_shed_total", cause="full") == 1


async def test_a_defect_while_a_waiting_request_starts_is_answered_500_and_stops_nothing(
    run_gateway, raw_worker, monkeypatch
):
    async with run_gateway([raw_worker.url], admission={"max_concurrent": 1}) as running:
        planner = running.runtime.plane.planner
        plan = planner.plan

        def broken(request, *arguments, **named):
            if b"number 1" in request.body:
                raise RuntimeError("a defect")
            return plan(request, *arguments, **named)

        async with busy_worker(running, raw_worker) as senders:
            monkeypatch.setattr(planner, "plan", broken)
            sent = [senders.send(number) for number in (1, 2)]
            await senders.waiting(2)

        assert [task.result().status_code for task in sent] == [500, 200]
        assert running.metric("kvroute_requests_in_flight") == 0
