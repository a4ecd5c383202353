"""The bytes of a prompt in the order in which a chat template would see them.

tools, then system or instructions, then messages (or prompt, input, query and documents). Two
requests whose rendered prompts share a beginning share a beginning here, whatever order their JSON
fields have; images and audio count by their hash, so that a picture is a few bytes and not its
base64. Nothing here is the engine's own text: `kvaware` needs exact tokens, `prefixaware` does not.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import astuple
from xxhash import xxh3_128_digest

from kvroute.openai.bounded import SMALL_BYTES, UNREADABLE, Bounded, Message, decode_body, head_of

_AFTER_MESSAGES = ("query", "text_1", "queries", "text_2", "suffix")
_NOTHING_ELSE = [UNSET] * 8
_LIST, _QUOTE = b'["'
_MANY_MESSAGES = 8
_FEW_BYTES = 1024
"""A content part above this is taken for media or a file and counted by its hash unless it is text."""


class _Part(Struct, gc=False):
    text: Raw | UnsetType = UNSET


_first = itemgetter(0)
_view: Callable[[Any], Any] = memoryview
_decode_messages = msgspec.json.Decoder(list[Message]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_part = msgspec.json.Decoder(_Part).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_id_lists = msgspec.json.Decoder(list[list[int]]).decode


class Prompt(NamedTuple):
    """One prompt as bytes. `is_token_ids`: 4 bytes (little-endian uint32) a token, exactly."""

    data: bytes
    is_token_ids: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)

    def after(self, begin: int) -> bytes:
        """What begins there."""
        return self.data[begin:]


class PromptPrefix(Struct, eq=False, weakref=True):
    """What is known of bodies that begin alike, up to the end of one of their messages.

    Their first message begins at `opened`, the next one at `end`; `head` is what the prompt has before the
    messages. Of the prompt up to there the first `whole_bytes` are not kept, and `rest` has the others.
    `notes` are those of who reads the prompt, under keys of theirs. Mutable: they are added, and forgotten
    with it.
    """

    opened: int
    end: int
    head: bytes
    rest: bytes
    whole_bytes: int = 0
    notes: dict[int, Any] = {}
    messages: int = 0
    """How many there are up to `end`."""


class SeenPrompt(Struct, eq=False):
    """The prompt of a chat whose beginning came before: `tail` is what follows the beginning's
    `whole_bytes`. It is also the beginning of what may come, where there is `becomes`."""

    body: bytes
    beginning: PromptPrefix
    tail: bytes
    becomes: PromptPrefix | None = None
    is_token_ids: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.beginning.whole_bytes + len(self.tail)

    def after(self, begin: int) -> bytes:
        """What begins there."""
        skipped = self.beginning.whole_bytes
        return self.tail[begin - skipped :] if begin >= skipped else self.data[begin:]

    @property
    def data(self) -> bytes:
        """All of it, made from the body as if nothing of it had been seen."""
        if not self.beginning.whole_bytes:
            return self.tail
        try:
            decoded = decode_body(self.body)
        except UNREADABLE:  # was readable from a place with more stack left: nested as deeply as can be
            return self.body
        return b"".join([*head_of(decoded), *rendered(cast("list[Message]", decoded.messages))])


AnyPrompt: TypeAlias = Prompt | SeenPrompt


PromptSteps: TypeAlias = Generator[None, None, tuple[Prompt, ...]]


def read_prompts(head: Sequence[Raw], fields: Mapping[str, Raw], bounded: Bounded | None) -> PromptSteps:
    if "messages" in fields:
        return (Prompt(b"".join([*head, fields["messages"]])),)
    if "prompt" in fields:
        return (yield from _listed(fields["prompt"], bounded, "prompt"))
    if "input" in fields:
        return (yield from _inputs(head, fields["input"], bounded))
    rest = [fields[name] for name in _AFTER_MESSAGES if name in fields]
    return (Prompt(b"".join([*rest, *head])),) if rest else ()


def rendered(messages: Sequence[Message], bounded: Bounded | None = None) -> list[bytes | Raw]:
    """What templates render of the messages, about 0.4 us each; less where they all are role and text.

    Raises OverLimit where their contents have more parts than is `bounded`.
    """
    left = sys.maxsize if bounded is None else bounded.limits.max_content_parts
    fields = list(map(astuple, messages))
    if len(fields) >= _MANY_MESSAGES and (plain := _all_plain(fields)) is not None:
        return plain
    parts: list[bytes | Raw] = []
    add = parts.append
    for role, content, *others in fields:
        add(b"\x1e")
        if role is not UNSET:
            add(role)
        is_plain = others == _NOTHING_ELSE
        if not is_plain:
            parts += [value for value in others[:3] if value is not UNSET]
        if content is not UNSET:
            if memoryview(content)[0] == _LIST:
                if bounded is not None and len(memoryview(content)) > left:
                    bounded.parts(content, left)
                found = _content(content)
                left -= len(found)
                parts += found
            else:
                add(content)
        if not is_plain:
            parts += [value for value in others[3:] if value is not UNSET]
    return parts


def _all_plain(fields: list[tuple[Any, ...]]) -> list[bytes | Raw] | None:
    """As `rendered`, by loops that are not Python's; None unless every message is a role and a content that
    is no list."""
    count = len(fields)
    roles, contents, *others = zip(*fields, strict=True)
    if others.count((UNSET,) * count) != len(others) or UNSET in roles or UNSET in contents:
        return None
    if _LIST in map(_first, map(_view, contents)):  # a copy of each would cost as much as the rest
        return None
    parts: list[bytes | Raw] = [b"\x1e"] * (3 * count)
    parts[1::3] = roles
    parts[2::3] = contents
    return parts


def _content(content: Raw) -> list[bytes | Raw]:
    """Of a list of parts the text, as it is written, and anything large by its hash."""
    try:
        items = _decode_items(content)
    except UNREADABLE:
        return [content]
    parts: list[bytes | Raw] = []
    for part in items:
        try:
            text = _decode_part(part).text
        except UNREADABLE:
            text = UNSET
        if text is not UNSET and memoryview(text)[0] == _QUOTE:
            parts.append(text)
        elif len(memoryview(part)) > _FEW_BYTES:
            parts.append(xxh3_128_digest(part))
        else:
            parts.append(part)
    return parts


def _listed(raw: Raw, bounded: Bounded | None, name: str) -> PromptSteps:
    """`prompt` of completions: a text, a list of texts, token ids, or a list of token-id lists."""
    data = bytes(raw)
    if not data.startswith(b"["):
        return (Prompt(data),)
    if len(data) > SMALL_BYTES:
        return (yield from _many_listed(data, bounded or Bounded(), name))
    found: tuple[Prompt, ...]
    try:
        return (_ids(_decode_ids(raw)),)
    except UNREADABLE:
        pass
    try:
        found = tuple(_ids(ids) for ids in _decode_id_lists(raw))
    except UNREADABLE:
        found = tuple(Prompt(bytes(item)) for item in _decode_items(raw))
    if bounded is not None and len(found) > bounded.limits.max_prompts:
        raise bounded.over("max_prompts", "prompts", name)
    return found


def _many_listed(data: bytes, bounded: Bounded, name: str) -> PromptSteps:
    """The same of a list that is not small."""
    first = data[1:1025].lstrip()[:1]
    if first not in (b"[", b'"', b"{"):
        ids = array("I")
        try:
            yield from bounded.token_ids(data, ids, name)
            return (Prompt(ids.tobytes(), is_token_ids=True),)
        except OverflowError:  # not token ids after all; the worker will say so
            return (Prompt(data),)
        except UNREADABLE:
            pass
    items = bounded.prompts(data, name)
    yield
    if first != b"[":
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


def _inputs(head: Sequence[Raw], raw: Raw, bounded: Bounded | None) -> PromptSteps:
    """`input`: of embeddings as `prompt`; of responses a text or a list of items that are one prompt."""
    view = memoryview(raw)
    if view[0] != _LIST:
        return (Prompt(b"".join([*head, b'\x1e"user"', raw])),)
    try:
        if len(view) <= SMALL_BYTES or bounded is None:
            items = _decode_messages(raw)
        else:
            items = bounded.messages(raw, "input")
    except UNREADABLE:
        return (yield from _listed(raw, bounded, "input"))
    if bounded is not None and len(items) > bounded.limits.max_messages:
        raise bounded.over("max_messages", "items", "input")
    yield
    return (Prompt(b"".join([*head, *rendered(items, bounded)])),)


def _ids(ids: list[int]) -> Prompt:
    try:
        return Prompt(array("I", ids).tobytes(), is_token_ids=True)
    except OverflowError:  # not token ids after all; the worker will say so
        return Prompt(repr(ids).encode())
