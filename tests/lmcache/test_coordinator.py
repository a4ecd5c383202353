"""The index has only chunks that LMCache's servers hold, even if reports are lost, late or repeated."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.clocks import ManualClock

from kvroute.blocks.chunks import ChunkKey, ChunkScheme, ChunkSpace, PromptChunks, chunk_key, chunk_names
from kvroute.blocks.keys import Tier
from kvroute.fleet.worker import Worker, WorkerFacts, WorkerId, WorkerSpec
from kvroute.index.chunk_index import ChunkHolder, ChunkIndex
from kvroute.index.map_trust import MapTrust
from kvroute.lmcache.coordinator import BatchOutcome, Coordinator
from kvroute.lmcache.membership import Doubt, ServedWorker, served_worker
from kvroute.lmcache.options import LMCacheOptions
from kvroute.wire.lmcache_server import CacheEvents, ServerRegistration, ServerStatus, decode_registration

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
MODEL = "/models/tiny"
SCHEME = ChunkScheme(chunk_tokens=4)
ONE_RANK = 0x01000100
PROMPT = list(range(100, 140))
_decode = msgspec.json.Decoder(list[CacheEvents]).decode


class Server:
    """An LMCache server that creates batches of events, and the chunks that it really holds in memory."""

    def __init__(
        self, name: str, *, incarnation: int = 1000, backend: str = "resp", shared: bool = True
    ) -> None:
        self.name, self.incarnation, self.seq = name, incarnation, 0
        self.backend, self.shared = backend, shared
        self.memory: set[bytes] = set()

    def batch(
        self,
        event_type: str,
        tier: str,
        chunks: Iterable[bytes],
        *,
        rank: int = ONE_RANK,
        group: int = 0,
        salt: str = "",
        model: str = MODEL,
    ) -> CacheEvents:
        self.seq += 1
        chunks = list(chunks)
        if tier == "l1" and event_type == "store":
            self.memory |= set(chunks)
        elif tier == "l1" and event_type == "delete":
            self.memory -= set(chunks)
        entries = [
            {
                "key": {
                    "chunk_hash_hex": chunk.hex(),
                    "model_name": model,
                    "kv_rank": rank,
                    "object_group_id": group,
                    "cache_salt": salt,
                }
            }
            for chunk in chunks
        ]
        body = {
            "instance_id": self.name,
            "incarnation": self.incarnation,
            "seq": self.seq,
            "event_type": event_type,
            "tier": tier,
            "backend": "dram" if tier == "l1" else self.backend,
            "entries": entries,
            "shared": self.shared and tier == "l2",
        }
        (batch,) = _decode(json.dumps([body]))
        return batch

    def restart(self) -> None:
        self.incarnation += 1
        self.seq = 0
        self.memory = set()


def chunks(first: int, count: int = 3) -> list[bytes]:
    """Names of the chunks of a prompt that begins with `first`."""
    return chunk_names([first, *range(count * 4 - 1)], SCHEME)


class Fleet:
    """A coordinator, its index and its clock."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock(0.0)
        self.index = ChunkIndex()
        self.coordinator = Coordinator(
            self.index, self.clock, LMCacheOptions(coordinator={"chunk_tokens": 4}, **options)
        )

    def register(self, name: str, ip: str = "10.0.0.1") -> None:
        self.coordinator.register(ServerRegistration(ip, 8080, name))

    def serve(
        self, worker: str, *slots: int, host: str = "10.0.0.1", models: Iterable[str] = (MODEL,)
    ) -> None:
        self.coordinator.worker_changed(ServedWorker(worker, host, slots, frozenset(models)))

    def send(self, *batches: CacheEvents) -> list[BatchOutcome]:
        outcomes = []
        for batch in batches:
            outcomes.append(self.coordinator.admit(batch))
            if outcomes[-1] is BatchOutcome.APPLIED:
                self.coordinator.apply(batch)
        return outcomes

    def in_index(self, server: Server) -> set[bytes]:
        """The chunks that the index has for the server's memory."""
        instance = self.coordinator.instance(server.name)
        if instance is None:
            return set()
        every = [name for first in range(12) for name in chunks(first)]
        space = ChunkSpace(instance.scheme, MODEL)
        return {name for name in every if self.index.holds(instance.memory.holder, space, chunk_key(name))}

    def match(self, tokens: list[int], salt: str = "") -> dict[int, tuple[int, int]]:
        return self.index.match(PromptChunks(tokens), salt, {})


