"""`kvroute serve`: the gateway, in the foreground."""

from __future__ import annotations

import sys

import click

from kvroute.app.config import Config, Loaded
from kvroute.cli.configuration import configured
from kvroute.cli.vllm_router import router_flags, router_settings
from kvroute.clock import SystemClock
from kvroute.errors import ConfigError


@click.command()
@router_flags
@configured(more=router_settings)
def serve(loaded: Loaded) -> None:
    """Run the gateway.

    Settings come from the file, then KVROUTE__SECTION__KEY variables, then --set, then the other
    flags; the last one wins. The flags of production-stack's router are taken, too (docs/migration.md).
    """
    require_workers(loaded.config)
    from kvroute.app.server import run  # a wrong configuration is told without loading the server

    sys.exit(run(loaded.config))


def require_workers(config: Config) -> None:
    """Raise ConfigError when no discovery source is configured."""
    from kvroute.fleet.discovery.registry import sources_of

    if not sources_of(config.fleet, SystemClock()):
        raise ConfigError(
            "fleet",
            "no workers: give --worker http://HOST:PORT (repeat for more), or fleet.workers or fleet.file "
            "(a watched list, which may be empty at first), or fleet.kubernetes or fleet.dns. "
            "`kvroute up` brings workers of its own.",
        )
