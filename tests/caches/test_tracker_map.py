"""The live map as routing sees it: places change with the streams' state."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import Tier, adapter_space, prompt_keys, token_keys
from kvroute.caches.tracker import LiveCaches
from kvroute.clock import SystemClock
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.map_trust import MapTrust, TrustReason
from kvroute.index.prefix_index import Holder, PrefixIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.membership import ServedWorker
from kvroute.lmcache.options import LMCacheOptions
from kvroute.routing.strategy import CachePlace, ExactPrompt, Tokens
from kvroute.wire.lmcache_server import CacheEvents, ServerRegistration

LORA = Path(__file__).parent.parent / "data" / "captures" / "lmcache-mp-lora.coordinator.jsonl"


class FakeIngest:
    """Streams by worker, as `(slot, rank, reason)`."""

    def __init__(self) -> None:
        self.reported: dict[str, list[tuple[int, int, TrustReason | None]]] = {}
        self.arrives: Callable[[], object] = lambda: None
        self.lookahead = 0

    def refresh(self, force: bool) -> bool:
        self.arrives()
        return True

    def streams(self, worker: Any) -> list[Any]:
        return [
            SimpleNamespace(
                slot=slot,
                rank=rank,
                subscriber=SimpleNamespace(reason=reason),
                ledger=SimpleNamespace(lookahead=self.lookahead),
            )
            for slot, rank, reason in self.reported.get(worker, [])
        ]


@pytest.fixture
def ingest() -> FakeIngest:
    return FakeIngest()


@pytest.fixture
def caches(ingest: Any) -> LiveCaches:
    return LiveCaches(PrefixIndex(), ChunkIndex(), ingest, lambda _: False)


def test_a_place_follows_its_streams_trust(caches: Any, ingest: FakeIngest) -> None:
    for reason, standing, why in (
        (TrustReason.REPLAYING, MapTrust.NONE, "replaying"),
        (None, MapTrust.WHOLE, ""),
        (None, MapTrust.WHOLE, ""),
        (TrustReason.GAP, MapTrust.PARTIAL, "gap"),
        (TrustReason.FULL, MapTrust.PARTIAL, "full"),
        (None, MapTrust.WHOLE, ""),
    ):
        ingest.reported = {"a": [(3, 0, reason)]}
        assert list(caches.places("a")) == [CachePlace(3, 0, standing, why)]
    assert caches.places("b") == []


def test_a_slot_that_is_anothers_now_has_its_rank(caches: Any, ingest: FakeIngest) -> None:
    ingest.reported = {"a": [(3, 0, None), (4, 1, TrustReason.GAP)]}
    assert [place.rank for place in caches.places("a")] == [0, 1]

    ingest.reported = {"b": [(4, 0, TrustReason.GAP)]}

    assert list(caches.places("b")) == [CachePlace(4, 0, MapTrust.PARTIAL, "gap")]


def test_a_refresh_applies_waiting_events(ingest: Any) -> None:
    index, holder, ids = PrefixIndex(), Holder(Tier.GPU), array("I", range(33))
    index.attach(0, holder)
    keys = prompt_keys(ids, adapter_space(None))
    ingest.arrives = lambda: index.store(holder, 16, None, keys)
    caches = LiveCaches(index, ChunkIndex(), ingest, lambda _: False)
    prompt = ExactPrompt(len(ids), keys, PromptChunks(ids), "", None)
    assert caches.match(prompt) == {}

    assert caches.refresh(True)

    assert caches.match(prompt) == {0: Tokens(gpu=32)}


def reports() -> list[CacheEvents]:
    """LMCache's reports: none; a prompt's chunks of the base model; of an adapter, with a salt."""
    bodies = [json.loads(line)["body"]["batches"] for line in LORA.read_text().splitlines()]
    return [
        batch for body in bodies for batch in msgspec.json.decode(json.dumps(body), type=list[CacheEvents])
    ]


def test_lmcache_gives_an_adapter_whatever_was_computed_of_its_tokens(ingest: Any) -> None:
    """A chunk's name does not say which adapter computed it, so a LoRA request finds those of others (LMCache
    0.5.6, seen on a real engine); only a salt keeps them apart. vLLM's own blocks are never shared."""
    empty, base, salted = reports()
    ids = array("I", [token for entry in base.entries for token in json.loads(bytes(entry.token_ids))])
    blocks, chunks = PrefixIndex(), ChunkIndex()
    coordinator = Coordinator(chunks, SystemClock(), LMCacheOptions(coordinator={"chunk_tokens": 64}))
    coordinator.worker_changed(ServedWorker("a", "127.0.0.1", (0,), frozenset({"/models/tiny"})))
    caches = LiveCaches(blocks, chunks, ingest, lambda _: True)

    def found(adapter: str | None, salt: str) -> Tokens:
        keys = prompt_keys([*ids, 5], adapter_space(adapter, salt))
        prompt = ExactPrompt(len(ids) + 1, keys, PromptChunks(ids), salt, adapter)
        return caches.match(prompt).get(0, Tokens())

    def reported(batch: CacheEvents) -> None:
        coordinator.admit(batch)
        coordinator.apply(batch)

    coordinator.register(ServerRegistration("127.0.0.1", 8080, "a"))
    reported(empty)
    assert {found(adapter, salt) for adapter in (None, "ada") for salt in ("", "ada")} == {Tokens()}

    reported(base)
    assert found(None, "") == found("ada", "") == Tokens(l1=320)
    assert found(None, "ada") == found("ada", "ada") == Tokens()

    reported(salted)
    assert found("ada", "ada") == Tokens(l1=320)
    # What the base model holds on the GPU is of no use to the adapter.
    holder = Holder(Tier.GPU)
    blocks.attach(0, holder)
    blocks.store(holder, 64, None, token_keys(ids, adapter_space(None).seed)[3::4])
    assert found(None, "") == Tokens(gpu=320)
    assert found("ada", "") == Tokens(l1=320)
