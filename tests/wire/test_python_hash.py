"""The start of LMCache's chunk hashes, compared with Python's own computation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvroute.wire.python_hash import none_hash, seeded_string_hash


@pytest.mark.parametrize("seed", ["0", "1", "42", "4294967295", "007"])
def test_it_is_the_hash_of_the_seed_in_a_process_with_that_seed(seed: str) -> None:
    code = "import os; print(hash(os.environ['PYTHONHASHSEED']))"
    theirs = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )

    assert none_hash(seed) == int(theirs.stdout)


def test_the_hash_equals_one_captured_from_a_worker() -> None:
    # LMCache 0.5.6 with PYTHONHASHSEED=0 on CPython 3.11.
    assert none_hash("0") == 5313149338359954478


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 23])
def test_strings_of_any_length_hash_as_python_hashes_them(length: int) -> None:
    text = "abcdefghijklmnopqrstuvw"[:length]
    theirs = subprocess.run(
        [sys.executable, "-c", f"print(hash({text!r}))"],
        env={"PYTHONHASHSEED": "3"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert seeded_string_hash(text, 3) == int(theirs.stdout)


def test_the_rounds_of_python_3_10_give_another_hash() -> None:
    assert seeded_string_hash("0", 0, rounds=(2, 4)) != seeded_string_hash("0", 0)


def test_siphash_2_4_is_that_of_its_authors() -> None:
    # Aumasson and Bernstein, "SipHash", appendix A: key 00..0f, message 00..0e.
    from kvroute.wire.python_hash import _siphash

    key = bytes(range(16))
    k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")

    assert _siphash(bytes(range(15)), k0, k1, (2, 4)) == 0xA129CA6149BE45E5


def test_sha256_needs_no_seed() -> None:
    # As cbor2 and hashlib have it for "vllm-none-hash" and for "0".
    assert none_hash("", sha256_cbor=True) == 0x9BD96A485AD84EFD
    assert none_hash("0", sha256_cbor=True) == 0x4E1195DF020DE59E


def test_builtin_hashes_without_a_seed_are_random() -> None:
    with pytest.raises(ValueError):
        none_hash("")
