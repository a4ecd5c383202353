"""`kvroute serve`: runs the gateway in the foreground. Also the configuration flags that `check` shares."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import click

from kvroute import __version__
from kvroute.app.config import Config, Loaded, load
from kvroute.app.config_loading import ConfigSetting
from kvroute.app.config_paths import Path
from kvroute.cli.vllm_router import router_flags, router_settings
from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.routing.registry import STRATEGIES

FLAGS: dict[str, Path] = {
    "host": ("server", "host"),
    "port": ("server", "port"),
    "processes": ("server", "processes"),
    "state_dir": ("server", "state_dir"),
    "admin_key_file": ("admin", "api_key_file"),
    "strategy": ("routing", "strategy"),
    "workers": ("fleet", "workers"),
    "log_level": ("logging", "level"),
    "log_format": ("logging", "format"),
}
"""Click parameter -> path of the option that it sets."""


class InvalidConfiguration(click.ClickException):
    """A wrong configuration: printed as one line per problem, without a traceback."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"kvroute: {line}", err=True)


def configured(
    failure: type[InvalidConfiguration] = InvalidConfiguration,
    more: Callable[[dict[str, Any]], list[ConfigSetting]] = lambda flags: [],
) -> Callable[[Callable[[Loaded], None]], Callable[..., None]]:
    """Add the configuration flags to a command, and call the command with the loaded configuration.

    A wrong configuration raises `failure`. `more` gets all flags, also the command's own ones, and returns
    additional settings; it may change the flags, which win over these settings.
    """

    def decorate(command: Callable[[Loaded], None]) -> Callable[..., None]:
        @click.option(
            "-c",
            "--config",
            "file",
            metavar="FILE",
            type=click.Path(path_type=pathlib.Path),
            help="YAML configuration; every key is in configs/reference.yaml.",
        )
        @click.option(
            "--worker",
            "workers",
            metavar="[ID=]URL",
            multiple=True,
            help="A worker's base URL or HOST:PORT; repeat for more. Replaces fleet.workers.",
        )
        @click.option("--strategy", metavar="NAME", help=f"Routing strategy: {', '.join(STRATEGIES)}.")
        @click.option("--host", help="Address to listen on.")
        @click.option("--port", help="Port to listen on.")
        @click.option(
            "--processes", metavar="N", help="Number of processes that share the port, one per core."
        )
        @click.option(
            "--state-dir",
            metavar="DIR",
            help="Folder where the gateway stores the admin key that it generates.",
        )
        @click.option(
            "--admin-key-file", metavar="FILE", help="File with the admin key. Default: a key is generated."
        )
        @click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
        @click.option("--log-format", metavar="FORMAT", help="text or json.")
        @click.option(
            "--set",
            "assignments",
            metavar="PATH=VALUE",
            multiple=True,
            help="Set any option, such as fleet.health.interval_s=2; repeat for more.",
        )
        @functools.wraps(command)
        def run(file: pathlib.Path | None, assignments: tuple[str, ...], **flags: Any) -> None:
            try:
                settings = [*more(flags), *flag_settings(flags)]
                loaded = load(file=file, environ=os.environ, assignments=assignments, flags=settings)
                command(loaded)
            except ConfigError as exc:
                raise failure(str(exc)) from exc

        return run

    return decorate


def flag_settings(flags: dict[str, Any]) -> list[ConfigSetting]:
    """The flags on the command line, as settings."""
    settings = []
    for name, path in FLAGS.items():
        value = flags[name]
        if value in (None, ()):
            continue
        origin = "--worker" if name == "workers" else f"--{name.replace('_', '-')}"
        settings.append(
            ConfigSetting(path, [worker(text) for text in value] if name == "workers" else value, origin)
        )
    return settings


def worker(text: str) -> str | dict[str, str]:
    """`URL` or `ID=URL` as an entry of `fleet.workers`; `HOST:PORT` is `http://HOST:PORT`."""
    name, separator, url = text.partition("=")
    if separator and "://" not in name:
        return {"id": name, "url": _with_scheme(url)}
    return _with_scheme(text)


_host_and_port = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:.]+\]):\d+/?").fullmatch


def _with_scheme(url: str) -> str:
    return f"http://{url}" if _host_and_port(url) else url


@click.command()
@router_flags
@configured(more=router_settings)
def serve(loaded: Loaded) -> None:
    """Run the gateway.

    Settings come from the file, then KVROUTE__SECTION__KEY variables, then --set, then the other flags; the
    last one wins. The flags of production-stack's router are accepted, too
    (docs/migration/production-stack.md).
    """
    _run(loaded)


@click.command()
@click.version_option(__version__, prog_name="vllm-router", message="%(prog)s (kvroute %(version)s)")
@router_flags
@configured(more=functools.partial(router_settings, is_whole_line=True))
def vllm_router(loaded: Loaded) -> None:
    """Run the gateway with a command line of production-stack's router, unchanged.

    Every flag of that router is accepted, and printed with the option that it sets; what that router refuses
    is refused (docs/migration/production-stack.md). kvroute's own flags work, too.
    """
    _run(loaded)


def _run(loaded: Loaded) -> None:
    require_workers(loaded.config)
    from kvroute.app.server import (
        run,
    )  # imported late: a wrong configuration is reported without loading the server

    sys.exit(run(loaded.config, loaded.source, loaded.signature))


def require_workers(config: Config) -> None:
    """Raise ConfigError when no discovery source is configured."""
    from kvroute.fleet.discovery.registry import sources_of

    if not sources_of(config.fleet, SystemClock()):
        raise ConfigError(
            "fleet",
            "no workers: set --worker http://HOST:PORT (repeat for more), or fleet.workers, or fleet.file "
            "(a watched list, which may be empty at first), or fleet.kubernetes, or fleet.dns. "
            "`kvroute up` starts its own workers.",
        )
