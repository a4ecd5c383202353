"""Token ids of prompts that begin alike, kept once: the next turn of a chat adds what is new of its ids, and
what is new of their keys."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator, Sequence
from itertools import chain
from typing import Final, cast, overload

from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, token_keys

SHARED_TOKENS: Final = 4096
"""Ids in a piece that prompts share. What is behind the last whole piece is copied for each prompt."""

_NEW_TOKENS: Final = 8 * SHARED_TOKENS
"""More new ids than these are not hashed in one go: it takes longer than half a millisecond."""


class KnownIds:
    """Ids that prompts begin with. Read-only, but that it notes the keys of the last prompt that began so.

    May be read from several threads: what is noted is replaced as a whole.
    """

    __slots__ = ("_noted", "_pieces", "_rest", "size")

    def __init__(self, pieces: tuple[array[int], ...] = (), rest: array[int] | None = None) -> None:
        self._pieces = pieces
        self._rest = array("I") if rest is None else rest
        self.size = len(pieces) * SHARED_TOKENS + len(self._rest)
        """Tokens."""
        self._noted: tuple[int, array[int]] | None = None

    def followed_by(self, ids: array[int]) -> KnownIds:
        """These and `ids`. Copies less than a piece of these."""
        rest = self._rest + ids
        if len(rest) < SHARED_TOKENS:
            return KnownIds(self._pieces, rest)
        whole = len(rest) - len(rest) % SHARED_TOKENS
        pieces = [rest[start : start + SHARED_TOKENS] for start in range(0, whole, SHARED_TOKENS)]
        return KnownIds((*self._pieces, *pieces), rest[whole:])

    def note(self, seed: int, keys: array[int]) -> None:
        """`keys` are those of a prompt that begins with these ids; nothing changes them any more."""
        self._noted = seed, keys

    def keys(self, seed: int) -> array[int] | None:
        """A copy of the keys of all full blocks of these ids, as far as noted; None if they were not."""
        noted = self._noted
        if noted is None or noted[0] != seed:
            return None
        return noted[1][: self.size // KEY_TOKENS]

    def ids(self, start: int, stop: int) -> array[int]:
        """Those from `start` to before `stop`, which are in it."""
        first, last = start // SHARED_TOKENS, stop // SHARED_TOKENS
        parts = [*self._pieces[first : last + 1], self._rest]
        start -= first * SHARED_TOKENS
        stop -= last * SHARED_TOKENS
        if first == last:
            return parts[0][start:stop]
        views = [memoryview(part) for part in parts[: last - first + 1]]
        views[0], views[-1] = views[0][start:], views[-1][:stop]
        found = array("I")
        found.frombytes(b"".join(views))
        return found

    def parts(self) -> Iterator[array[int]]:
        yield from self._pieces
        yield self._rest


class PromptIds(Sequence[int]):
    """One prompt's ids: `known`, which it shares with prompts that will go on from there, and `rest`.

    `before` are ids that it begins with and whose keys may be noted; those of this prompt are noted in
    `known` when they are made. A slice is an `array("I")`, or shares `known` if it has all of it. Read-only.
    """

    __slots__ = ("_before", "_known", "_rest", "_size")

    def __init__(self, known: KnownIds, rest: array[int], before: KnownIds | None = None) -> None:
        self._known = known
        self._rest = rest
        self._before = before or known
        self._size = known.size + len(rest)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        shared = self._known.size
        if isinstance(place, slice):
            start, stop, step = place.indices(self._size)
            if not start and step == 1 and stop >= shared:
                return PromptIds(self._known, self._rest[: stop - shared], self._before)
            return self._some(start, stop) if step == 1 else self.flat()[place]
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(place)
        return self._some(place, place + 1)[0]

    def __iter__(self) -> Iterator[int]:
        return chain(chain.from_iterable(self._known.parts()), self._rest)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return self.flat() == (other.flat() if isinstance(other, PromptIds) else array("I", other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PromptIds({len(self)} tokens)"

    def flat(self) -> array[int]:
        """A copy in one piece."""
        return self._some(0, self._size)

    def keys(self, seed: int) -> Sequence[BlockKey] | None:
        """Its keys where those of what it begins with are known and the others quickly made, else None."""
        before, size = self._before, self._size
        keys = before.keys(seed) if size - before.size <= _NEW_TOKENS else None
        if keys is None:
            return None
        # What was noted may be of a prompt that ended with `before`, and its last id.
        start = len(keys) * KEY_TOKENS
        keys.extend(token_keys(self._some(start, size), keys[-1] if keys else seed))
        self._known.note(seed, keys)
        return keys  # type: ignore[return-value]  # of 64-bit numbers, as keys are

    def note(self, seed: int, keys: array[int]) -> None:
        """These are its keys."""
        self._known.note(seed, keys)

    def _some(self, start: int, stop: int) -> array[int]:
        shared = self._known.size
        if start >= stop:
            return array("I")
        if start >= shared:
            return self._rest[start - shared : stop - shared]
        found = self._known.ids(start, min(stop, shared))
        return found if stop <= shared else found + self._rest[: stop - shared]


def id_array(token_ids: Sequence[int]) -> array[int]:
    """As an array of unsigned 32-bit numbers, the same one if it is one. Others raise OverflowError."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        return token_ids
    return token_ids.flat() if isinstance(token_ids, PromptIds) else array("I", token_ids)


