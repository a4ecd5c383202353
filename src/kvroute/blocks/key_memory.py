"""The keys of prompts whose beginnings were seen before: the next turn of a chat costs what is new of it."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from typing import Final, cast

from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import BlockKey
from kvroute.blocks.prompt_ids import PromptIds, id_array
from kvroute.blocks.tokens import KEY_TOKENS, token_keys

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
