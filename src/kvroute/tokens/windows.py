"""Next turns of chats whose template reads more than one message at a time.

Such a template renders the messages again for each turn, and may change earlier text: it drops old
reasoning, moves the tools to the last question, or asks which message is the last. So the text is
rendered and compared, not assumed:

- A short chat is rendered as a whole. Of its text only the part is tokenized again that differs from the
  text of the turn before, from the last special token before the difference on.
- A long chat is rendered without its middle: the first messages up to the first question, and the last
  ones (the *window*). The text of the middle is not rendered again. The ids are those of the whole chat
  if later messages change nothing in the middle. Whether a template is of this kind is found out by
  comparison: for each kind of turn the first ones are also tokenized as a whole, and so is one of `EVERY`
  later ones. A difference ends this for the template (`Proofs`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from kvroute.blocks.known_prompts import PrefixIds
from kvroute.lru import Lru
from kvroute.tokens.chat import Chat, EngineFlags, render_chat
from kvroute.tokens.encoders import Cutter, joined
from kvroute.tokens.options import Inexact
from kvroute.tokens.reading import TokenIds
from kvroute.tokens.template import ChatTemplate

NEEDED: Final = 2
"""Equal results that a kind of turn needs before the middle of a chat is left out."""
EVERY: Final = 64
"""One of this number of turns is compared after that."""
MOST_MESSAGES: Final = 16
"""A window is made smaller when it has more messages."""
_LAST_MESSAGES: Final = 6
_MOST_KINDS: Final = 256
_OVERHEAD_BYTES: Final = 500
_MESSAGE_FACTOR: Final = 2

Messages: TypeAlias = tuple[Any, ...]
EncodeParts = Callable[[Sequence[str]], list[TokenIds]]
Kind: TypeAlias = tuple[Any, ...]
"""What distinguishes turns for which a template may do different things."""


class Window(Struct, frozen=True, eq=False, gc=False):
    """The rendered part of a chat."""

    head: Messages
    """The messages before the middle that is left out; none if nothing is left out."""
    recent: Messages
    """The messages after it."""
    prefix_text: str
    """The rendered text whose ids are known, without the middle's."""
    text: str
    """The rest of the rendered text. It begins with a special token if `prefix_text` is not empty."""
    traits: frozenset[str] = frozenset()
    """`traits_of` all messages of the chat."""

    __repr__ = object.__repr__  # keeps prompts out of logs

    @property
    def is_whole(self) -> bool:
        """Whether no message is left out."""
        return not self.head

    @property
    def size(self) -> int:
        """Estimated memory, in bytes."""
        text = len(self.prefix_text) + len(self.text)
        return _OVERHEAD_BYTES * (1 + len(self.head) + len(self.recent)) + (1 + _MESSAGE_FACTOR) * text


class Turn(Struct, frozen=True, eq=False):
    """The next turn of a chat."""

    window: Window
    prefix: PrefixIds
    """The ids of the text before `window.text`."""
    suffix: TokenIds
    """The ids of `window.text`."""
    kind: Kind | None
    """What must be proved for these ids; None if they are exact anyway."""


class Proofs:
    """Counts, for one template, how often turns without their middle had the ids of the whole chat.

    Thread-safe. Mutable: `count`.
    """

    def __init__(self) -> None:
        self._equal = Lru[Kind, int](_MOST_KINDS)
        self._lock = threading.Lock()
        self.has_failed = False

    def needs(self, kind: Kind | None) -> bool:
        """Whether a turn of this kind must be compared."""
        if kind is None:
            return False
        with self._lock:
            equal = self._equal.get(kind) or 0
            if equal < NEEDED or equal % EVERY == 0:
                return True
            self._equal.put(kind, equal + 1)
            return False

    def count(self, kind: Kind, *, is_equal: bool) -> None:
        with self._lock:
            if is_equal:
                self._equal.put(kind, (self._equal.get(kind) or 0) + 1)
            else:
                self.has_failed = True


