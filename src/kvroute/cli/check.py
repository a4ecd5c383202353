"""`kvroute check`: what `kvroute serve` would do with the same flags, without doing it."""

from __future__ import annotations

import click

from kvroute.app.config import Loaded
from kvroute.app.config_dump import resolved_yaml
from kvroute.cli.configuration import InvalidConfiguration, configured
from kvroute.errors import ConfigError
from kvroute.fleet.discovery.file import read_workers_file


class NotValid(InvalidConfiguration):
    exit_code = 1


@click.command()
@configured(NotValid)
def check(loaded: Loaded) -> None:
    """Validate a configuration and print it resolved.

    The output is YAML with secrets masked; a comment behind a value says where it came from. Exit
    code 0: valid, 1: not.
    """
    check_workers_file(loaded)
    click.echo(resolved_yaml(loaded), nl=False)


def check_workers_file(loaded: Loaded) -> None:
    """Read the fleet's file once, as `serve` would over and over. Raises ConfigError."""
    file = loaded.config.fleet.file
    if file is None:
        return
    try:
        read_workers_file(file)
    except ConfigError as exc:
        raise ConfigError("fleet.file", f"{file}: {exc}") from exc
