"""Tokenizing only what is new: token ids of the pieces between special tokens, remembered by their text.

A tokenizer finds its special tokens before anything else and encodes what lies between them piece by
piece; nothing merges across. So a text cut in front of special tokens encodes to the ids of its
segments, one after the other, and a segment's ids never depend on what stands before it: the next
turn of a conversation finds every segment but the last ones, and so does another conversation with
the same system prompt.

That holds for tokens matched in the raw text (not `normalized`) that take no whitespace with them and
need no word boundary. tokenizers 0.23, `AddedVocabulary::extract_and_normalize`: leftmost-longest
matches of the raw tokens first, then normalizer, pre-tokenizer and model on each piece between. Cuts
stand in front of such a token and not behind it, because some tokenizers (metaspace, `first`) treat
the start of a text differently, and a segment that starts with a special token has no such start.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from kvroute.lru import Lru
from kvroute.tokens.reading import TokenIds

Encode = Callable[[str], TokenIds]
_OVERHEAD_BYTES = 200
"""Of one entry: its place in the dict, the array object."""


@dataclass(frozen=True, slots=True)
class RawToken:
    """An added token that is matched in the raw text. `is_cut`: a segment may begin with it."""

    text: str
    is_cut: bool


def is_cut(text: str, *, lstrip: bool, rstrip: bool, single_word: bool) -> bool:
    """Whether a segment may begin with a raw token that is matched in these ways."""
    return not (lstrip or rstrip or single_word or re.match(r"[\s\w]", text))


class Cutter:
    """Finds the segments of a text. Stateless.

    Every raw token takes part in the search, as a token that is no cut may hide one that is. About 1 ms
    for 100 KB with hundreds of tokens, 0.1 ms with a few.
    """

    def __init__(self, tokens: Iterable[RawToken]) -> None:
        known = {token.text: token.is_cut for token in tokens if token.text}
        self._cuts = frozenset(text for text, cuts in known.items() if cuts)
        self._pattern = re.compile(_longest_of(known)) if self._cuts else None
        self.reach = max(map(len, known), default=0)
        """Characters of the longest token: which tokens a place begins is decided by no more of the text."""

    def segments(self, text: str) -> list[str]:
        """Parts of `text`, in order, that join to it. Each but the first begins with a cut token."""
        segments, start, cuts = [], 0, self._cuts
        if self._pattern is not None:
            for found in self._pattern.finditer(text):
                place = found.start()
                if place > start and found[0] in cuts:
                    segments.append(text[start:place])
                    start = place
        segments.append(text[start:])
        return segments


def _longest_of(texts: Iterable[str]) -> str:
    """A pattern that matches the longest of `texts` at a place, with common beginnings written once."""
    tree: dict[str, object] = {}
    for text in texts:
        node: dict[str, object] = tree
        for char in text:
            child = node.setdefault(char, {})
            assert isinstance(child, dict)
            node = child
        node[""] = None
    return _pattern(tree)


def _pattern(tree: Mapping[str, object]) -> str:
    branches = []
    for char, below in tree.items():
        prefix = re.escape(char)
        while isinstance(below, dict) and len(below) == 1 and "" not in below:
            (char, below), *_ = below.items()
            prefix += re.escape(char)
        if isinstance(below, dict):
            branches.append(prefix + ("" if list(below) == [""] else _pattern(below)))
    joined = "|".join(branches)
    return f"(?:{joined})?" if "" in tree else f"(?:{joined})"


class SegmentCache:
    """Token ids by segment, the least recently used forgotten first. Thread-safe.

    Mutable: `encode` adds entries and moves them; at most `max_bytes` of text and ids are kept. Texts
    themselves are the keys: two different segments can never be taken for each other.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known = Lru[str, TokenIds](max_bytes, _size)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def bytes(self) -> int:
        return self._known.weight

    def encode(self, segments: Iterable[str], encode: Encode) -> TokenIds:
        """The ids of the joined segments. `encode` is called once for each one not known."""
        return joined(self.encode_each(list(segments), encode))

    def encode_each(self, segments: Sequence[str], encode: Encode) -> list[TokenIds]:
        """The same, of each of them; the arrays are the cache's own."""
        with self._lock:
            ids = list(map(self._known.get, segments))
        if None in ids:
            new: dict[str, TokenIds] = {}
            for place, found in enumerate(ids):
                if found is None:
                    segment = segments[place]
                    found = new.get(segment)
                    if found is None:
                        found = new[segment] = encode(segment)
                    ids[place] = found
            with self._lock:
                for segment, found in new.items():
                    if segment not in self._known:
                        self._known.put(segment, found)
        return cast("list[TokenIds]", ids)


def joined(parts: Iterable[TokenIds]) -> TokenIds:
    """All of them in a new array."""
    ids = array("I")
    for part in parts:
        ids += part
    return ids


def _size(segment: str, ids: TokenIds) -> int:
    return sys.getsizeof(segment) + ids.itemsize * len(ids) + _OVERHEAD_BYTES