class Windows:
    """Renders and tokenizes the next turns of chats with one template. Thread-safe; only `proofs` changes."""

    def __init__(
        self,
        template: ChatTemplate,
        cutter: Cutter,
        encode: EncodeParts,
        proofs: Proofs,
        flags: EngineFlags | None = None,
    ) -> None:
        self._template = template
        self._flags = flags
        self._cutter = cutter
        self._encode = encode
        self.proofs = proofs

    def first_turn(self, chat: Chat, text: str) -> Turn | None:
        """A chat that was rendered as a whole; None if it is too long to be rendered again for each turn."""
        messages = tuple(chat.messages)
        segments = self._cutter.segments(text)
        parts = self._encode(segments)
        window = Window((), messages, "", text, traits_of(messages, self._template.words))
        smaller = self._smaller(chat, window, segments)
        if smaller is None and len(messages) > 2 * MOST_MESSAGES:
            return None
        window, count = smaller or (window, 0)
        return Turn(window, PrefixIds().extended(joined(parts[:count])), joined(parts[count:]), None)

    def next_turn(self, chat: Chat, cached: Window, prefix: PrefixIds) -> Turn | None:
        """The chat with the messages of `chat` added; None if the known text has changed. Raises Inexact."""
        new = tuple(chat.messages)
        if not cached.is_whole and self.proofs.has_failed:
            return None
        recent = cached.recent + new
        try:
            rendered = self._rendered(chat, cached.head + recent)
        except Inexact:
            if cached.is_whole:
                raise
            return None  # the template may miss the messages that were left out
        if not rendered.startswith(cached.prefix_text):
            return None
        text = rendered[len(cached.prefix_text) :]
        if cached.prefix_text and not self._cutter.cuts_at(text, 0):
            return None
        segments = self._cutter.segments(text)
        parts = self._encode(segments)
        traits = traits_of(new, self._template.words)
        kind = None if cached.is_whole else self._kind(chat, cached, new, traits)
        # The next turn will keep at least what this one has kept.
        same, offset, count = _common_prefix(cached.text, text), 0, 0
        while count < len(segments) and offset + len(segments[count]) <= same:
            offset += len(segments[count])
            count += 1
        if count == len(segments) or not self._cutter.cuts_at(text, offset):
            offset = count = 0
        window = Window(
            cached.head, recent, cached.prefix_text + text[:offset], text[offset:], cached.traits | traits
        )
        smaller = self._smaller(chat, window, segments[count:])
        if smaller is not None:
            window, fewer = smaller
            count += fewer
        stable = prefix.extended(joined(parts[:count])) if count else prefix
        return Turn(window, stable, joined(parts[count:]), kind)

    def _rendered(self, chat: Chat, messages: Messages) -> str:
        return render_chat(Chat(list(messages), chat.tools, chat.kwargs), self._template, self._flags)

    def _smaller(self, chat: Chat, window: Window, segments: Sequence[str]) -> tuple[Window, int] | None:
        """A window with fewer messages, and how many segments of the text it leaves out.

        None if it needs none, or cannot have fewer. `segments` are those of `window.text`.
        """
        messages = window.head + window.recent
        if len(messages) <= MOST_MESSAGES or self.proofs.has_failed:
            return None
        head_count = len(window.head) or _after_first_question(messages)
        start = _window_start(messages, head_count, may_split_loop="reasoning" not in window.traits)
        if start is None:
            return None
        kept = messages[:head_count] + messages[start:]
        try:
            rendered = self._rendered(chat, kept)
        except Inexact:
            return None
        same = _common_suffix(window.text, rendered)
        offset = count = 0
        while len(window.text) - offset > same or (not window.prefix_text and not offset):
            if count == len(segments):
                return None
            offset += len(segments[count])
            count += 1
        if not self._cutter.cuts_at(window.text, offset):
            return None
        text = window.text[offset:]
        prefix_text = rendered[: len(rendered) - len(text)]
        return Window(messages[:head_count], messages[start:], prefix_text, text, window.traits), count

    def _kind(self, chat: Chat, cached: Window, new: Messages, traits: frozenset[str]) -> Kind:
        roles = tuple(message.get("role") for message in new[:8])
        options = msgspec.json.encode(chat.kwargs)
        return (
            roles,
            len(new) > len(roles),
            traits,
            cached.traits,
            options,
            chat.tools is None,
            _is_loop(cached),
        )


def traits_of(messages: Sequence[Any], words: Sequence[str]) -> frozenset[str]:
    """What the messages have that a template may look at. `words` are texts that the template looks for."""
    traits: set[str] = set()
    for message in messages:
        role = str(message.get("role"))
        traits.update(f"{role}.{name}" for name in message)
        content = message.get("content")
        traits.add(f"{role}.{type(content).__name__}")
        if message.get("reasoning") or message.get("reasoning_content"):
            traits.add("reasoning")
        if message.get("tool_calls"):
            traits.add("calls")
        texts = (
            [content]
            if isinstance(content, str)
            else [msgspec.json.encode(content).decode("utf-8", "replace")]
        )
        traits.update(word for word in words for text in texts if word in text)
        if any("think" in word.lower() for word in words if word in traits):
            traits.add("reasoning")
    return frozenset(traits)


def _is_loop(window: Window) -> bool:
    """Whether the window has no question of its own."""
    return all(message.get("role") != "user" for message in window.recent)


def _after_first_question(messages: Messages) -> int:
    for index, message in enumerate(messages):
        if message.get("role") == "user":
            return index + 1
    return len(messages)


def _window_start(messages: Messages, head_count: int, *, may_split_loop: bool) -> int | None:
    """Where the window begins: at an answer, so that questions and answers still alternate. None: nowhere.

    The window has the last two questions with what led to them, because a template may render the last
    question otherwise than the others, and drops reasoning from the answers before it. Within a long loop
    of tool calls after the last question it has the last few messages.
    """
    questions = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    start = None
    if len(questions) > 2:
        start = max((index for index in answers if head_count < index < questions[-2]), default=None)
    if (start is None or len(messages) - start > MOST_MESSAGES // 2 + 2) and may_split_loop:
        latest = len(messages) - _LAST_MESSAGES
        last_question = questions[-1] if questions else 0
        loop = max(
            (index for index in answers if max(head_count, last_question) < index <= latest), default=None
        )
        start = loop if loop is not None else start
    return start


def _common_prefix(one: str, other: str) -> int:
    """Number of characters at the start that are the same."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _common_suffix(one: str, other: str) -> int:
    """Number of characters at the end that are the same."""
    low, high = 0, min(len(one), len(other))
    if not high or one.endswith(other[len(other) - high :]):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle
    return low
