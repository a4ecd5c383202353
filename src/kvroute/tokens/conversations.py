"""The next turn of a chat for the price of what is new: no JSON, no template, no tokens of what is known.

A chat completion's body begins, byte for byte, with the body of the turn before up to the end of its last
message. Where that is so, and the chat template renders message by message (`tokens.separable`), and all
else that the template sees is the same, the text begins with the known text; and so do its ids, up to the
last special token that nothing behind it could change (`tokens.segments`).
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import ref

import msgspec
from msgspec import Raw, Struct
from xxhash import xxh3_64_intdigest

from kvroute.blocks.known_prompts import PrefixIds
from kvroute.lru import Lru
from kvroute.openai.bounded import UNREADABLE
from kvroute.openai.prompt import PromptPrefix
from kvroute.openai.request import InferenceRequest
from kvroute.tokens.chat import Chat, validated

CHAT_PATH: Final = "/v1/chat/completions"
"""Whose bodies are remembered."""

_WINDOW_BYTES: Final = 8192
"""In which the last messages' ends are looked for; then in four times as much before it, and so on."""
_SEARCHED_BYTES: Final = 524_288
"""Of a body's end. What adds more to a chat is tokenized as a whole."""
_MARKED_BYTES: Final = 1024
_TOKEN_BYTES: Final = 4.5
"""A token's id, and its part of a key."""
_OBJECTS: Final = 5
"""So many times as large as in bytes are tools and other arguments as objects, with their bytes."""
_OVERHEAD_BYTES: Final = 1000
_message_ends = re.compile(rb"}[ \t\r\n]*(?=]|,[ \t\r\n]*{)").finditer
"""Where messages may end. It may be something else that ends there."""
_ARRAY: Final = b'{"\\u0000":'
"""Stands before what remains of `messages`, under a name that is nobody's."""
_NAME: Final = b'"\\u0000"'
_BLANK: Final = b" \t\r\n"
_NOTE: Final = -1
"""Under which a beginning has the mark of the last chat that was kept with it."""

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode = msgspec.json.Decoder().decode
_decode_objects = msgspec.json.Decoder(list[dict[str, Any]]).decode
Mark: TypeAlias = tuple[int, int]
"""Where in the body its last message ends, and a digest of what is before: where to look, which proves
nothing."""


class CachedConversation(Struct, frozen=True, eq=False, gc=False):
    """A chat that was tokenized. `body` is what its body is up to the end of its last message, in parts;
    `after` is what follows. `before` are the fields in front of its messages; `chat` is what else the
    template saw, without messages, and `signature` the same in bytes; `head` is the length of its text before
    the messages, `tail` the one behind. `ids` are those of the text before `carry`, which ends with the last
    message's text. `beginning` is what `openai.seen` knew the body by, if it did, for as long as it does."""

    mark: Mark
    body: tuple[bytes, ...]
    after: bytes
    before: Mapping[str, Any]
    chat: Chat
    signature: bytes
    head: int
    tail: str
    carry: str
    ids: PrefixIds
    beginning: ref[PromptPrefix] | None = None

    __repr__ = object.__repr__  # prompts are in no log

    @property
    def end(self) -> int:
        """Bytes of `body`."""
        return self.mark[0]

    @property
    def size(self) -> int:
        return (
            self.end
            + len(self.after)
            + _OBJECTS * len(self.signature)
            + len(self.tail)
            + sys.getsizeof(self.carry)
            + int(self.ids.size * _TOKEN_BYTES)
            + _OVERHEAD_BYTES
        )

    def begins(self, body: bytes, beginning: PromptPrefix | None = None) -> bool:
        """Whether it is what `body` begins with. Where both are known by the same `beginning`, only what is
        behind that is compared: that much of a long body is in no cache any more."""
        own, start, place = self.beginning, 0, 0
        if beginning is not None and own is not None and own() is beginning:
            start = beginning.end
        for part in self.body:
            behind = place + len(part)
            if start <= place:
                if not body.startswith(part, place):
                    return False
            elif start < behind and body[start:behind] != part[start - place :]:
                return False
            place = behind
        return True

    def body_to(self, end: int, body: bytes) -> tuple[bytes, ...]:
        """The first `end` bytes of `body`, which begins with this one's, in parts. All but the last few parts
        are this one's own: each has at least twice as many bytes as the next."""
        parts, start = list(self.body), self.end
        while parts and len(parts[-1]) < 2 * (end - start):
            start -= len(parts.pop())
        return (*parts, body[start:end])


class Continued(NamedTuple):
    """What a body adds to a chat. `fields` are those of the whole body, but that `messages` are the new ones
    only; `mark` is where it would be looked for."""

    known: CachedConversation
    fields: dict[str, Any]
    mark: Mark


