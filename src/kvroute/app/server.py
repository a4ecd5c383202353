"""Runs the gateway's processes: listening sockets, signals, orderly shutdown, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvroute import __version__
from kvroute.access.admin_key import key_lines, key_path, read_or_create_key, user_state_folder
from kvroute.access.keys import AdminKeys
from kvroute.admin.application import Front
from kvroute.app.listening import Backlog, TlsListener, check_picker, picker_listener, picker_plane
from kvroute.app.reloading import InForce, SharedReload, reloading
from kvroute.app.replica import Replica, redis_channel
from kvroute.app.runtime import Runtime
from kvroute.clock import SystemClock
from kvroute.config.config import Config
from kvroute.config.loading import ConfigSource, check_files
from kvroute.dual_stack import EVERY_ADDRESS, dual_stack_socket
from kvroute.errors import ConfigError
from kvroute.http.allocator import keep_freed_memory, use_huge_pages
from kvroute.http.asgi_protocol import TrimmedProtocol
from kvroute.http.asgi_protocol_checks import trimmed_protocol_problem
from kvroute.http.edge import ClientBounds, EdgeProtocol
from kvroute.http.fastlane import fast_lane
from kvroute.http.fastlane_checks import fast_lane_problem
from kvroute.http.options import AFTER_CUT_S, ServerOptions
from kvroute.logs import configure
from kvroute.relay.dataplane import DataPlane
from kvroute.replicas.envelope import ID_BYTES
from kvroute.replicas.mesh import Mesh, make_socket_folder
from kvroute.replicas.shared_port import SharedPort
from kvroute.replicas.supervisor import ProcessSpec, Supervisor
from kvroute.tls import Signature

if TYPE_CHECKING:
    from kvroute.epp.service import Listener

log = logging.getLogger(__name__)


class AdminAccess:
    """The admin API's keys: the configured ones, or the one in the key file of the port.

    Mutable: `listens_on` adds the key of a port before the gateway accepts requests on the port.
    """

    def __init__(self, config: Config, environ: Mapping[str, str], port: int | None = None) -> None:
        """`port`: of the HTTP listener, if it is not `server.port`."""
        self.keys = AdminKeys(config.admin.keys)
        self._config = config
        self._port = config.server.port if port is None else port
        self._environ = environ
        self._is_configured = bool(config.admin.keys)
        self._files: dict[int, Path] = {}
        self._is_logged = False

    def listens_on(self, port: int) -> None:
        """Read or create the key of a port, and log its file once. Call before the gateway accepts requests.

        Raises ConfigError if a key file is needed and cannot be read or written. Blocks: call it at the start
        only.
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
        self.keys.add(key_lines(read_or_create_key(path)))
        self._files[port] = path
        log.info("the admin key is in %s", path)

    def close(self) -> None:
        """Remove the key files of ports that the system chose: no gateway will use these ports again."""
        if self._port == 0:
            for path in self._files.values():
                with contextlib.suppress(OSError):
                    path.unlink()

    def _folder(self) -> Path:
        folder = self._config.server.state_dir
        return folder.absolute() if folder is not None else user_state_folder(self._environ)


NEXT_STAGE = signal.SIGUSR1  # `NEXT_STAGE` of replicas/supervisor.py, which one process alone does not load


_GC_THRESHOLDS = (20_000, 20, 50)
_MIN_DESCRIPTORS = 8192
_FIRST_PROBES_S = 1.0
"""Longest wait for listed workers before the gateway listens; its first clients would get 503 otherwise."""


