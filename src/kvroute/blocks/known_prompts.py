"""Shares token ids and block keys between prompts with a common prefix.

The next turn of a chat stores only its new token ids, hashes only its new blocks, and sends only their keys
to other processes.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator, Sequence
from itertools import chain
from typing import Final, cast, overload

from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, token_keys

SHARED_TOKENS: Final = 4096
"""Token ids in one shared piece. The ids after the last whole piece are copied for each prompt."""

_NEW_TOKENS: Final = 8 * SHARED_TOKENS
"""A prompt with more new token ids is not hashed in one step: it takes longer than half a millisecond."""


class PrefixIds:
    """Token ids that several prompts begin with.

    Mutable: `store_keys` replaces the stored keys as a whole, so several threads may read them.
    """

    __slots__ = ("_pieces", "_stored", "_tail", "size")

    def __init__(self, pieces: tuple[array[int], ...] = (), tail: array[int] | None = None) -> None:
        self._pieces = pieces
        self._tail = array("I") if tail is None else tail
        self.size = len(pieces) * SHARED_TOKENS + len(self._tail)
        """Number of token ids."""
        self._stored: tuple[int, array[int]] | None = None
        """Seed and keys of the last prompt with this prefix."""

    def extended(self, ids: array[int]) -> PrefixIds:
        """A new prefix of these ids and `ids`. Copies less than one piece of the old ids."""
        tail = self._tail + ids
        if len(tail) < SHARED_TOKENS:
            return PrefixIds(self._pieces, tail)
        whole = len(tail) - len(tail) % SHARED_TOKENS
        pieces = [tail[start : start + SHARED_TOKENS] for start in range(0, whole, SHARED_TOKENS)]
        return PrefixIds((*self._pieces, *pieces), tail[whole:])

    def store_keys(self, seed: int, keys: array[int]) -> None:
        """Store the keys of a prompt that begins with these ids. The caller must not change `keys` later."""
        self._stored = seed, keys

    def keys(self, seed: int) -> array[int] | None:
        """A copy of the stored keys of the full blocks of these ids; None if there are none for `seed`."""
        stored = self._stored
        if stored is None or stored[0] != seed:
            return None
        return stored[1][: self.size // KEY_TOKENS]

    def ids(self, start: int, stop: int) -> array[int]:
        """The token ids from `start` to before `stop`."""
        first_piece, last_piece = start // SHARED_TOKENS, stop // SHARED_TOKENS
        pieces = [*self._pieces[first_piece : last_piece + 1], self._tail]
        start -= first_piece * SHARED_TOKENS
        stop -= last_piece * SHARED_TOKENS
        if first_piece == last_piece:
            return pieces[0][start:stop]
        views = [memoryview(piece) for piece in pieces[: last_piece - first_piece + 1]]
        views[0], views[-1] = views[0][start:], views[-1][:stop]
        ids = array("I")
        ids.frombytes(b"".join(views))
        return ids

    def parts(self) -> Iterator[array[int]]:
        yield from self._pieces
        yield self._tail


class PromptIds(Sequence[int]):
    """The token ids of one prompt: a shared `prefix`, and `rest`. Read-only.

    `keyed` is an older prefix of the prompt that may have stored keys. When this prompt's keys are computed,
    they are stored in `prefix`, for prompts that continue it. A slice with step 1 is an `array("I")`, or a
    `PromptIds` if it contains the whole prefix.
    """

    __slots__ = ("_keyed", "_prefix", "_size", "_tail")

    def __init__(self, prefix: PrefixIds, tail: array[int], keyed: PrefixIds | None = None) -> None:
        self._prefix = prefix
        self._tail = tail
        self._keyed = keyed or prefix
        self._size = prefix.size + len(tail)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        shared = self._prefix.size
        if isinstance(index, slice):
            start, stop, step = index.indices(self._size)
            if not start and step == 1 and stop >= shared:
                return PromptIds(self._prefix, self._tail[: stop - shared], self._keyed)
            return self._range(start, stop) if step == 1 else self.flat()[index]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._range(index, index + 1)[0]

    def __iter__(self) -> Iterator[int]:
        return chain(chain.from_iterable(self._prefix.parts()), self._tail)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return self.flat() == (other.flat() if isinstance(other, PromptIds) else array("I", other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PromptIds({len(self)} tokens)"

    def flat(self) -> array[int]:
        """A copy of the ids as one array."""
        return self._range(0, self._size)

    def keys(self, seed: int) -> Sequence[BlockKey] | None:
        """The keys, if `keyed` has stored keys and at most `_NEW_TOKENS` ids remain to hash; else None."""
        keyed, size = self._keyed, self._size
        keys = keyed.keys(seed) if size - keyed.size <= _NEW_TOKENS else None
        if keys is None:
            return None
        # The stored keys may be those of a prompt that ended with `keyed`. Such keys do not include the block
        # of the prompt's last token, so start after the last stored key.
        start = len(keys) * KEY_TOKENS
        keys.extend(token_keys(self._range(start, size), keys[-1] if keys else seed))
        self._prefix.store_keys(seed, keys)
        return keys  # type: ignore[return-value]  # an array of 64-bit numbers

    def store_keys(self, seed: int, keys: array[int]) -> None:
        """Store the computed keys of this prompt for prompts that continue it."""
        self._prefix.store_keys(seed, keys)

    def _range(self, start: int, stop: int) -> array[int]:
        shared = self._prefix.size
        if start >= stop:
            return array("I")
        if start >= shared:
            return self._tail[start - shared : stop - shared]
        ids = self._prefix.ids(start, min(stop, shared))
        return ids if stop <= shared else ids + self._tail[: stop - shared]


def id_array(token_ids: Sequence[int]) -> array[int]:
    """`token_ids` as an array of unsigned 32-bit numbers; itself if it is one. Others raise OverflowError."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        return token_ids
    return token_ids.flat() if isinstance(token_ids, PromptIds) else array("I", token_ids)


