"""Key spaces of LoRA adapters in LMCache: what is put into a request so that an adapter shares no KV.

LMCache (0.5.6) names a chunk by its tokens and the model, not by the adapter: an adapter's request is
served what the base model or another adapter computed for the same tokens, and its answer is wrong. What its
names do contain is set here: the request's `cache_salt` in multiprocess mode, tags from `kv_transfer_params`
in classic mode (inside the engine). Each mode ignores what the other one reads, and vLLM without LMCache
ignores the tag and takes the salt into its own names, where adapters are apart anyway. So one form fits every
worker (seen with vLLM 0.32 without LMCache and with LMCache 0.5.6 in both modes).
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
"""How every key space begins. Clients may not use such salts: they could put other KV there."""
TAG: Final = "lmcache.tag.kvroute"
_decode_params = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_string = msgspec.json.Decoder(str).decode
_SALT: Final = TopLevelMember("cache_salt")
_PARAMS: Final = TopLevelMember("kv_transfer_params")


def key_space(salt: str, adapter: str, revision: str) -> str:
    """The name of the key space of `adapter` for clients with `salt` ("" for none).

    Hashed, because vLLM takes no `@`, `/` or backslash in a salt and 128 characters at most; from nothing but
    its arguments, because every gateway in front of one LMCache must come to the same name.
    """
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
    """The client's own `cache_salt`, "" for none. Raises InvalidRequest where vLLM would not take it."""
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
    """`body`, which is that of `request` but perhaps for its model's name, in the key space `space`.

    Raises InvalidRequest if `kv_transfer_params` is no object. Costs a copy of the body, and one decoding for
    each of the two members that the client itself has set.
    """
    params = request.kv_transfer_params
    there: dict[TopLevelMember, Raw | None] = {_SALT: request.cache_salt, _PARAMS: params}
    members = {_SALT: b'"%b"' % space.encode()}
    if request.endpoint.isolation is Isolation.SALT_AND_TAG:
        members[_PARAMS] = _tagged(params, space)
    return with_members(body, there, members)


def check_can_be_isolated(request: InferenceRequest) -> None:
    """Raises AdapterNotIsolated if the body cannot be changed."""
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
    """Raises InvalidRequest for a request that a client wrote into, or next to, an adapter's key space."""
    salt = request.cache_salt
    if salt is not None and _mentions(salt):
        raise InvalidRequest(f"`cache_salt` must not contain {PREFIX!r}.", param=_SALT.name)
    params = request.kv_transfer_params
    if params is not None and _mentions(params):
        raise InvalidRequest(
            f"`kv_transfer_params` must not contain {TAG!r} or {PREFIX!r}.", param=_PARAMS.name
        )


def _mentions(raw: Raw) -> bool:
    """Whether any string in it contains one of our names, however it is escaped. LMCache joins tags to one
    string, so that one tag's value could look like another tag."""
    try:
        plain = json.dumps(json.loads(bytes(raw)))
    except (ValueError, RecursionError):
        return True
    return PREFIX in plain or TAG in plain


def _tagged(params: Raw | None, space: str) -> bytes:
    """The client's own parameters, as they came, and the tag."""
    members: dict[str, Raw] = {}
    if params is not None and bytes(params) != b"null":
        try:
            members = _decode_params(params)
        except UNREADABLE:
            raise InvalidRequest("`kv_transfer_params` must be an object.", param=_PARAMS.name) from None
    members[TAG] = Raw(b'"%b"' % space.encode())
    return msgspec.json.encode(members)
