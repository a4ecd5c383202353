"""`kvroute down`: end what `kvroute up` runs."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import click

from kvroute.cli.running import state_dir_option
from kvroute.deploy.state import StateFolder

KILLED_S = 15.0


@click.command()
@state_dir_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=90.0,
    show_default=True,
    help="Seconds that the processes have to end by themselves; then they are killed.",
)
def down(state_dir: Path, timeout_s: float) -> None:
    """End every process of `kvroute up`, as Ctrl-C there would."""
    state = StateFolder(state_dir).read()
    if state is None:
        click.echo(f"nothing runs in {state_dir}")
        return
    try:
        watch = os.pidfd_open(state.pid)
    except ProcessLookupError:
        raise click.ClickException(
            f"process {state.pid}, which supervises {state_dir}, is not on this machine (in a container?)"
        ) from None
    try:
        # A second signal kills what has not ended after the first; the last resort is for the supervisor.
        for number, wait_s in (
            (signal.SIGTERM, timeout_s),
            (signal.SIGTERM, KILLED_S),
            (signal.SIGKILL, KILLED_S),
        ):
            _send(watch, number)
            if select.select([watch], [], [], wait_s)[0]:
                click.echo(f"{state.name or 'it'} has ended")
                return
    finally:
        os.close(watch)
    raise click.ClickException(f"process {state.pid} did not end")


def _send(watch: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(watch, number)
    except ProcessLookupError:
        pass  # it has just ended
