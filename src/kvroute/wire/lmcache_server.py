"""The messages of LMCache's multiprocess servers to their coordinator (HTTP and JSON), and their load rates.

Source: LMCache 0.5.6, v1/mp_coordinator (api.py, schemas.py, http_apis/). Unknown fields are skipped, and
fields that kvroute does not use are not decoded. The caller handles unknown kinds of events and tiers.

The last part has the same reports as gateways forward them to each other (MessagePack): without token ids,
and with 8 bytes for a chunk.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvroute.errors import WireError
from kvroute.json_values import check_values

PIECE_BYTES: Final = 65_536
"""Target size of a piece of a large body: about 0.2 ms to decode."""
_SEARCH_BYTES: Final = 1_048_576
"""Bytes searched in one step: about 0.3 ms."""

_PIECE_TOKENS: Final = 8192
"""Tokens of a prompt that are encoded in one step."""

_Count = Annotated[int, Meta(ge=0)]

_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""Exceptions of decoding: not JSON or another shape; not UTF-8 or a number out of range; too deeply
nested."""


class ServerRegistration(Struct, frozen=True):
    """`POST /instances`: a server registers its address. With an empty `instance_id` it requests one."""

    ip: Annotated[str, Meta(min_length=1)]
    http_port: Annotated[int, Meta(ge=1, le=65535)]
    instance_id: str = ""
    p2p_advertised_url: str = ""
    mq_port: Annotated[int, Meta(ge=0, le=65535)] = 0


class ObjectKey(Struct, frozen=True, gc=False):
    """The name of one rank's part of one chunk."""

    chunk_hash_hex: str
    model_name: str
    """vLLM's `--model`, not the served name: often a path."""
    kv_rank: _Count
    """World size << 24 | rank << 16 | local world size << 8 | local rank."""
    object_group_id: _Count = 0
    """The group of layers, for servers that store groups separately."""
    cache_salt: str = ""

    @property
    def world(self) -> int:
        return self.kv_rank >> 24

    @property
    def rank(self) -> int:
        return self.kv_rank >> 16 & 0xFF


def prefetch_body(model_name: str, world: int, token_ids: Sequence[int], cache_salt: str) -> Iterator[bytes]:
    """The body of a `POST /cache/prefetches` to a server, in pieces. About 0.4 ms a piece.

    The server then loads those full chunks of `token_ids` that L2 has into its memory, and keeps them
    (v1/multiprocess/http_apis/schemas.py).
    """
    fields = {
        "model_name": model_name,
        "world_size": world,
        "cache_salt": cache_salt,
        "source_tier": "l2",
        "target_tier": "l1",
    }
    yield msgspec.json.encode(fields)[:-1] + b',"token_ids":['
    for start in range(0, len(token_ids), _PIECE_TOKENS):
        piece = msgspec.json.encode(list(token_ids[start : start + _PIECE_TOKENS]))
        yield piece[1:-1] if start + _PIECE_TOKENS >= len(token_ids) else piece[1:-1] + b","
    yield b"]}"


class _PrefetchAnswer(Struct):
    chunks: _Count


def read_prefetch_answer(body: bytes) -> int:
    """The number of requested chunks in a 202 answer; 0 if the prompt has no full chunk. Raises WireError."""
    try:
        return msgspec.json.decode(body, type=_PrefetchAnswer).chunks
    except _UNREADABLE as error:
        raise WireError(f"not an answer to a prefetch: {error}") from error


class EventEntry(Struct, frozen=True, gc=False):
    """One object in a batch."""

    key: ObjectKey
    size_bytes: int = 0
    """The size in a `store` event, else 0."""
    token_ids: msgspec.Raw = msgspec.Raw(b"[]")
    """The chunk's tokens as JSON, empty if the server does not know them; see `token_count`."""

    def token_count(self) -> int:
        """The number of tokens; 0 if the server did not know them. Raises WireError."""
        try:
            return len(_decode_ids(self.token_ids))
        except _UNREADABLE as error:
            raise WireError(f"token_ids of a chunk: {error}") from error


