"""The messages between LMCache's in-process connector and its controller.

msgpack maps, or JSON objects, whose `"type"` names the message (LMCache 0.4.3 to 0.5.6,
v1/cache_controller/message.py). Field names are LMCache's, so that messages decode straight into these
classes; unknown fields are skipped. Releases up to 0.3.9.post2 differ: they push their registration and
heartbeats and expect no reply (`distributed_url` instead of `peer_init_url`), send one admission or eviction
per message without a number, and have no full synchronisation.

A worker pushes messages as the frames of one multipart message. A request is `[identity, "", message]` at the
gateway's ROUTER socket, and so is the reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from kvroute.errors import WireError

MAX_ROWS: Final = 131_072
"""A message of more operations, keys or hashes is refused undecoded: each row needs some 400 bytes."""

ChunkHash: TypeAlias = int
"""LMCache's hash of a chunk: signed 64 bits with `builtin` hashes, unsigned with `sha256_cbor`."""


class Operation(Struct, frozen=True, gc=False):
    """One chunk was stored or removed. `seq_num` counts from 0 per worker and location."""

    op_type: Literal["admit", "evict"]
    key: ChunkHash
    seq_num: int


class Sender(Struct, frozen=True, kw_only=True):
    """The sender of a message: one rank (`worker_id`) of one LMCache instance."""

    instance_id: str
    worker_id: int


class _Endpoint(Sender, frozen=True, kw_only=True):
    ip: str = ""
    port: int = 0
    peer_init_url: str | None = None
    """The URL that peers fetch chunks from; None without P2P."""
    distributed_url: str | None = None
    """`peer_init_url` in releases before 0.4."""

    @property
    def peer_url(self) -> str | None:
        return self.peer_init_url or self.distributed_url


class Register(_Endpoint, frozen=True, kw_only=True, tag="RegisterMsg"):
    """A worker has started."""


class Heartbeat(_Endpoint, frozen=True, kw_only=True, tag="HeartbeatMsg"):
    """A worker is alive; the reply may have commands."""


class DeRegister(Sender, frozen=True, kw_only=True, tag="DeRegisterMsg"):
    """A worker shuts down."""


class KvOperations(Sender, frozen=True, kw_only=True, tag="BatchedKVOperationMsg"):
    """The changes in one location of a worker, in order, with consecutive numbers."""

    location: str
    operations: Annotated[list[Operation], msgspec.Meta(max_length=MAX_ROWS)]


class KvAdmit(Sender, frozen=True, kw_only=True, tag="KVAdmitMsg"):
    """One chunk was stored (up to 0.3.9.post2)."""

    location: str
    key: ChunkHash


class KvEvict(Sender, frozen=True, kw_only=True, tag="KVEvictMsg"):
    """One chunk was removed (up to 0.3.9.post2)."""

    location: str
    key: ChunkHash


class FullSyncStart(Sender, frozen=True, kw_only=True, tag="FullSyncStartMsg"):
    """The worker has frozen this location and will send all its keys in `batch_count` batches."""

    location: str
    sync_id: str
    total_keys: int
    batch_count: int


class FullSyncBatch(Sender, frozen=True, kw_only=True, tag="FullSyncBatchMsg"):
    location: str
    sync_id: str
    batch_id: int
    keys: Annotated[list[ChunkHash], msgspec.Meta(max_length=MAX_ROWS)]


class FullSyncEnd(Sender, frozen=True, kw_only=True, tag="FullSyncEndMsg"):
    location: str
    sync_id: str
    actual_total_keys: int


class FullSyncStatus(Sender, frozen=True, kw_only=True, tag="FullSyncStatusMsg"):
    """The worker asks whether it may continue, and which batches are missing."""

    sync_id: str


class P2pLookup(Sender, frozen=True, kw_only=True, tag="BatchedP2PLookupMsg"):
    """The worker asks which other instance has the first of these chunks, and how many of the next ones."""

    hashes: Annotated[list[ChunkHash], msgspec.Meta(max_length=MAX_ROWS)]


Message: TypeAlias = (
    Register
    | Heartbeat
    | DeRegister
    | KvOperations
    | KvAdmit
    | KvEvict
    | FullSyncStart
    | FullSyncBatch
    | FullSyncEnd
    | FullSyncStatus
    | P2pLookup
)


class FullSyncCommand(Struct, frozen=True, kw_only=True, tag_field="command_type", tag="full_sync"):
    """Asks the worker to send all its keys."""

    reason: str | None = None
    args: dict[str, object] | None = None


