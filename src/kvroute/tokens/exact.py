"""Exact token ids of requests: per model the best way there is, and why it was chosen."""

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
    """Runs blocking work beside the event loop. An async context manager.

    Mutable: the count of unfinished work, and `cpu_s`, the threads' CPU seconds for `run`. Work whose waiter
    has given up is dropped if it has not begun, and finished for the caches' sake if it has.
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

    async def run(self, work: Callable[..., T], *args: Any, deadline_s: float | None = None) -> T:
        """`work(*args)` in a thread. Raises Inexact: BUSY immediately, LATE after `deadline_s`, if given."""
        future: Future[T] = self._submitted(self._counted, work, *args)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._result(future)
        except TimeoutError:
            # A loop that was busy handles the timer before the result, even if the result came in time.
            if future.done() and not future.cancelled():
                return future.result()
            raise Inexact(TokensReason.LATE) from None

    async def run_long(self, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` without a deadline and not counted: for work done once, such as loading a model."""
        return await self._result(self._submitted(work, *args))

    def _counted(self, work: Callable[..., T], *args: Any) -> T:
        began = time.thread_time()
        try:
            return work(*args)
        finally:
            with self._lock:
                self._cpu_s += time.thread_time() - began

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
            raise Inexact(TokensReason.BUSY) from None  # the work was dropped at shutdown, its waiter was not

    def _finished(self, _: Future[Any] | None = None) -> None:
        with self._lock:
            self._unfinished -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop what waits and let what runs finish."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._executor.shutdown, wait=True)


log = logging.getLogger(__name__)


class Mode(StrEnum):
    LOCAL = "local"
    """In this process, verified against a worker."""
    REMOTE = "remote"
    """By a worker, one call for each request."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class TokenSource:
    """How one model's requests are tokenized. `through` is the library or the worker's endpoint."""

    model: str
    mode: Mode
    why: str
    through: str = ""


@dataclass(frozen=True, slots=True)
class ExactPrompts:
    """Token ids of each prompt of a request, in order."""

    prompts: tuple[Sequence[int], ...]
    mode: Mode


class ExactTokens:
    """Token ids for requests, per model.

    Mutable: `prepare` sets a model's source; touched from the loop only. `threads` and `client` belong
    to the caller. `cache_bytes` is for each model.
    """

    def __init__(
        self,
        threads: TokenThreads,
        client: httpx.AsyncClient,
        *,
        flags: EngineFlags | None = None,
        cache_bytes: int = 64 * 1024 * 1024,
        check_deadline_s: float = 5.0,
        allow_fastokens: bool = True,
    ) -> None:
        self._threads = threads
        self._remote = RemoteTokenizer(client, flags)
        self._flags = flags or EngineFlags()
        self._cache_bytes = cache_bytes
        self._check_deadline_s = check_deadline_s
        self._allow_fastokens = allow_fastokens
        self._sources: dict[str, TokenSource] = {}
        self._local: dict[str, LocalTokenizer] = {}

    @property
    def sources(self) -> Mapping[str, TokenSource]:
        return self._sources

    async def prepare(self, model: str, *, folder: Path | None, url: str) -> TokenSource:
        """Choose how `model` is tokenized, by sample requests to the worker at `url`.

        Local if the files in `folder` give the worker's ids for every sample that it answers; else the
        worker's render endpoints; else its `/tokenize`; else nothing. To be repeated when workers change
        or nothing answered. Takes seconds for a large vocabulary; requests go on meanwhile.
        """
        local, why = await self._verified(model, folder, url)
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

    def prompts_at_once(self, request: InferenceRequest, *, model: str) -> ExactPrompts | TokensReason | None:
        """What `prompts` gives, where that takes well under a millisecond; None where it may take longer."""
        local = self._local.get(model)
        if local is None:
            return None
        try:
            ids = local.prompts_at_once(request)
        except Exception as error:  # noqa: BLE001 - as in `prompts`
            return _reason(model, error)
        return None if ids is None else ExactPrompts(ids, Mode.LOCAL)

    async def prompts(
        self, request: InferenceRequest, *, model: str, url: str, deadline_s: float | None = None
    ) -> ExactPrompts | TokensReason:
        """The request's token ids, or why there are none. Waits no longer than `deadline_s`, if given.

        `url` is a worker of `model` that may be asked. Never raises but for cancellation.
        """
        source = self._sources.get(model)
        if source is None or source.mode is Mode.NONE:
            return TokensReason.NO_SOURCE
        try:
            if source.mode is Mode.LOCAL:
                ids = await self._threads.run(self._local[model].prompts, request, deadline_s=deadline_s)
            else:
                endpoint = RemoteEndpoint(source.through)
                ids = await self._remote.prompts(
                    request, model=model, url=url, endpoint=endpoint, deadline_s=deadline_s
                )
        except Exception as error:  # noqa: BLE001 - a worse choice of worker, and never a failed request
            return _reason(model, error)
        return ExactPrompts(ids, source.mode)

    async def _verified(self, model: str, folder: Path | None, url: str) -> tuple[LocalTokenizer | None, str]:
        if folder is None:
            return None, "no files of the model are known"
        try:
            files = await self._threads.run_long(self._load, folder)
        except UnusableModel as error:
            return None, str(error)
        except Inexact as error:
            return None, f"the model's files were not read: {error.reason}"
        share = self._cache_bytes // 2
        local = LocalTokenizer(files, SegmentCache(share), self._flags, Conversations(share))

        async def ours(request: InferenceRequest) -> tuple[Sequence[int], ...]:
            return await self._threads.run_long(local.prompts, request)

        async def worker(request: InferenceRequest) -> tuple[Sequence[int], ...]:
            return await self._asked(request, model, url, RemoteEndpoint.TOKENIZE)

        found = await compare(model, ours, worker)
        if found.differing:
            return None, f"token ids are not the worker's for: {', '.join(found.differing)}"
        if not found.agreed:
            return None, "the worker answered no sample"
        return local, f"{found.agreed} samples agree with {url}, {found.unanswered} were refused there"

    def _load(self, folder: Path) -> ModelFiles:
        return load_model(folder, self._flags, allow_fastokens=self._allow_fastokens)

    async def _worker_source(self, model: str, url: str, why: str) -> TokenSource:
        for endpoint in (RemoteEndpoint.RENDER, RemoteEndpoint.TOKENIZE):
            if await self._answers(model, url, endpoint):
                return TokenSource(model, Mode.REMOTE, why, endpoint.value)
        return TokenSource(model, Mode.NONE, f"{why}; the worker answered no sample")

    async def _answers(self, model: str, url: str, endpoint: RemoteEndpoint) -> bool:
        """Whether the endpoint takes any sample; one that is not there refuses the first in no time."""
        for _, request in sample_requests(model):
            try:
                await self._asked(request, model, url, endpoint)
            except Inexact:
                continue
            return True
        return False

    async def _asked(
        self, request: InferenceRequest, model: str, url: str, endpoint: RemoteEndpoint
    ) -> tuple[Sequence[int], ...]:
        deadline_s = self._check_deadline_s
        return await self._remote.prompts(
            request, model=model, url=url, endpoint=endpoint, deadline_s=deadline_s
        )


def _reason(model: str, error: Exception) -> TokensReason:
    """Why there are no ids; a defect of ours is logged."""
    if isinstance(error, Inexact):
        return error.reason
    # Its text may quote the prompt.
    log.error("tokenizing for %s failed: %s", model, type(error).__name__)
    return TokensReason.FAILED
