"""A request that is being prepared: it has been taken, and its exchange has not begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol, TypeAlias


class Going(Protocol):
    """What a client's connection holds on to while its request is under way."""

    @property
    def is_over(self) -> bool: ...
    def end(self, by: str) -> None: ...
    def hold(self) -> None: ...
    def go_on(self) -> None: ...


Prepare: TypeAlias = Callable[[], Coroutine[None, None, Going | None]]


class Pending:
    """Stands for an exchange until there is one, then for that.

    `prepare` ends with the exchange, or None when the request was answered otherwise; `left` is called when
    it was told to end before, with who told it. Mutable: by its task. Belongs to one event loop.
    """

    def __init__(self, prepare: Prepare, left: Callable[[Pending, str], None]) -> None:
        self._exchange: Going | None = None
        self._left = left
        self._is_over = False
        self._task = asyncio.create_task(self._prepared(prepare), name="preparing a request")

    @property
    def is_over(self) -> bool:
        return self._is_over if self._exchange is None else self._exchange.is_over

    @property
    def task(self) -> asyncio.Task[None]:
        return self._task

    def end(self, by: str) -> None:
        """As `Exchange.end`."""
        if self._exchange is not None:
            self._exchange.end(by)
        elif not self._is_over:
            self._is_over = True
            self._task.cancel()
            self._left(self, by)

    def hold(self) -> None:
        """As `Exchange.hold`."""
        if self._exchange is not None:
            self._exchange.hold()

    def go_on(self) -> None:
        """As `Exchange.go_on`."""
        if self._exchange is not None:
            self._exchange.go_on()

    async def _prepared(self, prepare: Prepare) -> None:
        self._exchange = await prepare()
        if self._exchange is None:
            self._is_over = True
