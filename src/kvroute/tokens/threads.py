"""A few threads for tokenizing; each caller waits under its own deadline."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from kvroute.tokens.reason import Inexact, Reason

T = TypeVar("T")


class TokenThreads:
    """Runs blocking work beside the event loop. An async context manager.

    Mutable: the count of unfinished work, and `cpu_s`, the threads' CPU seconds for `run`. Work whose waiter
    has given up is dropped if it has not begun, and finished for the caches' sake if it has.
    """

    def __init__(self, threads: int = 2, *, max_waiting: int = 64) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokens")
        self._most = threads + max_waiting
        self._unfinished = 0
        self._cpu_s = 0.0
        self._lock = threading.Lock()

    @property
    def unfinished(self) -> int:
        return self._unfinished

    @property
    def cpu_s(self) -> float:
        return self._cpu_s

    async def run(self, work: Callable[..., T], *args: Any, deadline_s: float | None = None) -> T:
        """`work(*args)` in a thread. Raises Inexact: BUSY immediately, LATE after `deadline_s`, if given."""
        future: Future[T] = self._submitted(self._counted, work, *args)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._result(future)
        except TimeoutError:
            # A loop that was busy handles the timer before the result, even if the result came in time.
            if future.done() and not future.cancelled():
                return future.result()
            raise Inexact(Reason.LATE) from None

    async def run_long(self, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` without a deadline and not counted: for work done once, such as loading a model."""
        return await self._result(self._submitted(work, *args))

    def _counted(self, work: Callable[..., T], *args: Any) -> T:
        began = time.thread_time()
        try:
            return work(*args)
        finally:
            with self._lock:
                self._cpu_s += time.thread_time() - began

    def _submitted(self, work: Callable[..., T], *args: Any) -> Future[T]:
        with self._lock:
            if self._unfinished >= self._most:
                raise Inexact(Reason.BUSY)
            self._unfinished += 1
        try:
            future = self._executor.submit(work, *args)
        except RuntimeError:  # shut down
            self._finished()
            raise Inexact(Reason.BUSY) from None
        future.add_done_callback(self._finished)
        return future

    async def _result(self, future: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Inexact(Reason.BUSY) from None  # the work was dropped at shutdown, its waiter was not

    def _finished(self, _: Future[Any] | None = None) -> None:
        with self._lock:
            self._unfinished -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop what waits and let what runs finish."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._executor.shutdown, wait=True)
