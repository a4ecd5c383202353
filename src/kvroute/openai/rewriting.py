"""Changes a request's body without serialising the rest: top-level members, another model, a key space.

Key spaces separate LoRA adapters, and tenants if configured, so that they share no KV.

LMCache (0.5.6) identifies a chunk by its tokens and the model, not by the adapter. Without a key space an
adapter's request gets KV that the base model or another adapter computed for the same tokens, and its answer
is wrong. LMCache's keys also contain the request's `cache_salt` in multiprocess mode, and tags from
`kv_transfer_params` in classic mode (inside the engine), so this module sets both. Each mode ignores the
other one's field. vLLM without LMCache ignores the tag and adds the salt to its own hashes, which separate
adapters anyway. So the same form fits every worker (tested with vLLM 0.32 without LMCache and with LMCache
0.5.6 in both modes).

Tenants (`server.isolation`) get their key spaces by the same two members.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import Raw

from kvroute.errors import AdapterNotIsolated, InvalidRequest, NotFound, TenantNotIsolated
from kvroute.openai.bounded import UNREADABLE
from kvroute.openai.endpoints import SALTED_LATE, BodyKind, Isolation
from kvroute.openai.request import InferenceRequest, cache_salt_of, transfer_params_of

_MAX_CANDIDATES = 1_000
"""Most members with the same name and value, including nested ones, among which the top-level one is
found."""
_LARGE_BYTES = 1 << 20
"""`with_members` does not search a larger body: decoding it would hold the event loop for too long."""
_BLANK = b" \t\r\n"
_ESCAPED = b"\\u"
_COLON = re.compile(rb"\s*:\s*")
_is_empty = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*\}[ \t\r\n]*").fullmatch


class TopLevelMember:
    """A top-level member of a JSON object. Its name must need no escaping."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._key = b'"%b"' % name.encode()
        only: Any = msgspec.defstruct("Only", [("value", Raw)], rename={"value": name})
        self._decode = msgspec.json.Decoder(only).decode

    def locate(self, body: bytes, value: bytes) -> slice | None:
        """Where `value`, the member's value, is in the object `body`; None if that cannot be decided.

        Of several members with this name it is the last one, as for Python's json and msgspec. Costs two
        searches of the body, and one decoding if the name occurs in it more than once or may be escaped.
        """
        if body.count(self._key) == 1 and _ESCAPED not in body:
            # The name is present, and only `\u` could write it in another way: this is the member.
            after = _COLON.match(body, body.index(self._key) + len(self._key))
            if after is not None and body.startswith(value, after.end()):
                return slice(after.end(), after.end() + len(value))
        pattern = re.escape(self._key) + rb"\s*:\s*(" + re.escape(value) + rb")"
        candidates = list(islice(re.finditer(pattern, body), _MAX_CANDIDATES + 1))
        if len(candidates) > _MAX_CANDIDATES:
            return None
        # Nested objects may have equal members. So each value is replaced by a number, and the decoder
        # returns the number of the top-level member.
        parts: list[bytes | memoryview] = []
        view, at = memoryview(body), 0
        for number, match in enumerate(candidates):
            parts += (view[at : match.start(1)], b"%d" % number)
            at = match.end(1)
        try:
            read = bytes(self._decode(b"".join([*parts, view[at:]])).value)
        except UNREADABLE:
            return None
        if not read.isdigit() or int(read) >= len(candidates):  # the member's name is written with escapes
            return None
        return slice(*candidates[int(read)].span(1))


def with_value(body: bytes, span: slice, value: bytes) -> bytes:
    """`body` with other bytes at `span`. Copies the body once."""
    view = memoryview(body)
    return b"".join([view[: span.start], value, view[span.stop :]])


def with_members(
    body: bytes, there: Mapping[TopLevelMember, Raw | None], members: Mapping[TopLevelMember, bytes]
) -> bytes:
    """`body` with each of `members` (to JSON text) set; all other bytes stay.

    `body` is a JSON object; `there` has the present values of `members`, None for an absent
    one. A present member gets its value replaced. An absent one, or one without a known place, is
    appended: of members with one name the last one counts, for Python's json (and so for vLLM) and msgspec.
    """
    added = []
    for member, value in members.items():
        old = there.get(member)
        span = member.locate(body, bytes(old)) if old is not None and len(body) <= _LARGE_BYTES else None
        if span is None:
            added.append(b'"%b":%b' % (member.name.encode(), value))
        else:
            body = with_value(body, span, value)
    if not added:
        return body
    end = len(body.rstrip(_BLANK)) - 1
    view, comma = memoryview(body), b"" if _is_empty(body) else b","
    return b"".join([view[:end], comma, b",".join(added), view[end:]])


_MODEL = TopLevelMember("model")


def with_model(request: InferenceRequest, model: str) -> bytes:
    """`request.body` with another `model`; all other bytes stay.

    Raises InvalidRequest if the body names an alias but could not be read: workers do not know the alias.
    """
    if request.endpoint.body is BodyKind.MULTIPART:
        return _in_form(request, model)
    if request.fields is None or "model" not in request.fields:
        raise InvalidRequest("A body that is not plain JSON cannot use a model alias.", param="model")
    span = _MODEL.locate(request.body, bytes(request.fields["model"]))
    if span is None:
        raise InvalidRequest("The `model` field of this body cannot be replaced by its alias.", param="model")
    return with_value(request.body, span, msgspec.json.encode(model))


