"""The bytes of a prompt in the order in which a chat template would see them.

tools, then system or instructions, then messages (or prompt, input, query and documents). Two
requests whose rendered prompts share a beginning share a beginning here, whatever order their JSON
fields have; images and audio count by their hash, so that a picture is a few bytes and not its
base64. Nothing here is the engine's own text: `kvaware` needs exact tokens, `prefixaware` does not.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import astuple
from xxhash import xxh3_128_digest

from kvroute.openai.json import UNREADABLE
from kvroute.openai.request import InferenceRequest, Message, decode_body, head_of

_AFTER_MESSAGES = ("query", "text_1", "queries", "text_2", "suffix")
_NOTHING_ELSE = [UNSET] * 8
_LIST = ord("[")
_MANY_MESSAGES = 8
_FEW_BYTES = 1024
"""A content part above this is taken for media or a file and counted by its hash unless it is text."""


class _Part(Struct):
    text: str | UnsetType = UNSET


_new = tuple.__new__
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


class Beginning(Struct, eq=False, weakref=True):
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


class SeenPrompt(Struct, eq=False):
    """The prompt of a chat whose beginning came before: `tail` is what follows the beginning's
    `whole_bytes`. It is also the beginning of what may come, where there is `becomes`."""

    body: bytes
    beginning: Beginning
    tail: bytes
    becomes: Beginning | None = None
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


def prompts_of(request: InferenceRequest) -> tuple[AnyPrompt, ...]:
    """The prompts that a worker would compute for this request, most often one; none if they cannot be read.

    About 40 us for a 256 KB chat of 100 messages.
    """
    if not request.is_read or not request.endpoint.fills_kv_cache:
        return ()
    if request.seen is not None:
        return (request.seen,)
    head, messages = request.head, request.read_messages  # all there are, where nothing was seen
    try:
        if messages is not None:
            parts = rendered(messages)
            if head:
                parts[:0] = head
            # As `Prompt(...)`, without its Python-level constructor.
            return (_new(Prompt, (b"".join(parts), False)),)
        return _prompts(head, request.fields or {})
    except UNREADABLE:
        return ()


def _prompts(head: Sequence[Raw], fields: Mapping[str, Raw]) -> tuple[Prompt, ...]:
    if "messages" in fields:
        return (Prompt(b"".join([*head, fields["messages"]])),)
    if "prompt" in fields:
        return _listed(fields["prompt"])
    if "input" in fields:
        return _inputs(head, fields["input"])
    rest = [fields[name] for name in _AFTER_MESSAGES if name in fields]
    return (Prompt(b"".join([*rest, *head])),) if rest else ()


def cache_salt_of(request: InferenceRequest) -> str:
    """The `cache_salt` that keeps this request's blocks apart, "" for none."""
    raw = request.cache_salt
    if raw is None or bytes(raw) == b"null":
        return ""
    return bytes(raw).decode("utf-8", "replace").strip('"')


def rendered(messages: Sequence[Message]) -> list[bytes | Raw]:
    """What templates render of the messages, about 0.4 us each; less where they all are role and text."""
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
                parts += _content(bytes(content))
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


def _content(data: bytes) -> Iterator[bytes]:
    """Of a list of parts the text, and anything large by its hash."""
    try:
        parts = _decode_items(data)
    except UNREADABLE:
        yield data
        return
    for item in parts:
        part = bytes(item)
        try:
            text = _decode_part(part).text
        except UNREADABLE:
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
    except UNREADABLE:
        pass
    try:
        return tuple(_ids(ids) for ids in _decode_id_lists(raw))
    except UNREADABLE:
        pass
    return tuple(Prompt(bytes(item)) for item in _decode_items(raw))


def _inputs(head: Sequence[Raw], raw: Raw) -> tuple[Prompt, ...]:
    """`input`: of embeddings as `prompt`; of responses a text or a list of items that are one prompt."""
    data = bytes(raw)
    if data.startswith(b"["):
        try:
            items = _decode_messages(raw)
        except UNREADABLE:
            return _listed(raw)
        return (Prompt(b"".join([*head, *rendered(items)])),)
    return (Prompt(b"".join([*head, b'\x1e"user"', data])),)


def _ids(ids: list[int]) -> Prompt:
    try:
        return Prompt(array("I", ids).tobytes(), is_token_ids=True)
    except OverflowError:  # not token ids after all; the worker will say so
        return Prompt(repr(ids).encode())
