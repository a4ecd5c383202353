"""Addresses as people write them for Redis and Valkey."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

TLS_SCHEMES = ("rediss", "valkeys")
_LOGIN = re.compile(r"(?<=//)[^\s'\"]+@|(?<![\w/])[^\s/'\":]*:[^\s/'\"]+@")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a store is. `password` never goes into an error."""

    host: str
    port: int
    username: str = ""
    password: str = ""
    database: int = 0
    tls: bool = False


def parse_address(url: str, *, schemes: tuple[str, ...], default_port: int) -> Address:
    """Read `redis://[user:password@]host[:port][/database]`, `host[:port]` or `redis:host:port`.

    Raises ValueError with what is wrong; the text has no credentials.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        # HyperPod's announcement writes `redis:HOST:PORT`.
        scheme, _, rest = url.partition(":") if url.partition(":")[0] in schemes else (schemes[0], "", url)
    if scheme not in schemes:
        raise ValueError(f"expected {schemes[0]}://HOST:PORT, got the scheme {masked(scheme)!r}")
    parts = urlsplit(f"{scheme}://{rest}")
    try:
        port = parts.port or default_port
    except ValueError:
        raise ValueError("the port is not a number from 1 to 65535") from None
    database = parts.path.strip("/")
    if not parts.hostname:
        raise ValueError(f"expected {schemes[0]}://HOST:PORT, found no host")
    if database and not database.isdigit():
        raise ValueError("what follows the port is a database's number")
    return Address(
        host=parts.hostname,
        port=port,
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=int(database or 0),
        tls=scheme in TLS_SCHEMES,
    )


def masked(text: str) -> str:
    """`text` with stars for the user and password of any address in it."""
    return _LOGIN.sub("***@", text)


def has_password(url: str) -> bool:
    """Whether an address, right or wrong, has a password in it."""
    login, at, _ = url.rpartition("@")
    return bool(at) and bool(login.rpartition("//")[2].partition(":")[2])
