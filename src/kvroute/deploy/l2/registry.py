"""Every second tier by its name in `l2CacheBackend`. A new one is a module and a line here."""

from __future__ import annotations

from typing import Final

from kvroute.deploy.l2.backend import Backend
from kvroute.deploy.l2.filesystem import FileSystem
from kvroute.deploy.l2.mooncake import Mooncake
from kvroute.deploy.l2.redis import Redis
from kvroute.deploy.l2.s3 import S3
from kvroute.deploy.l2.tieredstorage import TieredStorage
from kvroute.deploy.l2.valkey import Valkey

BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend for backend in (Redis(), TieredStorage(), Valkey(), FileSystem(), S3(), Mooncake())
}


def backend_named(name: str) -> Backend:
    """The backend; the case of `name` does not matter. Raises KeyError."""
    return BACKENDS[name.lower()]