class CacheEvents(Struct, frozen=True, gc=False):
    """Events of one kind from one server.

    `incarnation` is the server's start time (Unix seconds); `seq` counts its batches from 1. `backend` is the
    store within the tier ("dram", "resp", ...; "" for `access` in l1). `shared`: by its configuration,
    several servers mount the store.
    """

    instance_id: Annotated[str, Meta(min_length=1)]
    incarnation: _Count
    seq: Annotated[int, Meta(ge=1)]
    event_type: str
    """`store`, `delete`, `access` (does not change the stored objects) or `config`."""
    tier: str
    """`l1` or `l2`."""
    backend: str = ""
    entries: list[EventEntry] = []
    shared: bool = False
    capacity_bytes: int = 0
    """The capacity in a `config` event; 0 is unlimited."""


class L1Status(Struct, frozen=True):
    total_object_count: _Count = 0
    staging_object_count: _Count = 0
    """Objects among `total_object_count` that are still being written."""


class StorageStatus(Struct, frozen=True):
    l1_managers: dict[str, L1Status] = {}


class ServerStatus(Struct, frozen=True):
    """`GET /status` of a server: its chunk hash algorithm, and the number of objects in its memory."""

    chunk_size: Annotated[int, Meta(ge=1)]
    hash_algorithm: str = "blake3"
    storage_manager: StorageStatus | None = None

    @property
    def l1_objects(self) -> int | None:
        """Readable objects in L1; None if the server does not report them."""
        if self.storage_manager is None or not self.storage_manager.l1_managers:
            return None
        managers = self.storage_manager.l1_managers.values()
        return sum(manager.total_object_count - manager.staging_object_count for manager in managers)


class _Body(Struct, frozen=True):
    batches: list[CacheEvents] = []


_decode_ids = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_registration = msgspec.json.Decoder(ServerRegistration).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_decode_batch = msgspec.json.Decoder(CacheEvents).decode
_decode_status = msgspec.json.Decoder(ServerStatus).decode

_START: Final = b'{"batches":[{"instance_id":'
_BATCH: Final = b'{"instance_id":'
_ENTRY: Final = b'{"key":'
_ENTRIES: Final = b'"entries":['


def decode_registration(body: bytes) -> ServerRegistration:
    """Decode a registration. Raises a WireError that names the field."""
    try:
        return _decode_registration(body)
    except _UNREADABLE as error:
        raise WireError(f"registration: {error}") from error


def decode_status(body: bytes) -> ServerStatus:
    """Decode a status. Raises a WireError that names the field."""
    try:
        check_values(body)
        return _decode_status(body)
    except _UNREADABLE as error:
        raise WireError(f"status: {error}") from error


def decode_events(body: bytes | bytearray) -> Generator[None, None, list[CacheEvents]]:
    """Decode the batches of a `POST /events` in short steps; returns the batches in order.

    A large batch becomes several batches with the same `seq`. Raises a WireError that names the field.
    """
    if len(body) > PIECE_BYTES and body.startswith(_START) and body.endswith(b"}]}"):
        try:
            batches = []
            for piece in _split(body):
                if piece:
                    batches.append(_checked(_decode_batch, piece))
                yield
            return batches
        except (ValueError, WireError):
            pass  # not in LMCache's own form, or wrong: decode the body as a whole
    return _checked(_decode_body, body).batches


_T = TypeVar("_T")


def _checked(decode: Callable[[bytes | bytearray], _T], data: bytes | bytearray) -> _T:
    try:
        return decode(data)
    except _UNREADABLE as error:
        raise WireError(f"events: {error}") from error


def _split(body: bytes | bytearray) -> Iterator[bytes]:
    """Split a body in LMCache's compact form between batches and between entries.

    Yields empty bytes between the steps of a search. Raises ValueError if the body has another form.
    """
    # The search patterns have an unescaped quote after a brace, so they never occur inside a string.
    start = body.index(_BATCH)
    while start >= 0:
        following, searched = -1, start + 1
        while following < 0 and searched < len(body):
            following = body.find(_BATCH, searched, searched + _SEARCH_BYTES)
            searched += _SEARCH_BYTES - len(_BATCH)
            yield b""
        end = body.rindex(b"}", start, following if following > 0 else len(body) - 1) + 1
        yield from _split_batch(body, start, end)
        start = following


