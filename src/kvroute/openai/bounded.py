"""The shapes of request bodies, and decoders that stop when a body exceeds a limit.

A decoder creates an object for each element and holds the interpreter lock meanwhile. Bodies with too many
elements are therefore recognised without creating objects: by counting characters, by decoders that fail at
the first element too many, and by `msgspec.Raw`, which skips a value about as fast as its bytes can be
counted.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import astuple, fields

from kvroute.errors import InvalidRequest, OverLimit

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec: not JSON, not UTF-8 (checked only in decoded parts), or nested too deeply."""

BEFORE_MESSAGES = ("tools", "functions", "documents", "chat_template_kwargs", "system", "instructions")
"""Fields that chat templates render before the messages, in their order."""

CACHE_FIELDS = ("prompt_logprobs", "echo", "logprobs", "top_logprobs", "use_beam_search", "task")
"""Fields that decide whether the engine reads its prefix cache (`openai.cache_reads`), in this order."""


ENGINE_MEMBERS = ("vllm_xargs", "ec_transfer_params", "request_id")
"""Members that can tell an engine where to read KV, besides `kv_transfer_params` (`openai.kv_transfer`)."""


class Message(Struct, gc=False):
    """The fields that templates render of a message, or of an item of the Responses API."""

    role: Raw | UnsetType = UNSET
    content: Raw | UnsetType = UNSET
    name: Raw | UnsetType = UNSET
    reasoning: Raw | UnsetType = UNSET
    reasoning_content: Raw | UnsetType = UNSET
    tool_calls: Raw | UnsetType = UNSET
    tool_call_id: Raw | UnsetType = UNSET
    type: Raw | UnsetType = UNSET
    arguments: Raw | UnsetType = UNSET
    output: Raw | UnsetType = UNSET


SESSION_MEMBERS = ("prompt_cache_key", "conversation", "metadata", "previous_response_id", "user")
"""Members in which clients name their sessions, or persons."""


class Body(Struct, gc=False):
    """The fields of a body that the gateway reads, in one pass.

    After the first five come `SESSION_MEMBERS`, then the fields that templates render before the messages, in
    their order, those of `openai.cache_reads`, and `ENGINE_MEMBERS`.
    """

    model: str | None = None
    stream: Raw | UnsetType = UNSET
    messages: list[Message] | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    conversation: Raw | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET
    previous_response_id: Raw | UnsetType = UNSET
    user: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    functions: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    echo: Raw | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET
    top_logprobs: Raw | UnsetType = UNSET
    use_beam_search: Raw | UnsetType = UNSET
    task: Raw | UnsetType = UNSET
    vllm_xargs: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET
    request_id: Raw | UnsetType = UNSET


decode_body = msgspec.json.Decoder(Body).decode


Head: TypeAlias = Sequence[Raw | UnsetType]
"""The values of a body under the names in `BEFORE_MESSAGES`, in their order; empty if it has none of them."""


def head_of(decoded: Body) -> Head:
    """The values that a chat template renders before the messages, in its order."""
    return astuple(decoded)[10:16]


