"""Renders prompts as bytes, in the order in which a chat template renders their parts.

The order is tools, system or instructions, messages (or prompt, input, query and documents). The order of the
JSON fields has no effect: if two prompts share a prefix in the engine, their bytes share a prefix here. An
image or audio part is replaced by its hash. What the engine does not show the model is left out (`shown.py`).
The bytes are not the engine's text; `kvaware` uses exact tokens instead.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Generator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import astuple
from xxhash import xxh3_128_digest

from kvroute.errors import OverLimit
from kvroute.openai.bounded import SMALL_BYTES, UNREADABLE, Bounded, Head, Message, decode_body, head_of
from kvroute.openai.shown import shown_system_text, without_marks

_AFTER_MESSAGES = ("query", "text_1", "queries", "text_2", "suffix")
_NO_OTHER_FIELDS = [UNSET] * 8
_LIST, _QUOTE = b'["'
_SYSTEM = Raw(b'"system"')
_MAX_PLAIN_PART_BYTES = 1024
"""A larger content part that is neither text nor a tool's call or result (media or a file) is replaced by its
hash."""
_TOOL_PARTS: Final = (b'"tool_result"', b'"tool_use"')
"""Parts whose JSON is text of the prompt, however long. A hash in their place would give the prompt too few
bytes for its tokens."""


MEDIA_MARK: Final = b"\x1d"
"""Precedes each image, audio and video in a rendered prompt. JSON text has no such byte."""
_MEDIA_HEAD_BYTES: Final = 4096
_is_media = re.compile(
    rb'"type"[ \t\r\n]*:[ \t\r\n]*"(?:input_)?(?:image|audio|video|file|document)(?:_url|_embeds|_pil)?"'
).search


class _ContentPart(Struct, gc=False):
    text: Raw | UnsetType = UNSET
    type: Raw | UnsetType = UNSET
    tool_use_id: Raw | UnsetType = UNSET
    content: Raw | UnsetType = UNSET


_decode_messages = msgspec.json.Decoder(list[Message]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_part = msgspec.json.Decoder(_ContentPart).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_id_lists = msgspec.json.Decoder(list[list[int]]).decode


class Prompt(NamedTuple):
    """One prompt as bytes. With `is_token_ids`: 4 bytes (little-endian uint32) for each token."""

    data: bytes
    is_token_ids: bool = False

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.data)

    @property
    def has_media(self) -> bool:
        return not self.is_token_ids and MEDIA_MARK in self.data

    def after(self, begin: int) -> bytes:
        """The bytes from `begin` on."""
        return self.data[begin:]


class PromptPrefix(Struct, eq=False, weakref=True):
    """A known prefix of request bodies, up to the end of one of their messages.

    Mutable: readers of the prompt add `notes`, which are dropped together with this object.
    """

    opened: int
    """Where the first message begins in the body."""
    end: int
    """Where the next message begins in the body."""
    head: bytes
    """The rendered parts before the messages."""
    kept_tail: bytes
    """The rendered prefix from byte `whole_bytes` on."""
    whole_bytes: int = 0
    """Bytes of the rendered prefix that are not kept."""
    notes: dict[int, Any] = {}
    """Data of the prompt's readers, by their own keys."""
    messages: int = 0
    """Number of messages up to `end`."""
    has_media: bool = False


class SeenPrompt(Struct, eq=False):
    """The prompt of a chat whose prefix is known."""

    body: bytes
    prefix: PromptPrefix
    tail: bytes
    """The rendered prompt after the prefix's `whole_bytes`."""
    longer_prefix: PromptPrefix | None = None
    """A longer prefix that this prompt has made known, for the next turns of the chat."""
    is_token_ids: bool = False
    is_anthropic: bool = False
    """See `Endpoint.is_anthropic`."""

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.prefix.whole_bytes + len(self.tail)

    @property
    def has_media(self) -> bool:
        return self.prefix.has_media or MEDIA_MARK in self.tail

    def after(self, begin: int) -> bytes:
        """The bytes from `begin` on."""
        skipped = self.prefix.whole_bytes
        return self.tail[begin - skipped :] if begin >= skipped else self.data[begin:]

    @property
    def data(self) -> bytes:
        """The whole rendered prompt, rendered from the body."""
        if not self.prefix.whole_bytes:
            return self.tail
        try:
            decoded = decode_body(self.body)
        except UNREADABLE:  # nested so deeply that it is readable only with more stack left
            return self.body
        is_anthropic = self.is_anthropic
        messages = rendered(cast("list[Message]", decoded.messages), None, is_anthropic)
        return b"".join([*rendered_head(head_of(decoded), None, is_anthropic), *messages])


