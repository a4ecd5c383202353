"""What commands about a running `kvroute up` have in common."""

from __future__ import annotations

from pathlib import Path

import click

state_dir_option = click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".kvroute"),
    show_default=True,
    help="The folder of that `kvroute up`.",
)
