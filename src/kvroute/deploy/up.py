"""`kvroute up`: starts processes in stages, the gateway last, and keeps them running until it is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from zlib import crc32

from rich.console import Console
from rich.text import Text

from kvroute.access.admin_key import key_lines
from kvroute.clock import Clock
from kvroute.deploy.keeper import Keeper, ProcessPhase, remove_orphan_segments, show_status
from kvroute.deploy.plan import ProcessPlan
from kvroute.deploy.up_state import ProcessState, StateFolder, UpState

POLL_S = 0.2
CHUNK_BYTES = 65_536
# If the display is further behind, the oldest lines are skipped: a slow terminal must not delay `kvroute up`.
MAX_BEHIND_BYTES = 1_048_576
COLORS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")


class LogTail:
    """Reads the new lines of a log file. Mutable: how far the file has been read."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._partial_line = b""

    @classmethod
    def at_end(cls, path: Path) -> LogTail:
        """A reader of only the lines that are appended from now on."""
        return cls(path, offset=_size(path))

    def new_lines(self) -> list[str]:
        """Read at most `CHUNK_BYTES` of new whole lines. Empty without new lines or without a file."""
        size = _size(self._path)
        if size < self._offset:
            self._offset, self._partial_line = 0, b""
        skipped = max(0, size - self._offset - MAX_BEHIND_BYTES)
        if skipped:
            self._offset, self._partial_line = self._offset + skipped, b""
        if size == self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read(CHUNK_BYTES)
        self._offset += len(new)
        *lines, self._partial_line = (self._partial_line + new).split(b"\n")
        if len(self._partial_line) >= CHUNK_BYTES:
            lines, self._partial_line = [*lines, self._partial_line], b""
        notice = [f"... {skipped:,} more bytes are in {self._path}"] if skipped else []
        return notice + [line.decode(errors="replace").rstrip("\r") for line in lines]


def last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last `count` whole lines within `MAX_BEHIND_BYTES`, and the file offset at which they end."""
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
    """Prints log lines with the name of their process in front, in one colour per process."""

    def __init__(self, console: Console, names: Iterable[str]) -> None:
        self._console = console
        self._width = max(map(len, names), default=0)

    def show(self, name: str, lines: Sequence[str]) -> None:
        prefix = Text(f"{name:<{self._width}} | ", style=COLORS[crc32(name.encode()) % len(COLORS)])
        for line in lines:
            # Terminal control sequences in a log become colours or are dropped.
            self._console.print(prefix + Text.from_ansi(line), soft_wrap=True, highlight=False)


async def follow(files: Mapping[str, LogTail], screen: Screen, clock: Clock) -> None:
    """Show new lines of each file until cancelled."""
    while True:
        show_new(files, screen)
        await clock.sleep(POLL_S)


def show_new(files: Mapping[str, LogTail], screen: Screen) -> bool:
    """Show the new lines of each file. Returns whether there were any."""
    is_new = False
    for name, file in files.items():
        lines = file.new_lines()
        screen.show(name, lines)
        is_new = is_new or bool(lines)
    return is_new


@asynccontextmanager
async def showing_logs(console: Console, logs: Mapping[str, Path], *, clock: Clock) -> AsyncIterator[None]:
    """Show new log lines while the block runs, and after it the lines that remain."""
    files = {name: LogTail.at_end(path) for name, path in logs.items()}
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
    """Run `kvroute up`. Returns after Ctrl-C or SIGTERM, when every process has ended.

    `prepare` makes the plan; it is called when `state` is locked. Raises the errors of `prepare`,
    `ConfigError` when another `kvroute up` uses `state`, and `ProcessFailed` when a process does not start.
    """
    keepers: list[Keeper] = []
    with state.hold(UpState("", os.getpid(), "")), cancel_on_signals(keepers, console) as stopping:
        try:
            plan = await prepare()
            await asyncio.to_thread(remove_orphan_segments)
            await run_plan(plan, keepers, state, console=console, clock=clock, show_logs=show_logs)
        except asyncio.CancelledError:
            if not stopping.is_set():
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
    """Start the stages one after another and keep all processes running until cancelled, then stop them.

    One keeper per process is appended to `keepers`, and `state` publishes their status. Raises the first
    `ProcessFailed` of the start.
    """

    def report(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def changed(keeper: Keeper) -> None:
        if keeper.status.phase is ProcessPhase.READY:
            suffix = " again" if keeper.status.restarts else ""
            report(f"{keeper.name} is ready{suffix}: {keeper.planned.url}")
            for other in keepers if keeper.status.restarts else ():
                if keeper.name in other.planned.restart_with:
                    other.restart(keeper.name)
        try:
            state.write(state_of(plan, keepers, clock))
        except OSError as exc:
            report(f"cannot write the state for `kvroute ps`: {state.path}: {exc.strerror}")

    stages = [
        [Keeper(process, clock=clock, report=report, changed=changed) for process in stage]
        for stage in plan.stages
    ]
    keepers += [keeper for stage in stages for keeper in stage]
    logs = {keeper.name: keeper.planned.child.log_path for keeper in keepers}
    kind = "simulated" if plan.simulated else "vLLM"
    report(f"starting {len(plan.workers)} {kind} worker(s); logs in {plan.gateway.child.log_path.parent}")
    try:
        async with AsyncExitStack() as screen, asyncio.TaskGroup() as running:
            if show_logs:
                await screen.enter_async_context(showing_logs(console, logs, clock=clock))
            async with show_status(console, keepers, clock=clock):
                for stage in stages:
                    async with asyncio.TaskGroup() as starting:
                        for keeper in stage:
                            starting.create_task(keeper.start_and_wait())
                    for keeper in stage:
                        running.create_task(keeper.restart_on_exit())
            # Only to a terminal: other outputs may be stored. `console.is_terminal` is also true with
            # FORCE_COLOR.
            key = await asyncio.to_thread(_generated_key, plan) if console.file.isatty() else ""
            report(ready_text(plan, key))
    except ExceptionGroup as group:
        # The first error is the cause: the other processes failed for the same reason or were stopped.
        raise _first_error(group) from None
    finally:
        # The gateway stops first, so that running streams finish before their workers stop.
        for stage in reversed(stages):
            await asyncio.gather(*(keeper.stop() for keeper in stage))
        await asyncio.to_thread(remove_orphan_segments)


def state_of(plan: ProcessPlan, keepers: list[Keeper], clock: Clock) -> UpState:
    """The state of a running plan, as other commands read it."""
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


def _first_error(error: Exception) -> Exception:
    """The first error that is not itself a group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _generated_key(plan: ProcessPlan) -> str:
    """The admin key that the gateway generated; "" if there is none or it cannot be read."""
    if plan.admin_key_file is None:
        return ""
    with suppress(OSError, UnicodeDecodeError):
        return next(iter(key_lines(plan.admin_key_file.read_text(encoding="utf-8"))), "")
    return ""