class GatewayServer(uvicorn.Server):
    """uvicorn's server with the gateway's shutdown, in stages:

    1. delay: `/ready` answers 503, but all requests are served; `server.shutdown_delay_s`.
    2. drain: no new connections or requests, running answers may finish; `server.drain_timeout_s`.
    3. cut: running answers end with an error, connections are closed.

    The first SIGTERM or SIGINT starts the shutdown. Each further SIGINT ends the current stage. A further
    SIGTERM changes nothing, because a process may get it twice: from the service manager and from its parent.
    SIGHUP loads the configuration again (app/reloading.py).
    """

    def __init__(
        self,
        config: uvicorn.Config,
        runtime: Runtime,
        options: ServerOptions,
        process: ListeningProcess | None = None,
        access: AdminAccess | None = None,
        picker: Listener | None = None,
    ) -> None:
        super().__init__(config)
        self._access = access
        self._picker = picker
        self._process = process
        self._runtime = runtime
        self._delay_s = options.shutdown_delay_s
        self._drain_timeout_s = options.drain_timeout_s
        self._next_stage = asyncio.Event()
        self._backlog = Backlog(self._client_protocol, config.backlog)
        self._tls = (
            TlsListener(self._backlog, options.tls, runtime.metrics, runtime.plane.clock)
            if options.tls.is_on
            else None
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        listening: Sequence[socket.SocketType]
        if self._tls is None:
            try:
                await super().startup(sockets)
            except SystemExit as error:
                if isinstance(error.__context__, OSError):
                    log.error("%s", bind_problem(self.config.host, self.config.port, error.__context__))
                raise
            listening = [each for server in self.servers for each in server.sockets]
            await self._backlog.start(listening)
        else:
            await super().startup([])  # uvicorn's own servers can neither reload nor limit a handshake
            listening = sockets if sockets is not None else await self._bind()
            await self._tls.start(listening)
        if self._process is not None:
            self._process.ready()
            log.info("process %d accepts connections", self._process.replica.number)
            if self._process.replica.number:
                return  # process 0 alone logs the address
        scheme = "http" if self._tls is None else "https"
        for each in listening:
            host, port, *_ = each.getsockname()
            if self._access is not None:
                self._access.listens_on(port)
            shown = f"[{host}]" if ":" in host else host
            log.info("kvroute %s listens on %s://%s:%d", __version__, scheme, shown, port)
            log.info("the live page is at %s://%s:%d/ui#key=ADMIN-KEY", scheme, shown, port)
        if self._picker is not None:
            await self._picker.start()

    async def _bind(self) -> Sequence[socket.SocketType]:
        """Bind the configured address as uvicorn does, without accepting connections. Raises SystemExit."""
        loop, config = asyncio.get_running_loop(), self.config
        try:
            server = await loop.create_server(
                self._client_protocol, config.host, config.port, start_serving=False
            )
        except OSError as error:
            log.error("%s", bind_problem(config.host, config.port, error))
            self.started = False
            sys.exit(1)
        self.servers = [server]  # uvicorn closes it at shutdown
        return server.sockets

    async def main_loop(self) -> None:
        # uvicorn's loop wakes ten times a second. In a task of its own it resumes none of the coroutines that
        # wait for it.
        await asyncio.create_task(super().main_loop(), name="uvicorn's main loop")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's signal handlers with handlers that run in the event loop."""
        # Handlers in the loop may log. Unlike uvicorn's they do not raise the signal again after the
        # shutdown, which would change the exit code.
        if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._begin_shutdown)
        # With several processes, only the parent handles SIGINT, and sends NEXT_STAGE instead.
        further = signal.SIGINT if self._process is None else NEXT_STAGE
        loop.add_signal_handler(further, self._on_interrupt)
        yield

    def _begin_shutdown(self) -> None:
        self._runtime.plane.entry_control.announce_shutdown()
        self.should_exit = True
        if self._delay_s:
            self._close_after_answers()

    def _close_after_answers(self) -> None:
        # uvicorn and the fast lane add these headers to every answer and close the connection after it. The
        # client may connect to another gateway next, so no connection is in use when the delay ends.
        self.server_state.default_headers = [(b"connection", b"close")]

    def _on_interrupt(self) -> None:
        if self.should_exit:
            self._next_stage.set()
        else:
            self._begin_shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        plane = self._runtime.plane
        plane.entry_control.announce_shutdown()
        if self._delay_s:
            log.info(
                "shutting down in %g s (server.shutdown_delay_s): not ready, still serving", self._delay_s
            )
            self._close_after_answers()  # again: until now uvicorn has replaced the headers every second
            await self._wait(self._delay_s)
        if self._picker is not None:
            # Streams that Envoy has opened are still answered.
            await self._picker.close(self._drain_timeout_s, self._next_stage)
        plane.entry_control.close()
        if self._tls is not None:
            await self._tls.aclose()
        self._backlog.close()
        # uvicorn closes them too, but only after the log line below, which says that no client can enter.
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        if plane.entry_control.in_flight:
            log.info(
                "shutting down: waiting for %d requests, at most %g s (server.drain_timeout_s); a second "
                "Ctrl-C ends them",
                plane.entry_control.in_flight,
                self._drain_timeout_s,
            )
        else:
            log.info("shutting down: no requests are running")
        cutter = asyncio.create_task(self._cut_after_drain())
        try:
            await super().shutdown(sockets)
        finally:
            cutter.cancel()
            await asyncio.gather(cutter, return_exceptions=True)

    async def _wait(self, seconds: float) -> bool:
        """Wait for the end of a stage: for `seconds`, or until a signal ends it. True after a signal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._next_stage.wait()
        is_signalled = self._next_stage.is_set()
        self._next_stage.clear()
        return is_signalled

    def _client_protocol(self) -> asyncio.Protocol:
        """The protocol that uvicorn creates for an accepted connection."""
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def _cut_after_drain(self) -> None:
        clock = self._runtime.plane.clock
        began = clock.now()
        left_s = self._drain_timeout_s
        while left_s > 0 and not await self._wait(min(_PROGRESS_S, left_s)):
            left_s = began + self._drain_timeout_s - clock.now()
            if left_s > 0:
                log.info("waiting for %d requests", self._runtime.plane.entry_control.in_flight)
        cut = self._runtime.plane.entry_control.cut()
        if cut:
            log.warning(
                "cut %d requests after %.0f s (server.drain_timeout_s, or SIGINT)", cut, clock.now() - began
            )
        # A client that does not read its error event keeps its connection open.
        await self._wait(AFTER_CUT_S)
        self.force_exit = True


_PROGRESS_S: Final = 5.0
"""Time between two log lines about the requests that a shutdown waits for."""


def bind_problem(host: str, port: int, error: OSError) -> str:
    """Why the address cannot be listened on, with the options to change."""
    if error.errno == errno.EADDRINUSE:
        why = f"port {port} is in use by another program: address already in use"
    elif error.errno == errno.EACCES:
        why = f"port {port} needs more privileges"
    else:
        why = error.strerror or str(error)
    return f"cannot listen on {host}:{port}: {why} (change server.port with --port, server.host with --host)"


@dataclass(frozen=True, slots=True)
class ListeningProcess:
    """One of several processes: replica, listening sockets, the callback for "it serves", and the parent's
    results of SIGHUP."""

    replica: Replica
    sockets: list[socket.socket]
    ready: Callable[[], None]
    reload: SharedReload


def run(
    config: Config,
    source: ConfigSource | None = None,
    signature: Signature | None = None,
    *,
    is_picker: bool = False,
) -> int:
    """Serve until SIGTERM or SIGINT (see `GatewayServer`); as an endpoint picker if `is_picker`.

    `source`: where `config` comes from, for SIGHUP; `signature`: of its file when it was read. Returns the
    exit code: 0 after an orderly shutdown, 1 if the gateway could not start. Raises ConfigError, for example
    for a certificate that cannot be read.
    """
    configure(config.logging)
    raise_descriptor_limit()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the event loop has a handler
    check_files(config)
    port = config.server.port
    if is_picker:
        check_picker(config)
        port = config.epp.http_port
    access = AdminAccess(config, os.environ, port)
    source = source or ConfigSource()
    in_force = InForce.at_start(config, str(source), SystemClock(), signature)
    try:
        if config.server.processes > 1:
            return run_processes(in_force, access, source)
        if port:
            # Before the socket is opened: a bad key file is reported before a client can connect.
            access.listens_on(port)
        return run_one(in_force, access, source, is_picker=is_picker)
    finally:
        access.close()


def run_one(
    in_force: InForce,
    access: AdminAccess,
    source: ConfigSource,
    make_process: Callable[[], ListeningProcess] | None = None,
    *,
    is_picker: bool = False,
) -> int:
    """Serve in this process. With several processes, `make_process` is called inside the event loop."""
    keep_freed_memory()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(in_force, access, source, make_process, is_picker=is_picker))


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit, which needs no privileges. Returns the limit.

    A stream needs two descriptors, for client and worker: the usual soft limit of 1,024 allows 500 streams.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < _MIN_DESCRIPTORS and hard != resource.RLIM_INFINITY:
        log.warning(
            "the limit of %d open files (ulimit -n) allows about %d concurrent streams", hard, hard // 2
        )
    return hard


async def _serve(
    in_force: InForce,
    access: AdminAccess,
    source: ConfigSource,
    make_process: Callable[[], ListeningProcess] | None,
    *,
    is_picker: bool = False,
) -> int:
    config = in_force.config
    process = make_process() if make_process is not None else None
    replica = process.replica if process else None
    runtime = Runtime(
        in_force.construction,
        replica=replica,
        admin_keys=access.keys,
        in_force=in_force,
        plane_type=picker_plane() if is_picker else DataPlane,
    )
    shared = process.reload if process else None
    poll_s = config.server.config_poll_s if replica is None or replica.number == 0 else 0.0
    async with runtime, reloading(runtime.reload, source, shared, poll_s):
        http = uvicorn_config(config, runtime, config.epp.http_port if is_picker else config.server.port)
        server = GatewayServer(
            http,
            runtime,
            config.server,
            process,
            None if process else access,  # with several processes the parent has read the key
            picker_listener(config, runtime.fleet, runtime.plane, http) if is_picker else None,
        )
        # Objects from the start are never freed, so they are excluded from collections. A request leaves few
        # reference cycles, so collections can be rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        # Each forked process then shares 17 MiB less with the others. It needs less CPU: docs/scaling.md.
        moved = use_huge_pages()
        log.debug("%d MiB are in huge pages", moved >> 20)
        if config.fleet.workers:
            await runtime.wait_for_first_probes(_FIRST_PROBES_S)
        sockets = process.sockets if process else None
        if sockets is None and config.server.host == EVERY_ADDRESS:
            try:
                sockets = [dual_stack_socket(http.port)]
            except OSError as error:
                log.error("%s", bind_problem(http.host, http.port, error))
                return 1
        try:
            await server.serve(sockets)
        except SystemExit:  # uvicorn raises this when a socket cannot be bound, and has logged the reason
            return 1
    return 0 if server.started else 1


def uvicorn_config(config: Config, runtime: Runtime, port: int | None = None) -> uvicorn.Config:
    """uvicorn configured for a relay: it adds no headers, and has no lifespan and no access log.

    `port`: instead of `server.port`.
    """
    options = config.server
    return uvicorn.Config(
        Front(runtime.application, runtime.plane, options.trusted_proxies, options.root_path),
        host=options.host,
        port=options.port if port is None else port,
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
    """The protocol class for client connections: the edge's checks, the fast lane, and the trimmed protocol.

    A part whose self-test fails with the installed uvicorn is left out, with a log line.
    """
    plane = runtime.plane
    bounds = ClientBounds(config.server, runtime.metrics, runtime.descriptors, plane.trace_refused)
    parts: list[type[HttpToolsProtocol]] = [EdgeProtocol]
    if config.server.fast_lane:
        if problem := fast_lane_problem():
            log.warning("the fast lane is off: uvicorn %s %s", uvicorn.__version__, problem)
        else:
            parts = [fast_lane(plane, bounds)]
    if problem := trimmed_protocol_problem():
        log.warning(
            "the trimmed ASGI protocol is off, requests cost more CPU: uvicorn %s %s",
            uvicorn.__version__,
            problem,
        )
    else:
        parts.append(TrimmedProtocol)
    return type("ClientProtocol", tuple(parts), {"bounds": bounds})


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's event loop where uvloop is installed (CPython except on Windows), otherwise asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run_processes(in_force: InForce, access: AdminAccess, source: ConfigSource) -> int:
    """Serve with `server.processes` processes until SIGTERM or SIGINT. Returns the exit code as `run`.

    Raises ConfigError if the address cannot be bound. Call it while one thread and no event loop runs.
    """
    options = in_force.config.server
    port = SharedPort(options.host, options.port)
    try:
        access.listens_on(port.port)  # before the fork: all processes use the same key
    except ConfigError:
        port.close()
        raise
    try:
        folder = make_socket_folder(Path(tempfile.gettempdir()))
    except OSError as error:
        port.close()
        raise ConfigError(
            "server.processes", f"cannot create the folder for their sockets: {error.strerror}"
        ) from error
    parent = os.getpid()
    shared = SharedReload(in_force, source, folder, SystemClock())
    gateway = os.urandom(ID_BYTES)

    def work(spec: ProcessSpec) -> int:
        log.info("process %d of %d has pid %d", spec.number, options.processes, os.getpid())

        def make_process() -> ListeningProcess:
            mesh = Mesh(spec.number, options.processes, folder)
            channel = redis_channel(shared.in_force.config.sharing, gateway, spec.number, SystemClock())
            replica = Replica(spec.number, mesh, channel, generation=spec.generation)
            return ListeningProcess(replica, port.sockets(), spec.ready, shared)

        try:
            code = run_one(shared.in_force, access, source, make_process)
        except ConfigError as error:
            log.error("process %d cannot start: %s", spec.number, error)
            code = 2
        if os.getppid() != parent:  # the parent was killed and cannot remove the folder
            shutil.rmtree(folder, ignore_errors=True)
        return code

    supervisor = Supervisor(
        options.processes, work, SystemClock(), grace_s=options.longest_shutdown_s, on_hangup=shared.load
    )
    gc.freeze()  # keeps the shared memory of the forked processes unchanged, and so shared
    try:
        return supervisor.run()
    finally:
        port.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