class Conversations:
    """Chats by where they would be looked for, the least recently used forgotten first. Thread-safe.

    Mutable: `keep` adds, `find` moves; at most `max_bytes` are kept. Bodies below `least_bytes` are not: they
    cost less than remembering them.
    """

    def __init__(self, max_bytes: int, *, least_bytes: int = 4096) -> None:
        self.least_bytes = least_bytes
        self._known = Lru[Mark, CachedConversation](max_bytes, lambda _, known: known.size)
        self._ends: dict[int, int] = {}
        """How many of them end there."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def bytes(self) -> int:
        return self._known.weight

    def find(self, request: InferenceRequest) -> CachedConversation | None:
        """The chat that the request continues, if it is known; its very body, up to the last message, is
        what the request's begins with: by itself, or as surely as `openai.seen` knows it."""
        body, ends = request.body, self._ends
        if not ends or len(body) < self.least_bytes or request.endpoint.path != CHAT_PATH:
            return None
        if request.seen is not None:
            noted: Mark | None = request.seen.beginning.notes.get(_NOTE)
            if noted is not None and (known := self._at(noted, request)) is not None:
                return known
        for end in _ends(body):
            if end in ends and (known := self._at(_mark(body, end), request)) is not None:
                return known
        return None

    def _at(self, mark: Mark, request: InferenceRequest) -> CachedConversation | None:
        """The chat that would be looked for there, if it is what the request's begins with."""
        known, seen = self._known.peek(mark), request.seen
        if known is None or not known.begins(request.body, None if seen is None else seen.beginning):
            return None
        with self._lock:
            if self._known.peek(mark) is known:
                self._known.get(mark)  # marks it as used
        return known

    def keep(self, known: CachedConversation, instead: CachedConversation | None = None) -> None:
        """Remember a chat, `instead` of the one that it continues."""
        if known.size > self._known.max_weight:
            return
        with self._lock:
            if instead is not None and self._known.peek(instead.mark) is instead:
                self._forget(instead.mark)
            self._forget(known.mark)
            self._ends[known.end] = self._ends.get(known.end, 0) + 1
            for _, evicted in self._known.put(known.mark, known):
                self._uncount(evicted)
        beginning = None if known.beginning is None else known.beginning()
        if beginning is not None:
            beginning.notes[_NOTE] = known.mark

    def _forget(self, mark: Mark) -> None:
        known = self._known.pop(mark)
        if known is not None:
            self._uncount(known)

    def _uncount(self, known: CachedConversation) -> None:
        ends = self._ends
        if ends[known.end] == 1:
            del ends[known.end]
        else:
            ends[known.end] -= 1


def with_more_messages(request: InferenceRequest, known: CachedConversation) -> tuple[Chat, Mark] | None:
    """What the request adds to a chat that it was found to continue, and where it would be looked for, if it
    adds messages and nothing else has changed; else None. Raises Inexact."""
    body, after, end = request.body, known.after, known.end
    stop = len(body) - len(after)
    if body[end : end + 1] != b"," or stop <= end or not body.endswith(after):
        return None
    try:
        # What can stand between brackets here can also stand where it does: behind a message, before `after`.
        messages = _decode_objects(b"[" + body[end + 1 : stop] + b"]")
    except UNREADABLE:
        return None
    if not messages:
        return None
    said = known.chat
    chat = Chat([validated(message) for message in messages], said.tools, said.kwargs)
    return chat, _mark(body, _trimmed(body, stop))


def continued(request: InferenceRequest, known: CachedConversation) -> Continued | None:
    """What the request adds to a chat that it was found to continue; None where that is in doubt."""
    body = request.body
    rest = body[known.end :].lstrip(_BLANK)
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
    end = _trimmed(body, len(body) - len(rest) + len(bytes(raw["\0"])) - 2)
    return Continued(known, {**known.before, **fields}, _mark(body, end))


class Opening(NamedTuple):
    """Of a body that continues nothing known: the fields before `messages`, and as in `Continued`."""

    before: Mapping[str, Any]
    mark: Mark


def opening(request: InferenceRequest) -> Opening | None:
    """None where it is in doubt what stands where."""
    fields, body = request.fields, request.body
    if fields is None or "messages" not in fields:
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
    return Opening(before, _mark(body, _trimmed(body, start + len(array) - 1)))


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
    while end > 0:
        window = body[max(0, end - _WINDOW_BYTES) : end]
        blanks = len(window) - len(window.rstrip(_BLANK))
        end -= blanks
        if blanks < len(window):
            break
    return end


def _ends(body: bytes) -> Iterator[int]:
    """Where in it messages may end, the last ones first."""
    stop, size = len(body), _WINDOW_BYTES
    least = stop - _SEARCHED_BYTES
    while stop > max(0, least):
        start = max(0, stop - size)
        # Blanks, a comma and more may stand behind `stop`.
        found = [match.start() for match in _message_ends(body, start, stop + _WINDOW_BYTES)]
        for end in reversed(found):
            if end < stop:
                yield end + 1
        stop = start
        size *= 4


def _mark(body: bytes, end: int) -> Mark:
    return end, xxh3_64_intdigest(body[max(0, end - _MARKED_BYTES) : end])
