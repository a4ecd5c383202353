"""The bodies of a request whose prompt one worker computes and another one answers. Pure.

The first leg goes to the prefill worker, the second leg to the decode worker. `NixlPull` speaks vLLM's
NixlConnector (0.32, `distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`): the answer of the
first leg has `kv_transfer_params`, which say where the blocks are; the decode worker gets exactly these and
pulls the blocks. The prefill worker keeps the blocks until then, at most for its lease (30 s).

A client must not choose these parameters: they name the host that an engine connects to. `check_params`
refuses all of them but LMCache's own (`lmcache.tag.*`, ...). Nor must it see them: `ParamsMask` blanks them
in answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Final, Protocol

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from kvroute.errors import InvalidRequest
from kvroute.openai.bounded import UNREADABLE
from kvroute.openai.endpoints import BodyKind
from kvroute.openai.request import InferenceRequest, transfer_params_of

PARAMS: Final = "kv_transfer_params"
_XARGS: Final = "vllm_xargs"
_ENCODER_PARAMS: Final = "ec_transfer_params"
_EMPTY: Final = (b"null", b"{}")
_ALLOWED_PREFIX: Final = "lmcache."
_ONE, _NULL, _NO = Raw(b"1"), Raw(b"null"), Raw(b"false")
_LEG_MEMBERS: Final = {
    "max_completion_tokens": _ONE,  # it counts before `max_tokens`, also for /invocations
    "n": _ONE,  # with more vLLM (0.32) keeps the blocks of the other answers until their lease ends
    "stream_options": _NULL,
    "min_tokens": Raw(b"0"),
    # Nobody sees this token. An engine's first request with logprobs compiles a kernel, and all other
    # requests wait meanwhile (vLLM 0.32, v1/sample/ops/logprobs.py): a prefill worker never needs it.
    "logprobs": _NULL,
    "top_logprobs": _NULL,
}
"""If the client's request has one of these members, the first leg has this value in its place."""
_FORBIDDING: Final = frozenset(
    (
        "prompt_logprobs",
        "echo",
        "use_beam_search",
        "previous_response_id",
        "background",
        "prompt_embeds",
    )
)
"""Members with which the engine does not read its cache, or needs state that only one worker has."""
_FALSE: Final = (b"null", b"false")
_DECODED_BYTES: Final = 32_768
"""To change members, a larger body is not decoded: they are added at its end, without a copy of the body."""
_BLANK: Final = b" \t\r\n"
_FIRST_PARAMS: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_JSON = BodyKind.JSON  # to look up an enum member in its class costs 80 ns each time
PARAMS_KEY: Final = b'"%b"' % PARAMS.encode()
_opening = re.compile(PARAMS_KEY + rb"[ \t\r\n]*:[ \t\r\n]*[{\[]").search
"""Inside generated text the quotes are escaped, so this matches members only."""
_address = re.compile(rb"___(?:prefill|decode)_addr_").search
_has_member = re.compile(rb'\{[ \t\r\n]*"').match
_COMPACT_MEMBER: Final = b",%b:" % PARAMS_KEY
_structure = re.compile(rb'\n\n|\\(?:.|\Z)|["{}\[\]]', re.DOTALL).finditer
_TAIL_BYTES: Final = 64
"""Enough for the name of the member with white space up to its value."""
_EVENT_END: Final = b"\n\n"
_CLOSING: Final = ord("}")
_decode_params = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.encode


class _Body(Struct, gc=False):
    kv_transfer_params: Raw | UnsetType = UNSET


_decode_body = msgspec.json.Decoder(_Body).decode


class _Xargs(Struct, gc=False):
    kv_transfer_params: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET


_decode_xargs = msgspec.json.Decoder(_Xargs).decode


class _Kept(Struct, gc=False):
    remote_prefill_cached_tokens: int | None = None


_decode_kept = msgspec.json.Decoder(_Kept).decode
_CACHED: Final = b"remote_prefill_cached_tokens"


