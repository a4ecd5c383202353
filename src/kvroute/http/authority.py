"""Hosts and paths as the gateway reads them in a request."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

_AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")


def authority(text: str) -> tuple[str, int | None] | None:
    """Host and port of `host[:port]`, the host in lower case without a final dot; None if malformed."""
    match = _AUTHORITY.fullmatch(text.strip().lower())
    if match is None:
        return None
    name = match[1].removesuffix(".")
    if name.startswith("["):
        try:
            name = str(ip_address(name[1:-1]))
        except ValueError:
            return None
    return (name, int(match[2]) if match[2] else None) if name else None


def host_name(text: str) -> str | None:
    """A name or an address without a port, as `authority` returns it; None if it is neither."""
    found = authority(f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text)
    return found[0] if found is not None and found[1] is None else None


def is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


may_mislead = re.compile(
    rb"(?:^|/|\\)(?:\.|%2e){1,2}(?:$|/|\\|%2f|%5c|;)|%2f|%5c|%00|\\", re.IGNORECASE
).search
"""Paths that a proxy, the gateway and a worker may interpret differently."""
