"""What `kvroute tierd` tells about its objects, and the names that LMCache in the engine gives to objects.

Sources: docs/tierd.md (`GET /v1/changes/{bucket}`); `CacheEngineKey.to_string` of LMCache 0.3.9, 0.4.3 and
0.5.6 (utils.py), which is `MODEL@WORLD@RANK@HASH@DTYPE` with the hash in hexadecimal, perhaps negative, and
`@TAG%VALUE` for each tag of the request. LMCache 0.3.9 writes `vllm@` before it.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvroute.errors import WireError

_Count = Annotated[int, Meta(ge=0)]
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
_TAG: Final = "kvroute%"
"""The gateway's own tag: the key space of an adapter or a tenant (`openai.isolation`)."""
_LARGEST: Final = 2**64


class StoreChanges(Struct, frozen=True):
    """The objects that came or went since a position. `whole`: `stored` are all objects of the bucket."""

    incarnation: str
    """It changes when the daemon restarts."""
    number: _Count
    """The position after these changes, for the next call."""
    whole: bool = False
    stored: list[str] = []
    removed: list[str] = []


class StoredKind(NamedTuple):
    """Objects of one kind: only workers with the same model, world size and type of numbers read them."""

    model: str
    """vLLM's `--model`, often a path."""
    world: int
    dtype: str


class StoredPart(NamedTuple):
    """One rank's part of a chunk. `salt` is the key space of an adapter or a tenant, else empty."""

    kind: StoredKind
    rank: int
    chunk: int
    """LMCache's hash of the chunk, signed for `builtin`."""
    salt: str = ""


def decode_changes(body: bytes) -> StoreChanges:
    """The answer to `GET /v1/changes/{bucket}`. Raises WireError."""
    try:
        return msgspec.json.decode(body, type=StoreChanges)
    except _UNREADABLE as error:
        raise WireError(f"not a list of changes: {error}") from error


def parse_name(name: str) -> StoredPart | None:
    """Read an object's name; None if LMCache in the engine gives no such name. Some microseconds.

    Also None: names with tags of clients, whose requests the gateway does not predict; parts of single
    layers; names of LMCache's servers.
    """
    parts = name.split("@")
    salt = ""
    if parts[-1].startswith(_TAG):
        salt = parts.pop().removeprefix(_TAG)
    if len(parts) < 5 or "%" in parts[-1]:
        return None
    *model, world, rank, chunk, dtype = parts
    if len(model) > 1 and model[0] == "vllm":
        del model[0]
    if not (world.isdecimal() and rank.isdecimal() and dtype and not dtype.isdecimal()):
        return None
    try:
        key = int(chunk, 16)
    except ValueError:
        return None
    if not -_LARGEST < key < _LARGEST or int(rank) >= int(world):
        return None
    return StoredPart(StoredKind("@".join(model), int(world), dtype), int(rank), key, salt)