def test_unknown_kinds_of_events_take_no_memory() -> None:
    fleet, server = Fleet(), Server("a")
    fleet.register("a")
    for number in range(100):
        fleet.send(server.batch(f"kind-{number}", "l1", chunks(0)))

    assert fleet.coordinator.counts.events == {}
    assert fleet.coordinator.counts.unknown == 100


@pytest.fixture
def server() -> Server:
    return Server("a")


@pytest.fixture
def fleet(server: Server) -> Fleet:
    """One server and the worker of the same name, slot 0."""
    fleet = Fleet()
    fleet.register("a")
    fleet.serve("a", 0)
    return fleet


NAMES = chunk_names(PROMPT, SCHEME)


# Captures of real servers


def calls(name: str) -> Iterator[dict[str, Any]]:
    for line in (CAPTURES / f"{name}.coordinator.jsonl").read_text().splitlines():
        yield json.loads(line)


def truth_of(name: str) -> tuple[dict[str, set[tuple[str, str]]], set[tuple[str, str]]]:
    """(chunk, salt) in each server's L1 and in L2 at the end, computed directly from the capture."""
    memory: dict[str, set[tuple[str, str]]] = {"lmc-a": set(), "lmc-b": set()}
    store: set[tuple[str, str]] = set()
    for call in calls(name):
        for batch in (call["body"] or {}).get("batches", ()):
            where = memory[batch["instance_id"]] if batch["tier"] == "l1" else store
            named = {(e["key"]["chunk_hash_hex"], e["key"]["cache_salt"]) for e in batch["entries"]}
            if batch["event_type"] == "store":
                where |= named
            elif batch["event_type"] == "delete":
                where -= named
    return memory, store


@pytest.mark.parametrize("name", ["lmcache-mp-engine-driven", "lmcache-mp-lmcache-driven"])
def test_captures_replay_to_the_ground_truth(name: str) -> None:
    memory, store = truth_of(name)
    fleet = Fleet(pools={"resp": "redis"})
    coordinator, index = fleet.coordinator, fleet.index
    for call in calls(name):
        body = json.dumps(call["body"]).encode()
        if call["path"] == "/instances":
            coordinator.register(decode_registration(body))
            coordinator.status(call["body"]["instance_id"], ServerStatus(64))
        elif call["path"] == "/events":
            assert set(fleet.send(*_decode(json.dumps(call["body"]["batches"])))) == {BatchOutcome.APPLIED}
        elif call["method"] == "PUT":
            assert coordinator.heartbeat(call["path"].split("/")[2])

        if call["method"] == "DELETE":
            break
    scheme = ChunkScheme(chunk_tokens=64)

    def held(holder: ChunkHolder, named: set[tuple[str, str]]) -> bool:
        return holder.chunks == len(named) and all(
            index.holds(holder, ChunkSpace(scheme, MODEL, salt), chunk_key(bytes.fromhex(chunk)))
            for chunk, salt in named
        )

    for instance in coordinator.instances():
        assert held(instance.memory.holder, memory[instance.id])
        assert instance.trust is MapTrust.WHOLE
    (pool,) = coordinator.pools()
    assert held(pool.chunks.holder, store)
    assert len(store) > 100


