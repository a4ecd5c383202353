"""The blocks of one size, stored as runs of consecutive blocks with the same holders.

A *lane* is one bit of a mask: one holder's blocks of this size. Along a prompt the set of holders changes
rarely, so consecutive blocks with equal masks share one `BlockRun`. Keys are chained: a prompt that has the
last key of a run has all keys of the run. So a match visits runs and not blocks, and it is exact for any
holes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from kvroute.blocks.keys import BlockKey

RUN_BLOCKS: Final = 256
"""Longest run. Bounds the cost of moving blocks between runs."""

_END_BLOCKS: Final = 8
"""Most blocks at the end of a run that are moved to another run, so that new blocks can follow before
them."""

_SHARDS: Final = 256
"""Hash tables per block size. One table of ten million entries would block the process while it grows."""

_MASK: Final = _SHARDS - 1


class BlockRun:
    """Consecutive blocks with the same mask. Mutable; only its `RunTable` changes it.

    `next` is the id of the run whose first block is the child of this run's last block; 0 if unknown.
    """

    __slots__ = ("id", "keys", "mask", "next")

    def __init__(self, run_id: int, keys: array[int], mask: int) -> None:
        self.id = run_id
        self.keys = keys
        self.mask = mask
        self.next = 0

    def offset(self, key: int) -> int:
        """The position of `key` in the run, which must have it."""
        keys = self.keys
        if keys[0] == key:
            return 0
        last = len(keys) - 1
        return last if keys[last] == key else keys.index(key)

    def common(self, offset: int, prompt: Sequence[int], position: int) -> int:
        """How many blocks from `offset` on equal the prompt's blocks from `position` on; at least 1."""
        keys = self.keys
        high = min(len(keys) - offset, len(prompt) - position)
        if keys[offset + high - 1] == prompt[position + high - 1]:
            return high
        # Most prompts differ near the end: generated tokens are often not exactly the tokens of the next
        # turn.
        low, step = high - 1, 1
        while low > 1 and keys[offset + low - 1] != prompt[position + low - 1]:
            high = low
            step *= 2
            low = max(1, high - step)
        while high - low > 1:
            middle = (low + high) // 2
            if keys[offset + middle - 1] == prompt[position + middle - 1]:
                low = middle
            else:
                high = middle
        return low


