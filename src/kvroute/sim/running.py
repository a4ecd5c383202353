"""Running simulated workers: a real HTTP server on a real port, started and stopped without waiting."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvroute.clock import Clock, SystemClock
from kvroute.sim.app import SimApp
from kvroute.sim.engine import SimEngine
from kvroute.sim.http import Scope
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.worker import Worker


class RunningSim:
    """One worker with its listener and tasks. Made by `run_sim`; mutable through its methods.

    uvicorn's protocol class is served by a listener of our own, because `uvicorn.Server` polls for its
    shutdown and takes the process's signals.
    """

    def __init__(self, options: SimOptions, clock: Clock) -> None:
        publisher = EventPublisher(options, clock) if options.kv_events else None
        self.worker = Worker(options, clock, publisher)
        self._options = options
        self._state = ServerState()
        self._config = uvicorn.Config(
            SimApp(self.worker, self._reset),
            http=HttpToolsProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            timeout_keep_alive=600,
        )
        self._config.load()
        self._state.default_headers = self._config.encoded_headers
        self._listener: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return f"http://{self._options.host}:{self.port}"

    @property
    def engine(self) -> SimEngine:
        """The engine of the present process; another one after `restart`."""
        return self.worker.engine

    async def start(self) -> None:
        """Listen, on the same port as before if there was one. Returns when connections are accepted."""
        if not self._tasks:
            self._tasks.append(asyncio.create_task(self.worker.driver.run()))
            if self.worker.publisher is not None:
                self._tasks.append(asyncio.create_task(self.worker.publisher.serve()))
        if self._listener is None:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: HttpToolsProtocol(self._config, self._state, {}),
                host=self._options.host,
                port=self.port or self._options.port,
                backlog=4096,
            )
            self.port = self._listener.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Stop listening: new connections are refused, those that exist go on. `start` undoes it."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener.close()

    async def kill(self) -> None:
        """As SIGKILL does it: every connection is reset, nothing listens. `restart` brings it back."""
        await self.refuse()
        for protocol in list(self._state.connections):
            _abort(protocol.transport)
        self.worker.restart()

    async def restart(self) -> None:
        """Kill and start again on the same port: empty cache, event numbers from 0, a new start time."""
        await self.kill()
        await self.start()

    async def stop(self) -> None:
        """End everything that `start` began."""
        await self.kill()
        tasks = [*self._tasks, *self.worker.tasks]
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, *self._state.tasks, return_exceptions=True)
        self._tasks.clear()
        if self.worker.publisher is not None:
            self.worker.publisher.close()
        for end in ends:
            if isinstance(end, Exception):
                raise end  # a mistake of the simulator itself: let its test fail

    def _reset(self, scope: Scope) -> None:
        client = tuple(scope["client"]) if scope["client"] else None
        for protocol in list(self._state.connections):
            if isinstance(protocol, HttpToolsProtocol) and protocol.client == client:
                _abort(protocol.transport)


def _abort(transport: asyncio.Transport) -> None:
    """Close with a TCP reset."""
    raw = transport.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


@asynccontextmanager
async def run_sim(
    options: SimOptions | None = None, *, clock: Clock | None = None
) -> AsyncIterator[RunningSim]:
    """A simulated worker that listens while the context lasts, in this event loop."""
    running = RunningSim(options or SimOptions(), clock or SystemClock())
    try:
        await running.start()
        yield running
    finally:
        await running.stop()
