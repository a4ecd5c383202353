"""Registry of second tiers by their names in `l2CacheBackend`. A new tier is a module and a line here,
or an entry point `kvroute.l2_stores` of another distribution (a `Backend`)."""

from __future__ import annotations

from typing import Final

from kvroute import plugins
from kvroute.deploy.l2.adapters import S3, FileSystem, Mooncake, Redis, Valkey
from kvroute.deploy.l2.backend import Backend
from kvroute.deploy.l2.tieredstorage import TieredStorage

BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend for backend in (Redis(), TieredStorage(), Valkey(), FileSystem(), S3(), Mooncake())
}


def is_backend(name: str) -> bool:
    """Whether a tier has this name in lower case, a built-in one or one of an installed distribution."""
    return name in BACKENDS or plugins.find(plugins.L2_STORES, name) is not None


def backend_named(name: str) -> Backend:
    """The backend called `name`, in any case. Raises ConfigError."""
    name = name.lower()
    plugin: Backend = BACKENDS[name] if name in BACKENDS else plugins.load(plugins.L2_STORES, name)
    return plugin
