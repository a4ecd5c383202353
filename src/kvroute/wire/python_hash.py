"""Python's hash of strings with a given seed: LMCache's first hash."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

_MASK: Final = 2**64 - 1
_UNSEEDED: Final = "vllm-none-hash"
"""The seed without PYTHONHASHSEED for a cryptographic algorithm (vLLM 0.32); earlier releases used a random
one."""


def none_hash(hash_seed: str, *, sha256_cbor: bool = False) -> int:
    """The "previous hash" of the first chunk in processes with PYTHONHASHSEED `hash_seed`, "" if it is unset.

    With `sha256_cbor`, the first 8 bytes as an unsigned number, as in LMCache. Otherwise `builtin`, which is
    random in a process without a seed: raises ValueError.
    """
    if sha256_cbor:
        text = (hash_seed or _UNSEEDED).encode("ascii")
        return int.from_bytes(sha256(bytes((0x60 + len(text),)) + text).digest()[:8], "big")
    return seeded_string_hash(hash_seed, int(hash_seed))


def seeded_string_hash(text: str, seed: int, *, rounds: tuple[int, int] = (1, 3)) -> int:
    """Signed 64-bit `hash(text)` under `PYTHONHASHSEED=<seed>`. Python 3.10 has `rounds` (2, 4).

    Raises UnicodeEncodeError for text that is not ASCII.
    """
    data = text.encode("ascii")
    if not data:
        return 0
    key = _secret(seed)
    value = _siphash(data, int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"), rounds)
    signed = value - 2**64 if value >= 2**63 else value
    return -2 if signed == -1 else signed


def _secret(seed: int) -> bytes:
    if not seed:
        return bytes(16)
    state, secret = seed, bytearray()
    for _ in range(16):
        state = (state * 214013 + 2531011) & 0xFFFFFFFF
        secret.append(state >> 16 & 0xFF)
    return bytes(secret)


def _siphash(data: bytes, k0: int, k1: int, rounds: tuple[int, int]) -> int:
    """SipHash-c-d (Aumasson, Bernstein 2012)."""
    v0, v1 = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D
    v2, v3 = k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573

    def mix(times: int) -> None:
        nonlocal v0, v1, v2, v3
        for _ in range(times):
            v0 = (v0 + v1) & _MASK
            v1 = _rotated_left(v1, 13) ^ v0
            v0 = _rotated_left(v0, 32)
            v2 = (v2 + v3) & _MASK
            v3 = _rotated_left(v3, 16) ^ v2
            v0 = (v0 + v3) & _MASK
            v3 = _rotated_left(v3, 21) ^ v0
            v2 = (v2 + v1) & _MASK
            v1 = _rotated_left(v1, 17) ^ v2
            v2 = _rotated_left(v2, 32)

    whole = len(data) - len(data) % 8
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, whole, 8)]
    words.append(int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56)
    for word in words:
        v3 ^= word
        mix(rounds[0])
        v0 ^= word
    v2 ^= 0xFF
    mix(rounds[1])
    return v0 ^ v1 ^ v2 ^ v3


def _rotated_left(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK
