"""Parses a request's body once, only as deep as routing needs.

The body is forwarded as the same bytes. Only an alias's `model` field and a LoRA adapter's key space change
it (`rewriting.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import astuple
from python_multipart.multipart import parse_options_header

from kvroute.errors import InvalidRequest, ModelNotFound, OverLimit
from kvroute.openai.bounded import (
    BEFORE_MESSAGES,
    CACHE_FIELDS,
    ENGINE_MEMBERS,
    SESSION_MEMBERS,
    UNREADABLE,
    Body,
    Bounded,
    Head,
    Message,
    decode_body,
)
from kvroute.openai.cache_reads import reads_cache
from kvroute.openai.endpoints import BodyKind, Endpoint
from kvroute.openai.prompt import AnyPrompt, Prompt, SeenPrompt, read_prompts, rendered, rendered_head

MAX_FORM_PARTS: Final = 1_000
_MAX_FIELD_BYTES: Final = 64 * 1024
_MAX_HEAD_BYTES: Final = 16 * 1024
_MAX_BOUNDARY_BYTES: Final = 256
"""RFC 2046 allows 70."""


def form_spans(body: bytes, content_type: str, max_parts: int = MAX_FORM_PARTS) -> dict[str, slice]:
    """Map the name of each part to the place of its value in the body.

    Files and values of 64 KiB or more are left out; of equal names the last one counts. Raises InvalidRequest
    if the body is not the multipart form that its content type declares, and OverLimit for too many parts.
    """
    kind, params = parse_options_header(content_type)
    boundary = params.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > _MAX_BOUNDARY_BYTES:
        raise InvalidRequest("This endpoint takes a multipart/form-data body.", param="content-type")
    delimiter = b"\r\n--" + boundary
    spans: dict[str, slice] = {}
    # Like python-multipart, with which vLLM reads forms: only line breaks are allowed before the first
    # boundary, and nothing between a boundary and the end of its line.
    at = len(body[:_MAX_HEAD_BYTES]) - len(body[:_MAX_HEAD_BYTES].lstrip(b"\r\n"))
    if not body.startswith(delimiter[2:], at):
        raise _not_a_form()
    at += len(delimiter) - 2
    parts = 0
    while not body.startswith(b"--", at):
        if not body.startswith(b"\r\n", at):
            raise _not_a_form()
        parts += 1
        if parts > max_parts:
            raise OverLimit(
                "max_form_parts", f"The form has more than {max_parts} parts (server.max_form_parts)."
            )
        head = body.find(b"\r\n\r\n", at, at + _MAX_HEAD_BYTES)
        if head < 0 and len(body) - at > _MAX_HEAD_BYTES:
            raise InvalidRequest(f"The head of a form's part is larger than {_MAX_HEAD_BYTES} bytes.")
        begin = head + 4
        end = body.find(delimiter, begin) if head >= 0 else -1
        if end < 0:
            break  # the form is cut off: the worker reports the error
        name = _name(body[at + 2 : head])
        if name is not None and end - begin <= _MAX_FIELD_BYTES:
            spans[name] = slice(begin, end)
        at = end + len(delimiter)
    return spans


def _name(head: bytes) -> str | None:
    """The name of a part; None for a file."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            _, params = parse_options_header(value.strip())
            if b"name" in params and b"filename" not in params:
                return params[b"name"].decode("utf-8", "replace")
    return None


def _not_a_form() -> InvalidRequest:
    return InvalidRequest("The request body is not a valid multipart form.")


_decode = msgspec.json.Decoder(dict[str, object]).decode


def parse_object(body: bytes) -> dict[str, object]:
    """Parse a JSON object. Raises InvalidRequest for everything else."""
    try:
        return _decode(body)
    except UNREADABLE as error:
        raise InvalidRequest(f"The request body must be a JSON object: {error}") from None


_MULTIPART = BodyKind.MULTIPART  # to look up an enum member in its class costs 80 ns each time
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_string = msgspec.json.Decoder(str).decode


