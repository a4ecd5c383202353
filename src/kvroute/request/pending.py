"""Exchanges that begin later: a task prepares them, or they wait."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, TypeAlias

from kvroute.request.downstream import InFlightRequest

if TYPE_CHECKING:
    pass


Prepare: TypeAlias = Callable[[], Coroutine[None, None, InFlightRequest | None]]


class DelayedExchange:
    """A request whose exchange starts later; from then on it passes every call on to the exchange.

    A subclass sets `_exchange`, or `_is_over` if the request ends without one. Mutable: by the subclass and
    the client's side, on one event loop.
    """

    def __init__(self) -> None:
        self._exchange: InFlightRequest | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over if self._exchange is None else self._exchange.is_over

    def end(self, by: str) -> None:
        """See `Exchange.end`."""
        if self._exchange is not None:
            self._exchange.end(by)
        elif not self._is_over:
            self._is_over = True
            self._end_early(by)

    def pause(self) -> None:
        """See `Exchange.pause`."""
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        """See `Exchange.resume`."""
        if self._exchange is not None:
            self._exchange.resume()

    @abstractmethod
    def _end_early(self, by: str) -> None:
        """End the request before it has an exchange. Called once."""


class PendingExchange(DelayedExchange):
    """An exchange that is being prepared in a task.

    `prepare` returns the exchange, or None if it answered the request itself. `on_end` is called if `end`
    comes before `prepare` is ready. Mutable: by its task.
    """

    def __init__(self, prepare: Prepare, on_end: Callable[[PendingExchange, str], None]) -> None:
        super().__init__()
        self._on_end = on_end
        self._task = asyncio.create_task(self._run(prepare), name="prepare a request")

    @property
    def task(self) -> asyncio.Task[None]:
        return self._task

    def _end_early(self, by: str) -> None:
        self._task.cancel()
        self._on_end(self, by)

    async def _run(self, prepare: Prepare) -> None:
        self._exchange = await prepare()
        if self._exchange is None:
            self._is_over = True
