"""Whether a server of this host is ready: one visit to a URL."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import httpx

VISIT_TIMEOUT_S = 2.0


async def is_ready(url: str, http: httpx.AsyncClient) -> bool:
    """True when the server behind `url` answers as it should within `VISIT_TIMEOUT_S`.

    `http://...` answers 200; `redis://HOST:PORT` answers PING with PONG; `tcp://HOST:PORT` accepts a
    connection. Raises ValueError for any other scheme.
    """
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(VISIT_TIMEOUT_S):
            match parts.scheme:
                case "http":
                    return (await http.get(url)).status_code == 200
                case "redis":
                    return (await _said(parts.hostname, parts.port, b"PING\r\n")).startswith(b"+PONG")
                case "tcp":
                    await _said(parts.hostname, parts.port, b"")
                    return True
    except (OSError, TimeoutError, httpx.TransportError):
        return False  # not listening yet
    raise ValueError(f"nobody knows how to ask {url}")


async def _said(host: str | None, port: int | None, words: bytes) -> bytes:
    """The first line of the answer to `words`; nothing is waited for when there are none."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(words)
        return await reader.readline() if words else b""
    finally:
        writer.close()
