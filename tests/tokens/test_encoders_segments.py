from __future__ import annotations

import random
import threading
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from kvroute.tokens.encoders import Cutter, RawToken, SegmentCache, is_cut

TEXTS = ["<a>", "<a>>", "<", "<b", "[x]", " <s>", "w", "<lstrip>", "<rstrip>", "<word>", "<norm>", "é<"]
FLAGS: dict[str, dict[str, bool]] = {
    "<lstrip>": {"lstrip": True},
    "<rstrip>": {"rstrip": True},
    "<word>": {"single_word": True},
    "<norm>": {"normalized": True},
}
PIECES = [*TEXTS, " ", "  ", "a", "b", ">", "Hello", "world", "\n", "é", "_", "x1"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def metaspace() -> Tokenizer:
    vocabulary = {c: i for i, c in enumerate(sorted({*"▁".join(PIECES), "▁"}))} | {"?": 999}
    merges = [(a, b) for a, b in (("▁", "a"), ("▁", "H"), ("e", "l"), ("a", "b"))]
    vocabulary |= {a + b: 1000 + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="?"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


BASES = {"byte level": byte_level, "metaspace": metaspace}


def with_tokens(base: str, texts: list[str]) -> tuple[Tokenizer, Cutter]:
    tokenizer = BASES[base]()
    tokenizer.add_tokens([AddedToken(text, **{"normalized": False, **FLAGS.get(text, {})}) for text in texts])
    raw = [
        RawToken(
            token.content,
            is_cut(token.content, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word),
        )
        for token in tokenizer.get_added_tokens_decoder().values()
        if not token.normalized
    ]
    return tokenizer, Cutter(raw)


@pytest.mark.parametrize("base", BASES)
@settings(deadline=None)
@given(
    texts=st.lists(st.sampled_from(TEXTS), unique=True, max_size=6),
    pieces=st.lists(st.sampled_from(PIECES), max_size=25),
)
def test_segments_encode_to_the_ids_of_the_whole(base: str, texts: list[str], pieces: list[str]) -> None:
    """Against the real tokenizer, with tokens that overlap, strip, need word boundaries or normalising."""
    tokenizer, cutter = with_tokens(base, texts)
    text = "".join(pieces)

    def encode(part: str) -> array[int]:
        return array("I", tokenizer.encode(part, add_special_tokens=False).ids)

    cache = SegmentCache(100_000)
    for _ in range(2):
        assert cache.encode(cutter.segments(text), encode) == encode(text)


def test_segments_join_to_the_text_and_begin_with_special_tokens() -> None:
    cutter = Cutter([RawToken("<a>", True), RawToken("<aa>", True), RawToken("<a> ", False)])

    assert list(cutter.segments("x<a>y<aa><a> z<a>")) == ["x", "<a>y", "<aa><a> z", "<a>"]
    assert list(cutter.segments("")) == [""]
    assert list(Cutter(()).segments("<a>")) == ["<a>"]


def test_only_new_text_is_encoded() -> None:
    cache, asked = SegmentCache(100_000), []

    def encode(text: str) -> array[int]:
        asked.append(text)
        return array("I", list(text.encode()))

    cache.encode(["a", "b", "a"], encode)
    ids = cache.encode(["a", "c", "b"], encode)

    assert asked == ["a", "b", "c"]
    assert ids == array("I", list(b"acb"))


def test_the_least_recently_used_segment_is_forgotten_first() -> None:
    asked: list[str] = []

    def encode(text: str) -> array[int]:
        asked.append(text)
        return array("I", [1])

    cache = SegmentCache(0)
    cache.encode(["a"], encode)
    assert (len(cache), cache.bytes) == (0, 0)

    room = SegmentCache(10_000)
    room.encode(["a"], encode)
    cache = SegmentCache(2 * room.bytes)
    for segment in ("a", "b", "a", "c"):
        cache.encode([segment], encode)
    asked.clear()
    for segment in ("a", "c", "b"):
        cache.encode([segment], encode)

    assert asked == ["b"]
    assert cache.bytes <= 2 * room.bytes


def test_threads_share_a_cache_and_its_size_stays_right() -> None:
    cache = SegmentCache(4_000)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            segments = [str(rng.randrange(40)) for _ in range(5)]
            assert cache.encode(segments, lambda text: array("I", list(text.encode()))) == array(
                "I", list("".join(segments).encode())
            )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 0 < cache.bytes <= 4_000
