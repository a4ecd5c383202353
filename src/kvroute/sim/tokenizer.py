"""A tokenizer that is nobody's: three bytes of UTF-8 a token, so that ids are exact and reversible.

It is not a model's vocabulary; it only has the properties that routing depends on: equal texts give
equal ids, a longer text keeps the ids of its prefix (but for a last token of one or two bytes), and
detokenizing gives the text back. Chat messages are encoded one by one between special tokens, so a
conversation that grows keeps all its ids.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

VOCABULARY = 1 << 25
"""Ids lie below this: 0-255 one byte, 256-511 special, from 1 << 16 two bytes, from 1 << 24 three."""

SPECIAL = {256: "<|im_start|>", 257: "<|im_end|>", 258: "<|image|>", 259: "<|tools|>"}
IM_START, IM_END, IMAGE, TOOLS = SPECIAL

_PAIR, _TRIPLE = 1 << 16, 1 << 24


def encode(text: str) -> array[int]:
    """Token ids of `text` as unsigned 32-bit ints; lone surrogates become question marks.

    About 1 us per thousand bytes: the three-byte tokens are laid out by slicing.
    """
    data = text.encode("utf-8", "replace")
    whole = len(data) // 3
    body = data[: whole * 3]
    packed = bytearray(whole * 4)
    packed[0::4], packed[1::4], packed[2::4] = body[2::3], body[1::3], body[0::3]
    packed[3::4] = b"\x01" * whole
    ids = array("I")
    ids.frombytes(bytes(packed))
    if sys.byteorder == "big":
        ids.byteswap()
    rest = data[whole * 3 :]
    if len(rest) == 1:
        ids.append(rest[0])
    elif rest:
        ids.append(_PAIR | rest[0] << 8 | rest[1])
    return ids


def decode(ids: Iterable[int]) -> str:
    """Text of `ids`; ids that `encode` never gives become U+FFFD."""
    parts = bytearray()
    for token in ids:
        parts += token_bytes(token)
    return parts.decode("utf-8", "replace")


def token_bytes(token: int) -> bytes:
    """The bytes that one token stands for."""
    if token < 256:
        return bytes((token,))
    if token in SPECIAL:
        return SPECIAL[token].encode()
    if _TRIPLE <= token < VOCABULARY:
        return (token & 0xFFFFFF).to_bytes(3, "big")
    if _PAIR <= token < 2 * _PAIR:
        return (token & 0xFFFF).to_bytes(2, "big")
    return "�".encode()