PIECE_TOKENS: Final = 4096
"""Tokens whose keys are kept together; what is left over at a prompt's end is hashed each time."""

_PIECES_A_STEP: Final = 8
"""Unknown pieces hashed in one go: about 0.4 ms."""


class KeyMemory:
    """Gives what `token_keys` gives. Mutable: remembers the keys of at most `max_pieces` pieces (2.3 KB
    each), the least recently used forgotten first.

    A piece is known by a 64-bit digest of it and of all before it, as every key is. 64K tokens that are known
    take about 0.03 ms, unknown ones 0.8 to 1.3 ms (bench/micro_events.py).
    """

    def __init__(self, max_pieces: int = 8192) -> None:
        self._max_pieces = max_pieces
        self._known: dict[int, array[int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def at_once(self, token_ids: Sequence[int], seed: int) -> Sequence[BlockKey] | None:
        """What `steps` gives, where that takes one step; else None."""
        if isinstance(token_ids, PromptIds) and (own := token_ids.keys(seed)) is not None:
            return own
        try:
            next(self.steps(token_ids, seed))
        except StopIteration as end:
            keys: Sequence[BlockKey] = end.value
            return keys
        return None

    def steps(self, token_ids: Sequence[int], seed: int) -> Generator[None, None, Sequence[BlockKey]]:
        """Work that returns the keys at its end and is interrupted wherever it has taken long. They come as
        an array of 64-bit numbers: known ones are copied as bytes, and no number is made of them. Ids are
        unsigned 32-bit; others raise OverflowError. `PromptIds` have keys of their own, where it is known how
        they begin."""
        prompt = token_ids if isinstance(token_ids, PromptIds) else None
        if prompt is not None and (own := prompt.keys(seed)) is not None:
            return own
        ids = id_array(token_ids)
        known, keys, digest, hashed = self._known, array("Q"), seed, 0
        whole = len(ids) - len(ids) % PIECE_TOKENS
        view = memoryview(ids)
        for start in range(0, whole, PIECE_TOKENS):
            digest = xxh3_64_intdigest(view[start : start + PIECE_TOKENS], digest)
            made = known.pop(digest, None)
            if made is None:
                piece = ids[start : start + PIECE_TOKENS]
                made = array("Q", token_keys(piece, keys[-1] if keys else seed))
                hashed += 1
                if len(known) >= self._max_pieces:
                    del known[next(iter(known))]
            known[digest] = made
            keys += made
            if hashed == _PIECES_A_STEP:
                hashed = 0
                yield
        rest = ids[whole:]
        if len(rest) >= KEY_TOKENS:
            keys.extend(token_keys(rest, keys[-1] if keys else seed))
        if prompt is not None:
            prompt.note(seed, keys)
        return cast("Sequence[BlockKey]", keys)
