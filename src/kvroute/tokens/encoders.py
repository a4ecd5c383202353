"""The encoders of a model's texts: how one is chosen, and the cache of encoded segments.

The encoder is Hugging Face's `tokenizers`, or `fastokens` if it gives the same ids. fastokens reads the same
tokenizer.json and is about ten times as fast (bench/micro_tokens.py). It is another implementation, so it is
used only after it gave the same ids for a set of difficult texts.

Texts are cut into segments at special tokens, and the token ids of each segment are cached. A tokenizer first
finds its special tokens, then encodes each piece between them separately. So the ids of a text are the ids of
its segments, one after another, if each cut is directly before a special token. A segment's ids do not depend
on the text before it: the cache has all but the last segments of a conversation's next turn, and the first
segments of another conversation with the same system prompt.

A cut is possible before a token that is matched in the raw text (not `normalized`), includes no whitespace
around it, and needs no word boundary (tokenizers 0.23, `AddedVocabulary::extract_and_normalize`:
leftmost-longest matches of the raw tokens first, then normalizer, pre-tokenizer and model on each piece).
Cuts are before a token, not after it, because some tokenizers (metaspace, `first`) treat the start of a text
differently.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tokenizers import Tokenizer

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
        cuts_by_text = {token.text: token.is_cut for token in tokens if token.text}
        self._cuts = frozenset(text for text, cuts in cuts_by_text.items() if cuts)
        # A token that begins before a place ends before it if no token has the place's character inside.
        inside = {char for text in cuts_by_text for char in text[1:]}
        self._clean = frozenset(text for text in self._cuts if text[0] not in inside)
        self._pattern = re.compile(_longest_of(cuts_by_text)) if self._cuts else None
        self.reach = max(map(len, cuts_by_text), default=0)
        """Length of the longest raw token in characters. Whether there is a cut at a place depends on at most
        this number of characters after the place."""

    def cuts_at(self, text: str, index: int) -> bool:
        """Whether `text` is cut at `index`, whatever is before it. False also if that depends on the rest."""
        token = None if self._pattern is None else self._pattern.match(text, index)
        return token is not None and token[0] in self._clean

    def segments(self, text: str) -> list[str]:
        """The segments of `text`, in order. Every segment except the first begins with a cut token."""
        segments, start, cuts = [], 0, self._cuts
        if self._pattern is not None:
            for match in self._pattern.finditer(text):
                index = match.start()
                if index > start and match[0] in cuts:
                    segments.append(text[start:index])
                    start = index
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
        self._ids = Lru[str, TokenIds](max_bytes, _size)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def max_bytes(self) -> int:
        return self._ids.max_weight

    @property
    def bytes(self) -> int:
        return self._ids.weight

    def encode(self, segments: Iterable[str], encode: Encode) -> TokenIds:
        """The ids of all segments in one array. Calls `encode` once for each segment that is not cached."""
        return joined(self.encode_each(list(segments), encode))

    def encode_each(self, segments: Sequence[str], encode: Encode) -> list[TokenIds]:
        """The ids of each segment. The caller must not change the arrays, which belong to the cache."""
        with self._lock:
            ids = list(map(self._ids.get, segments))
        if None in ids:
            new: dict[str, TokenIds] = {}
            for index, cached in enumerate(ids):
                if cached is None:
                    segment = segments[index]
                    cached = new.get(segment)
                    if cached is None:
                        cached = new[segment] = encode(segment)
                    ids[index] = cached
            with self._lock:
                for segment, cached in new.items():
                    if segment not in self._ids:
                        self._ids.put(segment, cached)
        return cast("list[TokenIds]", ids)


def joined(parts: Iterable[TokenIds]) -> TokenIds:
    """All ids in one new array."""
    ids = array("I")
    for segment_ids in parts:
        ids += segment_ids
    return ids


def _size(segment: str, ids: TokenIds) -> int:
    return sys.getsizeof(segment) + ids.itemsize * len(ids) + _OVERHEAD_BYTES


# Each kind of text for which tokenizers have given different ids.
SAMPLES = (
    "",
    " ",
    "Hello, world! It's 2024; they'll say \"no\", I'D say it'S fine.",
    "  two leading, trailing   \n\n\n  newlines\t\ttabs\r\n",
    "def f(x: int) -> dict[str, list[int]]:\n\treturn {'a': [x**2, 0x1F, 1_000_000.5e-3]}\n",
    "1 12 123 1234 12345 123456789012345678901234567890 3.14159 1,000,000",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2.5, null, true]}}',
    "naïve café Ångström e\u0301 ﬁ ½ Ⅷ İ ß ǅ",  # composed, decomposed, ligatures, odd cases
    "你好，世界。日本語のテキスト 한국어 텍스트 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🇨🇭 👍🏽 \u200b\u200d\ufeff\u00a0\u2003|\x00\x07\x7f",
    "<|im_start|>user\n<s>[INST] <<SYS>> </s><tool_call></think><|end|><|turn|> <｜begin▁of▁sentence｜>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ----------------==========~~~~~~~~",
    "▁▁meta space ▁ Ġ Ċ",
)


@dataclass(frozen=True, slots=True)
class Encoder:
    """A function from text to token ids, and how it was chosen."""

    encode: Encode
    """The ids of a text, without special tokens that the tokenizer would add around it.

    Thread-safe; releases the interpreter lock while it runs."""
    name: str
    """The library."""
    explanation: str = ""
    """The reason for the choice."""
    quick_bytes: int = 2048
    """JSON of this size is parsed, rendered and encoded in well under a millisecond: it needs no thread."""


def choose_encoder(tokenizer: Tokenizer, *, allow_fastokens: bool = True) -> Encoder:
    """fastokens if it is installed and gives the ids of `tokenizer` for all samples, else `tokenizer`."""
    reference = _from_tokenizers(tokenizer)
    if not allow_fastokens:
        return Encoder(reference, "tokenizers", "fastokens is switched off")
    try:
        native = importlib.import_module("fastokens")
    except ImportError:
        return Encoder(reference, "tokenizers", "fastokens is not installed")
    try:
        other = native.Tokenizer.from_json_str(tokenizer.to_str())
        agrees = all(_flat(other, text) == reference(text) for text in _samples(tokenizer))
    except Exception as error:  # noqa: BLE001 - fastokens has no common error class; any error means no
        return Encoder(
            reference, "tokenizers", f"fastokens cannot read this tokenizer ({type(error).__name__})"
        )
    if not agrees:
        return Encoder(reference, "tokenizers", "fastokens gives other token ids")
    explanation = "agrees with tokenizers on all samples"
    return Encoder(lambda text: _flat(other, text), "fastokens", explanation, quick_bytes=8192)


def cuts_are_exact(tokenizer: Tokenizer, cutter: Cutter, encode: Encode) -> bool:
    """Whether all samples encode to the same ids in segments as in one piece."""
    for text in _samples(tokenizer):
        whole, pieces = encode(text), array("I")
        for segment in cutter.segments(text):
            pieces += encode(segment)
        if whole != pieces:
            return False
    return True


def _samples(tokenizer: Tokenizer) -> Iterable[str]:
    """The sample texts, alone and between the tokenizer's added tokens."""
    yield from SAMPLES
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:400]
    for gap in ("", " ", "\n", "  a ", "b"):
        pieces = [token + gap + SAMPLES[index % len(SAMPLES)] for index, token in enumerate(added)]
        yield gap.join(pieces)


