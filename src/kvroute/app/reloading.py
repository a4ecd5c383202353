"""Changes of the configuration at run time: which are allowed, and how they are applied, all or none."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import pickle
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvroute.clock import Clock, SystemClock
from kvroute.config.config import Config
from kvroute.config.loading import ConfigSource, Loaded, check_files, masked, origin_note
from kvroute.config.paths import dotted
from kvroute.errors import ConfigError, InvalidConfig
from kvroute.fleet.discovery.registry import sources_of
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.health import HealthMonitor
from kvroute.journal.compat_log_lines import announcer
from kvroute.logs import configure
from kvroute.metrics import Metrics
from kvroute.openai.bounded import Bounded
from kvroute.options import Options, may_change
from kvroute.relay.dataplane import DataPlane
from kvroute.relay.retry_budget import RetryBudget
from kvroute.relay.session_keys import SessionKeys
from kvroute.routing.router import Router
from kvroute.routing.strategies.session import SessionOptions
from kvroute.routing.strategy import Needs
from kvroute.tls import Signature, signatures
from kvroute.upstream.transport import Transports

log = logging.getLogger(__name__)

_DIGEST_CHARS = 16

Applier = Callable[[Config], None]
"""Brings one service to a configuration. It must not wait, and must not fail for a valid configuration."""


def changes(before: Options, after: Options, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all options that differ, in the order of declaration."""
    found: list[tuple[str, ...]] = []
    for name in type(before).model_fields:
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        path = (*prefix, name)
        if isinstance(old, Options) and type(old) is type(new):
            found += changes(old, new, path)
        else:
            found.append(path)
    return found


def check_change(current: InForce, loaded: Loaded) -> list[str]:
    """The changed options. Raises InvalidConfig that names every change that needs a restart."""
    started, after, changed = current.started, loaded.config, changes(current.config, loaded.config)
    problems = [
        ConfigError(
            dotted(path),
            f"cannot change while the gateway runs: restart it{origin_note(path, loaded.origins)}",
        )
        for path in changed
        if not may_change(type(loaded.config), path)
    ]
    # The queue, and the parts that read tokens, exist only if they were needed at the start.
    can_read_tokens = started.routing.may_need(Needs.TOKENS) or started.server.allow_strategy_header
    if after.routing.may_need(Needs.TOKENS) and not can_read_tokens:
        text = "the new strategy needs exact tokens, which this gateway does not read: restart it"
        problems.append(ConfigError("routing.strategy", text))
    try:
        SessionKeys(after.routing.options_of(SessionOptions).keys)
    except ConfigError as error:
        problems.append(error)
    if after.admission.is_on and not started.admission.is_on:
        text = "no worker had a limit when the gateway started, so it has no queue: restart it"
        problems.append(ConfigError("admission", text))
    if not after.fleet.may_be_empty and not sources_of(after.fleet, SystemClock()):
        problems.append(ConfigError("fleet", "no workers, and no source of workers"))
    if problems:
        raise InvalidConfig(problems)
    return [dotted(path) for path in changed]


@dataclass(frozen=True, slots=True)
class InForce:
    """The configuration in force, and what became of the last attempt to change it."""

    config: Config
    source: str
    loaded_at: float
    """Unix time."""
    started: Config
    """The configuration at the gateway's start. It decides which parts exist."""
    signature: Signature | None = None
    """Of the file, before the last attempt read it; None without a file."""
    version: int = 0
    """Rises with each attempt to load the configuration again."""
    outcome: str = "started"
    """`started`, `loaded`, `unchanged` or `refused`."""
    changed: tuple[str, ...] = ()
    """The options that the last change changed."""
    refused_at: float | None = None
    refused: tuple[str, ...] = ()
    """The problems of the last configuration that was refused."""

    @classmethod
    def at_start(
        cls, config: Config, source: str, clock: Clock, signature: Signature | None = None
    ) -> InForce:
        """The configuration with which a gateway starts."""
        return cls(config, source, clock.wall(), config, signature)

    @property
    def construction(self) -> Config:
        """The configuration to construct a process with, before `config` is applied to it.

        A process that replaces another one so has the same parts, and looks for the workers of now.
        """
        return self.started.model_copy(update={"fleet": self.config.fleet})

    def described(self) -> dict[str, Any]:
        """For `/admin/config`: digest, source and time; and the last refusal."""
        text = json.dumps(masked(self.config), sort_keys=True).encode()
        return {
            "digest": hashlib.sha256(text).hexdigest()[:_DIGEST_CHARS],
            "source": self.source,
            "loaded_at": _iso(self.loaded_at),
            "last_refused": None
            if self.refused_at is None
            else {"at": _iso(self.refused_at), "problems": list(self.refused)},
        }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def next_in_force(current: InForce, source: ConfigSource, clock: Clock) -> InForce:
    """Load the configuration again. Blocks. After an error the current one stays in force."""
    tried = replace(current, version=current.version + 1, signature=source.signature())
    try:
        loaded = source.load()
        config = loaded.config
        check_files(config)
        changed = tuple(check_change(current, loaded))
    except ConfigError as error:
        problems = error.problems if isinstance(error, InvalidConfig) else (error,)
        return _refused(tried, clock, map(str, problems))
    except Exception as error:  # a defect: the gateway, and the parent of its processes, continue
        log.exception("the configuration cannot be loaded")
        return _refused(tried, clock, [f"internal error: {type(error).__name__}"])
    if not changed:
        return replace(tried, outcome="unchanged")
    return replace(tried, config=config, loaded_at=clock.wall(), outcome="loaded", changed=changed)


