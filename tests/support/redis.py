"""Redis servers on free ports."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio
from tests.support.programs import program
from tests.support.sockets import free_port
from tests.support.waiting import until


class RedisServer:
    """A redis-server without persistence. Mutable: it can be killed and started again on its port."""

    def __init__(self, *arguments: str, tls: bool = False) -> None:
        self.port = free_port()
        self._arguments = (*(("--tls-port", str(self.port), "--port", "0") if tls else ()), *arguments)
        self._is_tls = tls
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis{'s' if self._is_tls else ''}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start, and wait until it answers (with TLS: until it listens)."""
        self._process = await asyncio.create_subprocess_exec(
            *(program("redis-server"), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
            *self._arguments,
            stdout=asyncio.subprocess.DEVNULL,
        )

        async def answers() -> bool:
            assert self._process is not None
            assert self._process.returncode is None
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return False
            writer.close()
            return True

        await until(answers)

    def client(self) -> redis.asyncio.Redis:
        return redis.asyncio.Redis(port=self.port)

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def proceed(self) -> None:
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@asynccontextmanager
async def redis_server(*arguments: str, tls: bool = False) -> AsyncIterator[RedisServer]:
    server = RedisServer(*arguments, tls=tls)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