def cached_tokens_in(params: bytes) -> int | None:
    """The cached tokens that a first leg's parameters report; None if they report none.

    vLLM reports them there since 0.32, also without --enable-prompt-tokens-details.
    """
    # To decode the block ids of a long prompt costs as much as a short request. `in` costs an exception more.
    if params.find(_CACHED) < 0:
        return None
    try:
        tokens = _decode_kept(params).remote_prefill_cached_tokens
    except UNREADABLE:
        return None
    return tokens if tokens is not None and 0 <= tokens < 10**9 else None


def split_params(answer: bytes) -> tuple[bytes, bytes]:
    """Return the answer of a first leg, and the JSON of its `kv_transfer_params`; empty if it has none.

    The first part may lack the parameters, and it need not be valid JSON. Raises the errors in `UNREADABLE`.
    """
    # vLLM (0.32) writes them as the last member, without an object in them. To skip the block ids of a long
    # prompt as JSON costs ten times as much as this.
    head, _, tail = answer.partition(_COMPACT_MEMBER)
    end = len(tail) - 2
    if end > 0 and tail.find(b"}") == end and tail.rfind(b"{") == 0 and tail[-1] == _CLOSING:
        return head + b"}", tail[:-1]
    raw = _decode_body(answer).kv_transfer_params
    return answer, b"" if raw is UNSET else bytes(raw)


def check_params(request: InferenceRequest) -> None:
    """Raise InvalidRequest if members of the client's body tell an engine where to read or to send KV.

    `kv_transfer_params` may have LMCache's members only. vLLM (0.32) copies the members of `vllm_xargs` to
    the engine's own arguments, among which are the parameters of both transfers; `ec_transfer_params` name
    where the outputs of encoders are; MoRIIO reads hosts from the request's id (`is_address`).
    """
    xargs, encoder, request_id = request.engine_members or (UNSET, UNSET, UNSET)
    if xargs is not UNSET:
        for name, value in zip((PARAMS, _ENCODER_PARAMS), _transfers_in(xargs), strict=True):
            if value is not UNSET:
                raise _decided_here(f"{_XARGS}.{name}")
    if encoder is not UNSET and bytes(encoder) not in _EMPTY:
        raise _decided_here(_ENCODER_PARAMS)
    if request_id is not UNSET and is_address(_text_of(request_id)):
        raise _decided_here("request_id")
    raw = transfer_params_of(request)
    if raw is None or bytes(raw) == b"null":
        return
    try:
        members = _decode_params(raw)
    except UNREADABLE:
        raise InvalidRequest(f"`{PARAMS}` must be an object.", param=PARAMS) from None
    for name in members:
        if not name.startswith(_ALLOWED_PREFIX):
            raise _decided_here(
                f"{PARAMS}.{name[:64]}", f" Clients may set `{_ALLOWED_PREFIX}*` members only."
            )


def is_address(request_id: bytes) -> bool:
    """Whether an engine could read hosts from this id of a request (vLLM 0.32, moriio/moriio_common.py)."""
    return b"_addr_" in request_id and _address(request_id) is not None


def _decided_here(param: str, more: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"`{param}` is set by this gateway: it can name a host that an engine reads KV from.{more}",
        param=param,
    )


def _text_of(raw: Raw) -> bytes:
    try:
        return msgspec.json.decode(raw, type=str).encode()
    except UNREADABLE:
        return bytes(raw)


def _transfers_in(xargs: Raw) -> tuple[object, object]:
    """The parameters of both transfers in `vllm_xargs`; UNSET if it is no object, which workers refuse."""
    try:
        decoded = _decode_xargs(xargs)
    except UNREADABLE:
        return UNSET, UNSET
    return decoded.kv_transfer_params, decoded.ec_transfer_params


