"""Probes of workers: health, models and cache size."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from kvroute.answers import LIMIT, BoundedTransport
from kvroute.errors import NoResources
from kvroute.fleet.worker import (
    SALTED_SINCE,
    MetricsPage,
    ModelsPage,
    parse_metrics,
    parse_models,
    release_of,
    release_shown,
)

_QUESTION_S = 0.5
_QUESTION_BYTES = 256
_TRUE = re.compile(rb'"is_(?:paused|sleeping)"\s*:\s*true').search


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """Why a probe failed. `refused`: nothing listens on the worker's port.

    `is_own`: the gateway lacks descriptors, ports or memory, so the probe says nothing about the worker.
    `not_isolated`: the worker answers, but may ignore `cache_salt`. `status`: that of its answer, 0 without
    one.
    """

    detail: str
    refused: bool = False
    is_own: bool = False
    not_isolated: bool = False
    status: int = field(default=0, compare=False)


_MAX_PAGE_BYTES = 4 << 20
"""Longest page of a worker: vLLM's /metrics has hundreds of kilobytes."""
_MAX_MODELS_BYTES = 2 << 20
_MAX_SHORT_BYTES = 1 << 20


def probe_client(
    transport: httpx.AsyncBaseTransport | None = None, on_refused: Callable[[str], None] | None = None
) -> httpx.AsyncClient:
    """An HTTP client for probes, without proxies, redirects and connection limits. The caller closes it.

    `transport` replaces httpx's own; it must not limit connections and must close idle ones within 4 s.
    An answer has at most 4 MiB and no content coding; `on_refused` gets the reason of each refused one.
    """
    # Without a limit, a hanging worker cannot block the probes of others. Idle connections are closed after
    # 4 s, before uvicorn's servers close them (5 s).
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0)
    inner = transport or httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
    bounded = BoundedTransport(inner, max_bytes=_MAX_PAGE_BYTES, on_refused=on_refused)
    return httpx.AsyncClient(trust_env=False, transport=bounded)


class Prober:
    """Sends probes to workers; each probe takes at most `timeout_s`.

    `api_key` is sent to `/v1/models`, `/is_paused` and `/is_sleeping` only: vLLM leaves `/health` and
    `/metrics` open (0.32).
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

    def configure(self, *, timeout_s: float, path: str) -> None:
        """Change the limit and the path of further probes."""
        self._timeout_s = timeout_s
        self._path = path

    async def health(self, url: str) -> ProbeFailure | None:
        """None if the worker at `url` is healthy."""
        answer = await self._get(url + self._path, {})
        return answer if isinstance(answer, ProbeFailure) else None

    async def models(self, url: str) -> ModelsPage | ProbeFailure:
        """Read the models that the worker at `url` serves."""
        answer = await self._get(url + "/v1/models", self._auth, _MAX_MODELS_BYTES)
        if isinstance(answer, ProbeFailure):
            return answer
        try:
            return parse_models(answer)
        except ValueError:
            return ProbeFailure("/v1/models is not a model list: is this a vLLM server?")

    async def metrics(self, url: str) -> MetricsPage | ProbeFailure:
        """Read cache size and process start time of the worker at `url`."""
        answer = await self._get(url + "/metrics", {}, _MAX_PAGE_BYTES)
        return answer if isinstance(answer, ProbeFailure) else parse_metrics(answer)

    async def release(self, url: str) -> tuple[int, ...] | ProbeFailure | None:
        """The release of vLLM of the worker at `url`; None if `/version` names none."""
        answer = await self._get(url + "/version", {})
        return answer if isinstance(answer, ProbeFailure) else release_of(answer.decode("utf-8", "replace"))

    async def question(self, url: str, path: str) -> bool | ProbeFailure | None:
        """What the worker at `url` answers to `/is_paused` or `/is_sleeping`; None without an answer in time.

        Waits `_QUESTION_S` at most: vLLM answers between two steps of its engine, which may be long (0.32).
        """
        try:
            async with asyncio.timeout(_QUESTION_S):
                answer = await self._get(url + path, self._auth)
        except TimeoutError:
            return None
        if isinstance(answer, ProbeFailure):
            return answer
        return _TRUE(answer[:_QUESTION_BYTES]) is not None

    async def isolation(
        self, url: str, learned: Callable[[tuple[int, ...]], object] | None = None
    ) -> ProbeFailure | None:
        """None if the release of the worker at `url`, which `learned` gets, honours `cache_salt`."""
        release = await self.release(url)
        if isinstance(release, ProbeFailure):
            return release
        if release is not None and learned is not None:
            learned(release)
        if release is not None and release >= SALTED_SINCE:
            return None
        shown = "a worker of an unknown release" if release is None else f"vLLM {release_shown(release)}"
        needed = f"vLLM {release_shown(SALTED_SINCE)} or newer"
        return ProbeFailure(
            f"{shown} may ignore `cache_salt`: server.isolation needs {needed}", not_isolated=True
        )

    async def _get(
        self, url: str, headers: dict[str, str], max_bytes: int = _MAX_SHORT_BYTES
    ) -> bytes | ProbeFailure:
        path = httpx.URL(url).path
        try:
            # httpx's own timeouts are per read: a worker that sends single bytes would never exceed them.
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.get(
                    url, headers=headers, timeout=self._timeout_s, extensions={LIMIT: max_bytes}
                )
        except (TimeoutError, httpx.TimeoutException):
            return ProbeFailure(f"{path} gave no answer within {self._timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if isinstance(error.__cause__, NoResources):
                return ProbeFailure(str(error), is_own=True)
            refused = is_refusal(error)
            return ProbeFailure("connection refused" if refused else f"{path}: {in_words(error)}", refused)
        if not answer.is_success:
            status = answer.status_code
            return ProbeFailure(f"{path} answered {status}{self._hint(status, headers)}", status=status)
        return answer.content

    def _hint(self, status: int, headers: dict[str, str]) -> str:
        """What the status probably means, after the words "PATH answered STATUS"."""
        if status == 404:
            return ": is this a vLLM server?"
        if status not in (401, 403):
            return ""
        if headers:
            return ": the worker refuses the key of fleet.worker_api_key"
        return ": the worker wants an API key (fleet.worker_api_key)"


def in_words(error: Exception) -> str:
    """The cause of an httpx error, for an operator."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return f"the host name cannot be resolved ({cause.strerror})"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def is_refusal(error: BaseException | None) -> bool:
    """Whether the cause of an httpx error is a refused connection."""
    # httpx wraps the operating system's errors twice (httpx 0.28 over httpcore 1 and anyio 4); several
    # addresses of one host make an exception group.
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            return all(is_refusal(one) for one in error.exceptions)
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False
