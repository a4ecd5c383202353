"""What has arrived from the fleet, handled in slices, so that the event loop never waits long for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

SLICE: Final = 1024
"""Messages that are worked through in one iteration of the event loop. Each costs 10 to 20 us."""
_ENVELOPE: Final = 2
"""An envelope costs as much as so many messages, and one more per `_BYTES`: to check and to decode it."""
_BYTES: Final = 8192
_FULL_BYTES: Final = 1024 * 1024


class Inbox:
    """Envelopes in the order in which they arrived. Little is worked through at once, the rest in slices.

    Mutable, on one event loop: `add`, and the slices that follow.
    """

    def __init__(
        self,
        read: Callable[[bytes], Iterator[None]],
        on_full: Callable[[], None],
        on_empty: Callable[[], None],
    ) -> None:
        """`read` works on an envelope and pauses after each message; it raises nothing.

        `on_full` is called when more than 1 MiB waits, and then `on_empty` when nothing waits any more.
        """
        self._read = read
        self._on_full = on_full
        self._on_empty = on_empty
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._is_full = False
        self._current: Iterator[None] | None = None
        self._budget = SLICE
        """Of the current slice. A new one is only scheduled when half of it is used."""
        self._next: asyncio.Handle | None = None

    def add(self, data: bytes) -> None:
        """An envelope has arrived."""
        self._waiting.append(data)
        self._bytes += len(data)
        self._work()
        if self._bytes > _FULL_BYTES and not self._is_full:
            self._is_full = True
            self._on_full()

    def close(self) -> None:
        """Drop what waits."""
        self._waiting.clear()
        self._current = None
        if self._next is not None:
            self._next.cancel()

    def _work(self) -> None:
        while self._budget > 0 and (self._current is not None or self._waiting):
            if self._current is None:
                data = self._waiting.popleft()
                self._bytes -= len(data)
                self._current = self._read(data)
                self._budget -= _ENVELOPE + len(data) // _BYTES
            current = self._current
            for _ in current:
                self._budget -= 1
                if self._budget <= 0:
                    break
            else:
                self._current = None
        if self._budget <= SLICE // 2 and self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._begin_slice)

    def _begin_slice(self) -> None:
        self._next, self._budget = None, SLICE
        self._work()
        if self._is_full and self._current is None and not self._waiting:
            self._is_full = False
            self._on_empty()
