"""Every kind of discovery, by name."""

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
"""Each makes its source from the options, or None where they do not ask for it."""


def sources_of(options: FleetOptions, clock: Clock) -> dict[str, Discovery]:
    """The sources that `options` ask for, by name; the first to name a worker wins."""
    made = {name: make(options, clock) for name, make in DISCOVERY.items()}
    return {name: source for name, source in made.items() if source is not None}