def _command() -> str:
    """How a reader in the present folder calls this program."""
    if shutil.which("kvroute") is not None or not sys.argv[0].endswith("kvroute"):
        return "kvroute"
    return shlex.quote(os.path.relpath(sys.argv[0]))


_QUESTION = (
    "Say in one sentence why an answer starts sooner if the worker holds the beginning of the prompt. "
    "Its cache has the keys and values of these tokens from an earlier request, so it computes attention "
    "for the new tokens only."
)
"""Long enough to be a prefix hit when it is sent again: a prompt of 100 bytes saves less prefill than the
first request has added to the load of its worker."""


def ready_text(plan: ProcessPlan, admin_key: str = "") -> str:
    """The text that is printed when everything is ready: addresses and a first request.

    With `admin_key` the address of the live page includes the key.
    """
    url = plan.gateway.url
    body = {"model": plan.model, "messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 32}
    if plan.simulated:
        kind = "The workers are SIMULATED: they answer with random text and simulate a KV cache."
    elif plan.tiny_model is not None:
        kind = "The workers are real vLLM engines; the model has random weights and answers with noise."
    else:
        kind = f"The workers are vLLM engines that serve {plan.model}."
    key = str(plan.admin_key_file or "as configured")
    command = _command()
    questions = f"""  why that worker?   {command} explain --url {url} --request-id X-REQUEST-ID
  anything wrong?    {command} doctor --url {url}
"""
    trust, note = "", ""
    if plan.ca_file is not None:
        trust = f"--cacert {shlex.quote(str(plan.ca_file))} "
        questions = ""  # these commands do not trust the certificate
        note = "\nThe certificate is self-signed: clients must trust this file, and it is for trials only.\n"
    return f"""
kvroute is ready at {url} with {len(plan.workers)} worker(s). {kind}

  curl -i {trust}{url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'

{questions}  live page          {url}/ui#key={admin_key or "ADMIN-KEY"}
  API documentation  {url}/docs
  metrics            {url}/metrics
  admin key          {key}
{note}
Ctrl-C ends everything.
"""


@contextmanager
def cancel_on_signals(keepers: list[Keeper], console: Console) -> Iterator[asyncio.Event]:
    """At SIGINT or SIGTERM cancel the current task and set the event; at a second signal kill `keepers`."""
    task, loop, stopping = asyncio.current_task(), asyncio.get_running_loop(), asyncio.Event()
    if task is None:
        raise RuntimeError("not in a task")

    def on_signal() -> None:
        if stopping.is_set():
            for keeper in keepers:
                keeper.kill()
            return
        stopping.set()
        console.print("\nstopping; a second signal kills all processes", markup=False)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield stopping
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
