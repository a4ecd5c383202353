"""Blocks of one size: which lanes hold them, as runs of consecutive blocks with the same holders.

A *lane* is one bit: one holder's blocks of this size. Along a prompt the set of holders changes rarely, so
consecutive blocks with equal masks share one `BlockRun`. Keys are chained, hence a prompt that agrees with a
run's last key agrees with all of it: a match looks at runs, not at blocks, and is exact with any holes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from kvroute.blocks.keys import BlockKey

RUN_BLOCKS: Final = 256
"""Longest run: bounds what moving a run's border costs."""

_END_BLOCKS: Final = 8
"""Blocks at a run's end that are moved to let the run go on before them."""

_SHARDS: Final = 256
"""Hash tables per size: one of ten million entries would stop the process for as long as it grows."""

_MASK: Final = _SHARDS - 1


class BlockRun:
    """Consecutive blocks with one mask. Mutable; only its `RunTable` changes it.

    `next` is the id of the run whose first block is the child of this one's last, if known, else 0.
    """

    __slots__ = ("id", "keys", "mask", "next")

    def __init__(self, run_id: int, keys: array[int], mask: int) -> None:
        self.id = run_id
        self.keys = keys
        self.mask = mask
        self.next = 0

    def offset(self, key: int) -> int:
        """Where `key` is, known to be there."""
        keys = self.keys
        if keys[0] == key:
            return 0
        last = len(keys) - 1
        return last if keys[last] == key else keys.index(key)

    def common(self, offset: int, prompt: Sequence[int], position: int) -> int:
        """How many blocks from `offset` on agree with the prompt's from `position` on; the first does."""
        keys = self.keys
        high = min(len(keys) - offset, len(prompt) - position)
        if keys[offset + high - 1] == prompt[position + high - 1]:
            return high
        # Most part near the end: what was generated is not quite what the next turn brings.
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
        """Lanes in use. A mask may have other bits too, of closed lanes: they mean nothing."""
        self.runs: dict[int, BlockRun] = {}
        self._where: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._last_id = 0
        self._closed = 0
        self._tainted = 0
        """Closed lanes in runs that were split off since the sweep began: it may have missed those."""
        self._sweeping: tuple[int, Iterator[int]] | None = None

    # Lanes

    def open_lane(self) -> int:
        """A bit that no block has."""
        taken = self.live | self._closed
        bit = ~taken & (taken + 1)
        self.live |= bit
        return bit

    def close_lane(self, bit: int) -> None:
        """All of the lane's blocks are gone at once; `sweep` returns their memory."""
        self.live &= ~bit
        self._closed |= bit

    def sweep(self, steps: int) -> int:
        """Clean up after closed lanes, at most about `steps` blocks; returns how many steps are left."""
        while steps > 0:
            if self._sweeping is None:
                if not self._closed:
                    return steps
                self._sweeping = self._closed, iter(list(self.runs))
                self._tainted = 0
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
            self._closed &= ~closed | self._tainted
            self._sweeping = None
        return 0

    # Blocks

    def find(self, key: int) -> BlockRun | None:
        run_id = self._where[key & _MASK].get(key)
        return None if run_id is None else self.runs[run_id]

    def store(self, bit: int, parent: int | None, keys: Sequence[BlockKey], room: int) -> tuple[int, int]:
        """Set `bit` on `keys`, each the parent of the next. Returns (keys done, bits newly set).

        `parent` is the block before the first, if known. At most `room` new blocks are made: then fewer
        keys than given are done.
        """
        position, total, fresh = 0, len(keys), 0
        left = None if parent is None else self.find(parent)
        if left is not None and left.keys[-1] != parent:
            left = self._without_end(left, bit, parent) if total and self.find(keys[0]) is None else None
        while position < total:
            run = self.find(keys[position])
            if run is None:
                if room <= 0:
                    break
                left, count = self._add(left, bit, keys, position, room)
                room -= count
                fresh += count
                position += count
                continue
            offset = run.offset(keys[position])
            count = run.common(offset, keys, position)
            if run.mask & bit:
                left = run if offset + count == len(run.keys) else None
            else:
                piece = self._cut(run, offset, offset + count, left)
                piece.mask = piece.mask & self.live | bit
                fresh += count
                left = self._joined(left, piece)
            position += count
        return position, fresh

    def append(self, bit: int, parent: int, key: int) -> bool:
        """`store` of one new block behind the last of a run that only this lane has; False, and nothing is
        done, if it is not as simple as that."""
        where = self._where
        run_id = where[parent & _MASK].get(parent)
        shard = where[key & _MASK]
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
        run_id = self._where[key & _MASK].get(key)
        return run_id is not None and bool(self.runs[run_id].mask & bit)

    def runs_at(self, bit: int, keys: Sequence[int]) -> Iterator[Sequence[int]]:
        """The runs with `bit` whose first block is one of `keys`."""
        for key in keys:
            run = self.find(key)
            if run is not None and run.keys[0] == key and run.mask & bit:
                yield run.keys

    def remove(self, bit: int, key: int) -> bool:
        """Clear `bit` on one block; False if it was not set."""
        run_id = self._where[key & _MASK].get(key)
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
            self._trim(run, mask)
            return True
        rest = self._new(keys[offset + 1 :], run.mask & self.live)
        rest.next = run.next
        run.next = 0
        if offset:
            del keys[offset + 1 :]
            self._trim(run, mask)
            if mask:
                self.runs[run.next].next = rest.id
            return True
        # The first block keeps the id: what lies before it may point there.
        del keys[1:]
        run.mask = mask
        if mask:
            run.next = rest.id
        else:
            self._delete(run)
        return True

    def _trim(self, run: BlockRun, mask: int) -> None:
        """The last block of a run of several gets another mask, or goes."""
        key = run.keys.pop()
        if not mask:
            del self._where[key & _MASK][key]
            self.blocks -= 1
            run.next = 0
            return
        after = self.runs.get(run.next)
        if after is not None and after.mask & self.live == mask and len(after.keys) < RUN_BLOCKS:
            after.keys.insert(0, key)
            self._where[key & _MASK][key] = after.id
            return
        piece = self._new(array("Q", (key,)), mask)
        piece.next = run.next
        run.next = piece.id

    def _without_end(self, run: BlockRun, bit: int, key: int | None) -> BlockRun | None:
        """`run`, which is to go on behind `key`, without the few blocks that it has there: they become a run
        of their own. None, and nothing is done, where that would be of no use.

        What was generated is often not quite what the next turn brings. A conversation would else become a
        chain of one run a turn.
        """
        keys = run.keys
        start = keys.index(key) + 1  # type: ignore[arg-type]  # known to be there
        if len(keys) - start > _END_BLOCKS or run.mask & self.live != bit:
            return None
        self._part(run, start)
        return run

    def _add(
        self, left: BlockRun | None, bit: int, keys: Sequence[int], position: int, room: int
    ) -> tuple[BlockRun, int]:
        """Put unknown keys from `position` on behind `left`, or into a new run, until one is known or the
        run is full."""
        if left is not None and left.mask & self.live == bit and len(left.keys) < RUN_BLOCKS:
            run = left
            run.mask = bit
            run.next = 0
        else:
            self._last_id += 1
            run = self.runs[self._last_id] = BlockRun(self._last_id, array("Q"), bit)
            if left is not None:
                left.next = run.id
        run_id, where = run.id, self._where
        stop = min(len(keys), position + min(room, RUN_BLOCKS - len(run.keys)))
        added = keys[position:stop]
        for count, key in enumerate(added):
            if where[key & _MASK].setdefault(key, run_id) != run_id:
                added = added[:count]
                break
        run.keys.extend(added)
        self.blocks += len(added)
        return run, len(added)

    def _new(self, keys: array[int], mask: int) -> BlockRun:
        """A run of blocks that are known already: they now belong to it."""
        self._last_id += 1
        self._tainted |= mask & self._closed
        run = self.runs[self._last_id] = BlockRun(self._last_id, keys, mask)
        self._point(keys, run.id)
        return run

    def _point(self, keys: array[int], run_id: int) -> None:
        where = self._where
        for key in keys:
            where[key & _MASK][key] = run_id

    def _cut(self, run: BlockRun, start: int, stop: int, left: BlockRun | None) -> BlockRun:
        """Make `run`'s blocks from `start` to `stop` a run of their own. `left` ends just before `start`,
        if it is known and not `run` itself."""
        keys = run.keys
        if stop < len(keys):
            if left is not None and not start and stop <= len(keys) // 2:
                # The longer part keeps the id: fewer blocks move. Only `left` can point to it.
                piece = self._new(keys[:stop], run.mask)
                del keys[:stop]
                piece.next = run.id
                left.next = piece.id
                return piece
            self._part(run, stop)
        return self._part(run, start) if start else run

    def _part(self, run: BlockRun, start: int) -> BlockRun:
        """What `run` has from `start` on becomes a run of its own, behind it."""
        rest = self._new(run.keys[start:], run.mask)
        rest.next = run.next
        run.next = rest.id
        del run.keys[start:]
        return rest

    def _joined(self, left: BlockRun | None, piece: BlockRun) -> BlockRun:
        """`left` with `piece` appended if they may be one, else `piece`."""
        if (
            left is None
            or left.mask & self.live != piece.mask
            or len(left.keys) + len(piece.keys) > RUN_BLOCKS
        ):
            if left is not None:
                left.next = piece.id
            return piece
        left.keys.extend(piece.keys)
        left.mask = piece.mask
        left.next = piece.next
        self._point(piece.keys, left.id)
        del self.runs[piece.id]
        return left

    def _delete(self, run: BlockRun) -> None:
        where = self._where
        for key in run.keys:
            del where[key & _MASK][key]
        self.blocks -= len(run.keys)
        del self.runs[run.id]
