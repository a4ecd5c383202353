from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute.sim.prompts import IM_START, VOCABULARY, decode, encode, token_bytes

TEXT = st.text(st.characters(exclude_categories=("Cs",)))


@given(TEXT)
def test_detokenizing_gives_the_text_back(text: str) -> None:
    ids = encode(text)

    assert decode(ids) == text
    assert b"".join(map(token_bytes, ids)) == text.encode()
    assert all(0 <= token < VOCABULARY for token in ids)


@given(TEXT, TEXT)
def test_a_longer_text_keeps_the_ids_of_its_prefix(text: str, more: str) -> None:
    ids, longer = encode(text), encode(text + more)
    whole = len(text.encode()) // 3

    assert ids[:whole] == longer[:whole]


def test_lone_surrogates_and_unknown_ids_are_replaced() -> None:
    assert decode(encode("a\ud800b")) == "a?b"
    assert decode([300, 1 << 18, VOCABULARY]) == "���"
    assert decode([IM_START]) == "<|im_start|>"
