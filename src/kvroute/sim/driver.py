"""Runs a `SimEngine` in real time and wakes the request handlers that wait for its tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from kvroute.clock import Clock
from kvroute.sim.engine import EngineRequest, RequestPhase, SimEngine
from kvroute.wire.vllm import KvEvent

MAX_CATCH_UP_S = 1.0
"""Largest delay that an engine corrects by shorter sleeps. A larger delay means that the machine is too slow
or was suspended."""

_ENDED = {RequestPhase.ABORTED: "abort", RequestPhase.REFUSED: "error"}


class Generation:
    """The sequences of one HTTP request. Mutable: changed by the driver and `wait`.

    The driver wakes a streamed generation in each iteration that adds tokens, any other only at its end.
    """

    def __init__(self, requests: Sequence[EngineRequest], reasons: Sequence[str], *, streamed: bool) -> None:
        self.requests = requests
        self.reasons = reasons
        """vLLM's finished_reason of each sequence, unless the sequence is aborted or refused."""
        self.streamed = streamed
        self.remaining = len(requests)
        self.refused = False
        self.cancelled = False
        """The client left or the engine was restarted: there will be no more tokens."""
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return self.remaining == 0 or self.refused or self.cancelled

    async def wait(self) -> None:
        """Wait until `wake` was called since the last `wait`."""
        if not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._woken = False

    def wake(self) -> None:
        """Let the current `wait` return, or the next one if none is running."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineDriver:
    """Runs the engine's iterations and tracks its generations. Mutable throughout."""

    def __init__(
        self, engine: SimEngine, clock: Clock, publish: Callable[[list[KvEvent]], None] | None = None
    ) -> None:
        self.engine = engine
        self.finished: Counter[str] = Counter()
        """Number of ended sequences by vLLM's finished_reason: stop, length, abort, error."""
        self._clock = clock
        self._publish = publish
        self._work = asyncio.Event()
        self._open: set[Generation] = set()
        self._streaming: set[Generation] = set()

    def submit(
        self, requests: Sequence[EngineRequest], reasons: Sequence[str], *, streamed: bool
    ) -> Generation:
        """Queue sequences. The caller ends the returned generation with `close`."""
        generation = Generation(requests, reasons, streamed=streamed)
        for request in requests:
            request.owner = generation
            self.engine.add(request)
        self._open.add(generation)
        self._work.set()
        return generation

    def close(self, generation: Generation) -> None:
        """Abort the unfinished sequences and count how each one ended. A second call does nothing."""
        if generation not in self._open:
            return
        self._open.discard(generation)
        self._streaming.discard(generation)
        if not generation.done:
            generation.cancelled = True
            for request in generation.requests:
                self.engine.abort(request)
            generation.wake()
        for request, reason in zip(generation.requests, generation.reasons, strict=True):
            self.finished[_ENDED.get(request.phase, reason)] += 1

    def cancel_all(self, engine: SimEngine) -> None:
        """Simulate a restart of the process: end all generations and continue with a new engine."""
        for generation in list(self._open):
            self.close(generation)
        self.engine = engine
        self.finished.clear()

    async def run(self) -> None:
        """Run iterations until cancelled; then end all generations."""
        try:
            await self._iterate()
        finally:
            for generation in list(self._open):
                self.close(generation)

    async def _iterate(self) -> None:
        due = self._clock.now()
        while True:
            engine = self.engine
            duration = engine.begin()
            if duration is None:
                self._work.clear()
                await self._work.wait()
                due = self._clock.now()
                continue
            # The iteration starts at the planned end of the one before. So neither Python's own time nor a
            # late wake-up slows the engine down.
            now = self._clock.now()
            due = max(due, now - MAX_CATCH_UP_S) + duration if duration else now
            await self._clock.sleep(max(0.0, due - now))
            if engine is self.engine:
                self._finish(engine)

    def _finish(self, engine: SimEngine) -> None:
        progress = engine.finish()
        if progress.events and self._publish is not None:
            self._publish(progress.events)
        for request in progress.first:
            generation = request.owner
            assert isinstance(generation, Generation)
            if generation.streamed and request.phase is not RequestPhase.ABORTED:
                self._streaming.add(generation)
        done = []
        for request in progress.finished + progress.refused:
            generation = request.owner
            assert isinstance(generation, Generation)
            generation.remaining -= 1
            generation.refused |= request.phase is RequestPhase.REFUSED
            if generation.done:
                done.append(generation)
        for generation in self._streaming:
            generation.wake()
        for generation in done:
            self._streaming.discard(generation)
            generation.wake()