def _split_batch(body: bytes | bytearray, start: int, end: int) -> Iterator[bytes]:
    if end - start <= PIECE_BYTES:
        yield bytes(body[start:end])
        return
    entry_start = body.index(_ENTRIES, start, end) + len(_ENTRIES)
    last = body.rindex(b"}]", entry_start, end) + 1
    head, tail = bytes(body[start:entry_start]), bytes(body[last:end])
    while entry_start < last:
        following = body.find(_ENTRY, min(entry_start + PIECE_BYTES, last), last)
        yield head + bytes(body[entry_start : following - 1 if following > 0 else last]) + tail
        entry_start = following if following > 0 else last


_SAMPLE: Final = re.compile(
    r"^lmcache_mp_(l0_l1|l2)_load_throughput\w*_(sum|count)(?:\{[^\n]*\})? (\S+)$", re.MULTILINE
)
"""Histograms `lmcache_mp.l0_l1_load_throughput` and `lmcache_mp.l2_load_throughput`; the exporter appends the
unit to the name."""
_TIERS: Final = {"l0_l1": "l1", "l2": "l2"}


@dataclass(frozen=True, slots=True)
class LoadRates:
    """The loads from each tier (`l1`, `l2`) since the server's start: their number, and the sum of their
    rates in GB/s.
    """

    loads: dict[str, int] = field(default_factory=dict)
    gb_s: dict[str, float] = field(default_factory=dict)

    def since(self, earlier: LoadRates) -> dict[str, tuple[float, int]]:
        """Tier -> (mean rate in GB/s, number) of the loads after `earlier`; empty if the server has
        restarted."""
        rates: dict[str, tuple[float, int]] = {}
        for tier, loads in self.loads.items():
            count = loads - earlier.loads.get(tier, 0)
            total = self.gb_s.get(tier, 0.0) - earlier.gb_s.get(tier, 0.0)
            if count < 0:
                return {}
            if count and total > 0:
                rates[tier] = total / count, count
        return rates


def read_load_rates(page: str) -> LoadRates:
    """Read the rates of all GPUs and adapters together from a page in Prometheus' text format.

    Samples that are not numbers are skipped. 0.3 ms for a page of 40 KB.
    """
    loads: dict[str, int] = {}
    gb_s: dict[str, float] = {}
    for name, kind, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if not math.isfinite(value) or value < 0:
            continue
        tier = _TIERS[name]
        if kind == "count":
            loads[tier] = loads.get(tier, 0) + int(value)
        else:
            gb_s[tier] = gb_s.get(tier, 0.0) + value
    return LoadRates(loads, gb_s)


_CHUNK_NAME_CHARS: Final = 64
_UNUSED_CHARS: Final = "0" * 48
"""In place of the part of a chunk's name that no key has."""


class SharedReport(Struct, frozen=True, array_like=True, tag=True):
    """Base of the reports that gateways forward. `server` is the id of an LMCache server."""


_Rank = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Group = Annotated[int, Meta(ge=0, lt=64)]
"""A group of layers. The parts of a chunk are bits of one number, which a large group would make large."""


class ChunkRun(Struct, frozen=True, array_like=True):
    """Objects that differ only in the chunk. `keys` are unsigned 64-bit numbers in the machine's order."""

    model: str
    kv_rank: _Rank
    group: _Group
    salt: str
    keys: bytes


class CacheServerEvents(SharedReport, frozen=True):
    """One piece of a `CacheEvents`; `piece` counts from 0. `chunk_tokens` is 0 while it is not known."""

    server: str
    incarnation: _Count
    seq: _Count
    piece: _Count
    is_last: bool
    event_type: str
    tier: str
    backend: str
    shared: bool
    chunk_tokens: _Count
    runs: list[ChunkRun]