def test_the_captured_servers_held_the_tokens_that_their_engines_then_found_cached() -> None:
    """The second request ran on B: 576 tokens of P, all from the shared Redis."""
    name = "lmcache-mp-engine-driven"
    requests = [json.loads(line) for line in (CAPTURES / f"{name}.requests.jsonl").read_text().splitlines()]
    (on_b,) = [each for each in requests if each["step"].startswith("B: P first time")]
    fleet = Fleet(pools={"resp": "redis"})
    fleet.serve("va", 0, host="10.0.0.11")
    fleet.serve("vb", 1, host="10.0.0.12")
    for call in calls(name):
        if call["t"] >= on_b["t"]:
            break
        if call["path"] == "/instances":
            fleet.coordinator.register(decode_registration(json.dumps(call["body"]).encode()))
            fleet.coordinator.status(call["body"]["instance_id"], ServerStatus(64))
        elif call["path"] == "/events":
            fleet.send(*_decode(json.dumps(call["body"]["batches"])))

    found = fleet.match(on_b["prompt_token_ids"][:-1])

    cached = on_b["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found == {0: (cached, 0), 1: (0, cached)}


# Instances


def test_a_server_without_an_id_gets_one(fleet: Fleet) -> None:
    first, again = fleet.coordinator.register(ServerRegistration("10.0.0.3", 1))
    second, _ = fleet.coordinator.register(ServerRegistration("10.0.0.4", 1, " "))

    assert not again
    assert len({first, second, "a"}) == 3


def test_heartbeats_of_unknown_servers_are_refused_so_that_they_register(
    fleet: Fleet, server: Server
) -> None:
    other = Server("b")
    fleet.send(other.batch("store", "l1", NAMES))

    assert fleet.coordinator.heartbeat("a")
    assert not fleet.coordinator.heartbeat("b")
    assert fleet.coordinator.counts.unknown_heartbeats == 1


@pytest.mark.parametrize("ends", ["goodbye", "silence"])
def test_chunks_in_memory_leave_with_the_server_and_chunks_in_l2_stay(
    fleet: Fleet, server: Server, ends: str
) -> None:
    fleet.register("b", "10.0.0.2")
    fleet.serve("b", 1, host="10.0.0.2")
    other = Server("b")
    fleet.send(server.batch("config", "l1", []), server.batch("store", "l1", NAMES))
    fleet.send(server.batch("store", "l2", NAMES), other.batch("config", "l2", []))
    assert fleet.match(PROMPT) == {0: (40, 0), 1: (0, 40)}

    if ends == "goodbye":
        fleet.coordinator.deregister("a")
    else:
        fleet.clock.time = 31.0
        fleet.coordinator.instance("b").last_message_at = 31.0  # type: ignore[union-attr]
        fleet.coordinator.expire()

    assert [each.id for each in fleet.coordinator.instances()] == ["b"]
    assert fleet.match(PROMPT) == {1: (0, 40)}


def test_a_server_that_reports_in_time_is_kept(fleet: Fleet) -> None:
    for _ in range(5):
        fleet.clock.time += 29.0
        assert fleet.coordinator.heartbeat("a")
        fleet.coordinator.expire()

    assert fleet.coordinator.counts.expired == 0


def test_a_private_store_is_not_read_by_others_and_outlives_its_server() -> None:
    fleet = Fleet()
    one, two = Server("a", backend="fs", shared=False), Server("b", backend="fs", shared=False)
    fleet.register("a", "10.0.0.1")
    fleet.register("b", "10.0.0.2")
    fleet.serve("a", 0)
    fleet.serve("b", 1, host="10.0.0.2")
    fleet.send(one.batch("store", "l2", NAMES), two.batch("store", "l2", NAMES[:1]))
    assert fleet.match(PROMPT) == {0: (0, 40), 1: (0, 4)}

    fleet.coordinator.deregister("a")
    fleet.register("a", "10.0.0.1")
    one.restart()
    fleet.send(one.batch("config", "l1", []))

    assert fleet.match(PROMPT) == {0: (0, 40), 1: (0, 4)}


def test_a_private_store_is_removed_when_its_server_stays_away() -> None:
    fleet = Fleet()
    fleet.register("a")
    fleet.send(Server("a", backend="fs", shared=False).batch("store", "l2", NAMES))
    fleet.coordinator.deregister("a")

    fleet.clock.time = 4000.0
    fleet.coordinator.expire()

    assert fleet.coordinator.pools() == []
    assert fleet.index.size().held_chunks == 0


# Fencing


def test_duplicates_and_stale_batches_change_nothing(fleet: Fleet, server: Server) -> None:
    stored = server.batch("store", "l1", NAMES)
    deletion = server.batch("delete", "l1", NAMES[5:])
    assert fleet.send(stored, deletion, stored) == [
        BatchOutcome.APPLIED,
        BatchOutcome.APPLIED,
        BatchOutcome.DUPLICATE,
    ]
    assert fleet.match(PROMPT) == {0: (20, 0)}

    old = Server("a", incarnation=999)
    assert fleet.send(old.batch("store", "l1", NAMES)) == [BatchOutcome.STALE]
    assert fleet.match(PROMPT) == {0: (20, 0)}


def test_a_restart_drops_the_chunks_in_memory_only(fleet: Fleet, server: Server) -> None:
    fleet.send(server.batch("store", "l1", NAMES), server.batch("store", "l2", NAMES[:2]))
    server.restart()

    fleet.send(server.batch("config", "l1", []))

    assert fleet.match(PROMPT) == {0: (0, 8)}
    assert fleet.coordinator.instance("a").trust is MapTrust.WHOLE  # type: ignore[union-attr]


def test_a_server_that_restarts_after_its_clock_was_set_back_is_believed_after_a_while(
    fleet: Fleet, server: Server
) -> None:
    """Its incarnation is its start time. Late batches of its earlier process do not come for so long."""
    fleet.send(server.batch("store", "l1", NAMES))
    restarted = Server("a", incarnation=server.incarnation - 100)
    assert fleet.send(restarted.batch("config", "l1", [])) == [BatchOutcome.STALE]
    fleet.clock.time += 20.0
    fleet.coordinator.heartbeat("a")
    assert fleet.send(restarted.batch("store", "l1", NAMES[:2])) == [BatchOutcome.STALE]
    fleet.clock.time += 11.0
    fleet.coordinator.heartbeat("a")

    assert fleet.send(restarted.batch("store", "l1", NAMES[2:4])) == [BatchOutcome.APPLIED]

    instance = fleet.coordinator.instance("a")
    assert instance is not None
    assert (instance.incarnation, instance.doubt) == (restarted.incarnation, Doubt.LOST_EVENTS)
    assert instance.memory.objects == 2
    assert fleet.send(server.batch("store", "l1", NAMES)) == [BatchOutcome.APPLIED], "a restart again"


def test_late_batches_do_not_count_as_a_restart_while_the_current_ones_come(
    fleet: Fleet, server: Server
) -> None:
    fleet.send(server.batch("store", "l1", NAMES))
    old = Server("a", incarnation=server.incarnation - 1)

    for _ in range(10):
        fleet.clock.time += 20.0
        fleet.coordinator.heartbeat("a")
        assert fleet.send(old.batch("delete", "l1", NAMES)) == [BatchOutcome.STALE]
        assert fleet.send(server.batch("store", "l1", [])) == [BatchOutcome.APPLIED]

    assert fleet.match(PROMPT) == {0: (40, 0)}


def test_a_lost_batch_drops_all_chunks_that_it_may_have_deleted(fleet: Fleet, server: Server) -> None:
    fleet.send(server.batch("store", "l1", NAMES), server.batch("store", "l2", NAMES))
    server.batch("delete", "l1", NAMES)
    server.batch("delete", "l2", NAMES)

    fleet.send(server.batch("store", "l1", NAMES[:1]))

    instance = fleet.coordinator.instance("a")
    assert instance is not None
    assert (instance.trust, instance.doubt) == (MapTrust.PARTIAL, Doubt.LOST_EVENTS)
    assert fleet.match(PROMPT) == {0: (4, 0)}
    assert fleet.coordinator.counts.gaps == 1


def test_a_server_whose_first_batches_were_missed_is_partial(fleet: Fleet, server: Server) -> None:
    server.seq = 40

    fleet.send(server.batch("store", "l1", NAMES))

    instance = fleet.coordinator.instance("a")
    assert instance is not None
    assert instance.doubt is Doubt.LATE
    assert fleet.match(PROMPT) == {0: (40, 0)}


def test_a_server_that_registers_again_may_have_lost_its_memory(fleet: Fleet, server: Server) -> None:
    fleet.send(server.batch("store", "l1", NAMES))
    fleet.register("a")

    assert fleet.match(PROMPT) == {}
    assert fleet.coordinator.instance("a").doubt is Doubt.REGISTERED_AGAIN  # type: ignore[union-attr]
    server.restart()
    fleet.send(server.batch("config", "l1", []))
    assert fleet.coordinator.instance("a").doubt is None  # type: ignore[union-attr]


def test_a_map_is_complete_again_when_it_has_as_many_objects_as_the_server(
    fleet: Fleet, server: Server
) -> None:
    fleet.send(server.batch("store", "l1", NAMES))
    server.batch("delete", "l1", NAMES[:1])  # lost
    fleet.send(server.batch("delete", "l1", NAMES[1:5]))
    instance = fleet.coordinator.instance("a")
    assert instance is not None
    page = lambda count: ServerStatus(4, storage_manager=_storage(count))  # noqa: E731
    for _ in range(3):
        fleet.coordinator.status("a", page(5))
        assert instance.doubt is Doubt.LOST_EVENTS

    fleet.send(server.batch("delete", "l1", NAMES))  # a clear
    fleet.coordinator.status("a", page(0))
    fleet.send(server.batch("access", "l1", NAMES))
    fleet.coordinator.status("a", page(0))
    assert instance.doubt is Doubt.LOST_EVENTS  # there was an event between the two answers
    fleet.coordinator.status("a", page(0))

    assert instance.trust is MapTrust.WHOLE
    assert fleet.in_index(server) == server.memory == set()


def _storage(count: int) -> Any:
    from kvroute.wire.lmcache_server import L1Status, StorageStatus

    return StorageStatus({"_default": L1Status(count + 2, 2)})


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_lost_late_and_repeated_reports_never_put_a_false_chunk_into_the_index(seed: int) -> None:
    """Batches are dropped, repeated, late and reordered; servers restart and leave. Without a loss the index
    has exactly the server's chunks."""
    rng = random.Random(seed)
    fleet, server = Fleet(), Server("a")
    fleet.register("a")
    waiting: list[CacheEvents] = []
    harmed = False
    for _ in range(30):
        some = [name for first in rng.sample(range(12), 2) for name in chunks(first)]
        fault = rng.random()
        if fault < 0.06:
            server.restart()
            waiting, harmed = [], False
            fleet.register("a")
        elif fault < 0.09:
            fleet.coordinator.deregister("a")
            fleet.register("a")
            harmed = server.seq > 0
            waiting = []
        batch = server.batch(rng.choice(["store", "store", "delete"]), "l1", some)
        if rng.random() < 0.06:
            harmed = True
            continue
        waiting.append(batch)
        if rng.random() < 0.1:
            waiting.append(waiting[0])
        if rng.random() < 0.1 and len(waiting) > 1:
            rng.shuffle(waiting)
        if rng.random() < 0.7:
            numbers = [each.seq for each in waiting]
            harmed |= numbers != sorted(numbers)
            fleet.send(*waiting)
            waiting = []
            last = fleet.coordinator.instance("a")
            if last is not None and last.last_seq == server.seq:
                assert fleet.in_index(server) <= server.memory
                if last.trust is MapTrust.WHOLE:
                    assert fleet.in_index(server) == server.memory
                if not harmed:
                    assert last.trust is MapTrust.WHOLE


# Parts of chunks


def ranks(world: int) -> list[int]:
    return [world << 24 | rank << 16 | world << 8 | rank for rank in range(world)]


def test_a_chunk_counts_once_every_rank_has_it(fleet: Fleet, server: Server) -> None:
    zero, one = ranks(2)
    fleet.send(server.batch("store", "l1", NAMES, rank=zero))
    assert fleet.match(PROMPT) == {}

    fleet.send(server.batch("store", "l1", NAMES[:5], rank=one))
    assert fleet.match(PROMPT) == {0: (20, 0)}

    fleet.send(server.batch("delete", "l1", NAMES[2:3], rank=zero))
    assert fleet.match(PROMPT) == {0: (8, 0)}
    instance = fleet.coordinator.instance("a")
    assert instance is not None
    assert instance.memory.objects == 14
    fleet.send(server.batch("store", "l1", NAMES[2:3], rank=zero))
    assert fleet.match(PROMPT) == {0: (20, 0)}


def test_chunks_with_parts_are_freed_in_steps_and_can_be_stored_again(fleet: Fleet, server: Server) -> None:
    def steps_of_clearing() -> int:
        instance = fleet.coordinator.instance("a")
        assert instance is not None
        assert instance.memory.holder.chunks == len(NAMES)
        instance.memory.clear()
        assert (instance.memory.objects, instance.memory.holder.chunks) == (0, 0)
        steps = 0
        while fleet.index.sweep(1):
            steps += 1
        return steps

    fleet.send(server.batch("store", "l1", NAMES))
    of_index = steps_of_clearing()
    for _ in range(2):
        fleet.send(*(server.batch("store", "l1", NAMES, rank=rank) for rank in ranks(2)))
        assert steps_of_clearing() == of_index + len(NAMES)


def test_groups_of_layers_count_as_parts(fleet: Fleet, server: Server) -> None:
    fleet.send(server.batch("store", "l1", NAMES[:2], group=0))
    assert fleet.match(PROMPT) == {0: (8, 0)}

    fleet.send(server.batch("store", "l1", NAMES[:2], group=1))
    assert fleet.match(PROMPT) == {}
    assert fleet.coordinator.instance("a").doubt is Doubt.PARTS  # type: ignore[union-attr]

    fleet.send(server.batch("store", "l1", NAMES[:2], group=0))
    assert fleet.match(PROMPT) == {0: (8, 0)}


def test_world_sizes_of_a_model_are_separate(fleet: Fleet, server: Server) -> None:
    for rank in ranks(2):
        fleet.send(server.batch("store", "l1", NAMES, rank=rank))
    assert fleet.match(PROMPT) == {0: (40, 0)}

    fleet.send(server.batch("store", "l1", NAMES[:1]))

    assert fleet.match(PROMPT) == {}  # it is not known which world size the worker has


def test_hashes_of_another_algorithm_are_detected(fleet: Fleet, server: Server) -> None:
    fleet.send(server.batch("store", "l1", [b"12345678"]))

    instance = fleet.coordinator.instance("a")
    assert instance is not None
    assert instance.doubt is Doubt.FOREIGN_HASHES
    fleet.coordinator.status("a", ServerStatus(4, "blake3", _storage(0)))
    assert instance.doubt is Doubt.FOREIGN_HASHES


def test_a_status_reports_another_algorithm(fleet: Fleet) -> None:
    fleet.coordinator.status("a", ServerStatus(256, "sha256_cbor"))

    assert fleet.coordinator.instance("a").doubt is Doubt.FOREIGN_HASHES  # type: ignore[union-attr]


def test_the_chunk_size_is_learned_from_events_with_tokens(server: Server) -> None:
    fleet = Fleet()
    fleet.register("a")
    fleet.serve("a", 0)
    eights = ChunkScheme(chunk_tokens=8)
    batch = server.batch("store", "l1", chunk_names(PROMPT, eights))
    tokens = msgspec.Raw(json.dumps(PROMPT[:8]).encode())
    entries = [msgspec.structs.replace(each, token_ids=tokens) for each in batch.entries]

    fleet.send(msgspec.structs.replace(batch, entries=entries))

    assert fleet.match(PROMPT) == {0: (40, 0)}


def test_the_chunk_size_may_be_known_after_the_chunks(fleet: Fleet, server: Server) -> None:
    fleet.send(server.batch("store", "l1", chunk_names(PROMPT, ChunkScheme(chunk_tokens=8))))
    assert fleet.match(PROMPT) == {}

    fleet.coordinator.status("a", ServerStatus(8))

    assert fleet.match(PROMPT) == {0: (40, 0)}


def test_events_of_an_unknown_kind_are_counted(fleet: Fleet, server: Server) -> None:
    assert fleet.send(server.batch("pin", "l1", NAMES)) == [BatchOutcome.APPLIED]
    assert fleet.send(server.batch("store", "l3", NAMES)) == [BatchOutcome.APPLIED]

    assert fleet.coordinator.counts.unknown == 2
    assert fleet.match(PROMPT) == {}


def test_chunks_with_different_salts_are_separate(fleet: Fleet, server: Server) -> None:
    fleet.send(server.batch("store", "l1", NAMES, salt="tenant"))

    assert fleet.match(PROMPT) == {}
    assert fleet.match(PROMPT, "tenant") == {0: (40, 0)}


# Workers


def test_a_server_without_a_worker_gets_no_traffic(fleet: Fleet) -> None:
    other = Server("b")
    fleet.register("b", "10.0.0.9")
    fleet.send(other.batch("store", "l1", NAMES))

    assert fleet.match(PROMPT) == {}
    assert fleet.coordinator.instance_of("b") is None


@pytest.mark.parametrize("sends_heartbeat", [True, False])
def test_a_server_that_has_not_registered_gets_no_traffic(server: Server, sends_heartbeat: bool) -> None:
    """A server may report events before it registers, with or without a heartbeat."""
    fleet = Fleet()
    fleet.serve("a", 0)
    if sends_heartbeat:
        assert not fleet.coordinator.heartbeat("a")
    fleet.send(server.batch("store", "l1", NAMES))
    assert fleet.match(PROMPT) == {}

    fleet.register("a")

    assert fleet.match(PROMPT) == {0: (40, 0)}
    assert fleet.coordinator.instance("a").doubt is None  # type: ignore[union-attr]


def test_a_server_that_restarted_before_it_registered_is_detected_by_its_incarnation(server: Server) -> None:
    fleet = Fleet()
    fleet.serve("a", 0)
    fleet.send(server.batch("store", "l1", NAMES))
    server.restart()
    fleet.register("a")

    fleet.send(server.batch("config", "l1", []))  # a server sends this after each registration

    assert fleet.match(PROMPT) == {}


def test_a_worker_reads_from_the_only_server_at_its_address(server: Server) -> None:
    fleet = Fleet()
    fleet.serve("one", 0, host="localhost")
    fleet.serve("two", 1, 2, host="127.0.0.1")
    fleet.serve("three", 3, host="10.0.0.3")
    fleet.register("a", "127.0.0.1")
    fleet.send(server.batch("store", "l1", NAMES))
    assert fleet.match(PROMPT) == {0: (40, 0), 1: (40, 0), 2: (40, 0)}

    fleet.register("b", "127.0.0.1")

    assert fleet.match(PROMPT) == {}
    fleet.coordinator.deregister("b")
    assert set(fleet.match(PROMPT)) == {0, 1, 2}


@pytest.mark.parametrize("options", [{"instances": {"w": "a"}}, {"instance": "{id}-{host}"}])
def test_a_worker_reads_from_the_configured_server(options: dict[str, Any]) -> None:
    name = "a" if "instances" in options else "w-10.0.0.1"
    fleet, server = Fleet(**options), Server(name)
    fleet.register(name, "10.0.0.77")
    fleet.register("w", "10.0.0.1")
    fleet.serve("w", 0)

    fleet.send(server.batch("store", "l1", NAMES))

    assert fleet.match(PROMPT) == {0: (40, 0)}
    assert fleet.coordinator.instance_of("w") is fleet.coordinator.instance(name)


def test_the_server_of_a_node_is_found_by_the_node_of_each_pod() -> None:
    """In Kubernetes a worker's pod and the pod of its node's server have different addresses."""
    fleet, server = Fleet(instance="demo-{node}"), Server("demo-n1")
    fleet.register("demo-n1", "10.0.0.77")
    fleet.register("demo-n2", "10.0.0.78")
    for slot, node in enumerate(("n1", "n1", "n2", "")):
        worker = ServedWorker(f"w{slot}", f"10.0.0.{slot}", (slot,), frozenset({MODEL}), node)
        fleet.coordinator.worker_changed(worker)

    fleet.send(server.batch("store", "l1", NAMES))

    assert fleet.match(PROMPT) == {0: (40, 0), 1: (40, 0)}


def test_a_worker_that_leaves_is_detached_and_its_server_stays(fleet: Fleet, server: Server) -> None:
    fleet.send(server.batch("store", "l1", NAMES))
    fleet.coordinator.worker_left("a")
    assert fleet.match(PROMPT) == {}

    fleet.serve("a", 7)
    assert fleet.match(PROMPT) == {7: (40, 0)}
    fleet.serve("a", 8, 9)
    assert fleet.match(PROMPT) == {8: (40, 0), 9: (40, 0)}


def test_a_model_is_found_by_its_path_or_as_the_only_one(server: Server) -> None:
    fleet = Fleet()
    fleet.register("a")
    fleet.serve("a", 0, models=())
    fleet.send(server.batch("store", "l1", NAMES))
    assert fleet.match(PROMPT) == {0: (40, 0)}

    fleet.serve("a", 0, models=["another/name"])  # the only worker, so the model must be the worker's
    assert fleet.match(PROMPT) == {0: (40, 0)}

    fleet.serve("b", 1, models=[MODEL])
    assert fleet.match(PROMPT) == {1: (40, 0)}

    fleet.send(server.batch("store", "l1", NAMES[:2], model="another/name"))
    assert fleet.match(PROMPT) == {0: (8, 0), 1: (40, 0)}


def test_a_worker_is_described_by_its_own_model_list() -> None:
    worker = Worker(WorkerSpec(WorkerId("w"), "http://10.0.0.5:8000"))
    cards: tuple[dict[str, object], ...] = (
        {"id": "tiny", "root": "/models/tiny"},
        {"id": "lora", "root": "/adapters/lora", "parent": "tiny"},
    )
    worker.facts = WorkerFacts(frozenset({"tiny", "lora"}), (("lora", "tiny"),), cards)

    assert served_worker(worker, [3]) == ServedWorker("w", "10.0.0.5", (3,), frozenset({"/models/tiny"}))


def test_servers_share_a_pool_if_configured_or_marked_as_shared() -> None:
    fleet = Fleet(pools={"a/resp": "redis", "b/resp": "redis"})
    one, two, three = Server("a", shared=False), Server("b", shared=False), Server("c", shared=False)
    for place, name in enumerate("abc"):
        fleet.register(name, f"10.0.0.{place}")
        fleet.serve(name, place, host=f"10.0.0.{place}")
    for each in (one, two, three):
        fleet.send(each.batch("config", "l2", []))

    fleet.send(one.batch("store", "l2", NAMES))

    assert fleet.match(PROMPT) == {0: (0, 40), 1: (0, 40)}
    fleet.send(two.batch("delete", "l2", NAMES[3:]))
    assert fleet.match(PROMPT) == {0: (0, 12), 1: (0, 12)}


def test_a_shared_index_is_empty_after_all_servers_left(fleet: Fleet, server: Server) -> None:
    fleet.send(server.batch("store", "l1", NAMES), server.batch("store", "l2", NAMES))
    instance = fleet.coordinator.instance("a")
    assert instance is not None
    assert instance.memory.holder.tier is Tier.L1

    fleet.coordinator.deregister("a")
    while fleet.index.sweep():
        pass

    assert fleet.index.size().held_chunks == fleet.index.size().chunks == len(NAMES)
    keys: set[ChunkKey] = {chunk_key(name) for name in NAMES}
    assert len(keys) == len(NAMES)
