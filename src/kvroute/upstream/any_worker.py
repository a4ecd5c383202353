"""All workers behind one httpx transport, for the control plane."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx

from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.transport import WorkerTransport


@dataclass(slots=True)
class _Asked:
    """Mutable: `asking` counts requests whose head has not come."""

    transport: WorkerTransport
    asking: int = 0


class AnyWorkerTransport(httpx.AsyncBaseTransport):
    """Sends each request over connections of its origin, opened on first use.

    For an `httpx.AsyncClient` that asks workers about themselves: a third of what the default transport
    costs. A worker that hangs keeps no other from being asked. Mutable: an origin without connections is
    dropped when the next new one comes. Belongs to one event loop; `aclose` it there.
    """

    def __init__(self, options: UpstreamOptions) -> None:
        """Of the options only `verify_tls` counts: the others are meant for answers to clients. Probes come
        one at a time and need no spare connections."""
        self._options = UpstreamOptions(verify_tls=options.verify_tls, spare_connections=0)
        self._asked: dict[tuple[str, str, int | None], _Asked] = {}

    @property
    def origins(self) -> int:
        """How many are remembered."""
        return len(self._asked)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As `WorkerTransport.handle_async_request`. Raises httpx's exceptions."""
        url = request.url
        asked = self._asked.get((url.scheme, url.host, url.port)) or self._added(request)
        asked.asking += 1
        try:
            return await asked.transport.handle_async_request(request)
        finally:
            asked.asking -= 1

    def _added(self, request: httpx.Request) -> _Asked:
        url = request.url
        host = f"[{url.host}]" if ":" in url.host else url.host
        port = "" if url.port is None else f":{url.port}"
        try:
            added = _Asked(WorkerTransport(f"{url.scheme}://{host}{port}", self._options))
        except ValueError as error:
            raise httpx.UnsupportedProtocol(str(error), request=request) from error
        self._asked = {
            origin: each
            for origin, each in self._asked.items()
            if each.asking or each.transport.open_connections
        }
        self._asked[url.scheme, url.host, url.port] = added
        return added

    async def aclose(self) -> None:
        """Close every connection; what is under way breaks off."""
        await asyncio.gather(*(each.transport.aclose() for each in self._asked.values()))
        self._asked.clear()
