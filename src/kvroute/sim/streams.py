"""Streaming a generation: one event per token and choice, however late the reader is."""

from __future__ import annotations

from collections.abc import Callable

from kvroute.sim.driver import Generation
from kvroute.sim.http import SSE, Call
from kvroute.sim.worker import Worker

Event = Callable[[int, int], bytes]
"""(sequence, token position) -> the bytes of the events that this token makes."""


async def stream(
    call: Call, worker: Worker, generation: Generation, event: Event, opening: bytes = b""
) -> None:
    """Send the head with the first token and then every token as it comes; the caller ends the answer.

    `opening` goes before the first token. Raises `Gone` when the client leaves, which aborts the
    generation.
    """
    sent = [0] * len(generation.requests)
    parts = [opening] if opening else []
    async with worker.attended(call, generation):
        done = False
        while not done:
            await generation.wait()
            worker.check(generation)
            done = generation.done
            iteration = worker.engine.iteration
            for sequence, request in enumerate(generation.requests):
                produced = request.produced(iteration)
                for position in range(sent[sequence], produced):
                    parts.append(event(sequence, position))
                sent[sequence] = max(sent[sequence], produced)
            if parts:
                if not call.started:
                    await call.start(200, [SSE])
                await call.chunk(b"".join(parts), len(parts))
                worker.counters.chunks += len(parts)
                parts = []
