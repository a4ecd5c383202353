"""A cache of tokenized chats, so that only the new messages of a chat's next turn are tokenized.

Usually the body of a chat's next turn begins, byte for byte, with the body of the turn before, up to the end
of its last message. If it does, if the chat template renders message by message (`tokens.template_analysis`),
and if all other inputs of the template are equal, then the rendered text begins with the old text. The token
ids begin with the old ids, up to the last special token that later text cannot change (`tokens.encoders`).
Chats with other templates, and those of gpt-oss, have a `render_state` (`tokens.windows`, `tokens.harmony`).
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias
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
"""The endpoint whose chats are cached."""

_WINDOW_BYTES: Final = 8192
"""The search for message ends starts in this last part of a body; each earlier part is 4 times as large."""
_SEARCHED_BYTES: Final = 524_288
"""The search covers this last part of a body. A body with more new bytes is tokenized completely."""
_MARKED_BYTES: Final = 1024
"""Number of bytes in the digest of a `Mark`."""
_TOKEN_BYTES: Final = 4.5
"""Memory of one token: its id, and its share of a block key."""
_OBJECT_FACTOR: Final = 5
"""Estimated memory of parsed tools and other arguments: 5 times their JSON size."""
_OVERHEAD_BYTES: Final = 1000
_message_ends = re.compile(rb"}[ \t\r\n]*(?=]|,[ \t\r\n]*{)").finditer
"""Finds possible ends of messages; some of the matches are ends of other objects."""
_ARRAY: Final = b'{"\\u0000":'
"""Put before the rest of `messages`, so that the rest decodes under a name that no client uses."""
_NAME: Final = b'"\\u0000"'
_BLANK: Final = b" \t\r\n"
_NOTE: Final = -1
"""The key in `PromptPrefix.notes` for the mark of the last chat that was cached with this prefix."""

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode = msgspec.json.Decoder().decode
_decode_objects = msgspec.json.Decoder(list[dict[str, Any]]).decode
Mark: TypeAlias = tuple[int, int]
"""The key of a cached chat: where its last message ends in the body, and a digest of the 1,024 bytes before.

Two chats may have equal marks, so a found chat's bytes are compared."""


class ContinuationState(Protocol):
    """What a kind of chat needs to be continued, besides `CachedConversation`'s own fields."""

    @property
    def size(self) -> int:
        """Estimated memory, in bytes."""


class CachedConversation(Struct, frozen=True, eq=False, gc=False):
    """A tokenized chat that a later request may continue."""

    mark: Mark
    body: tuple[bytes, ...]
    """The request's body up to the end of its last message, in parts."""
    after: bytes
    """The rest of the body."""
    leading_fields: Mapping[str, Any]
    """The fields before `messages` in the body."""
    chat: Chat
    """All inputs of the template except the messages."""
    signature: bytes
    """The same inputs as JSON (`signature_of`)."""
    head: int
    """Length of the rendered text before the messages."""
    tail: str
    """The rendered text after the messages."""
    carry: str
    """The end of the messages' rendered text, whose token ids may change with the next message."""
    ids: PrefixIds
    """Token ids of the rendered text before `carry`."""
    beginning: ref[PromptPrefix] | None = None
    """The prefix that `openai.prefix_cache` recognised in the body, while that cache has it."""
    render_state: ContinuationState | None = None
    """For chats that are not rendered message by message: then `ids` are those before the text in it."""

    __repr__ = object.__repr__  # keeps prompts out of logs

    @property
    def end(self) -> int:
        """Number of bytes in `body`."""
        return self.mark[0]

    @property
    def size(self) -> int:
        return (
            self.end
            + len(self.after)
            + _OBJECT_FACTOR * len(self.signature)
            + len(self.tail)
            + sys.getsizeof(self.carry)
            + int(self.ids.size * _TOKEN_BYTES)
            + (0 if self.render_state is None else self.render_state.size)
            + _OVERHEAD_BYTES
        )

    def is_prefix_of(self, body: bytes, beginning: PromptPrefix | None = None) -> bool:
        """Whether `body` begins with this chat's body up to the end of its last message.

        `beginning` is the prefix that `openai.prefix_cache` has recognised in `body`.
        """
        own_beginning, start, offset = self.beginning, 0, 0
        if beginning is not None and own_beginning is not None and own_beginning() is beginning:
            # Both have this prefix. To compare it again would read bytes that have left the CPU's caches.
            start = beginning.end
        for section in self.body:
            section_end = offset + len(section)
            if start <= offset:
                if not body.startswith(section, offset):
                    return False
            elif start < section_end and body[start:section_end] != section[start - offset :]:
                return False
            offset = section_end
        return True

    def body_parts(self, end: int, body: bytes) -> tuple[bytes, ...]:
        """The first `end` bytes of `body` in parts. `body` must begin with this chat's body.

        Reuses this chat's parts except the last few: each part is at least twice as large as the next one.
        """
        parts, start = list(self.body), self.end
        while parts and len(parts[-1]) < 2 * (end - start):
            start -= len(parts.pop())
        return (*parts, body[start:end])


