from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.clocks import QuickClock
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.fleet.discovery.base import Discoverer, Discovery, StaticDiscovery
from kvroute.fleet.discovery.file import FileDiscovery, parse_workers_file, read_workers_file
from kvroute.fleet.discovery.registry import DISCOVERY, sources_of
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.options import FleetOptions
from kvroute.fleet.worker import Worker, WorkerFacts, WorkerId, WorkerSpec

ONE = "workers: [http://one:1]\n"
TWO = "workers: [http://one:1, http://two:2]\n"


def ids(specs: tuple[WorkerSpec, ...]) -> list[str]:
    return [spec.id for spec in specs]


# The file's format


def test_a_file_lists_workers_as_urls_or_mappings() -> None:
    specs = parse_workers_file(
        """
        workers:
          - http://10.0.0.1:8000/
          - id: gpu-2
            url: http://10.0.0.2:8000
            models: [llama, mistral]
            capacity_tokens: 500000
        """
    )

    assert specs == (
        WorkerSpec(WorkerId("10.0.0.1:8000"), "http://10.0.0.1:8000"),
        WorkerSpec(WorkerId("gpu-2"), "http://10.0.0.2:8000", ("llama", "mistral"), 500000),
    )


def test_an_empty_list_is_a_list() -> None:
    assert parse_workers_file("workers: []") == ()