class ParamsMask(Struct):
    """Blanks the values of `kv_transfer_params` in one answer, so that the client gets an empty object.

    The length of the answer stays, and no byte waits for later ones: members that begin in one part and end
    in another are blanked, too. Members of any depth count, because a streamed response is a member of its
    event. Mutable: `blanked` changes the state between the parts.
    """

    _tail: bytes = b""
    """The last bytes of the answer so far, if a member may begin there."""
    _depth: int = 0
    """Open brackets of the value that is being blanked; 0 outside of one."""
    _is_in_text: bool = False
    _is_escaped: bool = False

    def blanked(self, piece: bytes) -> bytes:
        """The next part of the answer, as the client may see it; `piece` itself if nothing is blanked.

        `piece` has body bytes without the framing of chunks. Costs a search of `piece`.
        """
        seen = self._tail + piece
        if not self._depth and (seen.find(PARAMS_KEY) < 0 or _opening(seen) is None):
            self._tail = b"" if piece.endswith(_EVENT_END) else seen[-_TAIL_BYTES:]
            return piece
        out, at, tail = bytearray(piece), 0, self._tail
        self._tail = b""
        while True:
            if not self._depth:
                seen = tail + piece[at:]
                opening = _opening(seen)
                if opening is None:
                    self._tail = b"" if piece.endswith(_EVENT_END) else seen[-_TAIL_BYTES:]
                    break
                at += opening.end() - len(tail)
                tail, self._depth = b"", 1
            at = self._blank(out, at)
            if self._depth:
                break
        return piece if out == piece else bytes(out)

    def _blank(self, out: bytearray, at: int) -> int:
        """Blank the value that is open at `at`. Returns where its last bracket is, or the end of `out`."""
        end, is_in_text = len(out), self._is_in_text
        start = at
        if self._is_escaped and at < end:
            self._is_escaped, start = False, at if out.startswith(_EVENT_END, at) else at + 1
        for match in _structure(out, start):
            byte = match[0]
            if byte == _EVENT_END:  # the event broke off: the gateway's error event follows
                self._depth, is_in_text, end = 0, False, match.start()
                break
            if byte[0] == 0x5C:  # a backslash and what it escapes, which may be in the next part
                self._is_escaped = len(byte) == 1
            elif byte == b'"':
                is_in_text = not is_in_text
            elif not is_in_text:
                self._depth += 1 if byte in b"{[" else -1
                if not self._depth:
                    end = match.start()
                    break
        self._is_in_text = is_in_text
        out[at:end] = b" " * (end - at)
        return end


def can_hand_over(request: InferenceRequest) -> bool:
    """Whether the request's KV can be computed by one worker and used by another one."""
    endpoint = request.endpoint
    if not endpoint.limits or request.over or endpoint.body is not _JSON:
        return False
    members = request.members
    if not ("messages" in members or "prompt" in members or (members and endpoint.stores_response)):
        return False
    return members.keys().isdisjoint(_FORBIDDING) or all(
        bytes(members[name]) in _FALSE for name in _FORBIDDING & members.keys()
    )


class LegBody(Struct, frozen=True, gc=False):
    """The body of one leg: `start`, then `tail`. They are not joined, because that copies a large body."""

    start: bytes | memoryview
    tail: bytes = b""

    def joined(self) -> bytes:
        return b"".join((self.start, self.tail))


class Connector(Protocol):
    """How the KV of a prompt gets from one worker to another. A seam: `CONNECTORS` has all."""

    name: ClassVar[str]
    description: ClassVar[str]
    needs_params: ClassVar[bool]
    """Whether the second leg needs parameters from the first leg's answer, and the prefill worker keeps
    blocks for it."""

    def first_leg(self, body: bytes, request: InferenceRequest) -> LegBody:
        """The body for the prefill worker, made from `body`, that of a whole request."""
        ...

    def params_in(self, params: bytes) -> bytes | None:
        """The parameters for `second_leg`; None if the answer of the first leg does not have them.

        `params`: the JSON of its `kv_transfer_params`; empty if it has none.
        """
        ...

    def second_leg(self, body: bytes, request: InferenceRequest, params: bytes) -> LegBody:
        """The body for the decode worker."""
        ...


