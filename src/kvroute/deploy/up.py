"""`kvroute up`: processes in stages, the gateway last, kept up until told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from zlib import crc32

from rich.console import Console
from rich.text import Text

from kvroute.clock import Clock
from kvroute.deploy.keeper import Keeper, ProcessPhase, showing, sweep
from kvroute.deploy.plan import ProcessPlan
from kvroute.deploy.state import ProcessState, StateFolder, UpState

POLL_S = 0.2
CHUNK_BYTES = 65_536
# Further behind than this, the oldest lines are skipped: a screen must not hold up what it shows.
MAX_BEHIND_BYTES = 1_048_576
COLORS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")


class GrowingFile:
    """The new lines of a file that others append to. Mutable: how far it has been read."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""

    @classmethod
    def at_end(cls, path: Path) -> GrowingFile:
        """Of a file that is there, only what comes from now on."""
        return cls(path, offset=_size(path))

    def new_lines(self) -> list[str]:
        """At most `CHUNK_BYTES` of whole lines; none when there is nothing new, or no file yet."""
        size = _size(self._path)
        if size < self._offset:
            self._offset, self._rest = 0, b""
        skipped = max(0, size - self._offset - MAX_BEHIND_BYTES)
        if skipped:
            self._offset, self._rest = self._offset + skipped, b""
        if size == self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read(CHUNK_BYTES)
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        if len(self._rest) >= CHUNK_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        told = [f"... {skipped:,} bytes more are in {self._path}"] if skipped else []
        return told + [line.decode(errors="replace").rstrip("\r") for line in lines]