_new = tuple.__new__
_MAX_SALT_BYTES = 4_096
_ONLY_PROMPT = (UNSET,) * 22
"""A body with no member that is read, except its model, `stream` and its messages."""
_MAX_PARAMS_BYTES = 524_288
"""Enough for the block ids of a million tokens."""
_NO_HEAD = (UNSET,) * 6
_NO_SESSION = (UNSET,) * 5
_NO_CACHE_FIELDS = (UNSET,) * 6
_NO_ENGINE_MEMBERS = (UNSET,) * 3
_SESSION_INDEXES = {name: index for index, name in enumerate(SESSION_MEMBERS)}
_QUOTE, _OBJECT = b'"{'
_SMALL_BYTES = 65_536
_MAX_TEXT_BYTES = 4_096
"""Longest model name, and longest string that `InferenceRequest.text` returns."""
_NO_FORM: Mapping[str, str] = MappingProxyType({})


class InferenceRequest(Struct, eq=False, gc=False):
    """One request to an inference endpoint.

    Mutable: `messages` and `fields` are decoded on first use; `DataPlane.admit_key` sets `tenant`, and
    `gateway.sagemaker` the model.
    """

    endpoint: Endpoint
    body: bytes
    model: str | None
    """None if the body names no model."""
    stream: bool = False
    is_read: bool = False
    """False if the body is not JSON, or is JSON that Python's json accepts and msgspec does not. Such a body
    is forwarded unread."""
    read_messages: Sequence[Message] | None = None
    """The messages that are decoded; None if the body has no list of objects under that name."""
    head: Head = ()
    """The values that a chat template renders before the messages."""
    session: Sequence[Raw | UnsetType] | None = None
    """The values of `SESSION_MEMBERS`, empty if the body has none of them; None: look into `fields`."""
    cache_salt: Raw | None = None
    kv_transfer_params: Raw | None = None
    engine_members: Sequence[Raw | UnsetType] | None = None
    """The values of `ENGINE_MEMBERS`; None if the body has none of them."""
    form: Mapping[str, str] = _NO_FORM
    model_span: slice | None = None
    """Where a form's `model` is in the body."""
    seen: SeenPrompt | None = None
    """The prompt, if the prefix of the body is known. Then the messages are not decoded yet."""
    prompts: tuple[AnyPrompt, ...] | None = None
    """The prompts, if they were rendered while the body was read."""
    over: str = ""
    """The limit that the body exceeds, if it is forwarded unread for that reason."""
    bounded: Bounded | None = None
    """Decodes parts of a body that is not small."""
    tenant: str = ""
    """Whose key space the request gets (`server.isolation`); "" without isolation."""
    outline: bytes = b""
    """The body without most of its messages, if its prefix is known. Its other members are complete."""
    reads_cache: bool = True
    """Whether an engine that caches prefixes reads its cache for this request (`openai.cache_reads`)."""
    also_named: str | None = None
    """A model that the client named besides `model`, and that is not computed; its key must permit both."""
    _fields: Mapping[str, Raw] | None = None
    _members: Mapping[str, Raw] | None = None

    @property
    def messages(self) -> Sequence[Message] | None:
        """All messages; None if the body has no list of objects under that name."""
        if self.seen is not None and self.read_messages is None:
            try:
                messages = decode_body(self.body).messages
            except UNREADABLE:  # nested so deeply that it is readable only with more stack left
                return None
            self.read_messages = None if messages is UNSET else messages
        return self.read_messages

    @property
    def fields(self) -> Mapping[str, Raw] | None:
        """The raw JSON of each top-level field; None if the body could not be parsed."""
        if self._fields is None and self.is_read:
            try:
                self._fields = _decode_fields(self.body)
            except UNREADABLE:  # the error is in a field that was skipped before
                self.is_read = False
        return self._fields

    @property
    def members(self) -> Mapping[str, Raw]:
        """The raw JSON of each top-level field, but `messages` may have another value.

        Empty if the body could not be parsed. Costs a decoding of the part of the body that is not known yet.
        """
        members = self._members
        if members is None:
            members = _decode_fields(self.outline) if self.outline else self.fields or {}
            self._members = members
        return members

    def forget_members(self) -> None:
        """To be called when `body` has got another `model`."""
        self._fields = self._members = None

    @property
    def may_have_session(self) -> bool:
        """False if the body has none of `SESSION_MEMBERS`."""
        return self.session is None or bool(self.session)

    def text(self, path: str) -> str | None:
        """The string at a dotted path of the body (`metadata.session_id`); None if there is none.

        Raises InvalidRequest if it is too long. Costs a decoding of the body (see `members`), unless the path
        begins with one of `SESSION_MEMBERS`.
        """
        head, _, subpath = path.partition(".")
        session, index = self.session, _SESSION_INDEXES.get(head)
        raw: Raw | UnsetType | None
        if session is not None and index is not None:
            raw = session[index] if session else None
        elif self.is_read:
            try:
                raw = self.members.get(head)
            except UNREADABLE:
                return None
        else:
            return self.form.get(path)
        if raw is UNSET:
            return None
        for key in subpath.split(".") if subpath else ():
            if raw is None:
                return None
            raw = _member(raw, key)
        if raw is None or memoryview(raw)[0] != _QUOTE:
            return None
        if len(memoryview(raw)) > _MAX_TEXT_BYTES:
            raise InvalidRequest(f"`{path}` is longer than {_MAX_TEXT_BYTES} bytes.", param=path)
        try:
            return _decode_string(raw) or None
        except UNREADABLE:
            return None