class RegisterReply(Struct, frozen=True, kw_only=True, tag="RegisterRetMsg"):
    extra_config: dict[str, str] = {}
    """`heartbeat_url` (host:port) is the target of heartbeats; without it the worker sends none."""


class HeartbeatReply(Struct, frozen=True, kw_only=True, tag="HeartbeatRetMsg"):
    commands: list[FullSyncCommand] = []


class FullSyncStartReply(Struct, frozen=True, kw_only=True, tag="FullSyncStartRetMsg"):
    sync_id: str
    accepted: bool
    error_msg: str | None = None


class FullSyncStatusReply(Struct, frozen=True, kw_only=True, tag="FullSyncStatusRetMsg"):
    sync_id: str
    is_complete: bool
    global_progress: float
    """0 to 1; the worker only logs it."""
    can_exit_freeze: bool
    missing_batches: list[int] = []


class P2pLookupReply(Struct, frozen=True, kw_only=True, tag="BatchedP2PLookupRetMsg"):
    """`layout_info` has one row: an instance, its location, the number of leading chunks it has, and its peer
    URL.

    Without a hit the row is empty, because workers read the first row without a check.
    """

    layout_info: list[tuple[str, str, int, str]] = msgspec.field(default_factory=lambda: [("", "", 0, "")])


class ErrorReply(Struct, frozen=True, kw_only=True, tag="ErrorMsg"):
    error: str


Reply: TypeAlias = (
    RegisterReply | HeartbeatReply | FullSyncStartReply | FullSyncStatusReply | P2pLookupReply | ErrorReply
)


class _Header(Struct, frozen=True):
    type: str
    instance_id: str = ""
    worker_id: int = 0
    location: str = ""


_Rows: TypeAlias = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_ROWS)]


class _RawOperations(Sender, frozen=True, kw_only=True, tag="BatchedKVOperationMsg"):
    location: str
    operations: _Rows


class _RawKeys(Sender, frozen=True, kw_only=True, tag="FullSyncBatchMsg"):
    location: str
    sync_id: str
    batch_id: int
    keys: _Rows


_from_msgpack = msgspec.msgpack.Decoder(Message).decode
_from_json = msgspec.json.Decoder(Message).decode
_reply_from_msgpack = msgspec.msgpack.Decoder(Reply).decode
_header_from_msgpack = msgspec.msgpack.Decoder(_Header).decode
_header_from_json = msgspec.json.Decoder(_Header).decode
_raw_from_msgpack = msgspec.msgpack.Decoder(_RawOperations | _RawKeys).decode
_encode = msgspec.msgpack.Encoder().encode

SMALL_BYTES: Final = 16_384
"""Messages up to this size are not split: about 430 operations, or 1,800 keys."""


def decode(payload: bytes) -> Message:
    """Decode a worker's message; about 16 us for 100 operations. Raises `WireError`."""
    try:
        message: Message = _from_json(payload) if payload[:1] == b"{" else _from_msgpack(payload)
        return message
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a message to LMCache's controller: {_without_values(error)}") from error


def decode_reply(payload: bytes) -> Reply:
    """Decode a controller's reply. Raises `WireError`."""
    try:
        reply: Reply = _reply_from_msgpack(payload)
        return reply
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not an answer of LMCache's controller: {_without_values(error)}") from error


def encode(message: Message | Reply) -> bytes:
    """Encode as msgpack, which all releases read."""
    return _encode(message)


def origin(payload: bytes) -> tuple[str, int, str] | None:
    """(instance, worker, location) of a message that `decode` refuses; None if it has no instance."""
    try:
        header = _header_from_json(payload) if payload[:1] == b"{" else _header_from_msgpack(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return (header.instance_id, header.worker_id, header.location) if header.instance_id else None


def split(payload: bytes) -> Iterator[bytes]:
    """Split a large batch into batches of about `SMALL_BYTES`, in order. Other messages are yielded whole.

    One of more than `MAX_ROWS` is yielded as an unreadable message.

    The pieces of a `FullSyncBatch` keep its number.
    """
    if len(payload) <= SMALL_BYTES:
        yield payload
        return
    try:
        whole = _raw_from_msgpack(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        yield payload
        return
    rows: Sequence[msgspec.Raw]
    rows, field = (
        (whole.operations, "operations") if isinstance(whole, _RawOperations) else (whole.keys, "keys")
    )
    step = max(1, len(rows) * SMALL_BYTES // len(payload))
    for start in range(0, len(rows), step):
        yield _encode(msgspec.structs.replace(whole, **{field: rows[start : start + step]}))


def _without_values(error: Exception) -> str:
    """The error's text without values of the message: msgspec may quote a tag."""
    text = str(error)
    return "unknown type" if "Invalid value '" in text else text