def _from_tokenizers(tokenizer: Tokenizer) -> Encode:
    def encode(text: str) -> TokenIds:
        # `encode` holds the interpreter lock; the batch calls release it.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return array("I", encoding.ids)

    return encode


def _flat(tokenizer: object, text: str) -> TokenIds:
    ids = array("I")
    flat, _ = tokenizer.encode_batch_flat([text], add_special_tokens=False)  # type: ignore[attr-defined]
    ids.frombytes(flat)
    return ids


def added_around(tokenizer: Tokenizer) -> tuple[TokenIds, TokenIds] | None:
    """The ids that the tokenizer adds before and after a text; None if it changes the text's ids."""
    around: tuple[TokenIds, TokenIds] | None = None
    for text in ("a", "The quick brown fox, 42."):
        bare = tokenizer.encode(text, add_special_tokens=False).ids
        full = tokenizer.encode(text, add_special_tokens=True).ids
        for added_before in range(len(full) - len(bare) + 1):
            if full[added_before : added_before + len(bare)] == bare:
                break
        else:
            return None
        seen = array("I", full[:added_before]), array("I", full[added_before + len(bare) :])
        if around is not None and around != seen:
            return None
        around = seen
    return around


def tokenizer_json(folder_text: str) -> Tokenizer:
    """A tokenizer from the text of a tokenizer.json, with its truncation and padding switched off."""
    settings = json.loads(folder_text)
    settings["truncation"] = settings["padding"] = None
    return Tokenizer.from_str(json.dumps(settings))
