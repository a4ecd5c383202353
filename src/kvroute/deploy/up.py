"""`kvroute up`: processes in stages, the gateway last, kept up until told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from rich.console import Console

from kvroute.clock import Clock
from kvroute.deploy.following import following
from kvroute.deploy.keeper import Keeper, Phase
from kvroute.deploy.plan import Plan
from kvroute.deploy.progress import showing
from kvroute.deploy.segments import sweep
from kvroute.deploy.state import ProcessState, StateFolder, UpState

Prepare = Callable[[], Awaitable[Plan]]


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
    plan: Plan,
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
        if keeper.status.phase is Phase.READY:
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


def told_of(plan: Plan, keepers: list[Keeper], clock: Clock) -> UpState:
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


def welcome(plan: Plan) -> str:
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