def parse_request(
    endpoint: Endpoint, body: bytes, content_type: str = "", bounded: Bounded | None = None
) -> InferenceRequest:
    """Parse `body` as far as routing needs it.

    With `bounded` the work for a body of up to 1 MiB is bounded; `large_request` reads larger ones in steps.
    Raises InvalidRequest if the body is not a JSON object or its `model` is not a string, and OverLimit;
    workers report all other errors. About 1 us for small bodies, 60 us for a 256 KB chat.
    """
    if endpoint.body is _MULTIPART:
        return _parse_form(endpoint, body, content_type, bounded)
    try:
        decoded = decode_body(body) if bounded is None or len(body) <= _SMALL_BYTES else bounded.body(body)
    except UNREADABLE:  # also if `model` is no string
        return _parse_loosely(endpoint, body)
    return as_request(endpoint, body, decoded)


def _parse_form(
    endpoint: Endpoint, body: bytes, content_type: str, bounded: Bounded | None
) -> InferenceRequest:
    max_parts = MAX_FORM_PARTS if bounded is None else bounded.limits.max_form_parts
    spans = form_spans(body, content_type, max_parts)
    form = {name: body[span].decode("utf-8", "replace") for name, span in spans.items()}
    return InferenceRequest(
        endpoint,
        body,
        form.get("model") or None,
        form.get("stream") == "true",
        form=form,
        model_span=spans.get("model"),
    )


def as_request(endpoint: Endpoint, body: bytes, decoded: Body, *, is_chat: bool = False) -> InferenceRequest:
    """The request of a body that was decoded to `decoded`.

    `is_chat`: the body has messages, although `decoded` has not.
    """
    values = astuple(decoded)
    model, stream, messages = values[:3]
    request = InferenceRequest(
        endpoint,
        body,
        model or None,
        stream is not UNSET and bytes(stream) == b"true",
        True,
        None if messages is UNSET else messages,
        session=(),
    )
    if values[3:] == _ONLY_PROMPT:
        return request
    salt, params = values[3:5]
    session, head, cache_fields, engine = values[5:10], values[10:16], values[16:22], values[22:]
    if salt is not UNSET:
        request.cache_salt = salt
    if params is not UNSET:
        request.kv_transfer_params = params
    if session != _NO_SESSION:
        request.session = session
    if head != _NO_HEAD:
        request.head = head
    if engine != _NO_ENGINE_MEMBERS:
        request.engine_members = engine
    request.reads_cache = cache_fields == _NO_CACHE_FIELDS or reads_cache(
        endpoint.path, cache_fields, is_chat=is_chat or messages is not UNSET
    )
    return request