SMALL_BYTES: Final = 65_536
"""A body up to this size is decoded without counting its values first: at most about 20,000 objects."""
STEPWISE_BYTES: Final = 1_048_576
"""A larger body is read in steps; other requests run between the steps."""
_UNCOUNTED_BYTES: Final = 2_097_152
"""The values of a larger body are counted before any decoding."""
_WINDOW_BYTES: Final = 4_194_304
"""Bytes of a body in which characters are counted in one step."""
_SCANNED_BYTES: Final = 262_144
"""Bytes of a body in which characters outside of strings are counted in one step."""
_PIECE_BYTES: Final = 131_072
"""Bytes of a list of token ids that are decoded in one step."""
MEMBERS_LIMIT: Final = "max_json_members"
"""The limit of `BodyLimits` above which a body is not even read for its model alone."""
_READ_FIELDS: Final = (
    *("model", "stream", "messages", "cache_salt", "prompt", "input", "query", "text_1", "queries", "text_2"),
    *("suffix", "previous_response_id", "kv_transfer_params", *BEFORE_MESSAGES),
    *("prompt_embeds", "truncate_prompt_tokens", "truncation_side", *CACHE_FIELDS),
    *ENGINE_MEMBERS,
)
"""Fields of a large body that the gateway reads."""
_BYTE_ORDERS: Final = (b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")
_NOT_A_NUMBER: Final = (b"NaN", b"Infinity", b"-Infinity")

_Match: TypeAlias = Callable[[bytes, int, int], re.Match[bytes]]
"""The `match` method of a pattern that always matches."""
Steps: TypeAlias = Generator[None, None, Any]


class BodyLimits(NamedTuple):
    """The limits on one body that is read. The names are those of the options in `server`."""

    max_messages: int = 16_384
    max_prompts: int = 4_096
    max_content_parts: int = 16_384
    max_token_ids: int = 2_097_152
    max_json_values: int = 4_194_304
    max_form_parts: int = 1_000
    max_json_members: int = 262_144


class Bounded:
    """Decoders for one set of limits.

    `also` are top-level fields of large bodies to read in addition to the usual ones. Mutable: the count of
    the current decoding, so all calls must come from one thread.
    """

    def __init__(self, limits: BodyLimits | None = None, *, also: Sequence[str] = ()) -> None:
        self.limits = limits = limits or BodyLimits()
        self._remaining = 0
        bounded = self

        class Counted(Message, gc=False):
            def __post_init__(self) -> None:
                bounded._remaining -= 1
                if bounded._remaining < 0:
                    raise ValueError  # stops the decoding

        class CountedObject(Struct, gc=False):
            def __post_init__(self) -> None:
                bounded._remaining -= 1
                if bounded._remaining < 0:
                    raise ValueError

        messages: Any = list[Counted]
        body: Any = msgspec.defstruct(
            "CountedBody",
            [
                (
                    body_field.name,
                    messages | UnsetType if body_field.name == "messages" else body_field.type,
                    body_field.default,
                )
                for body_field in fields(Body)
            ],
            gc=False,
        )
        self._names = tuple(dict.fromkeys((*_READ_FIELDS, *also)))
        fields_type: Any = msgspec.defstruct(
            "Fields",
            [(f"f{index}", Raw | UnsetType, UNSET) for index in range(len(self._names))],
            rename={f"f{index}": name for index, name in enumerate(self._names)},
            gc=False,
        )
        self._decode_body = msgspec.json.Decoder(body).decode
        self._decode_messages = msgspec.json.Decoder(messages).decode
        self._decode_fields = msgspec.json.Decoder(fields_type).decode
        self._decode_objects = msgspec.json.Decoder(list[CountedObject]).decode
        self._decode_prompts: Callable[[Any], Struct] | None = None

    def over(self, limit: str, what: str, param: str | None = None) -> OverLimit:
        """The error for a body with more `what` than the limit named `limit` allows."""
        maximum: int = getattr(self.limits, limit)
        return OverLimit(
            limit, f"The request body has more than {maximum} {what} (server.{limit}).", param=param
        )

    def body(self, data: bytes) -> Body:
        """Like `decode_body`. Raises OverLimit and the errors in UNREADABLE."""
        self._remaining = self.limits.max_messages
        try:
            decoded: Body = self._decode_body(data)
        except UNREADABLE:
            self._check_count("messages")
            raise
        return decoded

    def messages(self, data: bytes | Raw, param: str = "messages") -> list[Message]:
        """Decode a list of objects. Raises OverLimit and the errors in UNREADABLE."""
        self._remaining = self.limits.max_messages
        try:
            decoded: list[Message] = self._decode_messages(data)
        except UNREADABLE:
            self._check_count(param)
            raise
        return decoded

    def _check_count(self, param: str) -> None:
        if self._remaining < 0:
            raise self.over("max_messages", "messages" if param == "messages" else "items", param)

    def fields(self, data: bytes) -> dict[str, Raw]:
        """The fields of a large body that the gateway reads.

        Raises InvalidRequest, and OverLimit for JSON that is not accepted at this size.
        """
        try:
            decoded = self._decode_fields(data)
        except RecursionError:
            raise OverLimit("nesting", "The request body is nested too deeply to be read.") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _unreadable(data, error) from None
        values = zip(self._names, astuple(decoded), strict=True)
        return {name: value for name, value in values if value is not UNSET}

    def parts(self, content: Raw, remaining: int) -> None:
        """Raise OverLimit if a message's content has more than `remaining` parts."""
        data = bytes(content)
        if data.count(b",") < remaining:
            return
        self._remaining = remaining
        try:
            self._decode_objects(data)
        except UNREADABLE:  # too many parts, or parts of a type that no endpoint accepts
            raise self.over("max_content_parts", "content parts", "messages") from None

    def prompts(self, data: bytes, param: str) -> list[Raw]:
        """The elements of a list. Raises OverLimit."""
        if self._decode_prompts is None:
            # The decoder of an array-like struct fails at the first element too many.
            prompt_fields = [
                (f"f{index}", Raw | UnsetType, UNSET) for index in range(self.limits.max_prompts)
            ]
            kind = msgspec.defstruct(
                "Prompts", prompt_fields, array_like=True, forbid_unknown_fields=True, gc=False
            )  # about 5 us a field
            self._decode_prompts = msgspec.json.Decoder(kind).decode
        try:
            prompts = astuple(self._decode_prompts(data))
        except msgspec.ValidationError:
            raise self.over("max_prompts", "prompts", param) from None
        return [item for item in prompts if item is not UNSET]

    def token_ids(self, data: bytes, ids: array[int], param: str) -> Steps:
        """Append the numbers of a list to `ids`, in steps.

        Raises OverLimit, and OverflowError or an error in UNREADABLE if they are no token ids.
        """
        at, end, most = 1, len(data) - 1, self.limits.max_token_ids
        while at < end:
            stop = min(at + _PIECE_BYTES, end)
            if stop < end:
                comma = data.find(b",", stop, end)
                stop = end if comma < 0 else comma
            # Numbers contain no comma, so each piece between commas is a list of numbers, too.
            ids.extend(_decode_ids(b"[%b]" % data[at:stop]))
            if len(ids) > most:
                raise self.over("max_token_ids", "token ids", param)
            at = stop + 1
            yield

    def values(self, body: bytes) -> Steps:
        """Count the JSON values and the members of a large body up to their limits, in steps.

        Raises OverLimit; if both limits are exceeded, for the members. Counting all separators and colons is
        quick and never too low. If a count exceeds its limit, only those outside of strings are counted.
        """
        # A value that is skipped costs about 10 ns, a member that the gateway reads up to 100 ns, also if
        # another one of the same name follows.
        if len(body) <= _UNCOUNTED_BYTES:
            return
        most = self.limits.max_json_values
        values = members = quotes = 0
        for start in range(0, len(body), _WINDOW_BYTES):
            stop = start + _WINDOW_BYTES
            values += _separators(body, start, stop)
            members += body.count(b":", start, stop)
            yield
        has_many_members = members > self.limits.max_json_members
        if values <= most and not has_many_members:
            return
        if not has_many_members:
            for start in range(0, len(body), _WINDOW_BYTES):
                stop = start + _WINDOW_BYTES
                quotes += body.count(b'"', start, stop) - body.count(b'\\"', max(0, start - 1), stop)
                yield
                if quotes > 2 * most:  # two unescaped ones for each string
                    raise self.over("max_json_values", "JSON values")
        values, members = yield from self._left_outside_strings(body, may_have_members=has_many_members)
        if members < 0:
            raise self.over(MEMBERS_LIMIT, "members in its JSON objects")
        if values < 0:
            raise self.over("max_json_values", "JSON values")

    def _left_outside_strings(
        self, body: bytes, *, may_have_members: bool
    ) -> Generator[None, None, tuple[int, int]]:
        """How many more values and members the body could have; a negative number ends the count.

        Without `may_have_members` only values are too many.
        """
        values, members = self.limits.max_json_values, self.limits.max_json_members
        at, end = 0, len(body)
        while at < end and members >= 0 and (values >= 0 or may_have_members):
            ahead = min(at + _SCANNED_BYTES, end)
            stop = _complete_strings(body, at, ahead).end()
            if stop > at:
                outside, strings = _strings(b"", body[at:stop])
                values -= strings + _separators(outside, 0, len(outside))
                members -= outside.count(b":")
                at = stop
                yield
                continue
            # A string that is longer than one step.
            at += 1
            values -= 1
            while at < end:
                stop = _rest_of_string(body, at, min(at + _SCANNED_BYTES, end)).end()
                if body[stop : stop + 1] == b'"':
                    at = stop + 1
                    break
                at = stop if stop > at else at + 2  # the end of the step is within an escape sequence
                yield
        return values, members


_strings = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL).subn
_complete_strings = cast("_Match", re.compile(rb'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL).match)
"""Matches up to the last place that is not within a string."""
_rest_of_string = cast("_Match", re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL).match)
"""Matches from within a string to its end."""
_decode_ids = msgspec.json.Decoder(list[int]).decode


def separators(body: bytes | Raw) -> int:
    """The number of commas and opening brackets: at least the number of values minus one."""
    data = bytes(body)
    return sum(_separators(data, at, at + _WINDOW_BYTES) for at in range(0, len(data), _WINDOW_BYTES))


def _separators(body: bytes, start: int, stop: int) -> int:
    count = body.count
    return count(b",", start, stop) + count(b"[", start, stop) + count(b"{", start, stop)


_error_offset = re.compile(r"\(byte (\d+)\)$").search


def not_plain_json() -> OverLimit:
    """The error for a large body that Python's json may accept but msgspec does not."""
    return OverLimit(
        "plain_json",
        f"Above {STEPWISE_BYTES} bytes a request body must be JSON in UTF-8, without NaN and Infinity.",
    )


def _unreadable(body: bytes, error: Exception) -> InvalidRequest | OverLimit:
    """The error for a large body that msgspec rejects."""
    position = _error_offset(str(error))
    at = int(position[1]) if position else 0
    if b"\0" in body[:4] or body.startswith(_BYTE_ORDERS) or body.startswith(_NOT_A_NUMBER, at):
        return not_plain_json()
    if isinstance(error, msgspec.ValidationError):
        return InvalidRequest("The request body must be a JSON object.")
    return InvalidRequest("The request body is not valid JSON.")
