"""What workers and Kubernetes answer to the gateway's own questions, and the files that an operator writes.

An answer may be refused, or be read as figures within their bounds; a file may be refused with ConfigError
only.
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import msgspec
from tests.fuzz.documents import ODD_YAML
from tests.fuzz.frames import ODD_JSON, Mutator
from tests.fuzz.lanes import Report
from tests.support.clocks import ManualClock

from kvroute.access.key_file import read_keys
from kvroute.errors import ConfigError, DiscoveryError
from kvroute.events.options import KvEventsOptions, parse_sources
from kvroute.fleet.catalog import catalog_of
from kvroute.fleet.discovery.file import parse_workers_file
from kvroute.fleet.discovery.kubernetes_api import (
    ObjectReader,
    _read_page,
    by_name,
    read_endpoint_slice,
    read_pod,
    read_pool,
)
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.options import HealthOptions
from kvroute.fleet.probe import Prober, probe_client
from kvroute.fleet.worker import MOST_RANKS, MOST_TOKENS, WorkerId, WorkerSpec

DEADLINE_S = 2.0
_NUMBERS = (
    b"9" * 400, b"9" * 5000, b"-" + b"9" * 400, b"NaN", b"nan", b"+Inf", b"-Inf", b"1e308", b"-1", b"1e-320",
    b"0x10",
)  # fmt: skip
_METRICS = (
    b"process_start_time_seconds 1.7e9\n"
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0",'
    b'enable_prefix_caching="True",kv_cache_size_tokens="1600"} 1.0\n'
    b'vllm:num_requests_running{engine="0",model_name="m"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
    b'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:request_success_total{finished_reason="stop"} 10.0\n'
    b'vllm:engine_sleep_state{sleep_state="awake"} 1.0\n'
    b'vllm:engine_sleep_state{sleep_state="discard_all"} 0.0\n'
    b'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 5.0\n'
    b'vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} 1.0\n'
)
_MODELS = (
    b'{"object":"list","data":[{"id":"m","object":"model","root":"/m","parent":null,"max_model_len":4096,'
    b'"created":1,"permission":[{"id":"p"}]},{"id":"ada","root":"ada","parent":"m"}]}'
)
_SOURCES = (
    b'{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":'
    b'"tcp://*:5558","buffer_steps":100,"topic":"kv"},"1":{"publisher":"zmq","endpoint":"tcp://[::]:5559"}}'
)
_ANSWERS = {
    "/health": b"",
    "/metrics": _METRICS,
    "/v1/models": _MODELS,
    "/version": b'{"version":"0.32.0"}',
    "/is_paused": b'{"is_paused":false}',
    "/is_sleeping": b'{"is_sleeping":false}',
}
_OBJECTS = (
    b'{"kind":"PodList","metadata":{"resourceVersion":"7","continue":""},"items":[{"metadata":{"name":"p","labels":'
    b'{"role":"decode","model":"m"}},"spec":{"nodeName":"n","containers":[{"name":"c","ports":[{"name":"http",'
    b'"containerPort":8000}]}]},"status":{"podIP":"10.0.0.1","phase":"Running","conditions":[{"type":"Ready",'
    b'"status":"True"}]}}]}',
    b'{"metadata":{"resourceVersion":"7"},"items":[{"metadata":{"name":"s"},"addressType":"IPv4","ports":[{"name":'
    b'"http","port":8000}],"endpoints":[{"addresses":["10.0.0.1"],"conditions":{"ready":true},"targetRef":{"kind":'
    b'"Pod","name":"p"},"nodeName":"n"}]}]}',
    b'{"metadata":{},"items":[{"metadata":{"name":"pool"},"spec":{"selector":{"matchLabels":{"app":"x"}},'
    b'"targetPorts":[{"number":8000}],"targetPortNumber":8000}}]}',
)
_HASH = b"sha256:" + b"ab" * 32
_KEY_FILES = (
    b"keys:\n- name: a\n  hash: " + _HASH + b"\n  models: [m]\n  limits: {requests_per_minute: 5}\n"
    b"- name: b\n  hash: [" + _HASH[:-1] + b"c]\n",
)
_WORKER_FILES = (b"workers:\n- http://a:8000\n- {id: b, url: 'http://b:8000', models: [m], role: decode}\n",)


class Probes:
    """A fleet of one worker, whose answers are mutated, and files. `last` was read last. Mutable."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.last = b""
        self._numbers, self._json = Mutator(rng, _NUMBERS), Mutator(rng, (*ODD_JSON, *_NUMBERS))
        self._yaml = Mutator(rng, (*ODD_YAML, *_NUMBERS))
        self._answers = dict(_ANSWERS)
        self._client = probe_client(httpx.MockTransport(self._answer))
        self._objects = ObjectReader("http", role_label="role", model_label="model")
        self.targets: list[Callable[[], Awaitable[str]]] = [
            *[self.worker] * 4, self.sources, self.kubernetes, self.kubernetes, self.keys, self.workers,
        ]  # fmt: skip
        self.begin()

    def begin(self) -> None:
        """Start with a worker that was never probed."""
        self.clock, self.fleet = ManualClock(1000.0), Fleet()
        self.fleet.apply("static", [WorkerSpec(WorkerId("w"), "http://w:8000")])
        prober = Prober(self._client, timeout_s=1.0)
        self.monitor = HealthMonitor(self.fleet, prober, self.clock, HealthOptions())

    def _answer(self, request: httpx.Request) -> httpx.Response:
        status = self.rng.choice((200, 200, 200, 200, 200, 200, 200, 204, 404, 503, 302))
        return httpx.Response(status, content=self._answers.get(request.url.path, b""))

    async def step(self) -> str:
        target = self.rng.choice(self.targets)
        return f"{target.__name__}: {await target()}"

    async def worker(self) -> str:
        """All probes of a worker, and what is computed with the figures."""
        rng = self.rng
        path = rng.choice(list(_ANSWERS))
        mutator = self._numbers if path == "/metrics" else self._json
        self.last = self._answers[path] = mutator.change(_ANSWERS[path], list(_ANSWERS.values()))
        (probes,) = self.monitor._probes.values()
        self.clock.time += rng.choice((0.5, 6.0, 400.0))
        failure = await self.monitor._probe(probes)
        self._answers[path] = _ANSWERS[path]
        await Prober(self._client, timeout_s=1.0).release("http://w:8000")
        worker = probes.worker
        facts, load, now = worker.facts, worker.load, self.clock.now()
        figures = (facts.capacity_tokens or 0, facts.block_size or 0, facts.start_time or 0.0, load.wait(now))
        if not all(0 <= figure <= MOST_TOKENS for figure in figures) or len(facts.ranks) > MOST_RANKS:
            raise AssertionError(f"figures of a worker: {figures}, {len(facts.ranks)} ranks"[:300])
        catalog_of([worker], {})
        msgspec.json.encode(facts.model_cards)
        return "failed" if failure is not None else "passed"

    async def sources(self) -> str:
        self.last = body = self._json.change(_SOURCES, [_MODELS])
        try:
            found = parse_sources(body, KvEventsOptions(), WorkerSpec(WorkerId("w"), "http://w:8000"))
        except ValueError:
            return "refused"
        if len(found) > MOST_RANKS or any(not 0 <= each.rank < 10**6 for each in found):
            raise AssertionError("ranks without a bound")
        return "read"

    async def kubernetes(self) -> str:
        self.last = text = self._json.change(self.rng.choice(_OBJECTS), _OBJECTS)
        items: list[object] = []
        try:
            await _read_page(text, items)  # type: ignore[arg-type]
        except DiscoveryError:
            return "refused"
        for item in items:
            assert isinstance(item, dict)
            for read in (read_pod, read_endpoint_slice):
                found = by_name(read(item, self._objects).workers)
                Fleet().apply("kubernetes", [each.spec(draining=False) for each in found.values()])
            read_pool(item)
        return "read"

    async def keys(self) -> str:
        self.last = data = self._yaml.change(self.rng.choice(_KEY_FILES), _WORKER_FILES)
        try:
            read_keys(data.decode("utf-8", "replace"), "keys.yaml")
        except ConfigError as error:
            if _HASH.decode()[7:] in str(error):
                raise AssertionError("a refusal shows a hash") from None
            return "refused"
        return "read"

    async def workers(self) -> str:
        self.last = data = self._yaml.change(self.rng.choice(_WORKER_FILES), _KEY_FILES)
        try:
            parse_workers_file(data.decode("utf-8", "replace"))
        except (ConfigError, DiscoveryError):
            return "refused"
        return "read"


