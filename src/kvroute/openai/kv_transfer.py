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
from kvroute.openai.request import InferenceRequest
from kvroute.openai.rewriting import TopLevelMember, with_members

PARAMS: Final = "kv_transfer_params"
_XARGS: Final = "vllm_xargs"
_ALLOWED_PREFIX: Final = "lmcache."
_PARAMS_MEMBER: Final = TopLevelMember(PARAMS)
_REPLACED: Final = {
    name: TopLevelMember(name)
    for name in (
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n",
        "stream",
        "stream_options",
        "min_tokens",
        "store",
        "logprobs",
        "top_logprobs",
    )
}
_SEARCHED_BYTES: Final = 32_768
"""In larger bodies members are appended, not replaced: to find each one costs a decoding of the body."""
_FORBIDDING: Final = (
    "prompt_logprobs",
    "echo",
    "use_beam_search",
    "previous_response_id",
    "background",
    "prompt_embeds",
)
"""Members with which the engine does not read its cache, or needs state that only one worker has."""
_FALSE: Final = (b"null", b"false")
_KEY: Final = b'"%b"' % PARAMS.encode()
_opening = re.compile(_KEY + rb"[ \t\r\n]*:[ \t\r\n]*[{\[]").search
"""Inside generated text the quotes are escaped, so this matches members only."""
_structure = re.compile(rb'\n\n|\\(?:.|\Z)|["{}\[\]]', re.DOTALL).finditer
_TAIL_BYTES: Final = 64
"""Enough for the name of the member with white space up to its value."""
_EVENT_END: Final = b"\n\n"
_decode_params = msgspec.json.Decoder(dict[str, Raw]).decode


class _Answer(Struct, gc=False):
    kv_transfer_params: Raw | UnsetType = UNSET


_decode_answer = msgspec.json.Decoder(_Answer).decode


class _Kept(Struct, gc=False):
    remote_prefill_cached_tokens: int | None = None


class _KeptAnswer(Struct, gc=False):
    kv_transfer_params: _Kept | None = None


_decode_kept = msgspec.json.Decoder(_KeptAnswer).decode


def cached_tokens_in(answer: bytes) -> int | None:
    """The cached tokens that a first leg's parameters report; None if they report none.

    vLLM reports them there since 0.32, also without --enable-prompt-tokens-details.
    """
    try:
        kept = _decode_kept(answer).kv_transfer_params
    except UNREADABLE:
        return None
    tokens = None if kept is None else kept.remote_prefill_cached_tokens
    return tokens if tokens is None or tokens >= 0 else None


def check_params(request: InferenceRequest) -> None:
    """Raise InvalidRequest if the client's `kv_transfer_params` have other members than LMCache's."""
    xargs = (request.fields or {}).get(_XARGS)
    if xargs is not None and PARAMS in _members_of(xargs):
        # vLLM (0.32) copies these members to the engine's own arguments, whatever their type.
        raise InvalidRequest(f"`{_XARGS}.{PARAMS}` is set by this gateway.", param=f"{_XARGS}.{PARAMS}")
    raw = request.kv_transfer_params
    if raw is None or bytes(raw) == b"null":
        return
    try:
        members = _decode_params(raw)
    except UNREADABLE:
        raise InvalidRequest(f"`{PARAMS}` must be an object.", param=PARAMS) from None
    for name in members:
        if not name.startswith(_ALLOWED_PREFIX):
            shown = name[:64]
            raise InvalidRequest(
                f"`{PARAMS}.{shown}` is set by this gateway, which hands prompts over between workers. "
                f"Clients may set `{_ALLOWED_PREFIX}*` members only.",
                param=f"{PARAMS}.{shown}",
            )


def _members_of(raw: Raw) -> Mapping[str, Raw]:
    """The members of an object; none if it is something else, which the worker refuses."""
    try:
        return _decode_params(raw)
    except UNREADABLE:
        return {}