def _parse_loosely(endpoint: Endpoint, body: bytes) -> InferenceRequest:
    """Parse a body that does not have the shape of `Body`, such as one whose `messages` are no objects."""
    try:
        return loose_request(endpoint, body, _decode_fields(body))
    except UNREADABLE:
        return _parse_with_python(endpoint, body)


def loose_request(endpoint: Endpoint, body: bytes, fields: Mapping[str, Raw]) -> InferenceRequest:
    """The request of a body with these top-level fields; its `messages` are not decoded."""
    stream = fields.get("stream")
    values = [fields.get(name, UNSET) for name in CACHE_FIELDS]
    engine = tuple(fields.get(name, UNSET) for name in ENGINE_MEMBERS)
    return InferenceRequest(
        endpoint,
        body,
        _model(fields.get("model", UNSET)),
        stream is not None and len(memoryview(stream)) == 4 and bytes(stream) == b"true",
        is_read=True,
        _fields=fields,
        head=[fields.get(name, UNSET) for name in BEFORE_MESSAGES],
        cache_salt=fields.get("cache_salt"),
        kv_transfer_params=fields.get("kv_transfer_params"),
        engine_members=None if engine == _NO_ENGINE_MEMBERS else engine,
        reads_cache=reads_cache(endpoint.path, values, is_chat="messages" in fields),
    )


def _member(raw: Raw, key: str) -> Raw | None:
    """The member `key` of a JSON object; None if there is none. Other members are not decoded."""
    if memoryview(raw)[0] != _OBJECT:
        return None
    try:
        if len(memoryview(raw)) <= _SMALL_BYTES:
            return _decode_fields(raw).get(key)
        # The object may have millions of members; this decoder skips those with other names.
        kind = msgspec.defstruct("Member", [("value", Raw | UnsetType, UNSET)], rename={"value": key})
        (member,) = astuple(msgspec.json.decode(raw, type=kind))
    except UNREADABLE:
        return None
    return None if member is UNSET else cast("Raw", member)


def _model(raw: Raw | UnsetType) -> str | None:
    """The model's name; None if it is absent, null or empty (vLLM treats an empty name as none).

    Raises InvalidRequest, ModelNotFound, and an error in UNREADABLE for a string that only Python's json
    accepts.
    """
    if raw is UNSET:
        return None
    if len(memoryview(raw)) > _MAX_TEXT_BYTES:
        start = bytes(memoryview(raw)[:64])
        if start[:1] != b'"':
            raise InvalidRequest("`model` must be a string.", param="model")
        raise ModelNotFound(start[1:].decode("utf-8", "replace") + "...")
    data = bytes(raw)
    if data.startswith(b'"'):
        return _decode_string(raw) or None
    if data == b"null":
        return None
    raise InvalidRequest("`model` must be a string.", param="model")


class _Named(Struct, gc=False):
    model: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    vllm_xargs: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET
    request_id: Raw | UnsetType = UNSET


_decode_named = msgspec.json.Decoder(_Named).decode


def model_alone(endpoint: Endpoint, body: bytes) -> str | None:
    """The model that a body names, of which nothing else is read: about 1 ms for each MB.

    Raises an error in UNREADABLE, InvalidRequest and ModelNotFound.
    """
    if endpoint.body is _MULTIPART:
        raise msgspec.DecodeError("a form")
    return _model(_decode_named(body).model)


_engine_names = re.compile(rb"_transfer_params|vllm_xargs|request_id|\\u").search


