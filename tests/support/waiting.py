"""Wait for a condition under a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any


async def until(
    condition: Callable[[], Any | Awaitable[Any]], *, within_s: float = 60.0, every_s: float | None = None
) -> Any:
    """Poll `condition` and return its first true value; TimeoutError after `within_s`.

    The time only ends a test that hangs: no test measures by it. `condition` may be a coroutine function,
    which is polled every 20 ms; a plain function is polled every ms.
    """
    async with asyncio.timeout(within_s):
        while True:
            found, pause_s = condition(), 0.001
            if inspect.isawaitable(found):
                found, pause_s = await found, 0.02
            if found:
                return found
            await asyncio.sleep(pause_s if every_s is None else every_s)
