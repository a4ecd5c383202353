"""Puts requests of LoRA adapters into key spaces of LMCache, so that adapters share no KV.

LMCache (0.5.6) identifies a chunk by its tokens and the model, not by the adapter. Without a key space an
adapter's request gets KV that the base model or another adapter computed for the same tokens, and its answer
is wrong. LMCache's keys also contain the request's `cache_salt` in multiprocess mode, and tags from
`kv_transfer_params` in classic mode (inside the engine), so this module sets both. Each mode ignores the
other one's field. vLLM without LMCache ignores the tag and adds the salt to its own hashes, which separate
adapters anyway. So the same form fits every worker (tested with vLLM 0.32 without LMCache and with LMCache
0.5.6 in both modes).
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw

from kvroute.errors import AdapterNotIsolated, InvalidRequest
from kvroute.openai.bounded import UNREADABLE
from kvroute.openai.endpoints import Isolation
from kvroute.openai.members import TopLevelMember, with_members
from kvroute.openai.request import InferenceRequest

PREFIX: Final = "kvroute-lora-"
"""The prefix of every key space. Clients must not use such salts: they could store other KV there."""
TAG: Final = "lmcache.tag.kvroute"
_decode_params = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_string = msgspec.json.Decoder(str).decode
_SALT: Final = TopLevelMember("cache_salt")
_PARAMS: Final = TopLevelMember("kv_transfer_params")


def key_space(salt: str, adapter: str, revision: str) -> str:
    """The name of the key space of `adapter` for clients with `salt` ("" for none)."""
    # A hash, because vLLM accepts no `@`, `/` or backslash in a salt and at most 128 characters. It depends
    # only on the arguments, because every gateway in front of one LMCache must compute the same name.
    digest = blake2b(digest_size=20)
    for part in (salt, adapter, revision):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b" % (len(encoded), encoded))
    return PREFIX + digest.hexdigest()


def transfer_params(space: str) -> dict[str, str]:
    """`kv_transfer_params` of a request in the key space `space`."""
    return {TAG: space}


def is_key_space(salt: str) -> bool:
    """Whether `salt` came from `key_space`."""
    return salt.startswith(PREFIX)


def client_salt(request: InferenceRequest) -> str:
    """The client's own `cache_salt`; "" for none. Raises InvalidRequest if vLLM would not accept it."""
    raw = request.cache_salt
    if raw is None or bytes(raw) == b"null":
        return ""
    try:
        salt = _decode_string(raw)
    except UNREADABLE:
        salt = ""
    if not salt:
        raise InvalidRequest("`cache_salt` must be a non-empty string.", param=_SALT.name)
    return salt


def isolated(body: bytes, request: InferenceRequest, space: str) -> bytes:
    """Put `body` into the key space `space`. It is the body of `request`, perhaps with another model name.

    Raises InvalidRequest if `kv_transfer_params` is no object. Costs a copy of the body, and one decoding for
    each of the two members that the client has set.
    """
    params = request.kv_transfer_params
    there: dict[TopLevelMember, Raw | None] = {_SALT: request.cache_salt, _PARAMS: params}
    members = {_SALT: b'"%b"' % space.encode()}
    if request.endpoint.isolation is Isolation.SALT_AND_TAG:
        members[_PARAMS] = _tagged(params, space)
    return with_members(body, there, members)


def check_can_be_isolated(request: InferenceRequest) -> None:
    """Raise AdapterNotIsolated if the body cannot be changed."""
    if request.endpoint.isolation is Isolation.IMPOSSIBLE:
        raise AdapterNotIsolated(
            f"{request.endpoint.path} takes no `cache_salt`, so that this LoRA adapter's request could be "
            "answered from another model's KV cache in LMCache. lmcache.isolate_adapters=false allows it.",
            param="model",
        )
    if not request.is_read:
        raise AdapterNotIsolated(
            "A request for a LoRA adapter must be plain JSON (UTF-8, no NaN): it gets a `cache_salt` of its "
            "own, and this body could not be read.",
        )


def check_uses_no_key_space(request: InferenceRequest) -> None:
    """Raise InvalidRequest if the client's own salt or parameters use an adapter's key space."""
    salt = request.cache_salt
    if salt is not None and _mentions(salt):
        raise InvalidRequest(f"`cache_salt` must not contain {PREFIX!r}.", param=_SALT.name)
    params = request.kv_transfer_params
    if params is not None and _mentions(params):
        raise InvalidRequest(
            f"`kv_transfer_params` must not contain {TAG!r} or {PREFIX!r}.", param=_PARAMS.name
        )


def _mentions(raw: Raw) -> bool:
    """Whether any string in `raw`, escaped in any way, contains the prefix or the tag of key spaces."""
    # LMCache joins tags to one string, so the value of one tag could look like another tag.
    try:
        plain = json.dumps(json.loads(bytes(raw)))
    except (ValueError, RecursionError):
        return True
    return PREFIX in plain or TAG in plain


def _tagged(params: Raw | None, space: str) -> bytes:
    """The client's own parameters, unchanged, and the tag."""
    members: dict[str, Raw] = {}
    if params is not None and bytes(params) != b"null":
        try:
            members = _decode_params(params)
        except UNREADABLE:
            raise InvalidRequest("`kv_transfer_params` must be an object.", param=_PARAMS.name) from None
    members[TAG] = Raw(b'"%b"' % space.encode())
    return msgspec.json.encode(members)
