"""Envelopes: what gateways send each other through Redis. Pure.

An envelope has a header, an HMAC if a message needs one (`NEEDS_HMAC`), and a MessagePack list of messages.
The header never changes its layout, so that members of every release can say which format another one uses.
Anybody who can write to the Redis can send envelopes; so they are bounded, and only `SharedMessage`s are
accepted.
"""

from __future__ import annotations

import hmac
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from struct import Struct as Packing
from typing import Final, NamedTuple

import msgspec

from kvroute.errors import WireError
from kvroute.replicas.messages import (
    KeyUsed,
    LimitsInUse,
    LostRequestsCleared,
    OverridesChanged,
    RequestLost,
    SharedMessage,
)
from kvroute.wire.lmcache_server import SharedReport

FORMAT: Final = 2
"""Raised when older members could no longer read the messages."""
ID_BYTES: Final = 8
TO_ALL: Final = bytes(ID_BYTES)
MAX_ENVELOPE_BYTES: Final = 4 * 1024 * 1024
"""A larger one is refused; it has room for the longest prompt whose keys are sent (4 MiB of text)."""
SPLIT_BYTES: Final = 256 * 1024
"""A batch above this size is divided, so that an envelope does not occupy Redis and event loops for long."""
SPLIT_MESSAGES: Final = 1024
"""A batch of more messages is divided: they cost the receiver's event loop 10 to 20 us each."""
MAX_MESSAGES: Final = 8192
"""An envelope with more messages is refused. Earlier releases send batches of some 512, and states of at most
`SPLIT_BYTES` whose messages are longer than 32 bytes."""

_HEADER: Final = Packing(">4sBBBB8s8s8sqd")
_MAGIC: Final = b"KVRT"
_MAC_BYTES: Final = 32
_LITTLE: Final = 0
_BIG: Final = 1
_ORDER: Final = _LITTLE if sys.byteorder == "little" else _BIG

NEEDS_HMAC: Final = (
    OverridesChanged,
    KeyUsed,
    LimitsInUse,
    RequestLost,
    LostRequestsCleared,
    SharedReport,
)
"""Messages that are sent and believed with an HMAC only. They change the fleet, use up limits of keys, let
bodies be refused, or say
where the KV and the LMCache server of a worker are: prefetches send prompts there."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[SharedMessage]).decode
_decode_list: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_decode_one: Final = msgspec.msgpack.Decoder(SharedMessage).decode


class Kind(IntEnum):
    """What an envelope is part of."""

    BATCH = 0
    """The sender's numbered sequence, for all members."""
    MISSED = 1
    """A batch again, for a member that has missed it; only its prompts still count."""
    PRIVATE = 2
    """Messages for one member, outside the sequence."""


class Refusal(StrEnum):
    """Why an envelope or a message was not believed. A closed set, so it can be a metric label."""

    MALFORMED = "malformed"
    FORMAT = "format"
    """The sender speaks another format: it runs another release."""
    BYTE_ORDER = "byte_order"
    TOO_LARGE = "too_large"
    SIGNATURE = "signature"
    """The HMAC is wrong: the sender has another `sharing.key`, or is no member."""
    UNSIGNED = "unsigned"
    """A message that needs an HMAC has none, or there is no `sharing.key` here."""
    STALE = "stale"
    """An envelope that has arrived already, or was recorded earlier."""
    UNKNOWN = "unknown"
    """A message type of a later release."""


class Refused(WireError):
    """An envelope is not believed; `sender` is empty if the header cannot be read."""

    def __init__(self, reason: Refusal, text: str, sender: bytes = b"") -> None:
        super().__init__(text)
        self.reason = reason
        self.sender = sender


class Envelope(NamedTuple):
    """The header and payload of one envelope."""

    kind: Kind
    gateway: bytes
    """The sender's gateway: all processes of one machine that serve one address."""
    sender: bytes
    """The sending process, by a random number of its start (its epoch)."""
    to: bytes
    """The receiver, or `TO_ALL`."""
    seq: int
    """Number of the batch in the sender's sequence; of other kinds, of the last batch before it."""
    sent_s: float
    """When it was written, by the sender's monotonic clock."""
    payload: bytes
    is_signed: bool = False


def pack(envelope: Envelope, key: bytes | None) -> bytes:
    """The bytes of an envelope, with an HMAC if it `is_signed`."""
    header = _HEADER.pack(
        _MAGIC,
        FORMAT,
        _ORDER,
        envelope.kind,
        envelope.is_signed,
        envelope.gateway,
        envelope.sender,
        envelope.to,
        envelope.seq,
        envelope.sent_s,
    )
    if not envelope.is_signed:
        return header + envelope.payload
    assert key is not None
    return header + hmac.digest(key, header + envelope.payload, "sha256") + envelope.payload