class CacheServerAlive(SharedReport, frozen=True):
    """A server has registered with the sender, or sent a heartbeat.

    `incarnation` and `seq` are those of the last batch that the sender knows; `incarnation` is None if it
    knows none. `is_whole`: the sender's map of the server is complete.
    """

    server: str
    address: str
    port: _Count
    chunk_tokens: _Count
    incarnation: int | None
    seq: _Count
    is_whole: bool


class CacheServerLeft(SharedReport, frozen=True):
    """A server has said goodbye."""

    server: str


class CacheServerWanted(SharedReport, frozen=True):
    """The sender's map of a server is incomplete; answered by `CacheServerState` if the receiver's is not.

    `incarnation` and `seq` as in `CacheServerAlive`. `has_doubt`: batches up to this number are missing.
    """

    server: str
    incarnation: int | None
    seq: _Count
    has_doubt: bool


class CacheServerState(SharedReport, frozen=True):
    """What the sender knows of a server follows, as `CacheServerStore`s and a `CacheServerStateEnd`.

    It has all batches up to number `seq`, and perhaps some later ones. `reports_to`: the member that gets the
    server's reports; empty: the sender. `is_reporting`: that member is alive. `scheme_known`: `chunk_tokens`
    is not only the configured default.
    """

    server: str
    address: str
    port: _Count
    chunk_tokens: Annotated[int, Meta(ge=1)]
    scheme_known: bool
    incarnation: _Count
    seq: _Count
    reports_to: str
    is_reporting: bool


class StoreLayout(Struct, frozen=True, array_like=True):
    """A model in a store, and the parts of its chunks."""

    model: str
    world: Annotated[int, Meta(ge=1, le=4096)]
    kv_ranks: list[_Rank]
    groups: list[_Group]


class CacheServerStore(SharedReport, frozen=True):
    """Some content of one of a server's stores: of its memory if `backend` is empty, or of an L2 pool.

    `entries` are entries of the chunk index, `runs` the objects of chunks that have several parts.
    """

    server: str
    backend: str
    shared: bool
    layouts: list[StoreLayout]
    entries: bytes
    runs: list[ChunkRun]


class CacheServerStateEnd(SharedReport, frozen=True):
    """The state is complete if that many `CacheServerStore`s have arrived.

    `is_valid` is False if the sender's map became incomplete meanwhile.
    """

    server: str
    messages: _Count
    is_valid: bool


class ControllerReport(SharedReport, frozen=True):
    """A message of an in-process LMCache to the sender's controller (`wire.lmcache_controller`)."""

    payload: bytes


class FullSyncWanted(SharedReport, frozen=True):
    """The sender's map of a rank is incomplete: the receiver shall request a full synchronisation."""

    instance_id: str
    worker_id: int


def runs_of(entries: Iterable[EventEntry]) -> list[ChunkRun]:
    """The objects of a batch as runs, in order; objects whose names are no BLAKE3 hashes are left out."""
    runs = []
    for (model, kv_rank, group, salt), run in groupby(entries, key=object_kind):
        keys = array("Q")
        for entry in run:
            name = entry.key.chunk_hash_hex
            try:
                if len(name) == _CHUNK_NAME_CHARS:
                    keys.append(int(name[len(_UNUSED_CHARS) :], 16))
            except ValueError:
                continue
        runs.append(ChunkRun(model, kv_rank, group, salt, keys.tobytes()))
    return runs


def entries_of(runs: Iterable[ChunkRun]) -> list[EventEntry]:
    """The objects of `runs`; of a chunk's name only the part that its key is made of. Raises ValueError."""
    entries = []
    for run in runs:
        keys = array("Q")
        keys.frombytes(run.keys)
        entries += [
            EventEntry(ObjectKey(f"{_UNUSED_CHARS}{key:016x}", run.model, run.kv_rank, run.group, run.salt))
            for key in keys
        ]
    return entries


def object_kind(entry: EventEntry) -> tuple[str, int, int, str]:
    """All of an object's name but the chunk: model, `kv_rank`, group of layers and salt."""
    key = entry.key
    return key.model_name, key.kv_rank, key.object_group_id, key.cache_salt