class Continuation(NamedTuple):
    """A body that continues a cached chat."""

    conversation: CachedConversation
    fields: dict[str, Any]
    """The fields of the whole body, with only the new messages in `messages`."""
    mark: Mark
    """The mark of the new body."""


class Conversations:
    """An LRU cache of chats by `Mark`, with at most `max_bytes`. Thread-safe.

    Bodies below `least_bytes` are not cached: to tokenize them costs less. Mutable: `store` adds chats,
    `find` moves them to the end of the LRU order.
    """

    def __init__(self, max_bytes: int, *, least_bytes: int = 4096) -> None:
        self.least_bytes = least_bytes
        self._by_mark = Lru[Mark, CachedConversation](max_bytes, lambda _, conversation: conversation.size)
        self._ends: dict[int, int] = {}
        """End in the body -> number of cached chats with this end."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_mark)

    @property
    def bytes(self) -> int:
        return self._by_mark.weight

    def find(self, request: InferenceRequest) -> CachedConversation | None:
        """The cached chat that the request continues, or None.

        The request's body begins with the cached body. This is checked by comparing bytes, except for a
        prefix that `openai.prefix_cache` has recognised by a 64-bit hash.
        """
        body, ends = request.body, self._ends
        if not ends or len(body) < self.least_bytes or request.endpoint.path != CHAT_PATH:
            return None
        if request.seen is not None:
            noted: Mark | None = request.seen.prefix.notes.get(_NOTE)
            if noted is not None and (cached := self._at(noted, request)) is not None:
                return cached
        for end in _ends(body):
            if end in ends and (cached := self._at(_mark(body, end), request)) is not None:
                return cached
        return None

    def _at(self, mark: Mark, request: InferenceRequest) -> CachedConversation | None:
        """The chat with this mark, if the request continues it."""
        cached, seen = self._by_mark.peek(mark), request.seen
        if cached is None or not cached.is_prefix_of(request.body, None if seen is None else seen.prefix):
            return None
        with self._lock:
            if self._by_mark.peek(mark) is cached:
                self._by_mark.get(mark)  # marks it as used
        return cached

    def store(self, conversation: CachedConversation, replaces: CachedConversation | None = None) -> None:
        """Add a chat; remove the chat that it continues."""
        if conversation.size > self._by_mark.max_weight:
            return
        with self._lock:
            if replaces is not None and self._by_mark.peek(replaces.mark) is replaces:
                self._remove(replaces.mark)
            self._remove(conversation.mark)
            self._ends[conversation.end] = self._ends.get(conversation.end, 0) + 1
            for _, evicted in self._by_mark.put(conversation.mark, conversation):
                self._uncount(evicted)
        beginning = None if conversation.beginning is None else conversation.beginning()
        if beginning is not None:
            beginning.notes[_NOTE] = conversation.mark

    def _remove(self, mark: Mark) -> None:
        removed = self._by_mark.pop(mark)
        if removed is not None:
            self._uncount(removed)

    def _uncount(self, removed: CachedConversation) -> None:
        ends = self._ends
        if ends[removed.end] == 1:
            del ends[removed.end]
        else:
            ends[removed.end] -= 1


def appended_messages(request: InferenceRequest, cached: CachedConversation) -> tuple[Chat, Mark] | None:
    """The new messages of a request that continues `cached`, and the request's mark.

    None if anything besides the messages has changed, or if there are no new messages. Raises Inexact.
    """
    body, after, end = request.body, cached.after, cached.end
    stop = len(body) - len(after)
    if body[end : end + 1] != b"," or stop <= end or not body.endswith(after):
        return None
    try:
        # These bytes follow a message and precede `after`. So if they are a list's content here, they are the
        # rest of `messages` there.
        messages = _decode_objects(b"[" + body[end + 1 : stop] + b"]")
    except UNREADABLE:
        return None
    if not messages:
        return None
    chat = Chat([validated(message) for message in messages], cached.chat.tools, cached.chat.kwargs)
    return chat, _mark(body, _trimmed(body, stop))


def continuation(request: InferenceRequest, cached: CachedConversation) -> Continuation | None:
    """Parse a request that continues `cached`, without its messages; None if the parse is ambiguous."""
    body = request.body
    remainder = body[cached.end :].lstrip(_BLANK)
    if remainder.startswith(b","):
        remainder = remainder[1:]
    elif not remainder.startswith(b"]"):
        return None
    if _NAME in remainder:
        return None
    try:
        raw = _decode_fields(_ARRAY + b"[" + remainder)
        fields = {name: _decode(value) for name, value in raw.items()}
    except UNREADABLE:
        return None
    if "messages" in fields:  # twice: the last one counts
        return None
    fields["messages"] = fields.pop("\0")
    end = _trimmed(body, len(body) - len(remainder) + len(bytes(raw["\0"])) - 2)
    return Continuation(cached, {**cached.leading_fields, **fields}, _mark(body, end))


class NewConversation(NamedTuple):
    """A body that continues no cached chat."""

    leading_fields: Mapping[str, Any]
    """The fields before `messages`."""
    mark: Mark


def new_conversation(request: InferenceRequest) -> NewConversation | None:
    """Locate the messages in a body that continues no cached chat; None if their place is ambiguous."""
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
        leading_fields = _decode(head)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, list) or [name for name, _ in pairs].count("messages") != 1:
        return None
    if leading_fields.pop("messages", 0) is not None:
        return None
    return NewConversation(leading_fields, _mark(body, _trimmed(body, start + len(array) - 1)))


def signature_of(chat: Chat) -> bytes | None:
    """All inputs of the template except the messages, as bytes that can be compared.

    None for chats that are not simply rendered from the first message to the last.
    """
    if chat.add_special_tokens or chat.truncate_to is not None or chat.kwargs.get("continue_final_message"):
        return None
    try:
        return msgspec.json.encode((chat.tools, chat.kwargs))
    except (TypeError, ValueError, OverflowError):  # a number that is too large
        return None


def _trimmed(body: bytes, end: int) -> int:
    """`end` without the blanks before it."""
    while end > 0:
        window = body[max(0, end - _WINDOW_BYTES) : end]
        blanks = len(window) - len(window.rstrip(_BLANK))
        end -= blanks
        if blanks < len(window):
            break
    return end


def _ends(body: bytes) -> Iterator[int]:
    """Possible ends of messages in a body, last one first."""
    stop, size = len(body), _WINDOW_BYTES
    least = stop - _SEARCHED_BYTES
    while stop > max(0, least):
        start = max(0, stop - size)
        # A match may need blanks, a comma and a bracket after `stop`.
        candidates = [match.start() for match in _message_ends(body, start, stop + _WINDOW_BYTES)]
        for end in reversed(candidates):
            if end < stop:
                yield end + 1
        stop = start
        size *= 4


def _mark(body: bytes, end: int) -> Mark:
    return end, xxh3_64_intdigest(body[max(0, end - _MARKED_BYTES) : end])