PIECE_TOKENS: Final = 4096
"""Tokens in one piece of `KeyCache`. A shorter rest at a prompt's end is hashed each time."""

_PIECES_PER_STEP: Final = 8
"""Number of new pieces that are hashed in one step: about 0.4 ms."""


class KeyCache:
    """Computes the same keys as `token_keys`, with an LRU cache of at most `max_pieces` pieces of 2.3 KB.

    A piece is identified by a 64-bit digest of the piece and of all pieces before it. 64K cached tokens take
    about 0.03 ms, new ones 0.8 to 1.3 ms (bench/micro_events.py). Mutable: `steps` changes the cache.
    """

    def __init__(self, max_pieces: int = 8192) -> None:
        self._max_pieces = max_pieces
        self._keys_by_digest: dict[int, array[int]] = {}

    def __len__(self) -> int:
        return len(self._keys_by_digest)

    def in_one_step(self, token_ids: Sequence[int], seed: int) -> Sequence[BlockKey] | None:
        """The result of `steps` if it takes one step only; else None."""
        if isinstance(token_ids, PromptIds) and (stored_keys := token_ids.keys(seed)) is not None:
            return stored_keys
        try:
            next(self.steps(token_ids, seed))
        except StopIteration as end:
            keys: Sequence[BlockKey] = end.value
            return keys
        return None

    def steps(self, token_ids: Sequence[int], seed: int) -> Generator[None, None, Sequence[BlockKey]]:
        """Compute the keys in steps of about 0.4 ms: yields after each step and returns the keys.

        Token ids are unsigned 32-bit; others raise OverflowError. The keys are an array of 64-bit numbers.
        """
        # An array, because cached keys are then copied as bytes, without an object per key. `PromptIds` have
        # their own stored keys, which are used first.
        prompt = token_ids if isinstance(token_ids, PromptIds) else None
        if prompt is not None and (stored_keys := prompt.keys(seed)) is not None:
            return stored_keys
        ids = id_array(token_ids)
        keys_by_digest, keys, digest, hashed = self._keys_by_digest, array("Q"), seed, 0
        whole = len(ids) - len(ids) % PIECE_TOKENS
        view = memoryview(ids)
        for start in range(0, whole, PIECE_TOKENS):
            digest = xxh3_64_intdigest(view[start : start + PIECE_TOKENS], digest)
            made = keys_by_digest.pop(digest, None)
            if made is None:
                piece = ids[start : start + PIECE_TOKENS]
                made = array("Q", token_keys(piece, keys[-1] if keys else seed))
                hashed += 1
                if len(keys_by_digest) >= self._max_pieces:
                    del keys_by_digest[next(iter(keys_by_digest))]
            keys_by_digest[digest] = made
            keys += made
            if hashed == _PIECES_PER_STEP:
                hashed = 0
                yield
        tail = ids[whole:]
        if len(tail) >= KEY_TOKENS:
            keys.extend(token_keys(tail, keys[-1] if keys else seed))
        if prompt is not None:
            prompt.store_keys(seed, keys)
        return cast("Sequence[BlockKey]", keys)
