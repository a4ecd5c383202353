"""Chunks are named as LMCache names them."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.chunks import (
    BLAKE3,
    BUILTIN,
    BUILTIN_NONE,
    SHA256_CBOR,
    ChunkKeys,
    ChunkScheme,
    PromptChunks,
    chunk_key,
    chunk_keys,
    chunk_names,
)

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
MP = ChunkScheme(chunk_tokens=64)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=60)
SCHEMES = [
    ChunkScheme(chunk_tokens=4),
    ChunkScheme(BUILTIN, 4, -77),
    ChunkScheme(BUILTIN_NONE, 4, 5),
    ChunkScheme(SHA256_CBOR, 4, 2**64 - 1),
]


def stored_chunks(name: str) -> Iterator[tuple[str, list[int]]]:
    """Hash and token ids of the chunks that a real LMCache server announced with tokens."""
    for line in (CAPTURES / f"{name}.coordinator.jsonl").read_text().splitlines():
        body = json.loads(line)["body"] or {}
        for batch in body.get("batches", ()):
            for entry in batch["entries"]:
                if batch["event_type"] == "store" and entry["token_offset"] == 0:
                    yield entry["key"]["chunk_hash_hex"], entry["token_ids"]


def test_first_chunks_have_the_names_that_a_real_server_announced() -> None:
    seen = list(stored_chunks("lmcache-mp-lmcache-driven"))
    assert len(seen) > 10

    for name, tokens in seen:
        assert [each.hex() for each in chunk_names(tokens, MP)] == [name]


def test_prompts_have_the_names_that_a_real_server_announced() -> None:
    announced = {
        entry["key"]["chunk_hash_hex"]
        for line in (CAPTURES / "lmcache-mp-engine-driven.coordinator.jsonl").read_text().splitlines()
        for batch in (json.loads(line)["body"] or {}).get("batches", ())
        for entry in batch["entries"]
    }
    prompts = [
        json.loads(line).get("prompt_token_ids") or []
        for line in (CAPTURES / "lmcache-mp-engine-driven.requests.jsonl").read_text().splitlines()
    ]

    named = {name.hex() for prompt in prompts for name in chunk_names(prompt, MP)}

    assert named == announced


def test_a_key_equals_the_chunk_hash_in_vllms_cpu_events() -> None:
    name = bytes.fromhex(next(stored_chunks("lmcache-mp-lmcache-driven"))[0])

    assert chunk_key(name) == 2839837872336624011


def test_builtin_keys_are_those_of_a_real_worker() -> None:
    """`LMCacheWorker` of LMCache 0.5.6 with PYTHONHASHSEED=0, whose seed is the number below."""
    admitted = [
        operation["key"]
        for line in (CAPTURES / "lmcache-classic-controller.jsonl").read_text().splitlines()
        for operation in json.loads(line)["decoded"].get("operations", ())
        if operation["op_type"] == "admit"
    ]

    assert chunk_keys(range(2000, 2600), ChunkScheme(BUILTIN, 64, 5313149338359954478)) == admitted


@pytest.mark.parametrize(
    ("seed", "tokens", "key"),
    [
        (0, [1, 300], 5816538826448388744),
        (2**63, [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1], 10335558105235928412),
    ],
)
def test_sha256_cbor_equals_the_encoding_of_a_cbor_library(seed: int, tokens: list[int], key: int) -> None:
    """Made with cbor2: first 8 bytes of sha256(cbor2.dumps((seed, tuple(tokens), ()), canonical=True))."""
    assert chunk_keys(tokens, ChunkScheme(SHA256_CBOR, len(tokens), seed)) == [key]


def test_builtin_none_is_the_hash_with_none() -> None:
    """As CPython 3.12 and later compute it, where `hash(None)` is this number and no address."""
    hash_of_none = 0xFCA86420
    if sys.version_info >= (3, 12):
        assert hash(None) == hash_of_none

    assert chunk_keys([1, 2], ChunkScheme(BUILTIN_NONE, 2, 9)) == [hash((9, (1, 2), hash_of_none))]


def test_builtin_does_not_depend_on_the_process() -> None:
    """Only the seed depends on PYTHONHASHSEED; every process hashes numbers and tuples alike."""
    code = "print(hash((-5, (1, 2, 3), ())))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)

    assert chunk_keys([1, 2, 3], ChunkScheme(BUILTIN, 3, -5)) == [int(other.stdout)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.algorithm)
@given(common=IDS, one=IDS, two=IDS)
def test_prompts_share_keys_exactly_as_far_as_full_chunks(
    scheme: ChunkScheme, common: list[int], one: list[int], two: list[int]
) -> None:
    first, second = common + one, common + two
    shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    shared = min(len(first), len(second)) if shared is None else shared

    some, others = chunk_keys(first, scheme), chunk_keys(second, scheme)

    assert len(some) == len(first) // 4
    common_keys = sum(a == b for a, b in zip(some, others, strict=False))
    assert common_keys == shared // 4
    assert some[:common_keys] == others[:common_keys]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.algorithm)
@given(ids=IDS, asked=st.lists(st.integers(-20, 20), max_size=6))
def test_keys_do_not_depend_on_the_order_of_requests(
    scheme: ChunkScheme, ids: list[int], asked: list[int]
) -> None:
    whole = chunk_keys(ids, scheme)
    lazy = ChunkKeys(array("I", ids), scheme)

    for place in asked:
        if -len(whole) <= place < len(whole):
            assert lazy[place] == whole[place]
            assert lazy[place : place + 3] == whole[place : place + 3]
        else:
            with pytest.raises(IndexError):
                lazy[place]
    assert lazy == whole


def test_only_requested_keys_are_computed() -> None:
    keys = PromptChunks(range(640)).keys(MP)

    assert keys[2] == chunk_key(keys.names[2])
    assert len(keys.computed) == 3
    assert keys.compute(99) is None
    assert len(keys.computed) == len(keys) == 10


def test_a_prompt_remembers_each_scheme() -> None:
    chunks = PromptChunks(list(range(100)))

    assert chunks.keys(SCHEMES[0]) is chunks.keys(SCHEMES[0])
    assert chunks.keys(SCHEMES[0]) != chunks.keys(SCHEMES[1])


@pytest.mark.parametrize("algorithm", [BUILTIN, SHA256_CBOR])
@pytest.mark.parametrize("ids", [list, partial(array, "I"), tuple])
def test_a_tail_is_the_chunk_that_ends_with_the_prompt(algorithm: str, ids: Callable[..., Any]) -> None:
    scheme = ChunkScheme(algorithm, 4, 7)
    tokens = list(range(100, 111))
    full = chunk_keys(tokens[:8], scheme)

    assert PromptChunks(ids(tokens[:7]), tokens[7]).tail(scheme) == (3, full[1])
    # Less than a chunk: its hash is that of a scheme with as large chunks, after the chunks before.
    (short,) = chunk_keys(tokens[8:11], ChunkScheme(algorithm, 3, full[-1]))
    assert PromptChunks(ids(tokens[:10]), tokens[10]).tail(scheme) == (2, short)


def test_a_prompt_has_no_tail_if_it_would_help_nothing() -> None:
    """Servers have full chunks only; without the last token the hash is unknown; one token is computed."""
    tokens = list(range(10))

    assert PromptChunks(tokens, 10).tail(ChunkScheme(BLAKE3, 4)) is None
    assert PromptChunks(tokens).tail(ChunkScheme(BUILTIN, 4)) is None
    assert PromptChunks(tokens[:8], 8).tail(ChunkScheme(BUILTIN, 4)) is None


def test_the_ids_given_are_left_as_they_are() -> None:
    ids = array("I", range(64))

    chunk_keys(ids, MP)

    assert ids == array("I", range(64))


def test_the_chain_starts_with_the_hash_of_zeros() -> None:
    start = blake3(bytes(8) + (0).to_bytes(4, "big")).digest()

    assert chunk_names([7], ChunkScheme(chunk_tokens=1)) == [blake3(start + b"\0\0\0\x07").digest()]


def test_senseless_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown chunk hash algorithm 'md5'"):
        chunk_keys([1], ChunkScheme("md5"))
    with pytest.raises(ValueError, match="at least one token"):
        chunk_keys([1], ChunkScheme(chunk_tokens=0))
    with pytest.raises(ValueError, match="32 bytes"):
        chunk_key(b"short")
    with pytest.raises(ValueError, match="blake3 only"):
        chunk_names([1], SCHEMES[1])
    with pytest.raises(OverflowError):
        chunk_keys([-1], ChunkScheme(chunk_tokens=1))
    with pytest.raises(OverflowError):
        chunk_keys([2**64], ChunkScheme(SHA256_CBOR, 1))