def _in_form(request: InferenceRequest, model: str) -> bytes:
    span = request.model_span
    if span is None:
        raise InvalidRequest("The `model` field of this form cannot be replaced by its alias.", param="model")
    return with_value(request.body, span, model.encode())


PREFIX: Final = "kvroute-lora-"
TENANT_PREFIX: Final = "kvroute-tenant-"
"""The prefixes of key spaces. Clients must not use such salts: they could store other KV there."""
TAG: Final = "lmcache.tag.kvroute"
_decode_params = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_string = msgspec.json.Decoder(str).decode
_SALT: Final = TopLevelMember("cache_salt")
_PARAMS: Final = TopLevelMember("kv_transfer_params")
_REQUEST_ID: Final = TopLevelMember("request_id")


def key_space(salt: str, adapter: str, revision: str, tenant: str = "") -> str:
    """The name of the key space of `adapter` and `tenant` ("" for none) for clients with `salt`."""
    # A hash, because vLLM accepts no `@`, `/` or backslash in a salt and at most 128 characters. It depends
    # only on the arguments, because every gateway in front of one LMCache must compute the same name. It
    # needs no secret: the gateway refuses salts and tags that look like a key space, so a client that knows
    # a name cannot use it.
    parts = (tenant, salt, adapter, revision) if tenant else (salt, adapter, revision)
    digest = blake2b(digest_size=20)
    for component in parts:
        encoded = component.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b" % (len(encoded), encoded))
    return (TENANT_PREFIX if tenant else PREFIX) + digest.hexdigest()


def transfer_params(space: str) -> dict[str, str]:
    """`kv_transfer_params` of a request in the key space `space`."""
    return {TAG: space}


def is_key_space(salt: str) -> bool:
    """Whether `salt` came from `key_space`."""
    return salt.startswith((PREFIX, TENANT_PREFIX))


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
    if request.tenant and request.endpoint.stores_response:
        there[_REQUEST_ID] = (request.fields or {}).get("request_id")
        members[_REQUEST_ID] = b'"%b"' % new_response_id(request.tenant).encode()
    return with_members(body, there, members)


def new_response_id(tenant: str) -> str:
    """A random ID for a stored response of `tenant`."""
    # The ID itself names the tenant. So all processes know whose it is, also after a restart. vLLM (0.32)
    # stores a response under the `request_id` of its request, and a client must not choose the ID: it could
    # replace another tenant's response.
    return _response_prefix(tenant) + secrets.token_hex(16)


def check_response_owner(tenant: str, response_id: str, param: str) -> None:
    """Raise NotFound if the response is not one of `tenant`. With the tenant "" every response passes."""
    if tenant and not response_id.startswith(_response_prefix(tenant)):
        raise NotFound("The response does not exist.", param=param, code="response_not_found")


def _response_prefix(tenant: str) -> str:
    return "resp_" + blake2b(tenant.encode(), digest_size=8).hexdigest()


def salted_since(request: InferenceRequest) -> tuple[int, int, int] | None:
    """The first release of vLLM that honours `cache_salt` in this request; None: every supported one."""
    endpoint = request.endpoint
    if endpoint.is_sagemaker and not {"messages", "prompt"} & (request.fields or {}).keys():
        return SALTED_LATE  # a pooling request
    return endpoint.salted_since


def check_can_be_isolated(request: InferenceRequest, *, needs_tag: bool = False) -> None:
    """Raise AdapterNotIsolated or TenantNotIsolated if the body cannot be changed.

    `needs_tag`: a `cache_salt` alone does not separate tenants, because workers have LMCache in classic mode.
    """
    if request.tenant:
        kind = request.endpoint.isolation
        if kind is Isolation.IMPOSSIBLE or (needs_tag and kind is Isolation.SALT):
            member = "`kv_transfer_params`" if kind is Isolation.SALT else "`cache_salt`"
            raise TenantNotIsolated(
                f"{request.endpoint.path} takes no {member}, so that this request could share KV with other "
                "clients' requests. This gateway does not allow that (server.isolation: per-key)."
            )
        if not request.is_read:
            raise TenantNotIsolated(
                "A request must be plain JSON (UTF-8, no NaN): this gateway gives each client's requests a "
                "`cache_salt` (server.isolation: per-key), and this body could not be read."
            )
        return
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
    """Raise InvalidRequest if the client's own salt or parameters use a key space of this gateway."""
    cache_salt_of(request)  # refuses a long one
    salt = request.cache_salt
    if salt is not None and (mention := _mentions(salt)):
        raise InvalidRequest(f"`cache_salt` must not contain {mention!r}.", param=_SALT.name)
    params = transfer_params_of(request)
    if params is not None and (mention := _mentions(params)):
        raise InvalidRequest(f"`kv_transfer_params` must not contain {mention!r}.", param=_PARAMS.name)


def _mentions(raw: Raw) -> str:
    """The prefix or the tag of key spaces that a string in `raw`, escaped in any way, contains; "" for none.

    It is a prefix, too, if `raw` cannot be read.
    """
    # LMCache joins tags to one string, so the value of one tag could look like another tag.
    try:
        plain = json.dumps(json.loads(bytes(raw)))
    except (ValueError, RecursionError):
        return PREFIX
    return next((marker for marker in (TAG, PREFIX, TENANT_PREFIX) if marker in plain), "")


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
