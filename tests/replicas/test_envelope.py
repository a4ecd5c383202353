from __future__ import annotations

import msgspec
import pytest

from kvroute.replicas import envelope as wire
from kvroute.replicas.envelope import (
    MAX_ENVELOPE_BYTES,
    TO_ALL,
    Envelope,
    Kind,
    Outgoing,
    Refusal,
    Refused,
    SendQueue,
    decode_payload,
    encode_payloads,
    pack,
    unpack,
)
from kvroute.replicas.mesh import encode_frame
from kvroute.replicas.messages import (
    Dispatched,
    Finished,
    FirstToken,
    Hello,
    RecentPrompts,
    SessionForgotten,
)

KEY = b"a secret of all members"


def envelope(payload: bytes = b"\x90", *, signed: bool = False) -> Envelope:
    return Envelope(Kind.BATCH, b"gateway1", b"sender01", TO_ALL, 7, 12.5, payload, signed)


def refusal(data: bytes, key: bytes | None = KEY) -> Refusal:
    with pytest.raises(Refused) as refused:
        unpack(data, key)
    return refused.value.reason


@pytest.mark.parametrize("signed", [False, True])
def test_an_envelope_arrives_as_it_was_packed(signed):
    sent = envelope(b"payload", signed=signed)

    assert unpack(pack(sent, KEY), KEY) == sent


def test_a_signed_envelope_is_read_without_a_key_as_an_unsigned_one():
    received = unpack(pack(envelope(b"payload", signed=True), KEY), None)

    assert (received.payload, received.is_signed) == (b"payload", False)


def test_every_changed_byte_of_a_signed_envelope_is_refused():
    data = pack(envelope(b"payload", signed=True), KEY)

    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        if place == 7:  # the flag of the HMAC: without it the envelope changes no fleet
            assert not unpack(bytes(changed), KEY).is_signed
        else:
            assert refusal(bytes(changed)) in set(Refusal)


def test_what_cannot_be_read_is_refused_with_its_reason():
    data = pack(envelope(), KEY)

    assert refusal(b"") is Refusal.MALFORMED
    assert refusal(b"another program's message, which is long enough for a header") is Refusal.MALFORMED
    assert refusal(data[:4] + b"\x01" + data[5:]) is Refusal.FORMAT
    assert refusal(data[:5] + bytes([1 - data[5]]) + data[6:]) is Refusal.BYTE_ORDER
    assert refusal(data[:6] + b"\x09" + data[7:]) is Refusal.MALFORMED
    assert refusal(data + bytes(MAX_ENVELOPE_BYTES)) is Refusal.TOO_LARGE
    assert refusal(pack(envelope(signed=True), b"another secret")) is Refusal.SIGNATURE


def test_a_message_about_another_format_says_which():
    data = pack(envelope(), KEY)

    with pytest.raises(Refused, match="has format 9, and this release of kvroute reads format 2"):
        unpack(data[:4] + b"\x09" + data[5:], KEY)


def test_messages_arrive_in_order_and_large_batches_are_divided(monkeypatch):
    monkeypatch.setattr(wire, "SPLIT_BYTES", 100)
    messages = [Finished(number) for number in range(200)] + [RecentPrompts("w", [bytes(300)])]

    payloads = list(encode_payloads(messages))

    assert [each for payload in payloads for each in decode_payload(payload)[0]] == messages
    assert len(payloads) > 5
    assert all(len(payload) <= 100 for payload in payloads[:-1])


def test_messages_of_a_later_release_are_skipped_and_later_fields_too():
    later = [["NewMessage", 1], ["Finished", 5, "a later field"], ["FirstToken", 6]]

    messages, unknown = decode_payload(msgspec.msgpack.encode(later))

    assert (list(messages), unknown) == ([Finished(5), FirstToken(6)], 1)


def test_messages_of_a_local_link_are_not_accepted():
    payload = encode_frame([Hello(0, True)])[4:]

    assert decode_payload(payload) == ([], 1)


def test_a_payload_that_is_no_list_is_refused():
    with pytest.raises(Refused) as refused:
        decode_payload(b"\xc1")
    assert refused.value.reason is Refusal.MALFORMED


def outgoing(seq: int, size: int = 10, kind: Kind = Kind.BATCH) -> Outgoing:
    return Outgoing(kind, TO_ALL, seq, bytes(size), False)


def test_the_queue_drops_the_oldest_that_wait():
    queue = SendQueue(30)

    assert [queue.add(outgoing(seq)) for seq in range(5)] == [0, 0, 0, 1, 1]
    assert [queue.take().seq for _ in range(3)] == [2, 3, 4]
    assert queue.take() is None
    assert queue.waiting_bytes == 0


def test_the_queue_keeps_written_batches_within_the_same_bound():
    queue = SendQueue(30)
    for seq in range(1, 6):
        queue.add(outgoing(seq, kind=Kind.PRIVATE if seq == 4 else Kind.BATCH))
        queue.take()

    assert [each.seq for each in queue.written_between(0, 9)] == [2, 3, 5]
    assert [each.seq for each in queue.written_between(2, 3)] == [3]
    queue.add(outgoing(6, size=25))
    assert queue.written_between(0, 9) == []


def test_one_envelope_may_be_larger_than_the_queue():
    queue = SendQueue(30)

    assert queue.add(outgoing(1, size=50)) == 0
    assert queue.take().seq == 1


def test_a_text_that_is_no_utf8_costs_its_own_message_only() -> None:
    payload = bytearray(msgspec.msgpack.encode([SessionForgotten("ab"), FirstToken(7)]))
    place = payload.index(b"ab")
    payload[place] = 0xFF

    assert decode_payload(bytes(payload)) == ([FirstToken(7)], 1)


@pytest.mark.parametrize("tokens", [-1, -(2**63), 10**18])
def test_a_dispatch_with_an_absurd_number_of_tokens_is_refused(tokens: int) -> None:
    good = Dispatched(1, "m", "w", "session", "r", True, 0.1, 5, 0, True, [], [], None, None, None)
    bad = msgspec.structs.replace(good, tokens=tokens)

    assert decode_payload(msgspec.msgpack.encode([bad, good])) == ([good], 1)
