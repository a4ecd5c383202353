"""Passes requests that change an engine's state to workers: its prefix cache, sleep mode, pauses.

vLLM (0.32) has these endpoints only with VLLM_SERVER_DEV_MODE=1. Where the engine empties its prefix cache,
what the gateway believes about that worker is dropped: no metric shows a reset, and an event only comes with
the next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs

import httpx
import msgspec

from kvroute.errors import InvalidRequest, WorkerTimeout, WorkerUnreachable
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.probe import in_words
from kvroute.fleet.sleep import PAUSED, SLEEPS
from kvroute.fleet.worker import Worker

ACTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "reset_prefix_cache": ("reset_running_requests", "reset_external"),
    "sleep": ("level", "mode"),
    "wake_up": ("tags",),
    "pause": ("mode", "clear_cache"),
    "resume": (),
}
"""The engine's endpoints, and the parameters that each one knows."""
_STOPS: Final[Mapping[str, str]] = {"sleep": SLEEPS, "pause": PAUSED}
_MAX_ANSWER_BYTES: Final = 16_384
_FALSE: Final = ("false", "0", "no", "off")


def check_query(action: str, query: str) -> None:
    """Raise InvalidRequest for a parameter that the engine's endpoint does not have."""
    known = ACTIONS[action]
    for name in parse_qs(query, keep_blank_values=True):
        if name not in known:
            shown = ", ".join(known) or "no parameters"
            raise InvalidRequest(f"{name!r} is no parameter of /{action}, which has {shown}.", param=name)


def empties_cache(action: str, query: str, answer: object) -> bool:
    """Whether the engine has emptied its prefix cache, by its answer to the request."""
    given = {name: values[-1].lower() for name, values in parse_qs(query).items()}
    match action:
        case "reset_prefix_cache":
            return not (isinstance(answer, dict) and answer.get("success") is False)
        case "sleep":
            return given.get("level") != "0"
        case "pause":
            return given.get("clear_cache") not in _FALSE
    return False


class EngineControl:
    """Sends such requests. Stateless; the client belongs to the caller.

    `cleared` is called with each worker whose prefix cache is empty now. `health` learns first which engines
    will sleep or pause, so that they get no more requests.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        timeout_s: float,
        api_key: str | None,
        cleared: Callable[[Worker], None],
        health: HealthMonitor,
    ) -> None:
        self._client = client
        self._health = health
        self._timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._cleared = cleared

    async def send(self, worker: Worker, action: str, query: str) -> object:
        """Send one request; returns the engine's answer as JSON values.

        Raises InvalidRequest, WorkerTimeout, and WorkerUnreachable also if the engine refuses.
        """
        check_query(action, query)
        return await self._send_to(worker, action, query, self._stop((worker,), action))

    def _stop(self, workers: Sequence[Worker], action: str) -> Collection[Worker]:
        """Take workers whose engines will stop out of routing; returns those that were in it."""
        why = _STOPS.get(action)
        stopped = [worker for worker in workers if not worker.asleep] if why else []
        if why:
            self._health.report_asleep(stopped, why)
        return stopped

    async def _send_to(self, worker: Worker, action: str, query: str, stopped: Collection[Worker]) -> object:
        try:
            return await self._send(worker, action, query)
        except WorkerUnreachable:
            if worker in stopped:
                self._health.report_awake(worker)
            raise
        finally:
            self._health.recheck(worker)

    async def _send(self, worker: Worker, action: str, query: str) -> object:
        url = f"{worker.spec.url}/{action}" + (f"?{query}" if query else "")
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.post(url, headers=self._headers, timeout=self._timeout_s)
        except (TimeoutError, httpx.TimeoutException):
            if action == "reset_prefix_cache" or empties_cache(action, query, None):
                self._cleared(worker)  # perhaps it was: to believe less is safe
            raise WorkerTimeout(
                f"Worker {worker.id!r} gave no answer to /{action} within {self._timeout_s:g} s."
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WorkerUnreachable(f"Worker {worker.id!r}: /{action}: {in_words(error)}.") from None
        if not answer.is_success:
            hint = ": vLLM has it only with VLLM_SERVER_DEV_MODE=1" if answer.status_code == 404 else ""
            raise WorkerUnreachable(f"Worker {worker.id!r} answered {answer.status_code} to /{action}{hint}.")
        try:
            value: object = msgspec.json.decode(answer.content[:_MAX_ANSWER_BYTES])
        except msgspec.DecodeError:
            value = None
        if empties_cache(action, query, value):
            self._cleared(worker)
        return value

    async def send_to_all(self, workers: Sequence[Worker], action: str, query: str) -> dict[str, Any]:
        """Send one request to each worker at the same time; returns answers and errors by worker."""
        check_query(action, query)
        stopped = self._stop(workers, action)  # all of them before one request goes from one to the next
        answers = await asyncio.gather(*(self._outcome(worker, action, query, stopped) for worker in workers))
        return dict(zip((worker.id for worker in workers), answers, strict=True))

    async def _outcome(
        self, worker: Worker, action: str, query: str, stopped: Collection[Worker]
    ) -> dict[str, Any]:
        try:
            return {"ok": True, "answer": await self._send_to(worker, action, query, stopped)}
        except (WorkerUnreachable, WorkerTimeout) as error:
            return {"ok": False, "error": error.message}
