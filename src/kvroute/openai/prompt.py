"""The bytes of a prompt in the order in which a chat template would see them.

tools, then system or instructions, then messages (or prompt, input, query and documents). Two
requests whose rendered prompts share a beginning share a beginning here, whatever order their JSON
fields have; images and audio count by their hash, so that a picture is a few bytes and not its
base64. Nothing here is the engine's own text: `kvaware` needs exact tokens, `prefixaware` does not.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw, UnsetType
from xxhash import xxh3_128_digest

from kvroute.openai.request import InferenceRequest

_BEFORE_MESSAGES = ("tools", "functions", "documents", "chat_template_kwargs", "system", "instructions")
_AFTER_MESSAGES = ("query", "text_1", "queries", "text_2", "suffix")
_FEW_BYTES = 1024
"""A content part above this is taken for media or a file and counted by its hash unless it is text."""


class _Message(msgspec.Struct):
    """The fields of a message that templates render, in the order in which they usually do."""

    role: Raw | UnsetType = UNSET
    name: Raw | UnsetType = UNSET
    reasoning: Raw | UnsetType = UNSET
    reasoning_content: Raw | UnsetType = UNSET
    content: Raw | UnsetType = UNSET
    tool_calls: Raw | UnsetType = UNSET
    tool_call_id: Raw | UnsetType = UNSET
    # items of the Responses API that are no messages
    type: Raw | UnsetType = UNSET
    arguments: Raw | UnsetType = UNSET
    output: Raw | UnsetType = UNSET


class _Part(msgspec.Struct):
    text: str | UnsetType = UNSET


_decode_messages = msgspec.json.Decoder(list[_Message]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_part = msgspec.json.Decoder(_Part).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_id_lists = msgspec.json.Decoder(list[list[int]]).decode


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as bytes. `is_token_ids`: 4 bytes (little-endian uint32) a token, exactly."""

    data: bytes
    is_token_ids: bool = False


def prompts_of(request: InferenceRequest) -> tuple[Prompt, ...]:
    """The prompts that a worker would compute for this request, most often one; none if they cannot be read.

    About 60 us for a 256 KB chat.
    """
    fields = request.fields
    if fields is None or not request.endpoint.fills_kv_cache:
        return ()
    try:
        return _prompts(fields)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ()


def _prompts(fields: Mapping[str, Raw]) -> tuple[Prompt, ...]:
    head = [bytes(fields[name]) for name in _BEFORE_MESSAGES if name in fields]
    if "messages" in fields:
        return (Prompt(b"".join([*head, *_messages(fields["messages"])])),)
    if "prompt" in fields:
        return _listed(fields["prompt"])
    if "input" in fields:
        return _inputs(head, fields["input"])
    rest = [bytes(fields[name]) for name in _AFTER_MESSAGES if name in fields]
    return (Prompt(b"".join(rest + head)),) if rest else ()


def cache_salt_of(fields: Mapping[str, Raw] | None) -> str:
    """The `cache_salt` that keeps this request's blocks apart, "" for none."""
    raw = fields.get("cache_salt") if fields else None
    return (
        bytes(raw).decode("utf-8", "replace").strip('"') if raw is not None and bytes(raw) != b"null" else ""
    )


def _messages(raw: Raw) -> Iterator[bytes]:
    try:
        messages = _decode_messages(raw)
    except msgspec.DecodeError:
        yield bytes(raw)
        return
    for message in messages:
        yield b"\x1e"
        for value in (message.role, message.name, message.reasoning, message.reasoning_content):
            if value is not UNSET:
                yield bytes(value)
        if message.content is not UNSET:
            yield from _content(message.content)
        for value in (
            message.tool_calls,
            message.tool_call_id,
            message.type,
            message.arguments,
            message.output,
        ):
            if value is not UNSET:
                yield bytes(value)


def _content(raw: Raw) -> Iterator[bytes]:
    """A string as it stands; of a list of parts the text, and anything large by its hash."""
    data = bytes(raw)
    if not data.startswith(b"["):
        yield data
        return
    try:
        parts = _decode_items(raw)
    except msgspec.DecodeError:
        yield data
        return
    for item in parts:
        part = bytes(item)
        try:
            text = _decode_part(part).text
        except msgspec.DecodeError:
            text = UNSET
        if text is not UNSET:
            yield msgspec.json.encode(text)
        elif len(part) > _FEW_BYTES:
            yield xxh3_128_digest(part)
        else:
            yield part


def _listed(raw: Raw) -> tuple[Prompt, ...]:
    """`prompt` of completions: a text, a list of texts, token ids, or a list of token-id lists."""
    data = bytes(raw)
    if not data.startswith(b"["):
        return (Prompt(data),)
    try:
        return (_ids(_decode_ids(raw)),)
    except msgspec.DecodeError:
        pass
    try:
        return tuple(_ids(ids) for ids in _decode_id_lists(raw))
    except msgspec.DecodeError:
        pass
    return tuple(Prompt(bytes(item)) for item in _decode_items(raw))


def _inputs(head: list[bytes], raw: Raw) -> tuple[Prompt, ...]:
    """`input`: of embeddings as `prompt`; of responses a text or a list of items that are one prompt."""
    data = bytes(raw)
    if data.startswith(b"["):
        try:
            _decode_messages(raw)
        except msgspec.DecodeError:
            return _listed(raw)
        return (Prompt(b"".join([*head, *_messages(raw)])),)
    return (Prompt(b"".join([*head, b'\x1e"user"', data])),)


def _ids(ids: list[int]) -> Prompt:
    try:
        return Prompt(array("I", ids).tobytes(), is_token_ids=True)
    except OverflowError:  # not token ids after all; the worker will say so
        return Prompt(repr(ids).encode())