async def fuzz_probes(count: int, seed: int, *, folder: Path | None = None) -> Report:
    """Read `count` answers and files. Those that show a defect are saved in `folder`."""
    report, probes = Report(), Probes(seed)
    for number in range(count):
        report.inputs += 1
        began, error = time.process_time(), None
        try:
            report.outcomes[await probes.step()] += 1
        except Exception as raised:
            error = raised
            probes.begin()
        if error is None and time.process_time() - began > DEADLINE_S:
            error = TimeoutError("one answer took too long")
        if error is not None:
            save(report, "probe", error, probes.last, folder)
        if number % 500 == 0:
            probes.begin()
            await asyncio.sleep(0)
    return report


def save(report: Report, part: str, error: BaseException, data: bytes, folder: Path | None) -> None:
    """Count a finding, print it, and keep what showed it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "kvroute" in frame.filename]
    place = f" in {Path(frames[-1].filename).name} {frames[-1].name}" if frames else ""
    kind = f"{type(error).__name__}{place}"
    report.findings[kind] += 1
    if report.findings[kind] <= 3:
        print(f"! {kind}\n{''.join(traceback.format_exception(error))[-3000:]}")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{part}-{kind.replace(' ', '-')}.{report.findings[kind]}.bin"
            file.write_bytes(data)
            report.saved.append(file)
