"""The registry of discovery sources: a new source adds one line to `DISCOVERY`.

Another distribution's source is an entry point `kvroute.discovery`; its section is `fleet.NAME`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvroute.clock import Clock
from kvroute.fleet.discovery.base import Discovery, StaticDiscovery
from kvroute.fleet.discovery.dns import DnsDiscovery
from kvroute.fleet.discovery.file import FileDiscovery
from kvroute.fleet.discovery.kubernetes import KubernetesDiscovery
from kvroute.fleet.options import FleetOptions

DISCOVERY: Final[dict[str, Callable[[FleetOptions, Clock], Discovery | None]]] = {
    "static": StaticDiscovery.configured,
    "file": FileDiscovery.configured,
    "kubernetes": KubernetesDiscovery.configured,
    "dns": DnsDiscovery.configured,
}
"""By name, a constructor of the source; it returns None if the options do not enable the source."""


def sources_of(options: FleetOptions, clock: Clock) -> dict[str, Discovery]:
    """The enabled sources by name. If two sources name one worker, the first to do so wins."""
    made = {name: make(options, clock) for name, make in DISCOVERY.items()}
    for name, source in options.sources.items():
        made[name] = source.configured(getattr(options, name), clock)
    return {name: source for name, source in made.items() if source is not None}