def _refused(tried: InForce, clock: Clock, problems: Iterable[str]) -> InForce:
    return replace(tried, outcome="refused", refused_at=clock.wall(), refused=tuple(problems))


def log_outcome(result: InForce) -> None:
    """Log what became of an attempt to load the configuration again."""
    if result.outcome == "refused":
        for problem in result.refused:
            log.error("the configuration is refused, the old one stays in force: %s", problem)
    elif result.outcome == "unchanged":
        log.info("the configuration is loaded again; nothing has changed")
    else:
        log.info("the configuration is loaded again; changed: %s", ", ".join(result.changed))


class ConfigReload:
    """Applies changed configurations to the services of one process.

    Mutable: `apply` replaces `in_force`; `appliers` may be appended to before the gateway serves. Requests
    that were dispatched before a change keep what they had.
    """

    def __init__(self, in_force: InForce, metrics: Metrics, *, counts: bool) -> None:
        """`counts`: this process counts the outcomes (one of several processes)."""
        self.in_force = in_force
        self.appliers: list[Applier] = []
        self._counts: Mapping[str, Any] = {
            outcome: metrics.config_reloads.labels(outcome)
            for outcome in ("loaded", "unchanged", "refused", "failed")
        }
        self._is_counting = counts

    def apply(self, result: InForce) -> None:
        """Bring all services to `result`. If one fails, all return to the configuration before."""
        before = self.in_force
        if result.version <= before.version:
            return
        outcome = result.outcome
        try:
            # A process that has just replaced another one may have missed earlier results.
            if result.config is not before.config:
                self._apply_all(result.config)
            self.in_force = result
        except Exception as error:  # a defect: the old configuration must be whole again
            log.exception("the changed configuration cannot be applied, the old one stays in force")
            outcome = "failed"
            self._apply_all(before.config)
            self.in_force = replace(
                before,
                version=result.version,
                outcome=outcome,
                refused_at=result.loaded_at,
                refused=(f"internal error: {type(error).__name__}",),
            )
        if self._is_counting:
            self._counts[outcome].inc()

    def _apply_all(self, config: Config) -> None:
        # Nothing waits in between, so no request sees a mixture.
        for applier in self.appliers:
            applier(config)


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a running gateway whose options may change."""

    fleet: Fleet
    health: HealthMonitor
    plane: DataPlane
    router: Router
    budget: RetryBudget
    transports: Transports
    clock: Clock


def apply_changes(before: Config, config: Config, services: Services) -> None:
    """Bring the services from `before` to `config`, which differs only in options that may change."""
    server, fleet, upstream, plane = config.server, config.fleet, config.upstream, services.plane
    configure(config.logging)
    names = fleet.aliases, config.configured_names
    if names != (before.fleet.aliases, before.configured_names):
        services.fleet.set_names(*names)
    if fleet.health != before.fleet.health:
        services.health.configure(fleet.health)
    if plane.queue is not None:
        plane.queue.configure(config.admission)
    services.router.configure(config.routing)
    services.budget.configure(config.retries)
    if plane.deps.streams is not None and config.streams != before.streams:
        plane.deps.streams.configure(config.streams)
    if upstream != before.upstream:
        services.transports.configure(upstream)
        plane.stored.timeout_s = upstream.connect_timeout_s
    session_keys = config.routing.options_of(SessionOptions).keys
    if session_keys != before.routing.options_of(SessionOptions).keys:
        sources = SessionKeys(session_keys)
        plane.read_sessions(
            sources,
            Bounded(server.body_limits, also=sources.fields),
            announcer(config.logging, services.clock, session_keys),
        )
    plane.configure(
        max_body_bytes=server.max_body_bytes,
        max_in_flight=server.max_in_flight,
        held_bytes=upstream.read_buffer_bytes,
        retries=config.retries,
    )
    if fleet.workers != before.fleet.workers:
        services.fleet.apply("static", [entry.spec() for entry in fleet.workers])


class OwnReload:
    """Loads the configuration again in a gateway of one process. Mutable: its task."""

    def __init__(self, reload: ConfigReload, source: ConfigSource, clock: Clock) -> None:
        self._reload = reload
        self._source = source
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._is_due = False

    def load(self) -> None:
        """Load again; a call that arrives meanwhile starts another attempt afterwards."""
        self._is_due = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._load(), name="reload of the configuration")

    async def aclose(self) -> None:
        """Wait for the end of a running attempt."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _load(self) -> None:
        while self._is_due:
            self._is_due = False
            before = self._reload.in_force
            result = await asyncio.to_thread(next_in_force, before, self._source, self._clock)
            self._reload.apply(result)
            log_outcome(result)


