"""The next turn of a chat for the price of what is new: no JSON, no template, no tokens of what is known.

A chat completion's body begins, byte for byte, with the body of the turn before up to the end of its last
message. Where that is so, and the chat template renders message by message (`tokens.separable`), and all
else that the template sees is the same, the text begins with the known text; and so do its ids, up to the
last special token that nothing behind it could change (`tokens.segments`).
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Raw
from xxhash import xxh3_64_intdigest

from kvroute.openai.json import UNREADABLE
from kvroute.openai.request import InferenceRequest, Message
from kvroute.tokens.chat import Chat
from kvroute.tokens.reading import TokenIds

_LOOKED_AT: Final = 16
"""Messages that a turn may add and still be found to continue the one before."""
_OVERHEAD_BYTES: Final = 600
_ARRAY: Final = b'{"\\u0000":'
"""Stands before what remains of `messages`, under a name that is nobody's."""
_NAME: Final = b'"\\u0000"'
_BLANK: Final = b" \t\r\n"

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode = msgspec.json.Decoder().decode
Mark: TypeAlias = tuple[int, int]
"""How many messages, and a digest of the last two: where to look, which proves nothing."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Known:
    """A chat that was tokenized. `body` ends behind its last message, `before` are the fields in front of
    its messages; `signature` is what else the template saw, `head` and `tail` the lengths of its texts around
    the messages. `ids` are those of the text before `carry`, which ends with the last message's text."""

    mark: Mark
    body: bytes
    before: Mapping[str, Any]
    signature: bytes
    head: int
    tail: int
    carry: str
    ids: TokenIds

    @property
    def size(self) -> int:
        return (
            len(self.body)
            + len(self.signature)
            + sys.getsizeof(self.carry)
            + len(self.ids) * self.ids.itemsize
            + _OVERHEAD_BYTES
        )


class Continued(NamedTuple):
    """What a body adds to a chat. `fields` are those of the whole body, but that `messages` are the new ones
    only; `end` is where in the body its last message ends, `mark` where it would be looked for."""

    known: Known
    fields: dict[str, Any]
    mark: Mark
    end: int


class Conversations:
    """Chats by where they would be looked for, the least recently used forgotten first. Thread-safe.

    Mutable: `keep` adds, `find` moves; at most `max_bytes` are kept. Bodies below `least_bytes` are not: they
    cost less than remembering them.
    """

    def __init__(self, max_bytes: int, *, least_bytes: int = 4096) -> None:
        self.least_bytes = least_bytes
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: dict[Mark, Known] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def bytes(self) -> int:
        return self._bytes

    def find(self, request: InferenceRequest) -> Known | None:
        """The chat that the request continues, if it is known; its very body, up to the last message, is
        what the request's begins with."""
        messages, body = request.messages, request.body
        if not messages or not self._known or len(body) < self.least_bytes:
            return None
        for count in range(len(messages), max(0, len(messages) - _LOOKED_AT), -1):
            mark = _mark(messages, count)
            known = self._known.get(mark)
            if known is not None and body.startswith(known.body):
                with self._lock:
                    if self._known.get(mark) is known:
                        self._known[mark] = self._known.pop(mark)
                return known
        return None

    def keep(self, known: Known, instead: Known | None = None) -> None:
        """Remember a chat, `instead` of the one that it continues."""
        if known.size > self._max_bytes:
            return
        with self._lock:
            if instead is not None and self._known.get(instead.mark) is instead:
                self._bytes -= self._known.pop(instead.mark).size
            if (before := self._known.pop(known.mark, None)) is not None:
                self._bytes -= before.size
            self._known[known.mark] = known
            self._bytes += known.size
            while self._bytes > self._max_bytes:
                oldest = next(iter(self._known))
                self._bytes -= self._known.pop(oldest).size


def continued(request: InferenceRequest, known: Known) -> Continued | None:
    """What the request adds to a chat that it was found to continue; None where that is in doubt."""
    body, messages = request.body, request.messages
    assert messages is not None
    rest = body[len(known.body) :].lstrip(_BLANK)
    if rest.startswith(b","):
        rest = rest[1:]
    elif not rest.startswith(b"]"):
        return None
    if _NAME in rest:
        return None
    try:
        raw = _decode_fields(_ARRAY + b"[" + rest)
        fields = {name: _decode(value) for name, value in raw.items()}
    except UNREADABLE:
        return None
    if "messages" in fields:  # twice: the last one counts
        return None
    fields["messages"] = fields.pop("\0")
    end = len(body) - len(rest) + len(bytes(raw["\0"])) - 2
    return Continued(known, {**known.before, **fields}, _mark(messages, len(messages)), _trimmed(body, end))


class Opening(NamedTuple):
    """Of a body that continues nothing known: the fields before `messages`, and as in `Continued`."""

    before: Mapping[str, Any]
    mark: Mark
    end: int


def opening(request: InferenceRequest) -> Opening | None:
    """None where it is in doubt what stands where."""
    fields, messages, body = request.fields, request.messages, request.body
    if fields is None or not messages:
        return None
    array = bytes(fields["messages"])
    start = body.find(array)
    if start < 0 or body.find(array, start + 1) >= 0:
        return None
    head = body[:start] + b"null}"
    try:
        pairs = json.loads(head, object_pairs_hook=list)
        before = _decode(head)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, list) or [name for name, _ in pairs].count("messages") != 1:
        return None
    if before.pop("messages", 0) is not None:
        return None
    return Opening(before, _mark(messages, len(messages)), _trimmed(body, start + len(array) - 1))


def signature_of(chat: Chat) -> bytes | None:
    """Equal for chats whose template sees the same beside the messages; None for chats that are not simply
    rendered from the first message to the last."""
    if chat.add_special_tokens or chat.truncate_to is not None or chat.kwargs.get("continue_final_message"):
        return None
    try:
        return msgspec.json.encode((chat.tools, chat.kwargs))
    except (TypeError, ValueError, OverflowError):  # a number that is too large
        return None


def _trimmed(body: bytes, end: int) -> int:
    """`end`, or where the blanks before it begin."""
    while body[end - 1] in _BLANK:
        end -= 1
    return end


def _mark(messages: Sequence[Message], count: int) -> Mark:
    digest = _digest(messages[count - 2], 0) if count > 1 else 0
    return count, _digest(messages[count - 1], digest)


def _digest(message: Message, seed: int) -> int:
    content = message.content if message.content is not UNSET else message.tool_calls
    return seed if content is UNSET else xxh3_64_intdigest(content, seed)