@pytest.mark.parametrize(
    ("text", "path", "complaint"),
    [
        ("", "", "must be a mapping"),
        ("- http://a", "", "must be a mapping"),
        ("workers:", "workers", "valid tuple"),
        ("{}", "workers", "required"),
        ("worker: []", "workers", "required"),
        ("workers: []\nextra: 1", "extra", "not permitted"),
        ("workers: [{url: 'http://a', model: m}]", "workers[0].model", "not permitted"),
        ("workers: ['http://a', {id: b}]", "workers[1].url", "required"),
        ("workers: ['http://a', 'b:1']", "workers[1].url", "must look like http://host:port"),
        ("workers: [{url: 'http://a', capacity_tokens: 0}]", "workers[0].capacity_tokens", "greater than 0"),
        ("workers: ['http://a', 'http://a']", "workers", "two workers have the id 'a'"),
        ("workers: [\n'http://a'", "line 2", "not YAML"),
        ("workers: !!python/object:os.system {}", "line 1", "not YAML"),
        ("workers: " + "[" * 10_000, "", "not YAML"),
        ("workers: [{url: 'http://a', capacity_tokens: " + "9" * 5_000 + "}]", "", "not YAML"),
    ],
)
def test_a_wrong_file_names_the_place(text: str, path: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_workers_file(text)

    assert caught.value.path == path
    assert "Value error" not in str(caught.value)


def test_a_missing_file_and_a_file_that_is_no_text_give_an_error(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"workers: [\xe4]")

    with pytest.raises(ConfigError, match="No such file"):
        read_workers_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_workers_file(tmp_path / "latin")


# Watching it


class WatchedFile:
    """A workers file that is watched with short pauses between the polls."""

    def __init__(self, path: Path, clock: QuickClock | None = None) -> None:
        self.path = path
        self.clock = clock or QuickClock(0.001)
        self.source = FileDiscovery(path, self.clock)
        self._found = self.source.watch()

    @property
    def polls(self) -> int:
        return len(self.clock.slept)

    async def next_ids(self) -> list[str]:
        """The ids of the next list of workers that the source yields."""
        async with asyncio.timeout(20):
            return ids(await anext(self._found))

    async def ids_after_repair(self) -> list[str]:
        """Poll the broken file until its error is counted, and 20 times more; then repair the file and return
        the next ids."""
        waiting = asyncio.ensure_future(self.next_ids())
        await until(lambda: self.source.errors > 0)
        enough = self.polls + 20
        await until(lambda: self.polls >= enough)
        assert self.source.errors == 1
        assert not waiting.done()
        replace_file(self.path, TWO)
        return await waiting

    async def aclose(self) -> None:
        await self._found.aclose()


def replace_file(path: Path, text: str) -> None:
    """Rename a new file to `path`, as editors do. A poll may find a file empty that is written in place."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


@pytest.mark.parametrize("write", [Path.write_text, replace_file], ids=["in place", "replaced"])
async def test_a_change_of_the_file_is_found(tmp_path: Path, write: Callable[[Path, str], Any]) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(ONE)
    file = WatchedFile(path)

    assert await file.next_ids() == ["one:1"]
    write(path, TWO)
    assert await file.next_ids() == ["one:1", "two:2"]
    await file.aclose()


async def test_a_swapped_symbolic_link_is_a_change(tmp_path: Path) -> None:
    """So a mounted ConfigMap is updated."""
    (tmp_path / "v1").write_text(ONE)
    (tmp_path / "v2").write_text(TWO)
    path = tmp_path / "workers.yaml"
    path.symlink_to("v1")
    file = WatchedFile(path)
    assert await file.next_ids() == ["one:1"]

    fresh = tmp_path / "fresh"
    fresh.symlink_to("v2")
    fresh.replace(path)

    assert await file.next_ids() == ["one:1", "two:2"]
    await file.aclose()


@pytest.mark.parametrize("bad", [b"workers: [nonsense]", b"workers: [", b"\xff\xfe", b""])
async def test_a_malformed_file_is_logged_and_counted_once_and_yields_nothing(
    tmp_path: Path, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(ONE)
    file = WatchedFile(path)
    await file.next_ids()

    fresh = tmp_path / "fresh"
    fresh.write_bytes(bad)
    fresh.replace(path)

    assert await file.ids_after_repair() == ["one:1", "two:2"]
    assert caplog.text.count("the known workers stay") == 1
    assert str(path) in caplog.text
    await file.aclose()


async def test_each_malformed_version_of_a_file_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text("nonsense")
    file = WatchedFile(path)
    waiting = asyncio.ensure_future(file.next_ids())
    await until(lambda: file.source.errors == 1)

    replace_file(path, "more nonsense")
    await until(lambda: file.source.errors == 2)
    replace_file(path, ONE)

    assert await waiting == ["one:1"]
    await file.aclose()


async def test_a_file_that_vanishes_changes_nothing_until_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(ONE)
    file = WatchedFile(path)
    await file.next_ids()

    path.unlink()

    assert await file.ids_after_repair() == ["one:1", "two:2"]
    await file.aclose()


async def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    file = WatchedFile(tmp_path / "workers.yaml")

    assert await file.ids_after_repair() == ["one:1", "two:2"]
    await file.aclose()


async def test_a_file_caught_in_the_middle_of_being_written_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(ONE)
    read_text = Path.read_text

    def read_and_change(self: Path, encoding: str | None = None) -> str:
        text = read_text(self, encoding)
        if text == ONE:
            self.write_text(TWO)
        return text

    monkeypatch.setattr(Path, "read_text", read_and_change)
    file = WatchedFile(path)

    assert await file.next_ids() == ["one:1", "two:2"]
    assert file.source.errors == 0
    await file.aclose()


async def test_a_far_shorter_list_is_accepted_at_the_second_poll(tmp_path: Path) -> None:
    """A program that writes the file line by line may be at its beginning."""
    path = tmp_path / "workers.yaml"
    path.write_text("workers: [http://a:1, http://b:1, http://c:1]")
    file = WatchedFile(path)
    await file.next_ids()

    replace_file(path, ONE)
    polls = file.polls
    assert await file.next_ids() == ["one:1"]
    assert file.polls == polls + 2

    replace_file(path, "workers: []")
    assert await file.next_ids() == []
    await file.aclose()


@pytest.mark.parametrize("second", ["workers: [http://a:1, http://b:1, http://d:1]", "workers: ["])
async def test_a_shorter_list_that_changes_again_is_not_accepted(tmp_path: Path, second: str) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text("workers: [http://a:1, http://b:1, http://c:1]")

    class Writer(QuickClock):
        """Writes the rest of the file as soon as its beginning has been read."""

        async def sleep(self, seconds: float) -> None:
            if path.read_text() == ONE:
                replace_file(path, second)
            await super().sleep(seconds)

    file = WatchedFile(path, Writer(0.001))
    await file.next_ids()

    replace_file(path, ONE)
    waiting = asyncio.ensure_future(file.next_ids())
    if second.endswith("["):
        await until(lambda: file.source.errors == 1)
        replace_file(path, "workers: [http://a:1, http://b:1, http://d:1]")

    # Either ONE was read before the first sleep, or the source never saw the change.
    assert await waiting in (["a:1", "b:1", "d:1"],)
    await file.aclose()


# Sources and the fleet


def test_options_choose_the_sources(tmp_path: Path) -> None:
    every = {
        "workers": ["http://a"],
        "file": str(tmp_path / "w.yaml"),
        "kubernetes": {"enabled": True, "api_url": "https://api", "namespace": "llm"},
        "dns": {"names": ["vllm:8000"]},
    }
    clock = SystemClock()

    assert sources_of(FleetOptions(), clock) == {}
    assert list(sources_of(FleetOptions.model_validate(every), clock)) == list(DISCOVERY)
    for name, option in zip(DISCOVERY, every, strict=True):
        options = FleetOptions.model_validate({option: every[option]})
        assert list(sources_of(options, clock)) == [name]


async def test_a_static_set_is_found_once() -> None:
    spec = WorkerSpec(WorkerId("a"), "http://a")

    assert [found async for found in StaticDiscovery((spec,)).watch()] == [(spec,)]


class Scripted:
    """Yields what it is given; raises what is an exception."""

    is_explicit = False

    def __init__(self, *script: tuple[WorkerSpec, ...] | Exception) -> None:
        self.errors = 2
        self.recheck_s: float | None = None
        self.script = list(script)

    async def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        while self.script:
            step = self.script.pop(0)
            if isinstance(step, Exception):
                raise step
            yield step


async def test_a_source_that_crashes_is_restarted_and_its_workers_stay(
    clock: Any, running: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = WorkerSpec(WorkerId("a"), "http://a"), WorkerSpec(WorkerId("b"), "http://b")
    fleet = Fleet()
    source: Discovery = Scripted((a,), RuntimeError("a bug"), (a, b))
    discoverer = Discoverer(fleet, {"scripted": source}, clock)

    task = running(discoverer.run())
    await clock.settle()
    assert [worker.id for worker in fleet.workers()] == ["a"]
    assert "discovery scripted failed" in caplog.text
    await clock.advance(1.0)

    assert [worker.id for worker in fleet.workers()] == ["a", "b"]
    assert discoverer.errors() == {"scripted": 3}
    await task


async def test_changes_of_a_workers_file_do_not_affect_other_workers(
    tmp_path: Path, running: Callable[..., Any]
) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(ONE)
    options = FleetOptions.model_validate(
        {"workers": ["http://static:1"], "file": str(path), "file_poll_s": 0.005}
    )
    fleet = Fleet()
    seen = asyncio.Event()

    def listener(change: FleetChange, worker: Worker) -> None:
        if (change, worker.id) in [(FleetChange.JOINED, "one:1"), (FleetChange.LEFT, "one:1")]:
            seen.set()

    fleet.subscribe(listener)
    discoverer = Discoverer(fleet, sources_of(options, SystemClock()), SystemClock())
    running(discoverer.run())
    async with asyncio.timeout(20):
        await seen.wait()
        for worker in fleet.workers():
            fleet.update_facts(worker, WorkerFacts(models=frozenset({"m"})))
            fleet.mark_healthy(worker, 0.0)
        request = fleet.get("one:1").load.reserve(0.0, prefill_s=1.0, tokens=1)
        seen.clear()

        path.write_text("workers: [http://two:2]")
        await seen.wait()

    assert [worker.id for worker in fleet.view("m").workers] == ["static:1"]
    assert {worker.id for worker in fleet.workers()} == {"static:1", "two:2"}
    assert not request.is_finished
    request.finish(1.0)