class NixlPull:
    """vLLM's NixlConnector: the decode worker pulls the blocks from the prefill worker."""

    name: ClassVar[str] = "nixl"
    description: ClassVar[str] = "vLLM's NixlConnector; the decode worker pulls"
    needs_params: ClassVar[bool] = True

    def first_leg(self, body: bytes, request: InferenceRequest) -> LegBody:
        members = _one_token(request)
        members[PARAMS] = _merged(body, request, _FIRST_PARAMS)
        return _with(body, request, members)

    def params_in(self, params: bytes) -> bytes | None:
        # The object is passed on whole and unread: it has more members in each release.
        return params if _has_members(params) else None

    def second_leg(self, body: bytes, request: InferenceRequest, params: bytes) -> LegBody:
        if request.kv_transfer_params is None and body is request.body:
            # There is nothing to replace, and to encode the block ids of a long prompt costs more than this.
            return _appended(body, b"%b%b}" % (_COMPACT_MEMBER, params))
        return _with(body, request, {PARAMS: _merged(body, request, params)})


class SharedCache:
    """A cache that both workers use: the prefill worker stores the prompt's KV there, the decode worker loads
    it."""

    name: ClassVar[str] = "shared_cache"
    description: ClassVar[str] = "both workers use one LMCache server or store"
    needs_params: ClassVar[bool] = False

    def first_leg(self, body: bytes, request: InferenceRequest) -> LegBody:
        return _with(body, request, _one_token(request))

    def params_in(self, params: bytes) -> bytes | None:
        return b""

    def second_leg(self, body: bytes, request: InferenceRequest, params: bytes) -> LegBody:
        return LegBody(body)


CONNECTORS: Final[dict[str, Connector]] = {
    connector.name: connector for connector in (NixlPull(), SharedCache())
}


def release_leg(connector: Connector, body: bytes, request: InferenceRequest, params: bytes) -> bytes:
    """The body of a second leg whose only purpose is that the prefill worker frees its blocks: one token."""
    members = _one_token(request)
    if connector.needs_params:
        members[PARAMS] = _merged(body, request, params)
    return _with(body, request, members).joined()


def _one_token(request: InferenceRequest) -> dict[str, Raw]:
    """The members of a first leg: one token, not streamed, one answer."""
    endpoint, present = request.endpoint, request.members
    members = dict.fromkeys(endpoint.limits, _ONE)
    members["stream"] = _NO
    if endpoint.stores_response:
        members["store"] = _NO
    if not _LEG_MEMBERS.keys().isdisjoint(present):
        for name, value in _LEG_MEMBERS.items():
            if name in present:
                members[name] = value
    return members


def _with(body: bytes, request: InferenceRequest, members: Mapping[str, Raw]) -> LegBody:
    """`body`, an object, with these members. The JSON of all others stays, but not the space between them."""
    present_members: Mapping[str, Raw] | None = None
    if body is request.body:
        present_members = None if request.outline else request.members
    elif len(body) <= _DECODED_BYTES:
        present_members = _decode_params(body)
    if present_members is not None:
        return LegBody(_encode({**present_members, **members}))
    # To replace members would cost a decoding of the body. Of several members with one name the last one
    # counts, for Python's json (and so for vLLM) and msgspec.
    return _appended(body, b"," + _encode(members)[1:])


def _appended(body: bytes, tail: bytes) -> LegBody:
    """The JSON object `body`, which has members, with `tail` in place of its last bracket.

    `tail`: a comma, further members and a bracket.
    """
    end = len(body.rstrip(_BLANK)) - 1
    if end < _DECODED_BYTES:
        return LegBody(body[:end] + tail)
    return LegBody(memoryview(body)[:end], tail)


def _merged(body: bytes, request: InferenceRequest, params: bytes) -> Raw:
    """`params` with the members that `body` already has: the client's, and those of its key space."""
    present: Raw | UnsetType | None = request.kv_transfer_params
    if present is None and body is request.body:
        return Raw(params)
    if body is not request.body:  # see `openai.rewriting.isolated`
        try:
            present = _decode_body(body).kv_transfer_params
        except UNREADABLE:
            present = None
    if present is None or present is UNSET or not _has_members(bytes(present)):
        return Raw(params)
    return Raw(b"%b,%b" % (bytes(present).rstrip()[:-1], params.lstrip()[1:]))


def _has_members(text: bytes) -> bool:
    """Whether the valid JSON is an object that is not empty."""
    return text.startswith(b'{"') or _has_member(text) is not None