def last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last `count` whole lines within `MAX_BEHIND_BYTES`, and where in the file they end."""
    size = _size(path)
    if size == 0:
        return [], 0
    with path.open("rb") as file:
        file.seek(max(0, size - MAX_BEHIND_BYTES))
        text = file.read(size - file.tell())
    whole = text[: text.rfind(b"\n") + 1]
    lines = whole.decode(errors="replace").splitlines()
    return lines[-count:] if count else [], size - len(text) + len(whole)


class Screen:
    """Prints lines behind the names of their processes, a colour each."""

    def __init__(self, console: Console, names: Iterable[str]) -> None:
        self._console = console
        self._width = max(map(len, names), default=0)

    def show(self, name: str, lines: Sequence[str]) -> None:
        prefix = Text(f"{name:<{self._width}} | ", style=COLORS[crc32(name.encode()) % len(COLORS)])
        for line in lines:
            # What a process writes for terminals becomes colour, or nothing.
            self._console.print(prefix + Text.from_ansi(line), soft_wrap=True, highlight=False)


async def follow(files: Mapping[str, GrowingFile], screen: Screen, clock: Clock) -> None:
    """Show what each process writes, until cancelled."""
    while True:
        show_new(files, screen)
        await clock.sleep(POLL_S)


def show_new(files: Mapping[str, GrowingFile], screen: Screen) -> bool:
    """Show what has been written since the last time; whether that was anything."""
    found = False
    for name, file in files.items():
        lines = file.new_lines()
        screen.show(name, lines)
        found = found or bool(lines)
    return found


@asynccontextmanager
async def following(console: Console, logs: Mapping[str, Path], *, clock: Clock) -> AsyncIterator[None]:
    """Show the logs for as long as the block runs, and what its end has added to them."""
    files = {name: GrowingFile.at_end(path) for name, path in logs.items()}
    screen = Screen(console, logs)
    task = asyncio.create_task(follow(files, screen, clock))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        while show_new(files, screen):
            pass


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


Prepare = Callable[[], Awaitable[ProcessPlan]]


async def run_up(
    prepare: Prepare, state: StateFolder, *, console: Console, clock: Clock, show_logs: bool = False
) -> None:
    """All that `kvroute up` does; returns after Ctrl-C or SIGTERM, when every process has ended.

    `prepare` makes the plan once it is certain that nothing else runs in `state`. Raises what that
    raises, `ConfigError` when something does run there, and `ProcessFailed` when a process does not
    come up.
    """
    keepers: list[Keeper] = []
    with state.hold(UpState("", os.getpid(), "")), stopped_by_signals(keepers, console) as told:
        try:
            plan = await prepare()
            await asyncio.to_thread(sweep)
            await run_plan(plan, keepers, state, console=console, clock=clock, show_logs=show_logs)
        except asyncio.CancelledError:
            if not told.is_set():
                raise


async def run_plan(
    plan: ProcessPlan,
    keepers: list[Keeper],
    state: StateFolder,
    *,
    console: Console,
    clock: Clock,
    show_logs: bool = False,
) -> None:
    """Start stage after stage and keep all up until cancelled; all have ended then.

    `keepers` receives one keeper per process, and `state` tells how each is. Raises the first
    `ProcessFailed` of the start.
    """

    def report(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def changed(keeper: Keeper) -> None:
        if keeper.status.phase is ProcessPhase.READY:
            again = " again" if keeper.status.restarts else ""
            report(f"{keeper.name} is ready{again}: {keeper.planned.url}")
            for other in keepers if keeper.status.restarts else ():
                if keeper.name in other.planned.renewed_with:
                    other.renew(keeper.name)
        try:
            state.write(told_of(plan, keepers, clock))
        except OSError as exc:
            report(f"cannot tell `kvroute ps`: {state.path}: {exc.strerror}")

    stages = [
        [Keeper(each, clock=clock, report=report, changed=changed) for each in stage] for stage in plan.stages
    ]
    keepers += [keeper for stage in stages for keeper in stage]
    logs = {keeper.name: keeper.planned.child.log_path for keeper in keepers}
    kind = "simulated" if plan.simulated else "vLLM"
    report(f"starting {len(plan.workers)} {kind} worker(s); logs in {plan.gateway.child.log_path.parent}")
    try:
        async with AsyncExitStack() as screen, asyncio.TaskGroup() as running:
            if show_logs:
                await screen.enter_async_context(following(console, logs, clock=clock))
            async with showing(console, keepers, clock=clock):
                for stage in stages:
                    async with asyncio.TaskGroup() as starting:
                        for keeper in stage:
                            starting.create_task(keeper.bring_up())
                    for keeper in stage:
                        running.create_task(keeper.keep_up())
            report(welcome(plan))
    except ExceptionGroup as group:
        # Several may have failed for one reason; the others were stopped because of the first.
        raise _first(group) from None
    finally:
        # The gateway first: it lets the streams that its workers are still sending finish.
        for stage in reversed(stages):
            await asyncio.gather(*(keeper.stop() for keeper in stage))
        await asyncio.to_thread(sweep)


def told_of(plan: ProcessPlan, keepers: list[Keeper], clock: Clock) -> UpState:
    """What others are told of a running plan."""
    to_wall = clock.wall() - clock.now()
    return UpState(
        name=plan.name,
        pid=os.getpid(),
        gateway=plan.gateway.url,
        processes=tuple(
            ProcessState(
                name=keeper.name,
                phase=keeper.status.phase.value,
                since=keeper.status.since + to_wall,
                restarts=keeper.status.restarts,
                pid=keeper.pid,
                url=keeper.planned.url,
                log=str(keeper.planned.child.log_path),
            )
            for keeper in keepers
        ),
        admin_key_file=str(plan.admin_key_file or ""),
    )


def _first(error: Exception) -> Exception:
    """The first of a group that may hold others."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def welcome(plan: ProcessPlan) -> str:
    """What to try now."""
    url = plan.gateway.url
    body = {"model": plan.model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    if plan.simulated:
        kind = "The workers are SIMULATED: they answer with made-up text and keep a modelled KV cache."
    elif plan.tiny_model is not None:
        kind = "The workers are real vLLM engines; the model has random weights and answers with noise."
    else:
        kind = f"The workers are vLLM engines that serve {plan.model}."
    key = str(plan.admin_key_file or "as configured")
    return f"""
kvroute is ready at {url} with {len(plan.workers)} worker(s). {kind}

  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'

  API documentation  {url}/docs
  metrics            {url}/metrics
  admin key          {key}

Ctrl-C ends everything.
"""


@contextmanager
def stopped_by_signals(keepers: list[Keeper], console: Console) -> Iterator[asyncio.Event]:
    """SIGINT or SIGTERM cancels the current task and sets the event; a second one kills `keepers`."""
    task, loop, told = asyncio.current_task(), asyncio.get_running_loop(), asyncio.Event()
    if task is None:
        raise RuntimeError("not in a task")

    def arrived() -> None:
        if told.is_set():
            for keeper in keepers:
                keeper.kill()
            return
        told.set()
        console.print("\nstopping; once more to kill", markup=False)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, arrived)
    try:
        yield told
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
