"""Messages between LMCache's in-process connector and its controller."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.errors import WireError
from kvroute.wire import lmcache_controller as wire
from kvroute.wire.lmcache_controller import (
    SMALL_BYTES,
    DeRegister,
    FullSyncBatch,
    FullSyncEnd,
    FullSyncStart,
    FullSyncStatus,
    Heartbeat,
    KvAdmit,
    KvEvict,
    KvOperations,
    Message,
    Operation,
    P2pLookup,
    P2pLookupReply,
    Register,
    decode,
    decode_reply,
    encode,
    origin,
    split,
)

WHO: Any = {"instance_id": "a", "worker_id": 3}
keys = st.integers(-(2**63), 2**64 - 1)
operations = st.builds(Operation, st.sampled_from(["admit", "evict"]), keys, st.integers(0, 2**40))
who: Any = {"instance_id": st.text(), "worker_id": st.integers(0, 1000)}
place: Any = {"location": st.text()}
count = st.integers(-(2**31), 2**32)
messages = st.one_of(
    st.builds(Register, **who, port=count, peer_init_url=st.none() | st.text()),
    st.builds(Heartbeat, **who, port=count),
    st.builds(DeRegister, **who),
    st.builds(KvOperations, **who, **place, operations=st.lists(operations)),
    st.builds(KvAdmit, **who, **place, key=keys),
    st.builds(KvEvict, **who, **place, key=keys),
    st.builds(FullSyncStart, **who, **place, sync_id=st.text(), total_keys=count, batch_count=count),
    st.builds(FullSyncBatch, **who, **place, sync_id=st.text(), batch_id=count, keys=st.lists(keys)),
    st.builds(FullSyncEnd, **who, **place, sync_id=st.text(), actual_total_keys=count),
    st.builds(FullSyncStatus, **who, sync_id=st.text()),
    st.builds(P2pLookup, **who, hashes=st.lists(keys)),
)


@settings(deadline=None)
@given(messages)
def test_a_message_comes_back_from_msgpack_and_from_json(message: Message) -> None:
    assert decode(encode(message)) == message
    assert decode(msgspec.json.encode(message)) == message


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_a_message_or_an_error(payload: bytes) -> None:
    for read in (decode, decode_reply):
        try:
            read(payload)
        except WireError:
            pass
    origin(payload)
    assert list(split(payload)) == [payload]


@settings(deadline=None)
@given(messages, st.data())
def test_half_a_message_is_an_error(message: Message, data: st.DataObject) -> None:
    payload = encode(message)
    with pytest.raises(WireError):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))])


def test_the_peer_url_has_two_names() -> None:
    old = {"type": "RegisterMsg", **WHO, "ip": "i", "port": 1, "distributed_url": "u"}
    new = {"type": "RegisterMsg", **WHO, "ip": "i", "port": 1, "peer_init_url": "u"}

    for fields in (old, new):
        message = decode(json.dumps(fields).encode())
        assert isinstance(message, Register)
        assert message.peer_url == "u"


def test_an_absent_worker_is_an_empty_row() -> None:
    # LMCache reads the first row without looking whether there is one (0.5.6, p2p_backend.py).
    assert decode_reply(encode(P2pLookupReply())) == P2pLookupReply(layout_info=[("", "", 0, "")])


def test_an_error_does_not_repeat_the_message() -> None:
    for payload in (
        b'{"type": "secret"}',
        b'{"type": "KVAdmitMsg", "instance_id": "secret", "key": "secret"}',
    ):
        with pytest.raises(WireError) as error:
            decode(payload)
        assert "secret" not in str(error.value)


def test_an_unreadable_message_may_still_name_its_worker() -> None:
    fields = {"type": "BatchedKVOperationMsg", **WHO, "location": "L", "operations": [{"op_type": "new"}]}

    for payload in (json.dumps(fields).encode(), msgspec.msgpack.encode(fields)):
        with pytest.raises(WireError):
            decode(payload)
        assert origin(payload) == ("a", 3, "L")
    assert origin(b'{"type": "x"}') is None


def test_a_large_batch_is_split_into_equal_content() -> None:
    batch = [Operation("admit" if number % 3 else "evict", number << 40, number) for number in range(5000)]
    whole = encode(KvOperations(**WHO, location="L", operations=batch))

    pieces = list(split(whole))

    read: list[Operation] = []
    for piece in pieces:
        assert len(piece) < SMALL_BYTES * 1.2
        message = decode(piece)
        assert isinstance(message, KvOperations)
        assert (message.instance_id, message.worker_id, message.location) == ("a", 3, "L")
        read += message.operations
    assert read == batch
    assert len(pieces) > 5


def test_a_large_batch_of_a_synchronisation_keeps_its_number() -> None:
    sent = list(range(2**62, 2**62 + 5000))
    whole = encode(FullSyncBatch(**WHO, location="L", sync_id="s", batch_id=7, keys=sent))

    read = [decode(piece) for piece in split(whole)]

    assert len(read) > 1
    assert [key for piece in read if isinstance(piece, FullSyncBatch) for key in piece.keys] == sent
    assert {piece.batch_id for piece in read if isinstance(piece, FullSyncBatch)} == {7}


@pytest.mark.parametrize("kind", ["BatchedKVOperationMsg", "FullSyncBatchMsg", "BatchedP2PLookupMsg"])
def test_a_message_of_too_many_rows_is_refused_before_they_are_decoded(kind: str) -> None:
    """Decoded, five million small numbers need two gigabytes."""
    rows = [1] * (wire.MAX_ROWS + 1)
    body = {"type": kind, "instance_id": "a", "worker_id": 0, "location": "L", "sync_id": "s", "batch_id": 0}
    payload = msgspec.msgpack.encode(body | {"operations": rows, "keys": rows, "hashes": rows})

    (message,) = wire.split(payload)
    assert message is payload
    with pytest.raises(WireError):
        wire.decode(message)