AnyPrompt: TypeAlias = Prompt | SeenPrompt


PromptSteps: TypeAlias = Generator[None, None, tuple[Prompt, ...]]


def read_prompts(
    head: Sequence[bytes | Raw], fields: Mapping[str, Raw], bounded: Bounded | None
) -> PromptSteps:
    """The prompts of a body without a list of messages; `head` is rendered."""
    if "messages" in fields:
        return (Prompt(b"".join([*head, fields["messages"]])),)
    if "prompt" in fields:
        return (yield from _read_prompt_field(fields["prompt"], bounded, "prompt"))
    if "input" in fields:
        return (yield from _read_input_field(head, fields["input"], bounded))
    other_fields = [fields[name] for name in _AFTER_MESSAGES if name in fields]
    return (Prompt(b"".join([*other_fields, *head])),) if other_fields else ()


def rendered_head(
    head: Head, bounded: Bounded | None = None, is_anthropic: bool = False
) -> list[bytes | Raw]:
    """The rendered parts before the messages. `is_anthropic`: see `Endpoint`."""
    if not head:
        return []
    tools, functions, documents, kwargs, system, instructions = head
    parts: list[bytes | Raw] = [] if tools is UNSET else [without_marks(tools)]
    parts += [value for value in (functions, documents, kwargs) if value is not UNSET]
    if system is not UNSET:
        parts += _render_system(system, bounded) if is_anthropic else [system]
    if instructions is not UNSET:
        parts.append(_shown(instructions, whole=False))
    return parts


def _render_system(system: Raw, bounded: Bounded | None) -> list[bytes | Raw]:
    """The field `system` of Anthropic's API: a text, or a list of blocks."""
    if memoryview(system)[0] != _LIST:
        return [_shown(system, whole=False)]
    try:
        if bounded is not None:
            bounded.parts(system, bounded.limits.max_content_parts)
    except OverLimit:
        return [system]
    return _render_content(system, is_system=True, whole=True)


def _shown(text: Raw, *, whole: bool) -> Raw | bytes:
    return shown_system_text(text, whole=whole) if memoryview(text)[0] == _QUOTE else text


def rendered(
    messages: Sequence[Message], bounded: Bounded | None = None, is_anthropic: bool = False
) -> list[bytes | Raw]:
    """The rendered messages, about 0.4 us each. `is_anthropic`: see `Endpoint`.

    Raises OverLimit if their contents have more parts than `bounded` allows.
    """
    remaining_parts = sys.maxsize if bounded is None else bounded.limits.max_content_parts
    parts: list[bytes | Raw] = []
    add = parts.append
    for role, content, *others in map(astuple, messages):
        add(b"\x1e")
        if role is not UNSET:
            add(role)
        is_plain = others == _NO_OTHER_FIELDS
        if not is_plain:
            parts += [value for value in others[:3] if value is not UNSET]
        if content is not UNSET:
            if memoryview(content)[0] == _LIST:
                if bounded is not None and len(memoryview(content)) > remaining_parts:
                    bounded.parts(content, remaining_parts)
                content_parts = _render_content(
                    content, role == _SYSTEM, is_anthropic, bounded, remaining_parts
                )
                remaining_parts -= len(content_parts)
                parts += content_parts
            elif role == _SYSTEM:
                add(_shown(content, whole=is_anthropic))
            else:
                add(content)
        if not is_plain:
            parts += [value for value in others[3:] if value is not UNSET]
    return parts


