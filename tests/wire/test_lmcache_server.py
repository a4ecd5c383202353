from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvroute.errors import WireError
from kvroute.wire import lmcache_server as lmcache_mp
from kvroute.wire.lmcache_server import CacheEvents, decode_events, decode_registration, decode_status

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
NAMES = ("lmcache-mp-engine-driven", "lmcache-mp-lmcache-driven")

TEXT = st.sampled_from(["", "dram", '{"key":', '},{"key":"', '{"instance_id":', "}],", "ü\\"])
ENTRY = st.fixed_dictionaries(
    {
        "key": st.fixed_dictionaries(
            {
                "chunk_hash_hex": st.binary(min_size=4, max_size=4).map(bytes.hex),
                "model_name": TEXT,
                "kv_rank": st.just(0x02010201),
                "object_group_id": st.integers(0, 3),
                "cache_salt": TEXT,
            }
        ),
        "size_bytes": st.integers(0, 9),
        "token_ids": st.lists(st.integers(0, 99), max_size=4),
        "token_offset": st.just(-1),
    }
)
BATCH = st.fixed_dictionaries(
    {
        "instance_id": st.sampled_from(["a", '"entries":[']),
        "incarnation": st.just(5),
        "seq": st.integers(1, 9),
        "event_type": st.sampled_from(["store", "delete", "flush"]),
        "tier": st.just("l1"),
        "backend": TEXT,
        "entries": st.lists(ENTRY, max_size=6),
        "shared": st.booleans(),
    }
)


def packed(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def decoded(body: bytes | bytearray) -> tuple[list[CacheEvents], int]:
    """The batches, and in how many steps they came."""
    decoding, steps = decode_events(body), 1
    while True:
        try:
            next(decoding)
        except StopIteration as end:
            return end.value, steps
        steps += 1


def joined(batches: list[CacheEvents]) -> list[Any]:
    """Batches as plain data, those of one number as one."""
    rows: list[Any] = []
    for batch in batches:
        entries = [
            (each.key.chunk_hash_hex, each.key.model_name, each.key.cache_salt, each.token_count())
            for each in batch.entries
        ]
        head = (batch.instance_id, batch.seq, batch.event_type, batch.backend, batch.shared)
        if rows and rows[-1][0] == head:
            rows[-1][1].extend(entries)
        else:
            rows.append((head, entries))
    return rows


@settings(max_examples=60, deadline=None, phases=(Phase.generate,))
@given(batches=st.lists(BATCH, max_size=4), size=st.integers(1, 400))
def test_a_large_body_gives_the_same_events_in_pieces_as_whole(batches: list[Any], size: int) -> None:
    for seq, batch in enumerate(batches, 1):
        batch["seq"] = seq
    body = packed({"batches": batches})
    whole, _ = decoded(body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmcache_mp, "PIECE_BYTES", size)
        pieces, _ = decoded(bytearray(body))

    assert joined(pieces) == joined(whole)


def test_pieces_are_small() -> None:
    entry = {"key": {"chunk_hash_hex": "00" * 32, "model_name": "m", "kv_rank": 1}, "token_ids": [1] * 64}
    batch = {"instance_id": "a", "incarnation": 1, "seq": 1, "event_type": "store", "tier": "l1"}
    body = packed({"batches": [{**batch, "entries": [entry] * 5000, "shared": False}]})

    pieces, steps = decoded(body)

    assert steps > len(pieces) > len(body) // lmcache_mp.PIECE_BYTES // 2
    assert sum(len(piece.entries) for piece in pieces) == 5000
    assert len({piece.seq for piece in pieces}) == 1


def test_a_body_of_another_form_is_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_mp, "PIECE_BYTES", 10)
    batch = {
        "tier": "l1",
        "instance_id": "a",
        "incarnation": 1,
        "seq": 1,
        "event_type": "store",
        "entries": [],
    }

    batches, _ = decoded(json.dumps({"batches": [batch], "later": [1]}, indent=1).encode())

    assert [batch.instance_id for batch in batches] == ["a"]


@pytest.mark.parametrize("name", NAMES)
def test_everything_that_real_servers_sent_is_understood(name: str) -> None:
    kinds = set()
    for line in (CAPTURES / f"{name}.coordinator.jsonl").read_text().splitlines():
        call = json.loads(line)
        body = packed(call["body"])
        if call["path"] == "/events":
            for batch in decoded(body)[0]:
                kinds.add((batch.event_type, batch.tier, batch.backend))
                assert all(each.key.world == 1 and each.key.rank == 0 for each in batch.entries)
        elif call["method"] == "POST":
            known = decode_registration(body)
            assert (known.instance_id, known.ip) in {("lmc-a", "10.0.0.11"), ("lmc-b", "10.0.0.12")}
    assert ("store", "l2", "resp") in kinds
    assert ("access", "l1", "") in kinds
    assert ("config", "l1", "dram") in kinds


def test_ranks_are_read_from_their_packed_form() -> None:
    key = lmcache_mp.ObjectKey("00", "m", 8 << 24 | 5 << 16 | 4 << 8 | 1)

    assert (key.world, key.rank) == (8, 5)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "events"),
        (b"[]", "events"),
        (b'{"batches":[{"incarnation":1,"seq":1,"event_type":"store","tier":"l1"}]}', "instance_id"),
        (b'{"batches":[{"instance_id":"a","incarnation":1,"seq":0,"event_type":"x","tier":"l1"}]}', "seq"),
        (
            b'{"batches":[{"instance_id":"a","incarnation":-1,"seq":1,"event_type":"x","tier":"l1"}]}',
            "incarn",
        ),
        (b'\xff{"batches":[]}', "events"),
    ],
)
def test_a_senseless_field_is_refused_by_name(body: bytes, named: str) -> None:
    with pytest.raises(WireError, match=named):
        decoded(body)


def test_a_registration_needs_an_address() -> None:
    with pytest.raises(WireError, match="ip"):
        decode_registration(b'{"instance_id":"a","ip":"","http_port":8080}')
    with pytest.raises(WireError, match="http_port"):
        decode_registration(b'{"instance_id":"a","ip":"10.0.0.1","http_port":0}')


def test_a_status_has_the_hash_algorithm_and_the_number_of_chunks() -> None:
    manager = {"total_object_count": 9, "staging_object_count": 2, "memory_used_bytes": 5}
    page = {
        "chunk_size": 64,
        "hash_algorithm": "blake3",
        "storage_manager": {"l1_managers": {"_default": manager}},
    }

    status = decode_status(packed(page))

    assert (status.chunk_size, status.hash_algorithm, status.l1_objects) == (64, "blake3", 7)
    assert decode_status(b'{"chunk_size":256}').l1_objects is None
    with pytest.raises(WireError, match="chunk_size"):
        decode_status(b"{}")


DEEP = b'{"instance_id":' + b"[" * 100_000


@pytest.mark.parametrize(
    "decode",
    [
        lmcache_mp.decode_registration,
        lmcache_mp.decode_status,
        lmcache_mp.read_prefetch_answer,
        lambda body: list(lmcache_mp.decode_events(body)),
    ],
)
def test_too_deep_nesting_is_refused(decode: Any) -> None:
    with pytest.raises(WireError):
        decode(b'{"unknown":' + DEEP)
    with pytest.raises(WireError):
        decode(DEEP)