def may_direct_engine(body: bytes, *, is_decodable: bool = True) -> bool:
    """Whether an unread body may have a member that can tell an engine where to read KV.

    One search, about 1 ms for each MB, and as much again if it finds something. Without `is_decodable` the
    search alone decides.
    """
    if _engine_names(body) is None:
        return False
    if not is_decodable:
        return True
    try:
        _, *members = astuple(_decode_named(body))
    except UNREADABLE:
        return True
    return any(member is not UNSET for member in members)


def _parse_with_python(endpoint: Endpoint, body: bytes) -> InferenceRequest:
    """Read only the model of a body that msgspec rejects and Python's json accepts.

    Such bodies contain NaN or lone surrogates, or are encoded in UTF-16.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("The request body is not valid JSON.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    model = value.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("`model` must be a string.", param="model")
    engine = tuple(_raw(value, name) or UNSET for name in ENGINE_MEMBERS)
    return InferenceRequest(
        endpoint,
        body,
        model or None,
        value.get("stream") is True,
        cache_salt=_raw(value, "cache_salt"),
        kv_transfer_params=_raw(value, "kv_transfer_params"),
        engine_members=None if engine == _NO_ENGINE_MEMBERS else engine,
    )


def _raw(value: Mapping[str, object], name: str) -> Raw | None:
    return Raw(json.dumps(value[name]).encode()) if name in value else None


def prompts_of(request: InferenceRequest) -> tuple[AnyPrompt, ...]:
    """The prompts that a worker computes for this request, usually one; empty if they cannot be read.

    About 60 us for a 256 KB chat of 100 messages. Raises OverLimit.
    """
    if not request.is_read or not request.endpoint.fills_kv_cache:
        return ()
    if request.seen is not None:
        return (request.seen,)
    if request.prompts is not None:
        return request.prompts
    head, messages = request.head, request.read_messages  # all messages, because `seen` is None
    is_anthropic, bounded = request.endpoint.is_anthropic, request.bounded
    try:
        if messages is not None:
            parts = rendered(messages, bounded, is_anthropic)
            if head:
                parts[:0] = rendered_head(head, bounded, is_anthropic)
            # Like `Prompt(...)`, but without its constructor, which is Python code.
            return (_new(Prompt, (b"".join(parts), False)),)
        steps = read_prompts(rendered_head(head, bounded, is_anthropic), request.fields or {}, bounded)
        while True:
            next(steps)
    except StopIteration as end:
        prompts: tuple[AnyPrompt, ...] = end.value
        return prompts
    except UNREADABLE:
        return ()


def prompt_steps(request: InferenceRequest) -> Generator[None, None, tuple[AnyPrompt, ...]]:
    """Like `prompts_of`, for a large body, in steps."""
    if request.seen is not None or request.read_messages is not None or not request.fields:
        return prompts_of(request)
    head = rendered_head(request.head, request.bounded, request.endpoint.is_anthropic)
    try:
        return (yield from read_prompts(head, request.fields, request.bounded))
    except UNREADABLE:
        return ()


def transfer_params_of(request: InferenceRequest) -> Raw | None:
    """The request's `kv_transfer_params`; None without any. Raises InvalidRequest if they are too long to be
    decoded."""
    raw = request.kv_transfer_params
    if raw is None or len(memoryview(raw)) <= _MAX_PARAMS_BYTES:
        return raw
    name = "kv_transfer_params"
    raise InvalidRequest(f"`{name}` is longer than {_MAX_PARAMS_BYTES} bytes.", param=name)


def cache_salt_of(request: InferenceRequest) -> str:
    """The request's `cache_salt`, which separates its blocks from others; "" for none. Raises
    InvalidRequest."""
    raw = request.cache_salt
    if raw is None:
        return ""
    if len(memoryview(raw)) > _MAX_SALT_BYTES:
        raise InvalidRequest(f"`cache_salt` is longer than {_MAX_SALT_BYTES} bytes.", param="cache_salt")
    data = bytes(raw)
    return "" if data == b"null" else data.decode("utf-8", "replace").strip('"')
