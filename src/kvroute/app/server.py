"""Running the gateway's process: socket, signals, shutdown in order, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvroute import __version__
from kvroute.app.collectors import keep_freed_memory, use_huge_pages
from kvroute.app.config import Config
from kvroute.app.replica import Replica
from kvroute.app.runtime import Runtime
from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.gateway.access import AdminKeys
from kvroute.gateway.admin_guard import kept_key, key_lines, key_path, user_state_folder
from kvroute.gateway.application import Front
from kvroute.gateway.complete import CompleteProtocol
from kvroute.gateway.edge import ClientBounds, EdgeProtocol
from kvroute.gateway.fastlane import fast_lane
from kvroute.gateway.options import AFTER_CUT_S, ServerOptions
from kvroute.gateway.selftest import complete_trouble, fast_lane_trouble
from kvroute.logs import configure
from kvroute.replicas.mesh import SharedPort, folder_of_links
from kvroute.replicas.supervisor import ProcessSpec, Supervisor

log = logging.getLogger(__name__)

_SERVERS = 8
"""For each listening socket. One that finds nobody waiting any more costs 3 us, hence no more of them."""


class Backlog:
    """Further servers of the loop on sockets that listen, beside the one that is there.

    libuv accepts one connection in each round of the loop, for each server. A round that relays some
    hundred streams lasts milliseconds, and so of 640 clients that come together the last ones waited 2
    seconds to be accepted. (asyncio's own loop accepts all that wait at once.)
    Mutable: `begin` and `close`. Belongs to one event loop.
    """

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol], length: int) -> None:
        """`length` is how many connections the kernel holds, as the sockets were told before."""
        self._make_protocol = make_protocol
        self._length = length
        self._servers: list[asyncio.Server] = []

    async def begin(self, listening: Iterable[socket.SocketType]) -> None:
        """Accept from these, through descriptors of its own."""
        loop = asyncio.get_running_loop()
        for each in listening:
            for _ in range(_SERVERS):
                own = socket.socket(fileno=os.dup(each.fileno()))
                own.setblocking(False)
                server = await loop.create_server(self._protocol, sock=own, backlog=self._length)
                self._servers.append(server)

    def close(self) -> None:
        """Accept no more; what was accepted stays open. Idempotent."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    def _protocol(self) -> asyncio.Protocol:
        try:
            return self._make_protocol()
        except Exception:  # uvloop would end the server
            log.exception("a client's connection could not be set up")
            return _Refused()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class AdminAccess:
    """`keys` are those of `config`; without any, `listens_on` adds the one in the port's key file.

    Mutable: by `listens_on`, before the gateway takes requests on that port.
    """

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self.keys = AdminKeys(config.admin.keys)
        self._config = config
        self._environ = environ
        self._is_configured = bool(config.admin.keys)
        self._files: dict[int, Path] = {}
        self._is_logged = False

    def listens_on(self, port: int) -> None:
        """The gateway listens on `port`, or is about to. Logs where the key is, once for each file.

        Raises ConfigError where a key is needed and cannot be kept. Blocks: call it at the start only.
        """
        if self._is_configured:
            if not self._is_logged:
                self._is_logged = True
                file = self._config.admin.api_key_file
                where = (
                    "the configured one (admin.api_key)"
                    if file is None
                    else f"in {file} (admin.api_key_file)"
                )
                log.info("the admin key is %s", where)
            return
        if port in self._files:
            return
        path = key_path(self._folder(), port)
        self.keys.add(key_lines(kept_key(path)))
        self._files[port] = path
        log.info("the admin key is in %s", path)

    def close(self) -> None:
        """Remove the files of ports that the system has chosen: nobody will listen there again."""
        if self._config.server.port == 0:
            for path in self._files.values():
                with contextlib.suppress(OSError):
                    path.unlink()

    def _folder(self) -> Path:
        folder = self._config.server.state_dir
        return folder.absolute() if folder is not None else user_state_folder(self._environ)


NEXT_STAGE = signal.SIGUSR1  # `NEXT_STAGE` of replicas/supervisor.py, which one process alone does not load


_GC_THRESHOLDS = (20_000, 20, 50)
_FEW_DESCRIPTORS = 8192


class GatewayServer(uvicorn.Server):
    """uvicorn's server with the gateway's shutdown, in stages:

    1. delay: not ready, but everything is served on; `server.shutdown_delay_s`.
    2. drain: no new connections or requests, running answers may finish; `server.drain_timeout_s`.
    3. cut: running answers end with an error, connections are closed.

    The first SIGTERM or SIGINT starts the shutdown. Each further SIGINT ends the current stage. A further
    SIGTERM changes nothing, because a process may get it twice: from the service manager and from its parent.
    SIGHUP is only logged.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        runtime: Runtime,
        options: ServerOptions,
        part: ListeningProcess | None = None,
        access: AdminAccess | None = None,
    ) -> None:
        super().__init__(config)
        self._access = access
        self._part = part
        self._runtime = runtime
        self._delay_s = options.shutdown_delay_s
        self._drain_timeout_s = options.drain_timeout_s
        self._next_stage = asyncio.Event()
        self._backlog = Backlog(self._client_protocol, config.backlog)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self._backlog.begin(listening for server in self.servers for listening in server.sockets)
        if self._part is not None:
            self._part.ready()
            if self._part.replica.number:
                return  # one of them says it
        for server in self.servers:
            for listening in server.sockets:
                host, port, *_ = listening.getsockname()
                if self._access is not None:
                    self._access.listens_on(port)
                shown = f"[{host}]" if ":" in host else host
                log.info("kvroute %s listens on http://%s:%d", __version__, shown, port)

    async def main_loop(self) -> None:
        # uvicorn's loop wakes ten times a second. In a task of its own it resumes none of the coroutines that
        # wait for it.
        await asyncio.create_task(super().main_loop(), name="uvicorn's main loop")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's place for its signal handlers. These run in the loop, so they may log; and no signal is
        raised again after the shutdown, which would change the exit code."""
        if threading.current_thread() is not threading.main_thread():  # which alone gets signals
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._begin_shutdown)
        # Of several processes, the parent alone listens to SIGINT, and passes it on.
        further = signal.SIGINT if self._part is None else NEXT_STAGE
        loop.add_signal_handler(further, self._interrupted)
        yield

    def _begin_shutdown(self) -> None:
        self._runtime.plane.admission.announce_shutdown()
        self.should_exit = True
        if self._delay_s:
            self._close_after_answers()

    def _close_after_answers(self) -> None:
        # uvicorn and the fast lane add these headers to every answer and close the connection after it. The
        # client may connect to another gateway next, so no connection is in use when the delay ends.
        self.server_state.default_headers = [(b"connection", b"close")]

    def _interrupted(self) -> None:
        if self.should_exit:
            self._next_stage.set()
        else:
            self._begin_shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        plane = self._runtime.plane
        plane.admission.announce_shutdown()
        if self._delay_s:
            log.info(
                "shutting down in %g s (server.shutdown_delay_s): not ready, still serving", self._delay_s
            )
            self._close_after_answers()  # again: uvicorn sets them anew every second, until now
            await self._wait(self._delay_s)
        plane.admission.close()
        self._backlog.close()
        log.info("shutting down: %d requests are running", plane.admission.in_flight)
        cutter = asyncio.create_task(self._cut_late())
        try:
            await super().shutdown(sockets)
        finally:
            cutter.cancel()
            await asyncio.gather(cutter, return_exceptions=True)

    async def _wait(self, seconds: float) -> None:
        """Let a stage last that long, or until it is ended by a signal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._next_stage.wait()
        self._next_stage.clear()

    def _client_protocol(self) -> asyncio.Protocol:
        """As uvicorn makes one for a connection that it accepts."""
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def _cut_late(self) -> None:
        clock = self._runtime.plane.clock
        began = clock.now()
        await self._wait(self._drain_timeout_s)
        cut = self._runtime.plane.admission.cut()
        if cut:
            log.warning(
                "cut %d requests after %.0f s (server.drain_timeout_s, or SIGINT)", cut, clock.now() - began
            )
        # Who does not read its error event keeps its connection open.
        await self._wait(AFTER_CUT_S)
        self.force_exit = True


@dataclass(frozen=True, slots=True)
class ListeningProcess:
    """One of several processes: what it listens on, and what it calls when it does."""

    replica: Replica
    sockets: list[socket.socket]
    ready: Callable[[], None]


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT (see `GatewayServer`). Return the exit code: 0 after an orderly
    shutdown, 1 if the gateway could not start."""
    configure(config.logging)
    raise_descriptor_limit()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a loop that logs it
    access = AdminAccess(config, os.environ)
    try:
        if config.server.processes > 1:
            # one process alone needs nothing of it

            return run_processes(config, access)
        if config.server.port:
            access.listens_on(
                config.server.port
            )  # what is wrong with the key file shows before anybody connects
        return run_one(config, access)
    finally:
        access.close()


