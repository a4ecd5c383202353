"""`kvroute logs`: what the processes of `kvroute up` have written."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click
from rich.console import Console

from kvroute.cli.running import state_dir_option
from kvroute.clock import SystemClock
from kvroute.deploy.following import GrowingFile, Screen, follow, last_lines
from kvroute.deploy.state import StateFolder


@click.command()
@state_dir_option
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=100, show_default=True, help="How many of the last."
)
@click.option("-f", "--follow", "keep_on", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
def logs(state_dir: Path, lines: int, keep_on: bool, names: tuple[str, ...]) -> None:
    """Show the logs of these processes, or of all; also after they have ended."""
    files = StateFolder(state_dir).log_files()
    unknown = [name for name in names if name not in files]
    if unknown:
        known = ", ".join(files) or f"none in {state_dir}"
        raise click.ClickException(f"there is no log of {', '.join(unknown)}; logs: {known}")
    chosen = {name: files[name] for name in names or files}
    screen, growing = Screen(Console(), chosen), {}
    for name, path in chosen.items():
        last, end = last_lines(path, lines)
        if len(chosen) == 1 and not keep_on:
            click.echo("".join(f"{line}\n" for line in last), nl=False)
        else:
            screen.show(name, last)
        growing[name] = GrowingFile(path, offset=end)
    if keep_on:
        asyncio.run(_follow_until_told(growing, screen))


async def _follow_until_told(files: dict[str, GrowingFile], screen: Screen) -> None:
    """Until SIGINT or SIGTERM, also where the shell has started this with SIGINT ignored (`&`)."""
    following = asyncio.create_task(follow(files, screen, SystemClock()))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, following.cancel)
    await asyncio.wait({following})
    if not following.cancelled():
        following.result()
