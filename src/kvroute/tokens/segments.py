"""Cuts texts into segments at special tokens, and caches the token ids of each segment.

A tokenizer first finds its special tokens, then encodes each piece between them separately. So the ids of a
text are the ids of its segments, one after another, if each cut is directly before a special token. A
segment's ids do not depend on the text before it: the cache has all but the last segments of a conversation's
next turn, and the first segments of another conversation with the same system prompt.

A cut is possible before a token that is matched in the raw text (not `normalized`), includes no whitespace
around it, and needs no word boundary (tokenizers 0.23, `AddedVocabulary::extract_and_normalize`:
leftmost-longest matches of the raw tokens first, then normalizer, pre-tokenizer and model on each piece).
Cuts are before a token, not after it, because some tokenizers (metaspace, `first`) treat the start of a text
differently.
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
"""Memory of one cache entry besides text and ids: dict entry, array object."""


@dataclass(frozen=True, slots=True)
class RawToken:
    """An added token that is matched in the raw text. `is_cut`: a segment may begin with this token."""

    text: str
    is_cut: bool


def is_cut(text: str, *, lstrip: bool, rstrip: bool, single_word: bool) -> bool:
    """Whether a segment may begin with a raw token with these matching rules."""
    return not (lstrip or rstrip or single_word or re.match(r"[\s\w]", text))


class Cutter:
    """Cuts a text into segments. Stateless.

    Takes about 1 ms for 100 KB with hundreds of raw tokens, 0.1 ms with a few.
    """

    def __init__(self, tokens: Iterable[RawToken]) -> None:
        # The pattern has all raw tokens: a token that is no cut may contain the text of one that is.
        known = {token.text: token.is_cut for token in tokens if token.text}
        self._cuts = frozenset(text for text, cuts in known.items() if cuts)
        self._pattern = re.compile(_longest_of(known)) if self._cuts else None
        self.reach = max(map(len, known), default=0)
        """Length of the longest raw token in characters. Whether there is a cut at a place depends on at most
        this number of characters after the place."""

    def segments(self, text: str) -> list[str]:
        """The segments of `text`, in order. Every segment except the first begins with a cut token."""
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
    """A pattern that matches the longest of `texts` at a place; common prefixes occur once in it."""
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
    """An LRU cache of token ids by segment, with at most `max_bytes` of text and ids. Thread-safe.

    Mutable: `encode` adds and moves entries.
    """

    # The keys are the texts themselves, not hashes, so two segments are never confused.

    def __init__(self, max_bytes: int) -> None:
        self._known = Lru[str, TokenIds](max_bytes, _size)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def bytes(self) -> int:
        return self._known.weight

    def encode(self, segments: Iterable[str], encode: Encode) -> TokenIds:
        """The ids of all segments in one array. Calls `encode` once for each segment that is not cached."""
        return joined(self.encode_each(list(segments), encode))

    def encode_each(self, segments: Sequence[str], encode: Encode) -> list[TokenIds]:
        """The ids of each segment. The caller must not change the arrays, which belong to the cache."""
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
    """All ids in one new array."""
    ids = array("I")
    for part in parts:
        ids += part
    return ids


def _size(segment: str, ids: TokenIds) -> int:
    return sys.getsizeof(segment) + ids.itemsize * len(ids) + _OVERHEAD_BYTES
