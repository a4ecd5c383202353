"""The list of changed objects: a gateway follows with it what a daemon holds.

The list has names only, in the order of the changes. Whether an object came or went is read from the store
when a call is answered, so a name that changed several times is sent once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from kvroute.tierd.pool import ObjectName

_KEPT: Final = 16_384
"""Changes in the list: about 2.5 MB. A client that is further behind gets all names again."""
LONGEST_WAIT_S: Final = 30.0


class Position(NamedTuple):
    """How far a client has read: the daemon's incarnation, and the number of changes."""

    incarnation: str
    number: int


class ChangeList:
    """The newest changes. Mutable, used from one event loop only; `note` takes well below 1 us."""

    def __init__(self, *, kept: int = _KEPT) -> None:
        self.number = 0
        """Changes since the start."""
        self._names: deque[ObjectName] = deque(maxlen=kept)
        self._waiting: set[asyncio.Future[None]] = set()

    def note(self, name: ObjectName) -> None:
        """An object came or went."""
        self.number += 1
        self._names.append(name)
        if self._waiting:
            for each in self._waiting:
                if not each.done():
                    each.set_result(None)
            self._waiting.clear()

    def since(self, number: int) -> Iterable[ObjectName] | None:
        """The names of the changes after the first `number` ones; None if some are no longer in the list."""
        first = self.number - len(self._names)
        if not first <= number <= self.number:
            return None
        return islice(self._names, number - first, None)

    async def wait(self, number: int, timeout_s: float) -> None:
        """Return when there are other changes than the first `number` ones, or after `timeout_s`."""
        if number != self.number:
            return
        changed = asyncio.get_running_loop().create_future()
        self._waiting.add(changed)
        try:
            await asyncio.wait([changed], timeout=timeout_s)
        finally:
            self._waiting.discard(changed)


class _Changes(msgspec.Struct):
    """The answer. `stored` and `removed` are keys of one bucket; `whole`: `stored` are all its objects."""

    incarnation: str
    number: int
    whole: bool
    stored: list[str]
    removed: list[str]


def changes_body(
    changes: ChangeList,
    incarnation: str,
    bucket: bytes,
    after: Position,
    held: Callable[[], Iterable[ObjectName]],
    holds: Callable[[ObjectName], bool],
) -> bytes:
    """The JSON of the changes of `bucket` after a position. `held` are all objects, `holds` asks for one.

    Takes about 1 us per name. Keys that are not UTF-8 are left out: LMCache's keys always are.
    """
    names = changes.since(after.number) if after.incarnation == incarnation else None
    answer = _Changes(incarnation, changes.number, names is None, [], [])
    for name in dict.fromkeys(held() if names is None else names):
        if name.bucket == bucket and (key := _text(name.key)) is not None:
            (answer.stored if names is None or holds(name) else answer.removed).append(key)
    return msgspec.json.encode(answer)


def _text(key: bytes) -> str | None:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None
