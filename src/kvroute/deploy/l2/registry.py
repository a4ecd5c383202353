"""Registry of second tiers by their names in `l2CacheBackend`. A new tier is a module and a line here."""

from __future__ import annotations

from typing import Final

from kvroute.deploy.l2.adapters import S3, FileSystem, Mooncake, Redis, Valkey
from kvroute.deploy.l2.backend import Backend
from kvroute.deploy.l2.tieredstorage import TieredStorage

BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend for backend in (Redis(), TieredStorage(), Valkey(), FileSystem(), S3(), Mooncake())
}


def backend_named(name: str) -> Backend:
    """The backend called `name`, in any case. Raises KeyError."""
    return BACKENDS[name.lower()]