def unpack(data: bytes, key: bytes | None) -> Envelope:
    """Read an envelope and check its HMAC. Raises Refused."""
    if len(data) < _HEADER.size:
        raise Refused(Refusal.MALFORMED, "it is shorter than a header")
    magic, version, order, kind, signed, gateway, sender, to, seq, sent_s = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise Refused(Refusal.MALFORMED, "it is not from a kvroute gateway")
    if version != FORMAT:
        text = f"it has format {version}, and this release of kvroute reads format {FORMAT}"
        raise Refused(Refusal.FORMAT, text, sender)
    if order != _ORDER:
        raise Refused(Refusal.BYTE_ORDER, "the sender's machine has another byte order", sender)
    if len(data) > MAX_ENVELOPE_BYTES:
        raise Refused(Refusal.TOO_LARGE, f"it has {len(data)} bytes", sender)
    if kind not in (Kind.BATCH, Kind.MISSED, Kind.PRIVATE) or signed > 1:
        raise Refused(Refusal.MALFORMED, "its kind is unknown", sender)
    payload = data[_HEADER.size :]
    if signed:
        given, payload = payload[:_MAC_BYTES], payload[_MAC_BYTES:]
        if key is None:
            signed = 0  # its messages that need no HMAC still count
        elif not hmac.compare_digest(given, hmac.digest(key, data[: _HEADER.size] + payload, "sha256")):
            raise Refused(Refusal.SIGNATURE, "its HMAC is wrong: is sharing.key the same?", sender)
    return Envelope(Kind(kind), gateway, sender, to, seq, sent_s, payload, bool(signed))


def encode_payloads(messages: Sequence[SharedMessage]) -> Iterable[bytes]:
    """`messages` as payloads within `SPLIT_MESSAGES` and `SPLIT_BYTES`. A single message may be larger."""
    if len(messages) <= SPLIT_MESSAGES:
        payload = _encode(messages)
        if len(payload) <= SPLIT_BYTES or len(messages) == 1:
            yield payload
            return
    middle = len(messages) // 2
    yield from encode_payloads(messages[:middle])
    yield from encode_payloads(messages[middle:])


def decode_payload(payload: bytes) -> tuple[Sequence[SharedMessage], int]:
    """The messages of a payload, and how many were skipped because this release does not know them.

    Raises Refused if the payload is no list of messages, or a list of more than `MAX_MESSAGES`.
    """
    if (count := _list_length(payload)) > MAX_MESSAGES:
        raise Refused(Refusal.TOO_LARGE, f"it has {count} messages")
    try:
        return _decode(payload), 0
    except _UNREADABLE:
        pass
    try:
        undecoded = _decode_list(payload)
    except _UNREADABLE as error:
        raise Refused(Refusal.MALFORMED, "its messages cannot be decoded") from error
    messages = []
    for encoded in undecoded:
        try:
            messages.append(_decode_one(encoded))
        except _UNREADABLE:
            continue
    return messages, len(undecoded) - len(messages)


def _list_length(payload: bytes) -> int:
    """The length that a MessagePack list claims, from its header alone; 0 if it is no list."""
    header = payload[0] if payload else 0
    if 0x90 <= header <= 0x9F:  # fixarray
        return header & 0x0F
    if header == 0xDC:  # array 16
        return int.from_bytes(payload[1:3], "big")
    if header == 0xDD:  # array 32
        return int.from_bytes(payload[1:5], "big")
    return 0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One envelope that is to be written, or that was written and can be sent again."""

    kind: Kind
    to: bytes
    seq: int
    payload: bytes
    is_signed: bool


class SendQueue:
    """Envelopes that wait to be written, and after that the latest batches, for members that missed some.

    Both are bounded by one number of bytes. Mutable: by its methods.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[Outgoing] = deque()
        self._written: deque[Outgoing] = deque()
        self.waiting_bytes = 0
        self._written_bytes = 0

    def add(self, outgoing: Outgoing) -> int:
        """Append an envelope. Returns how many were dropped to make room: the oldest that still waited."""
        self._waiting.append(outgoing)
        self.waiting_bytes += len(outgoing.payload)
        dropped = 0
        while self.waiting_bytes > self._max_bytes and len(self._waiting) > 1:
            self.waiting_bytes -= len(self._waiting.popleft().payload)
            dropped += 1
        self._forget_written()
        return dropped

    def take(self) -> Outgoing | None:
        """The next envelope to write; None if none waits."""
        if not self._waiting:
            return None
        outgoing = self._waiting.popleft()
        self.waiting_bytes -= len(outgoing.payload)
        if outgoing.kind is Kind.BATCH:
            self._written.append(outgoing)
            self._written_bytes += len(outgoing.payload)
            self._forget_written()
        return outgoing

    def written_between(self, seq: int, until: int) -> Sequence[Outgoing]:
        """The written batches after number `seq` up to number `until` that are still kept."""
        return [outgoing for outgoing in self._written if seq < outgoing.seq <= until]

    def _forget_written(self) -> None:
        while self._written and self._written_bytes + self.waiting_bytes > self._max_bytes:
            self._written_bytes -= len(self._written.popleft().payload)
