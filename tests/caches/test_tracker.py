"""The cache tracker as a whole: it opens or reports why not, and shows failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.support.sockets import listening, tcp_server
from tests.support.waiting import until

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import Tier
from kvroute.caches.tracker import CacheTracker, worker_client
from kvroute.clock import SystemClock
from kvroute.config.config import Config
from kvroute.errors import ConfigError
from kvroute.events.ingest import EventIngest
from kvroute.events.ledger import Ledger
from kvroute.events.probes import KnownPrompt
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker, WorkerFacts, WorkerId, WorkerSpec
from kvroute.index.prefix_index import PrefixIndex
from kvroute.metrics import Metrics
from kvroute.openai.rewriting import key_space
from kvroute.relay.key_spaces import KeySpaces
from kvroute.routing.strategy import ExactPrompt


def make_tracker(rates: list[Any] | None = None, fleet: Fleet | None = None, **sections: Any) -> CacheTracker:
    """`rates` collects the measured bandwidths."""
    config = Config.model_validate({"routing": {"strategy": "kvaware"}, **sections})
    measured = [] if rates is None else rates
    fleet = fleet or Fleet()
    isolation = KeySpaces(fleet, adapters=True)
    return CacheTracker(
        config,
        fleet,
        Metrics(),
        SystemClock(),
        isolation,
        lambda _: None,
        lambda *_: 0.05,
        lambda *rate: measured.append(rate),
    )


@pytest.fixture
def taken() -> Iterator[str]:
    with listening() as port:
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        (lambda at: {"kv_events": {"bind": [f"tcp://{at}"]}}, r"kv_events\.bind\.0"),
        (lambda at: {"lmcache": {"coordinator": {"enabled": True, "listen": at}}}, r"coordinator\.listen"),
        (
            lambda at: {
                "kv_events": {"bind": ["tcp://127.0.0.1:0"]},
                "lmcache": {
                    "coordinator": {"enabled": True, "listen": "127.0.0.1:0"},
                    "controller": {
                        "enabled": True,
                        "pull": "127.0.0.1:0",
                        "reply": at,
                        "heartbeat": "127.0.0.1:0",
                    },
                },
            },
            r"lmcache\.controller\.reply",
        ),
    ],
)
async def test_an_address_in_use_is_a_config_error(sections: Any, path: str, taken: str) -> None:
    """And what was opened before is closed: an open socket would be a warning, which is an error here."""
    with pytest.raises(ConfigError, match=path):
        await make_tracker(**sections(taken)).__aenter__()


async def test_a_failure_shows_in_notes_and_metrics_and_the_work_restarts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, calls = EventIngest.run, []

    async def fails_once(ingest: EventIngest) -> None:
        calls.append(True)
        if len(calls) == 1:
            raise KeyError("a defect")
        await run(ingest)

    monkeypatch.setattr(EventIngest, "run", fails_once)
    made = make_tracker()
    async with made:
        await until(lambda: len(calls) == 2)
        assert "KV events failed (KeyError) and was restarted" in made.notes()
        failures = next(each for each in made.gauges() if each.name == "kvroute_following_failures")
    assert {each.labels["work"]: each.value for each in failures.samples}["KV events"] == 1
    assert "KV events failed; it is restarted" in caplog.text


async def test_a_registered_lmcache_server_does_not_receive_the_workers_key() -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    sections = {"fleet": {"worker_api_key": "a-secret"}}
    made = make_tracker(
        **sections,
        lmcache={"coordinator": {"enabled": True, "listen": "127.0.0.1:0"}},
    )
    async with tcp_server(answer) as port, made, httpx.AsyncClient(trust_env=False) as client:
        url = f"http://{made.lmcache.coordinator_address}/instances"
        instance = {"instance_id": "x", "ip": "127.0.0.1", "http_port": port}
        assert (await client.post(url, json=instance)).status_code == 200
        await until(lambda: asked)

    assert asked[0].startswith(b"GET /status ")
    assert b"a-secret" not in asked[0]
    async with worker_client(Config.model_validate(sections), lambda _: None) as workers:
        assert workers.headers["authorization"] == "Bearer a-secret"


async def test_each_workers_own_lmcache_server_is_polled_for_bandwidths() -> None:
    loads = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal loads
        request = await reader.readuntil(b"\r\n\r\n")
        loads += request.startswith(b"GET /metrics ")
        name = b"lmcache_mp_l2_load_throughput_GB_per_second"
        page = b"%s_count %d.0\n%s_sum %d.0\n" % (name, loads, name, 3 * loads)
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(page)
        writer.write(head + page)

    rates: list[Any] = []
    made = make_tracker(
        rates,
        lmcache={"coordinator": {"enabled": True, "listen": "127.0.0.1:0", "rates_interval_s": 0.01}},
    )
    for name, slot in (("x", 5), ("y", 6)):
        made.lmcache.slots_changed(Worker(WorkerSpec(WorkerId(name), f"http://{name}")), {0: slot})
    async with tcp_server(answer) as port, made, httpx.AsyncClient(trust_env=False) as client:
        instance = {"instance_id": "x", "ip": "127.0.0.1", "http_port": port}
        url = f"http://{made.lmcache.coordinator_address}/instances"
        assert (await client.post(url, json=instance)).status_code == 200
        await until(lambda: rates)

    assert rates[0] == (5, Tier.L2, 3.0, 1)
    assert {slot for slot, *_ in rates} == {5}


def test_cpu_time_of_exact_tokens_is_shown_by_thread() -> None:
    made = make_tracker()
    made.preparer.cpu_s = 0.25

    (shown,) = [each for each in made.gauges() if each.name == "kvroute_tokenizing_cpu_seconds"]

    assert {each.labels["thread"]: each.value for each in shown.samples} == {"loop": 0.25, "tokenizer": 0.0}


def test_a_prompt_sent_in_another_key_space_is_not_reannounced(monkeypatch):
    """A worker with another revision of the adapter would store its own KV under the first one's salt."""

    class Stream:
        slot, rank, reason = 0, 0, None

        def __init__(self) -> None:
            self.noted: list[KnownPrompt] = []
            self.prompts = self.subscriber = self
            self.ledger = Ledger(PrefixIndex(), 0)

        def note(self, prompt: KnownPrompt) -> None:
            self.noted.append(prompt)

        def on_answer(self, *_: object) -> None:
            pass

    stream, fleet = Stream(), Fleet()
    monkeypatch.setattr(EventIngest, "streams", lambda *_: [stream])
    made = make_tracker(fleet=fleet)
    fleet.apply("test", [WorkerSpec(WorkerId(name), f"http://{name}:1") for name in "abc"])
    for worker, root in zip(fleet.workers(), ("/1", "/2", "/2"), strict=True):
        cards = ({"id": "ada", "root": root, "parent": "base"},)
        fleet.update_facts(worker, WorkerFacts(frozenset({"ada"}), (("ada", "base"),), cards))
        fleet.mark_healthy(worker, 0.0)
    prompt = ExactPrompt(33, [], PromptChunks(range(32)), key_space("", "ada", "/2"), "ada")
    for worker in fleet.workers():
        made.answered(worker, 0, "ada", prompt, 0.0, 0)

    assert len(stream.noted) == 2