class RunTable:
    """All blocks of `stride` x `KEY_TOKENS` tokens, known by the key at their end.

    Mutable: `store` and `remove` change blocks, `open_lane`, `close_lane` and `sweep` lanes. `blocks`
    counts different blocks, closed lanes' included until they are swept.
    """

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.blocks = 0
        self.live = 0
        """The bits of open lanes. A mask may also have bits of closed lanes, which are ignored."""
        self.runs: dict[int, BlockRun] = {}
        self._run_ids: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._last_id = 0
        self._closed = 0
        self._missed = 0
        """Closed lanes in runs that were split off since the sweep started, so the sweep may have missed
        them."""
        self._sweeping: tuple[int, Iterator[int]] | None = None

    # Lanes

    def open_lane(self) -> int:
        """Open a lane; returns a bit that no block has."""
        taken = self.live | self._closed
        bit = ~taken & (taken + 1)
        self.live |= bit
        return bit

    def close_lane(self, bit: int) -> None:
        """Remove all blocks of the lane, in constant time; `sweep` returns their memory."""
        self.live &= ~bit
        self._closed |= bit

    def sweep(self, steps: int) -> int:
        """Return the memory of closed lanes, about `steps` blocks at most; returns how many steps are
        left."""
        while steps > 0:
            if self._sweeping is None:
                if not self._closed:
                    return steps
                self._sweeping = self._closed, iter(list(self.runs))
                self._missed = 0
            closed, run_ids = self._sweeping
            for run_id in run_ids:
                steps -= 1
                run = self.runs.get(run_id)
                if run is not None and run.mask & closed:
                    run.mask &= self.live
                    if not run.mask:
                        self._delete(run)
                        steps -= len(run.keys)
                if steps <= 0:
                    return 0
            self._closed &= ~closed | self._missed
            self._sweeping = None
        return 0

    # Blocks

    def find(self, key: int) -> BlockRun | None:
        """The run that has the block; None if no lane has it."""
        run_id = self._run_ids[key & _MASK].get(key)
        return None if run_id is None else self.runs[run_id]

    def store(self, bit: int, parent: int | None, keys: Sequence[BlockKey], room: int) -> tuple[int, int]:
        """Set `bit` on the blocks `keys`, each the parent of the next. Returns (keys done, bits newly set).

        `parent` is the block before the first one, if known. At most `room` new blocks are created; if there
        are more, fewer keys are done.
        """
        position, total, newly_set = 0, len(keys), 0
        predecessor = None if parent is None else self.find(parent)
        if predecessor is not None and predecessor.keys[-1] != parent:
            predecessor = (
                self._detach_tail(predecessor, bit, parent) if total and self.find(keys[0]) is None else None
            )
        while position < total:
            run = self.find(keys[position])
            if run is None:
                if room <= 0:
                    break
                predecessor, count = self._add_new(predecessor, bit, keys, position, room)
                room -= count
                newly_set += count
                position += count
                continue
            offset = run.offset(keys[position])
            count = run.common(offset, keys, position)
            if run.mask & bit:
                predecessor = run if offset + count == len(run.keys) else None
            else:
                piece = self._cut(run, offset, offset + count, predecessor)
                piece.mask = piece.mask & self.live | bit
                newly_set += count
                predecessor = self._join(predecessor, piece)
            position += count
        return position, newly_set

    def append(self, bit: int, parent: int, key: int) -> bool:
        """As `store`, for one new block after the last block of a run that only this lane has.

        False, and no change, in every other case.
        """
        run_ids = self._run_ids
        run_id = run_ids[parent & _MASK].get(parent)
        shard = run_ids[key & _MASK]
        if run_id is None or key in shard:
            return False
        run = self.runs[run_id]
        keys = run.keys
        if run.mask != bit or keys[-1] != parent or len(keys) >= RUN_BLOCKS:
            return False
        shard[key] = run_id
        keys.append(key)
        run.next = 0
        self.blocks += 1
        return True

    def has(self, bit: int, key: int) -> bool:
        """Is `bit` set on this block?"""
        run_id = self._run_ids[key & _MASK].get(key)
        return run_id is not None and bool(self.runs[run_id].mask & bit)

    def runs_at(self, bit: int, keys: Sequence[int]) -> Iterator[Sequence[int]]:
        """The runs with `bit` whose first block is one of `keys`."""
        for key in keys:
            run = self.find(key)
            if run is not None and run.keys[0] == key and run.mask & bit:
                yield run.keys

    def remove(self, bit: int, key: int) -> bool:
        """Clear `bit` on one block; False if it was not set."""
        run_id = self._run_ids[key & _MASK].get(key)
        if run_id is None:
            return False
        run = self.runs[run_id]
        if not run.mask & bit:
            return False
        mask = run.mask & self.live & ~bit
        keys = run.keys
        if len(keys) == 1:
            run.mask = mask
            if not mask:
                self._delete(run)
            return True
        offset = run.offset(key)
        if offset == len(keys) - 1:
            self._change_last(run, mask)
            return True
        tail = self._new(keys[offset + 1 :], run.mask & self.live)
        tail.next = run.next
        run.next = 0
        if offset:
            del keys[offset + 1 :]
            self._change_last(run, mask)
            if mask:
                self.runs[run.next].next = tail.id
            return True
        # The first block keeps the run's id, because the run before it may refer to that id.
        del keys[1:]
        run.mask = mask
        if mask:
            run.next = tail.id
        else:
            self._delete(run)
        return True

    def _change_last(self, run: BlockRun, mask: int) -> None:
        """Change the mask of the last block of a run with several blocks, or remove the block if `mask` is
        0."""
        key = run.keys.pop()
        if not mask:
            del self._run_ids[key & _MASK][key]
            self.blocks -= 1
            run.next = 0
            return
        after = self.runs.get(run.next)
        if after is not None and after.mask & self.live == mask and len(after.keys) < RUN_BLOCKS:
            after.keys.insert(0, key)
            self._run_ids[key & _MASK][key] = after.id
            return
        piece = self._new(array("Q", (key,)), mask)
        piece.next = run.next
        run.next = piece.id

    def _detach_tail(self, run: BlockRun, bit: int, key: int | None) -> BlockRun | None:
        """Move the few blocks after `key` out of `run`, so that new blocks can follow `key` in it.

        None, and no change, if there are too many such blocks or other lanes have the run too.
        """
        # Generated tokens are often not exactly the tokens of the next turn. Without this, a conversation
        # would become a chain with one run per turn.
        keys = run.keys
        start = keys.index(key) + 1  # type: ignore[arg-type]  # known to be there
        if len(keys) - start > _END_BLOCKS or run.mask & self.live != bit:
            return None
        self._split_at(run, start)
        return run

    def _add_new(
        self, predecessor: BlockRun | None, bit: int, keys: Sequence[int], position: int, room: int
    ) -> tuple[BlockRun, int]:
        """Append new keys from `position` on to `predecessor`, or to a new run, until a key is known or the
        run is full.

        Returns the run and how many keys were added.
        """
        if (
            predecessor is not None
            and predecessor.mask & self.live == bit
            and len(predecessor.keys) < RUN_BLOCKS
        ):
            run = predecessor
            run.mask = bit
            run.next = 0
        else:
            self._last_id += 1
            run = self.runs[self._last_id] = BlockRun(self._last_id, array("Q"), bit)
            if predecessor is not None:
                predecessor.next = run.id
        run_id, run_ids = run.id, self._run_ids
        stop = min(len(keys), position + min(room, RUN_BLOCKS - len(run.keys)))
        added = keys[position:stop]
        for count, key in enumerate(added):
            if run_ids[key & _MASK].setdefault(key, run_id) != run_id:
                added = added[:count]
                break
        run.keys.extend(added)
        self.blocks += len(added)
        return run, len(added)

    def _new(self, keys: array[int], mask: int) -> BlockRun:
        """Create a run from blocks of other runs."""
        self._last_id += 1
        self._missed |= mask & self._closed
        run = self.runs[self._last_id] = BlockRun(self._last_id, keys, mask)
        self._set_run_of(keys, run.id)
        return run

    def _set_run_of(self, keys: array[int], run_id: int) -> None:
        run_ids = self._run_ids
        for key in keys:
            run_ids[key & _MASK][key] = run_id

    def _cut(self, run: BlockRun, start: int, stop: int, predecessor: BlockRun | None) -> BlockRun:
        """Move the blocks from `start` to `stop` of `run` into a run of their own, and return that run.

        `predecessor` is the run that ends just before `start`, if known and another run than `run`.
        """
        keys = run.keys
        if stop < len(keys):
            if predecessor is not None and not start and stop <= len(keys) // 2:
                # The longer part keeps the id, so fewer blocks move. Only `predecessor` can refer to it.
                piece = self._new(keys[:stop], run.mask)
                del keys[:stop]
                piece.next = run.id
                predecessor.next = piece.id
                return piece
            self._split_at(run, stop)
        return self._split_at(run, start) if start else run

    def _split_at(self, run: BlockRun, start: int) -> BlockRun:
        """Move the blocks of `run` from `start` on into a new run after it, and return that run."""
        tail = self._new(run.keys[start:], run.mask)
        tail.next = run.next
        run.next = tail.id
        del run.keys[start:]
        return tail

    def _join(self, predecessor: BlockRun | None, piece: BlockRun) -> BlockRun:
        """Append `piece` to `predecessor` if they may be one run. Returns the run that has its blocks."""
        if (
            predecessor is None
            or predecessor.mask & self.live != piece.mask
            or len(predecessor.keys) + len(piece.keys) > RUN_BLOCKS
        ):
            if predecessor is not None:
                predecessor.next = piece.id
            return piece
        predecessor.keys.extend(piece.keys)
        predecessor.mask = piece.mask
        predecessor.next = piece.next
        self._set_run_of(piece.keys, predecessor.id)
        del self.runs[piece.id]
        return predecessor

    def _delete(self, run: BlockRun) -> None:
        run_ids = self._run_ids
        for key in run.keys:
            del run_ids[key & _MASK][key]
        self.blocks -= len(run.keys)
        del self.runs[run.id]