class ParamsMask:
    """Blanks the values of `kv_transfer_params` in one answer, so that the client gets an empty object.

    The length of the answer stays, and no byte waits for later ones: members that begin in one part and end
    in another are blanked, too. Members of any depth count, because a streamed response is a member of its
    event. Mutable: `blanked` changes the state between the parts.
    """

    __slots__ = ("_depth", "_is_escaped", "_is_in_text", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        """The last bytes of the answer so far, if a member may begin there."""
        self._depth = 0
        """Open brackets of the value that is being blanked; 0 outside of one."""
        self._is_in_text = self._is_escaped = False

    def blanked(self, part: bytes) -> bytes:
        """The next part of the answer, as the client may see it; `part` itself if nothing is blanked.

        `part` has body bytes without the framing of chunks. Costs a search of `part`.
        """
        seen = self._tail + part
        if not self._depth and (_KEY not in seen or _opening(seen) is None):
            self._tail = b"" if part.endswith(_EVENT_END) else seen[-_TAIL_BYTES:]
            return part
        out, at, tail = bytearray(part), 0, self._tail
        self._tail = b""
        while True:
            if not self._depth:
                seen = tail + part[at:]
                found = _opening(seen)
                if found is None:
                    self._tail = b"" if part.endswith(_EVENT_END) else seen[-_TAIL_BYTES:]
                    break
                at += found.end() - len(tail)
                tail, self._depth = b"", 1
            at = self._blank(out, at)
            if self._depth:
                break
        return part if out == part else bytes(out)

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
    if not request.endpoint.limits or request.over or request.endpoint.body is not BodyKind.JSON:
        return False
    fields = request.fields
    if fields is None or not ("messages" in fields or "prompt" in fields or request.endpoint.stores_response):
        return False
    return all(name not in fields or bytes(fields[name]) in _FALSE for name in _FORBIDDING)


class Connector(Protocol):
    """How the KV of a prompt gets from one worker to another. A seam: `CONNECTORS` has all."""

    name: ClassVar[str]
    description: ClassVar[str]
    needs_params: ClassVar[bool]
    """Whether the second leg needs parameters from the first leg's answer, and the prefill worker keeps
    blocks for it."""

    def first_leg(self, body: bytes, request: InferenceRequest) -> bytes:
        """The body for the prefill worker, made from `body`, that of a whole request."""
        ...

    def params_in(self, answer: bytes) -> bytes | None:
        """What `second_leg` needs from the first leg's answer; None if the answer lacks it."""
        ...

    def second_leg(self, body: bytes, request: InferenceRequest, params: bytes) -> bytes:
        """The body for the decode worker."""
        ...


class NixlPull:
    """vLLM's NixlConnector: the decode worker pulls the blocks from the prefill worker."""

    name: ClassVar[str] = "nixl"
    description: ClassVar[str] = "vLLM's NixlConnector; the decode worker pulls"
    needs_params: ClassVar[bool] = True

    def first_leg(self, body: bytes, request: InferenceRequest) -> bytes:
        members = _one_token(request)
        members[_PARAMS_MEMBER] = _merged(
            body,
            request,
            b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
            b'"remote_block_ids":null,"remote_host":null,"remote_port":null}',
        )
        return _with(body, request, members)

    def params_in(self, answer: bytes) -> bytes | None:
        try:
            params = _decode_answer(answer).kv_transfer_params
            # The object is passed on whole and unread: it has more members in each release.
            return bytes(params) if params is not UNSET and _decode_params(params) else None
        except UNREADABLE:
            return None

    def second_leg(self, body: bytes, request: InferenceRequest, params: bytes) -> bytes:
        return _with(body, request, {_PARAMS_MEMBER: _merged(body, request, params)})


class SharedCache:
    """A cache that both workers use: the prefill worker stores the prompt's KV there, the decode worker loads
    it."""

    name: ClassVar[str] = "shared_cache"
    description: ClassVar[str] = "both workers use one LMCache server or store"
    needs_params: ClassVar[bool] = False

    def first_leg(self, body: bytes, request: InferenceRequest) -> bytes:
        return _with(body, request, _one_token(request))

    def params_in(self, answer: bytes) -> bytes | None:
        return b""

    def second_leg(self, body: bytes, request: InferenceRequest, params: bytes) -> bytes:
        return body


CONNECTORS: Final[dict[str, Connector]] = {each.name: each for each in (NixlPull(), SharedCache())}


def release_leg(connector: Connector, body: bytes, request: InferenceRequest, params: bytes) -> bytes:
    """The body of a second leg whose only purpose is that the prefill worker frees its blocks: one token."""
    return _with(connector.second_leg(body, request, params), request, _one_token(request))


def _one_token(request: InferenceRequest) -> dict[TopLevelMember, bytes]:
    """The members of a first leg: one token, not streamed, one answer.

    With `n` above 1 vLLM (0.32) keeps the blocks of the other answers until their lease ends.
    """
    fields = request.fields or {}
    members = {_REPLACED[name]: b"1" for name in request.endpoint.limits}
    members[_REPLACED["stream"]] = b"false"
    if "max_completion_tokens" in fields:  # it counts before `max_tokens`, also for /invocations
        members[_REPLACED["max_completion_tokens"]] = b"1"
    if "n" in fields:
        members[_REPLACED["n"]] = b"1"
    if "stream_options" in fields:
        members[_REPLACED["stream_options"]] = b"null"
    if "min_tokens" in fields:
        members[_REPLACED["min_tokens"]] = b"0"
    for name in ("logprobs", "top_logprobs"):
        # Nobody sees this token. An engine's first request with logprobs compiles a kernel, and all other
        # requests wait meanwhile (vLLM 0.32, v1/sample/ops/logprobs.py): a prefill worker never needs it.
        if name in fields:
            members[_REPLACED[name]] = b"null"
    if request.endpoint.stores_response:
        members[_REPLACED["store"]] = b"false"
    return members


def _with(body: bytes, request: InferenceRequest, members: dict[TopLevelMember, bytes]) -> bytes:
    there: dict[TopLevelMember, Raw | None] = {}
    if len(body) <= _SEARCHED_BYTES:
        fields = request.fields or {}
        there = {member: fields.get(member.name) for member in members if member is not _PARAMS_MEMBER}
        there[_PARAMS_MEMBER] = _params_of(body, request)
    return with_members(body, there, members)


def _params_of(body: bytes, request: InferenceRequest) -> Raw | None:
    """The `kv_transfer_params` in `body`: the client's, and those of its key space (`openai.rewriting`)."""
    if body is request.body:
        return request.kv_transfer_params
    try:
        params = _decode_answer(body).kv_transfer_params
    except UNREADABLE:
        return None
    return None if params is UNSET else params


def _merged(body: bytes, request: InferenceRequest, params: bytes) -> bytes:
    """`params` with the members that `body` already has."""
    present = _params_of(body, request)
    if present is None or not _decode_params(present if bytes(present) != b"null" else b"{}"):
        return params
    return b"%b,%b" % (bytes(present).rstrip()[:-1], params.lstrip()[1:])
