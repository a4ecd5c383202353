"""Runs a `SimEngine` in real time and wakes whoever waits for its tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from kvroute.clock import Clock
from kvroute.sim.engine import EngineRequest, RequestPhase, SimEngine
from kvroute.wire.vllm import KvEvent

MOST_LATE_S = 1.0
"""What an engine that runs late makes up for at most; beyond it the machine is too slow, or was suspended."""

_ENDED = {RequestPhase.ABORTED: "abort", RequestPhase.REFUSED: "error"}


class Generation:
    """The sequences of one HTTP request. Mutable; the driver and `wait` change it.

    A streamed one is woken in every iteration that gives it tokens, any other only when all is done.
    """

    def __init__(self, requests: Sequence[EngineRequest], reasons: Sequence[str], *, streamed: bool) -> None:
        self.requests = requests
        self.reasons = reasons
        """How each sequence ends if nothing comes between: vLLM's finished_reason."""
        self.streamed = streamed
        self.remaining = len(requests)
        self.refused = False
        self.cut = False
        """The client left or the engine was restarted: nothing more will come."""
        self._poked = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return self.remaining == 0 or self.refused or self.cut

    async def wait(self) -> None:
        """Until something changed since the last call."""
        if not self._poked:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._poked = False

    def poke(self) -> None:
        """Wake the one who waits, now or the next time it would."""
        self._poked = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineDriver:
    """Owns the engine's loop. Mutable: which generations are being streamed."""

    def __init__(
        self, engine: SimEngine, clock: Clock, publish: Callable[[list[KvEvent]], None] | None = None
    ) -> None:
        self.engine = engine
        self.finished: Counter[str] = Counter()
        """Sequences ended, by vLLM's finished_reason: stop, length, abort, error."""
        self._clock = clock
        self._publish = publish
        self._work = asyncio.Event()
        self._all: set[Generation] = set()
        self._streaming: set[Generation] = set()

    def submit(
        self, requests: Sequence[EngineRequest], reasons: Sequence[str], *, streamed: bool
    ) -> Generation:
        """Queue the sequences; end the returned generation with `close`."""
        generation = Generation(requests, reasons, streamed=streamed)
        for request in requests:
            request.owner = generation
            self.engine.add(request)
        self._all.add(generation)
        self._work.set()
        return generation

    def close(self, generation: Generation) -> None:
        """Abort what is still running of it and count how its sequences ended. Safe to call again."""
        if generation not in self._all:
            return
        self._all.discard(generation)
        self._streaming.discard(generation)
        if not generation.done:
            generation.cut = True
            for request in generation.requests:
                self.engine.abort(request)
            generation.poke()
        for request, reason in zip(generation.requests, generation.reasons, strict=True):
            self.finished[_ENDED.get(request.phase, reason)] += 1

    def cut_all(self, engine: SimEngine) -> None:
        """The process dies: end everything and go on with a fresh engine."""
        for generation in list(self._all):
            self.close(generation)
        self.engine = engine
        self.finished.clear()

    async def run(self) -> None:
        """Iterate while there is work; ends only by cancellation, and then everything else ends with it."""
        try:
            await self._iterate()
        finally:
            for generation in list(self._all):
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
            # Counted from when the iteration before should have ended: neither Python's time nor waking up
            # late slows the engine down.
            now = self._clock.now()
            due = max(due, now - MOST_LATE_S) + duration if duration else now
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
            generation.poke()
        for generation in done:
            self._streaming.discard(generation)
            generation.poke()