def _render_content(
    content: Raw,
    is_system: bool,
    whole: bool,
    bounded: Bounded | None = None,
    remaining_parts: int = sys.maxsize,
    *,
    is_result: bool = False,
) -> list[bytes | Raw]:
    """The rendered parts of a content list: text as written, large other parts as hashes.

    `whole`: see `shown_system_text`. `is_result`: it is the content of a tool's result, which has no further
    result inside. Raises OverLimit if a tool's result has more than `remaining_parts` parts.
    """
    try:
        items = _decode_items(content)
    except UNREADABLE:
        return [content]
    parts: list[bytes | Raw] = []
    for content_part in items:
        read: _ContentPart | None = None
        try:
            read = _decode_part(content_part)
            text = read.text
        except UNREADABLE:
            text = content_part if memoryview(content_part)[0] == _QUOTE else UNSET
        if text is not UNSET and memoryview(text)[0] == _QUOTE:
            parts.append(shown_system_text(text, whole=whole) if is_system else text)
            continue
        seen = without_marks(content_part)
        view = memoryview(seen)
        if len(view) > _MAX_PLAIN_PART_BYTES and read is not None and _is_of_a_tool(read) and not is_result:
            result = read.content
            if result is UNSET or memoryview(result)[0] != _LIST:
                parts.append(seen)
                continue
            # Its parts may be images.
            if bounded is not None and len(memoryview(result)) > remaining_parts:
                bounded.parts(result, remaining_parts)
            parts += [value for value in (read.type, read.tool_use_id) if value is not UNSET]
            parts += _render_content(result, is_system=False, whole=False, is_result=True)
            continue
        shown = xxh3_128_digest(seen) if len(view) > _MAX_PLAIN_PART_BYTES else seen
        if _is_media(view[:_MEDIA_HEAD_BYTES]) or _is_media(view[-_MEDIA_HEAD_BYTES:]):
            shown = b"".join((MEDIA_MARK, shown))
        parts.append(shown)
    return parts


def _is_of_a_tool(content_part: _ContentPart) -> bool:
    kind = content_part.type
    return kind is not UNSET and bytes(memoryview(kind)[: len(_TOOL_PARTS[0]) + 1]) in _TOOL_PARTS


def _read_prompt_field(raw: Raw, bounded: Bounded | None, name: str) -> PromptSteps:
    """The prompts in a field that is a text, a list of texts, token ids, or a list of token-id lists."""
    data = bytes(raw)
    if not data.startswith(b"["):
        return (Prompt(data),)
    if len(data) > SMALL_BYTES:
        return (yield from _read_large_prompt_field(data, bounded or Bounded(), name))
    prompts: tuple[Prompt, ...]
    try:
        return (_token_id_prompt(_decode_ids(raw)),)
    except UNREADABLE:
        pass
    try:
        prompts = tuple(_token_id_prompt(ids) for ids in _decode_id_lists(raw))
    except UNREADABLE:
        prompts = tuple(Prompt(bytes(item)) for item in _decode_items(raw))
    if bounded is not None and len(prompts) > bounded.limits.max_prompts:
        raise bounded.over("max_prompts", "prompts", name)
    return prompts


def _read_large_prompt_field(data: bytes, bounded: Bounded, name: str) -> PromptSteps:
    """Like `_read_prompt_field`, in steps, for a list that is not small."""
    first_byte = data[1:1025].lstrip()[:1]
    if first_byte not in (b"[", b'"', b"{"):
        ids = array("I")
        try:
            yield from bounded.token_ids(data, ids, name)
            return (Prompt(ids.tobytes(), is_token_ids=True),)
        except OverflowError:  # no token ids; the worker reports the error
            return (Prompt(data),)
        except UNREADABLE:
            pass
    items = bounded.prompts(data, name)
    yield
    if first_byte != b"[":
        return tuple(Prompt(bytes(item)) for item in items)
    ids, ends = array("I"), [0]
    try:
        for item in items:
            yield from bounded.token_ids(bytes(item), ids, name)
            ends.append(len(ids))
    except (OverflowError, *UNREADABLE):
        return tuple(Prompt(bytes(item)) for item in items)
    all_ids = memoryview(ids)
    return tuple(Prompt(all_ids[start:end].tobytes(), True) for start, end in pairwise(ends))


def _read_input_field(head: Sequence[bytes | Raw], raw: Raw, bounded: Bounded | None) -> PromptSteps:
    """The prompts in `input`: like `prompt` for embeddings; a text or a list of items for responses."""
    view = memoryview(raw)
    if view[0] != _LIST:
        return (Prompt(b"".join([*head, b'\x1e"user"', raw])),)
    try:
        if len(view) <= SMALL_BYTES or bounded is None:
            items = _decode_messages(raw)
        else:
            items = bounded.messages(raw, "input")
    except UNREADABLE:
        return (yield from _read_prompt_field(raw, bounded, "input"))
    if bounded is not None and len(items) > bounded.limits.max_messages:
        raise bounded.over("max_messages", "items", "input")
    yield
    return (Prompt(b"".join([*head, *rendered(items, bounded)])),)


def _token_id_prompt(ids: list[int]) -> Prompt:
    try:
        return Prompt(array("I", ids).tobytes(), is_token_ids=True)
    except OverflowError:  # no token ids; the worker reports the error
        return Prompt(repr(ids).encode())
