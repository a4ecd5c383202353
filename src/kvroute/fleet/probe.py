"""Asking a worker: is it alive, what does it serve, how large is its cache."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx

from kvroute.fleet.facts import MetricsPage, ModelsPage, parse_metrics, parse_models


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """Why a question got no good answer. `refused`: nothing listens there."""

    detail: str
    refused: bool = False


def probe_client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """A client fit for probing: no proxy from the environment, no redirects, no limit on connections
    (a hanging worker must not keep others from being asked), none kept for as long as uvicorn's servers
    keep theirs (5 s). `transport` in place of httpx's own promises the last two. The caller closes it."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0)
    return httpx.AsyncClient(trust_env=False, limits=limits, transport=transport)


class Prober:
    """Asks one worker one question at a time; each answer has `timeout_s` as a whole.

    `api_key` goes to `/v1/models` only: vLLM leaves `/health` and `/metrics` open (0.32).
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        timeout_s: float,
        path: str = "/health",
        api_key: str | None = None,
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._path = path
        self._auth = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def health(self, url: str) -> ProbeFailure | None:
        """None if the worker at `url` is well."""
        answer = await self._get(url + self._path, {})
        return answer if isinstance(answer, ProbeFailure) else None

    async def models(self, url: str) -> ModelsPage | ProbeFailure:
        """What it serves."""
        answer = await self._get(url + "/v1/models", self._auth)
        if isinstance(answer, ProbeFailure):
            return answer
        try:
            return parse_models(answer)
        except ValueError:
            return ProbeFailure("/v1/models is not a model list")

    async def metrics(self, url: str) -> MetricsPage | ProbeFailure:
        """Its cache and its process."""
        answer = await self._get(url + "/metrics", {})
        return answer if isinstance(answer, ProbeFailure) else parse_metrics(answer)

    async def _get(self, url: str, headers: dict[str, str]) -> bytes | ProbeFailure:
        path = httpx.URL(url).path
        try:
            # httpx's own timeouts are per read: a worker that trickles would never run into them.
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.get(url, headers=headers, timeout=self._timeout_s)
        except (TimeoutError, httpx.TimeoutException):
            return ProbeFailure(f"{path} gave no answer within {self._timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            refused = _is_refusal(error)
            return ProbeFailure("connection refused" if refused else f"{path}: {error!r}", refused)
        if not answer.is_success:
            return ProbeFailure(f"{path} answered {answer.status_code}")
        return answer.content


def _is_refusal(error: BaseException | None) -> bool:
    """httpx wraps the operating system's errors twice (httpx 0.28 over httpcore 1 and anyio 4), and
    several addresses of one host make a group."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            return all(_is_refusal(one) for one in error.exceptions)
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False