class SharedReload:
    """Loads the configuration again in the parent of several processes, and passes it on in a file.

    All processes so apply the same configuration or none, even if the file changes once more. Mutable:
    `in_force`, by the parent.
    """

    def __init__(self, in_force: InForce, source: ConfigSource, folder: Path, clock: Clock) -> None:
        """`folder` belongs to the gateway alone: the file in it has secrets."""
        self.in_force = in_force
        self._source = source
        self._file = folder / "configuration"
        self._clock = clock
        self._parent = os.getpid()

    def request(self) -> None:
        """For the other processes: have the parent load again."""
        if os.getppid() == self._parent:  # without a parent this process is about to end, too
            os.kill(self._parent, signal.SIGHUP)

    def load(self) -> None:
        """For the parent: load again, and write the result for the other processes. Blocks."""
        result = next_in_force(self.in_force, self._source, self._clock)
        partial = self._file.with_suffix(".new")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
                pickle.dump(result, stream)
            partial.rename(self._file)
        except OSError as error:
            problem = f"it cannot be passed to the processes: {error.strerror}"
            # The processes do not get this result either, and continue with the version before.
            result = _refused(replace(self.in_force, signature=result.signature), self._clock, [problem])
        self.in_force = result
        configure(result.config.logging)
        log_outcome(result)

    def read(self) -> InForce:
        """For the other processes: the parent's latest result."""
        try:
            text = self._file.read_bytes()
        except OSError:
            return self.in_force
        result = pickle.loads(text)
        assert isinstance(result, InForce)
        return result


@contextlib.asynccontextmanager
async def reloading(
    reload: ConfigReload, source: ConfigSource, shared: SharedReload | None, poll_s: float
) -> AsyncIterator[None]:
    """Loads the configuration again on SIGHUP, and with `poll_s` also when its file has changed.

    With several processes the parent loads it, and `shared` has the results.
    """
    clock, loop = SystemClock(), asyncio.get_running_loop()
    own = None
    if shared is None:
        own = OwnReload(reload, source, clock)
        on_signal = on_change = own.load
    else:
        results, on_change = shared, shared.request

        def on_signal() -> None:
            reload.apply(results.read())

    is_main = threading.current_thread() is threading.main_thread()  # only it can handle signals
    if is_main:
        loop.add_signal_handler(signal.SIGHUP, on_signal)
    if shared is not None:
        on_signal()  # the parent may have loaded another one since this process was forked
    watch = None
    if poll_s and source.watched is not None:
        watching = watch_file(source.watched, poll_s, lambda: reload.in_force, on_change, clock)
        watch = asyncio.create_task(watching, name="configuration file")
    try:
        yield
    finally:
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if is_main:
            loop.remove_signal_handler(signal.SIGHUP)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if own is not None:
            await own.aclose()


async def watch_file(
    file: Path, interval_s: float, current: Callable[[], InForce], on_change: Callable[[], None], clock: Clock
) -> None:
    """Call `on_change` whenever the file is another one than the last attempt read, until cancelled.

    A file that still changes is not loaded: its signature must be equal in two readings.
    """
    before = current().signature
    called_for = before
    while True:
        await clock.sleep(interval_s)
        (found,) = await asyncio.to_thread(signatures, (file,))
        if found == before and found not in (called_for, current().signature):
            called_for = found
            on_change()
        before = found
