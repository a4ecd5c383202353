"""Exact token ids of requests. For each model it chooses a source: local files or a worker."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from kvroute.openai.request import InferenceRequest
from kvroute.tokens.chat import EngineFlags
from kvroute.tokens.conversations import Conversations
from kvroute.tokens.encoders import compare, sample_requests
from kvroute.tokens.local import LocalTokenizer
from kvroute.tokens.model import ModelFiles, load_model
from kvroute.tokens.options import Inexact, TokensReason, UnusableModel
from kvroute.tokens.remote import RemoteEndpoint, RemoteTokenizer
from kvroute.tokens.segments import SegmentCache

T = TypeVar("T")


class TokenThreads:
    """A bounded thread pool for blocking work. An async context manager.

    If the caller stops waiting, work that has not started is dropped; work that has started finishes, so that
    the caches get its result. Mutable: the number of unfinished calls, and `cpu_s`, the CPU seconds of `run`.
    """

    def __init__(self, threads: int = 2, *, max_waiting: int = 64) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokens")
        self._most = threads + max_waiting
        self._unfinished = 0
        self._cpu_s = 0.0
        self._lock = threading.Lock()

    @property
    def unfinished(self) -> int:
        return self._unfinished

    @property
    def cpu_s(self) -> float:
        return self._cpu_s

    async def run(self, work: Callable[..., T], *args: Any, timeout_s: float | None = None) -> T:
        """Run `work(*args)` in a thread. Raises Inexact: BUSY immediately, LATE after `timeout_s`."""
        future: Future[T] = self._submitted(self._counted, work, *args)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._result(future)
        except TimeoutError:
            # A busy event loop may handle the timer first, although the result was there in time.
            if future.done() and not future.cancelled():
                return future.result()
            raise Inexact(TokensReason.LATE) from None

    async def run_long(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` without a timeout and without counting its CPU time, such as loading a model."""
        return await self._result(self._submitted(work, *args))

    def _counted(self, work: Callable[..., T], *args: Any) -> T:
        started = time.thread_time()
        try:
            return work(*args)
        finally:
            with self._lock:
                self._cpu_s += time.thread_time() - started

    def _submitted(self, work: Callable[..., T], *args: Any) -> Future[T]:
        with self._lock:
            if self._unfinished >= self._most:
                raise Inexact(TokensReason.BUSY)
            self._unfinished += 1
        try:
            future = self._executor.submit(work, *args)
        except RuntimeError:  # shut down
            self._finished()
            raise Inexact(TokensReason.BUSY) from None
        future.add_done_callback(self._finished)
        return future

    async def _result(self, future: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Inexact(TokensReason.BUSY) from None  # the pool shut down; the caller was not cancelled

    def _finished(self, _: Future[Any] | None = None) -> None:
        with self._lock:
            self._unfinished -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop waiting work and wait for running work."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._executor.shutdown, wait=True)


log = logging.getLogger(__name__)


class Mode(StrEnum):
    LOCAL = "local"
    """In this process; the token ids were compared with a worker's."""
    REMOTE = "remote"
    """By a worker, with one call per request."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class TokenSource:
    """How the requests of one model are tokenized, and why."""

    model: str
    mode: Mode
    why: str
    through: str = ""
    """The library, or the worker's endpoint."""


@dataclass(frozen=True, slots=True)
class ExactPrompts:
    """The token ids of a request's prompts, in order."""

    prompts: tuple[Sequence[int], ...]
    mode: Mode


class ExactTokens:
    """Provides the token ids of requests, by the source of their model.

    `threads` and `client` belong to the caller; `cache_bytes` is per model. Mutable: `prepare` sets a model's
    source. Used from the event loop only.
    """

    def __init__(
        self,
        threads: TokenThreads,
        client: httpx.AsyncClient,
        *,
        flags: EngineFlags | None = None,
        cache_bytes: int = 64 * 1024 * 1024,
        check_timeout_s: float = 5.0,
        allow_fastokens: bool = True,
    ) -> None:
        self._threads = threads
        self._remote = RemoteTokenizer(client, flags)
        self._flags = flags or EngineFlags()
        self._cache_bytes = cache_bytes
        self._check_timeout_s = check_timeout_s
        self._allow_fastokens = allow_fastokens
        self._sources: dict[str, TokenSource] = {}
        self._local: dict[str, LocalTokenizer] = {}

    @property
    def sources(self) -> Mapping[str, TokenSource]:
        return self._sources

    def is_remote(self, model: str) -> bool:
        """Whether workers tokenize for `model`."""
        source = self._sources.get(model)
        return source is not None and source.mode is Mode.REMOTE

    async def prepare(self, model: str, *, folder: Path | None, url: str) -> TokenSource:
        """Choose the source of `model` by sample requests to the worker at `url`.

        The first that works: the files in `folder`, if they give the worker's ids for every sample that it
        answers; the worker's render endpoints; its `/tokenize`; no source. Call it again when workers change,
        or when no worker answered. Takes seconds for a large vocabulary; requests are served meanwhile.
        """
        local, why = await self._verified_local(model, folder, url)
        if local is not None:
            library = local.files.encoder
            source = TokenSource(model, Mode.LOCAL, f"{why}; {library.name}, {library.why}", library.name)
        else:
            source = await self._worker_source(model, url, why)
        self._local.pop(model, None)
        if local is not None:
            self._local[model] = local
        self._sources[model] = source
        return source

    def prompts_if_quick(
        self, request: InferenceRequest, *, model: str
    ) -> ExactPrompts | TokensReason | None:
        """As `prompts` if that takes well under a millisecond; None if it may take longer."""
        local = self._local.get(model)
        if local is None:
            return None
        try:
            ids = local.prompts_if_quick(request)
        except Exception as error:  # noqa: BLE001 - as in `prompts`
            return _reason(model, error)
        return None if ids is None else ExactPrompts(ids, Mode.LOCAL)

    async def prompts(
        self, request: InferenceRequest, *, model: str, url: str, timeout_s: float | None = None
    ) -> ExactPrompts | TokensReason:
        """The request's token ids, or the reason why there are none. Waits at most `timeout_s`.

        `url` is a worker of `model`, for a remote source. Raises nothing except CancelledError.
        """
        source = self._sources.get(model)
        if source is None or source.mode is Mode.NONE:
            return TokensReason.NO_SOURCE
        try:
            if source.mode is Mode.LOCAL:
                ids = await self._threads.run(self._local[model].prompts, request, timeout_s=timeout_s)
            else:
                endpoint = RemoteEndpoint(source.through)
                ids = await self._remote.prompts(
                    request, model=model, url=url, endpoint=endpoint, timeout_s=timeout_s
                )
        except Exception as error:  # noqa: BLE001 - without ids the choice is worse, but no request fails
            return _reason(model, error)
        return ExactPrompts(ids, source.mode)

    async def _verified_local(
        self, model: str, folder: Path | None, url: str
    ) -> tuple[LocalTokenizer | None, str]:
        if folder is None:
            return None, "no files of the model are known"
        try:
            files = await self._threads.run_long(self._load, folder)
        except UnusableModel as error:
            return None, str(error)
        except Inexact as error:
            return None, f"the model's files could not be read: {error.reason}"
        share = self._cache_bytes // 2
        local = LocalTokenizer(files, SegmentCache(share), self._flags, Conversations(share))

        async def ours(request: InferenceRequest) -> tuple[Sequence[int], ...]:
            return await self._threads.run_long(local.prompts, request)

        async def worker(request: InferenceRequest) -> tuple[Sequence[int], ...]:
            return await self._remote_prompts(request, model, url, RemoteEndpoint.TOKENIZE)

        found = await compare(model, ours, worker)
        if found.differing:
            return None, f"token ids are not the worker's for: {', '.join(found.differing)}"
        if not found.agreed:
            return None, "the worker answered no sample request"
        return local, f"{found.agreed} samples agree with {url}, which refused {found.unanswered}"

    def _load(self, folder: Path) -> ModelFiles:
        return load_model(folder, self._flags, allow_fastokens=self._allow_fastokens)

    async def _worker_source(self, model: str, url: str, why: str) -> TokenSource:
        for endpoint in (RemoteEndpoint.RENDER, RemoteEndpoint.TOKENIZE):
            if await self._answers(model, url, endpoint):
                return TokenSource(model, Mode.REMOTE, why, endpoint.value)
        return TokenSource(model, Mode.NONE, f"{why}; the worker answered no sample request")

    async def _answers(self, model: str, url: str, endpoint: RemoteEndpoint) -> bool:
        """Whether the endpoint answers at least one sample. A missing endpoint refuses each one quickly."""
        for _, request in sample_requests(model):
            try:
                await self._remote_prompts(request, model, url, endpoint)
            except Inexact:
                continue
            return True
        return False

    async def _remote_prompts(
        self, request: InferenceRequest, model: str, url: str, endpoint: RemoteEndpoint
    ) -> tuple[Sequence[int], ...]:
        timeout_s = self._check_timeout_s
        return await self._remote.prompts(
            request, model=model, url=url, endpoint=endpoint, timeout_s=timeout_s
        )


def _reason(model: str, error: Exception) -> TokensReason:
    """The reason for an error; an unexpected error is logged."""
    if isinstance(error, Inexact):
        return error.reason
    # The error's text is not logged: it may contain parts of the prompt.
    log.error("tokenizing for %s failed: %s", model, type(error).__name__)
    return TokensReason.FAILED