def run_one(
    config: Config, access: AdminAccess, make_part: Callable[[], ListeningProcess] | None = None
) -> int:
    """Serve as a process of its own, or as a part of several; `make_part` is called within the loop."""
    keep_freed_memory()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, access, make_part))


def raise_descriptor_limit() -> int:
    """Lift the soft limit of open files to the hard one, which every process may; the limit in force.

    A stream takes two descriptors, one towards each side: the usual soft limit of 1,024 ends at 500.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < _FEW_DESCRIPTORS and hard != resource.RLIM_INFINITY:
        log.warning("at most %d open files, enough for about %d streams at once (ulimit -n)", hard, hard // 2)
    return hard


async def _serve(
    config: Config, access: AdminAccess, make_part: Callable[[], ListeningProcess] | None
) -> int:
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _hung_up)
    part = make_part() if make_part is not None else None
    replica = part.replica if part else None
    async with Runtime(config, replica=replica, admin_keys=access.keys) as runtime:
        server = GatewayServer(
            uvicorn_config(config, runtime),
            runtime,
            config.server,
            part,
            None if part else access,  # the parent of several has seen to it
        )
        # What start-up made stays. A request leaves few cycles behind, so collections can be rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        if part is None:  # several share what start-up made, as long as nobody moves it
            moved = use_huge_pages()
            log.debug("%d MiB are in huge pages", moved >> 20)
        try:
            await server.serve(part.sockets if part else None)
        except SystemExit:  # uvicorn's word for a socket that cannot be bound; it has logged why
            return 1
    return 0 if server.started else 1


def _hung_up() -> None:
    log.info("SIGHUP: there is nothing to reload yet; the gateway goes on")


def uvicorn_config(config: Config, runtime: Runtime) -> uvicorn.Config:
    """uvicorn set up for a relay: no header of its own, no lifespan, no access log."""
    options = config.server
    return uvicorn.Config(
        Front(runtime.application, runtime.plane, options.trusted_proxies),
        host=options.host,
        port=options.port,
        backlog=options.backlog,
        http=_protocol(config, runtime),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=options.keep_alive_s,  # type: ignore[arg-type] # a timer's, which takes fractions
        timeout_graceful_shutdown=math.ceil(options.drain_timeout_s + AFTER_CUT_S),
    )


def _protocol(config: Config, runtime: Runtime) -> type[HttpToolsProtocol]:
    """What speaks with clients. Where uvicorn is not as a part of it expects, a line is logged and the part
    left out; without any, it is uvicorn's own under the edge's bounds."""
    bounds = ClientBounds(config.server, runtime.metrics)
    parts: list[type[HttpToolsProtocol]] = [EdgeProtocol]
    if config.server.fast_lane:
        if trouble := fast_lane_trouble():
            log.warning("the fast lane is off: uvicorn %s %s", uvicorn.__version__, trouble)
        else:
            parts = [fast_lane(runtime.plane, bounds)]
    if trouble := complete_trouble():
        log.warning("the complete path costs more than it must: uvicorn %s %s", uvicorn.__version__, trouble)
    else:
        parts.append(CompleteProtocol)
    return type("ClientProtocol", tuple(parts), {"bounds": bounds})


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where it is installed (every CPython platform but Windows), asyncio's otherwise."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run_processes(config: Config, access: AdminAccess) -> int:
    """Serve with `server.processes` processes until SIGTERM or SIGINT. Exit code as `server.run`.

    Raises ConfigError if the address cannot be had. Call it with one thread running and no event loop.
    """
    options = config.server
    port = SharedPort(options.host, options.port)
    try:
        access.listens_on(port.port)  # before the processes are forked, which all take the same key
    except ConfigError:
        port.close()
        raise
    try:
        folder = folder_of_links(Path(tempfile.gettempdir()))
    except OSError as error:
        port.close()
        raise ConfigError("server.processes", f"no place for their sockets: {error.strerror}") from error
    parent = os.getpid()

    def work(birth: ProcessSpec) -> int:
        log.info("process %d of %d has the id %d", birth.number, options.processes, os.getpid())

        def part() -> ListeningProcess:
            replica = Replica(birth.number, options.processes, folder, generation=birth.generation)
            return ListeningProcess(replica, port.sockets(), birth.ready)

        try:
            code = run_one(config, access, part)
        except ConfigError as error:
            log.error("process %d cannot start: %s", birth.number, error)
            code = 2
        if os.getppid() != parent:  # it was killed, and cannot tidy up
            shutil.rmtree(folder, ignore_errors=True)
        return code

    supervisor = Supervisor(options.processes, work, SystemClock(), grace_s=options.longest_shutdown_s)
    gc.freeze()  # what all of them share stays untouched, and so shared
    try:
        return supervisor.run()
    finally:
        port.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
