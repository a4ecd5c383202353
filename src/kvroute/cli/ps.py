"""`kvroute ps`: what `kvroute up` runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvroute.cli.running import state_dir_option
from kvroute.clock import SystemClock
from kvroute.deploy.state import StateFolder, UpState


@click.command()
@state_dir_option
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object; its `processes` are empty when nothing runs."
)
def ps(state_dir: Path, as_json: bool) -> None:
    """List the processes of `kvroute up`: how each is, for how long, restarts and addresses."""
    state = StateFolder(state_dir).read()
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(state) if state is not None else {"processes": []}))
    elif state is None:
        click.echo(f"nothing runs in {state_dir}")
    else:
        click.echo(f"{state.name or 'starting'}, supervised by process {state.pid}")
        Console().print(_table(state, SystemClock().wall()))
        if state.admin_key_file:
            click.echo(f"the gateway's admin key: {state.admin_key_file}")


def _table(state: UpState, now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("NAME", "STATE", "FOR", "RESTARTS", "PID", "URL"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("RESTARTS", "PID") else "left")
    for process in state.processes:
        pid = str(process.pid) if process.pid is not None else "-"
        row = (
            process.name,
            process.phase,
            _for(now - process.since),
            str(process.restarts),
            pid,
            process.url,
        )
        table.add_row(*row)
    return table


def _for(seconds: float) -> str:
    """A duration in its two largest units."""
    left = max(0, round(seconds))
    for name, length, smaller in (("d", 86_400, ("h", 3600)), ("h", 3600, ("m", 60)), ("m", 60, ("s", 1))):
        if left >= length:
            return f"{left // length} {name} {left % length // smaller[1]} {smaller[0]}"
    return f"{left} s"
