"""Exact token ids of requests. For each model it chooses a source: local files or a worker.

A worker gives token ids by its `/tokenize`, or by its render endpoints. vLLM 0.32: every worker has
`/tokenize`, for chats and texts. `/v1/.../render` accepts every unchanged body, but answers 403 unless the
worker runs with --enable-scale-out (`vllm launch render` always does). An answer of one token with
`return_token_ids` has the ids that the engine computed with. `/tokenize` renders every chat with the chat
template, also where the chat endpoint does not (gpt-oss), so it is no proof for such a model.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from kvroute.blocks.media import MediaItem
from kvroute.errors import ConnectionLost
from kvroute.openai.request import InferenceRequest, prompts_of
from kvroute.openai.rewriting import TopLevelMember, with_members, with_model
from kvroute.openai.shown import BillingRule
from kvroute.tokens.chat import Chat, EngineFlags, refuse_media
from kvroute.tokens.conversations import Conversations
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.harmony import looks_like_harmony
from kvroute.tokens.local import LocalTokenizer, ModelFiles, harmony_files, load_model
from kvroute.tokens.options import Inexact, TokensReason, UnusableModel
from kvroute.tokens.reading import Plain, TokenIds, decoded, read, truncated
from kvroute.tokens.samples import Agreement, Shape, compare, samples, shapes_of

_MOST_TEXTS = 32
_RENDERED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_WITHOUT_TENSORS: Final = MappingProxyType(
    # Otherwise the answer contains the processed pixels: megabytes. Before 0.32 the second name was used.
    {TopLevelMember("mm_payload"): b'"none"', TopLevelMember("return_mm_kwargs"): b"false"}
)


class RemoteEndpoint(StrEnum):
    TOKENIZE = "/tokenize"
    RENDER = "/render"


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Answered(msgspec.Struct):
    """An answer with `return_token_ids`: the prompt's ids are beside the choices of a chat, and in a
    text's."""

    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None

    def ids(self) -> tuple[TokenIds, ...]:
        id_lists = (
            [self.prompt_token_ids] if self.prompt_token_ids else [c.prompt_token_ids for c in self.choices]
        )
        if not id_lists or None in id_lists:
            raise Inexact(TokensReason.WORKER_FAILED)  # a release that does not know the field
        return tuple(array("I", ids or ()) for ids in id_lists)


class _Placeholders(msgspec.Struct):
    offset: int


class _Features(msgspec.Struct):
    """The media of a rendered prompt, by kind ("image", "audio", ...)."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Placeholders]]

    def items(self) -> tuple[MediaItem, ...]:
        """In the order of their places. Raises Inexact if hashes and places do not fit together."""
        try:
            return tuple(
                sorted(
                    MediaItem(placeholder.offset, identifier)
                    for kind, identifiers in self.mm_hashes.items()
                    for placeholder, identifier in zip(self.mm_placeholders[kind], identifiers, strict=True)
                )
            )
        except (KeyError, ValueError):
            raise Inexact(TokensReason.WORKER_FAILED) from None


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None
    """None without media."""

    def ids(self) -> TokenIds:
        if self.features is not None:
            raise Inexact(TokensReason.MEDIA)
        return array("I", self.token_ids)

    def media(self) -> tuple[MediaItem, ...]:
        return self.features.items() if self.features is not None else ()


_decode_answered = msgspec.json.Decoder(_Answered).decode
_decode_tokens = msgspec.json.Decoder(_Tokens).decode
_decode_rendered = msgspec.json.Decoder(_Rendered).decode
_decode_rendered_list = msgspec.json.Decoder(list[_Rendered]).decode


class RemoteTokenizer:
    """Requests token ids from workers. Stateless; `client` belongs to the caller."""

    def __init__(self, client: httpx.AsyncClient, flags: EngineFlags | None = None) -> None:
        self._client = client
        self._flags = flags or EngineFlags()

    async def prompts(
        self,
        request: InferenceRequest,
        *,
        model: str,
        url: str,
        endpoint: RemoteEndpoint = RemoteEndpoint.TOKENIZE,
        timeout_s: float | None = None,
        billing: BillingRule | None = None,
    ) -> tuple[TokenIds, ...]:
        """The token ids of the request's prompts, in order. Raises Inexact: LATE after `timeout_s`.

        `model` is the model's name on the worker at `url`, `billing` the rule of its release (default: that
        of the flags).
        """
        flags = self._flags if billing is None else replace(self._flags, billing=billing)
        try:
            async with asyncio.timeout(timeout_s):
                if endpoint is RemoteEndpoint.RENDER and request.endpoint.path in _RENDERED:
                    return tuple(prompt.ids() for prompt in await self._render(request, model, url))
                prompt = read(request, flags, lambda _: None)
                if request.endpoint.path == "/v1/responses":
                    _refuse_tool_calls(prompt)
                return await self._tokenize_all(prompt, model, url)
        except TimeoutError:
            raise Inexact(TokensReason.LATE) from None
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, OverflowError, RecursionError):
            raise Inexact(TokensReason.WORKER_FAILED) from None

    async def with_media(
        self, request: InferenceRequest, *, model: str, url: str, timeout_s: float | None = None
    ) -> ExactPrompts:
        """The ids of a request with images, audio or video, and their identifiers, as a worker renders them.

        The worker loads and processes the media for that, without its cache of processed media (vLLM 0.32).
        Raises Inexact: MEDIA where the endpoint is not rendered, MEDIA_LATE after `timeout_s`.
        """
        if request.endpoint.path not in _RENDERED:
            raise Inexact(TokensReason.MEDIA)
        try:
            async with asyncio.timeout(timeout_s):
                prompts = await self._render(request, model, url, _WITHOUT_TENSORS)
            ids = tuple(array("I", prompt.token_ids) for prompt in prompts)
            return ExactPrompts(ids, Mode.REMOTE, tuple(prompt.media() for prompt in prompts))
        except TimeoutError:
            raise Inexact(TokensReason.MEDIA_LATE) from None
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, OverflowError, RecursionError):
            raise Inexact(TokensReason.WORKER_FAILED) from None

    async def computed(
        self, request: InferenceRequest, *, model: str, url: str, timeout_s: float | None = None
    ) -> tuple[TokenIds, ...]:
        """The ids that the worker computes with for a chat or texts: it answers one token. Raises Inexact."""
        body = {**decoded(request), "model": model, "max_tokens": 1, "return_token_ids": True}
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._post(f"{url}{request.endpoint.path}", msgspec.json.encode(body))
            return _decode_answered(answer).ids()
        except TimeoutError:
            raise Inexact(TokensReason.LATE) from None
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, OverflowError, RecursionError):
            raise Inexact(TokensReason.WORKER_FAILED) from None

    async def _render(
        self,
        request: InferenceRequest,
        model: str,
        url: str,
        members: Mapping[TopLevelMember, bytes] = MappingProxyType({}),
    ) -> Sequence[_Rendered]:
        body = request.body if request.model == model else with_model(request, model)
        if members:
            body = with_members(body, {}, members)
        answer = await self._post(f"{url}{request.endpoint.path}/render", body)
        if request.endpoint.path == "/v1/completions":
            return _decode_rendered_list(answer)
        return (_decode_rendered(answer),)

    async def _tokenize_all(self, prompt: Chat | Plain, model: str, url: str) -> tuple[TokenIds, ...]:
        if isinstance(prompt, Chat):
            refuse_media(prompt.messages)
            return (await self._tokenize_chat(prompt, model, url),)
        if prompt.ids:
            return tuple(truncated(ids, prompt.truncate_to, prompt.truncation_side) for ids in prompt.ids)
        return await self._tokenize_texts(prompt, model, url)

    async def _tokenize_chat(self, chat: Chat, model: str, url: str) -> TokenIds:
        kwargs = dict(chat.kwargs)
        fields: dict[str, Any] = {
            "model": model,
            "messages": chat.messages,
            "add_generation_prompt": kwargs.pop("add_generation_prompt", True),
            "continue_final_message": kwargs.pop("continue_final_message", False),
            "add_special_tokens": chat.add_special_tokens,
        }
        if chat.tools is not None:
            fields["tools"] = chat.tools
        if kwargs:
            fields["chat_template_kwargs"] = kwargs
        if chat.add_special_tokens and chat.truncate_to is not None and chat.truncation_side is None:
            raise Inexact(TokensReason.TRUNCATION)  # only the tokenizer knows how many tokens it adds
        return truncated(await self._tokenize(url, fields), chat.truncate_to, chat.truncation_side)

    async def _tokenize_texts(self, prompt: Plain, model: str, url: str) -> tuple[TokenIds, ...]:
        if len(prompt.texts) > _MOST_TEXTS:
            raise Inexact(TokensReason.BUSY)
        special = prompt.add_special_tokens
        if special and prompt.truncate_to is not None and prompt.truncation_side is None:
            raise Inexact(TokensReason.TRUNCATION)
        bodies = [{"model": model, "prompt": text, "add_special_tokens": special} for text in prompt.texts]
        answers = await self._tokenize_each(url, bodies)
        return tuple(truncated(ids, prompt.truncate_to, prompt.truncation_side) for ids in answers)

    async def _tokenize_each(self, url: str, bodies: Sequence[Mapping[str, Any]]) -> list[TokenIds]:
        tasks = [asyncio.ensure_future(self._tokenize(url, fields)) for fields in bodies]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tokenize(self, url: str, fields: Mapping[str, Any]) -> TokenIds:
        return array(
            "I", _decode_tokens(await self._post(f"{url}/tokenize", msgspec.json.encode(fields))).tokens
        )

    async def _post(self, url: str, body: bytes) -> bytes:
        headers = {"content-type": "application/json"}
        try:
            answer = await self._client.post(url, content=body, headers=headers)
        except httpx.ReadError as error:
            cause = error.__cause__
            if isinstance(cause, ConnectionLost) and not cause.reused:
                raise Inexact(TokensReason.WORKER_LOST) from None
            raise
        if answer.status_code != httpx.codes.OK:
            raise Inexact(TokensReason.WORKER_FAILED)
        return answer.content


def _refuse_tool_calls(prompt: Chat | Plain) -> None:
    """Raise Inexact for a chat with tool calls."""
    # `/tokenize` puts the fields of a tool call into another order than `/v1/responses`; a template may print
    # them.
    if isinstance(prompt, Chat) and any("tool_calls" in message for message in prompt.messages):
        raise Inexact(TokensReason.UNSUPPORTED)


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
    explanation: str
    through: str = ""
    """The library, or the worker's endpoint."""
    refused: frozenset[Shape] = frozenset()
    """Shapes of requests that get no exact tokens, because the engine computes other ones."""
    reason: TokensReason = TokensReason.DIFFERS
    """Why these get none."""
    renders: bool = False
    """Whether the workers have render endpoints, which show the identifiers of media."""


@dataclass(frozen=True, slots=True)
class ExactPrompts:
    """The token ids of a request's prompts, in order."""

    prompts: tuple[Sequence[int], ...]
    mode: Mode
    media: tuple[tuple[MediaItem, ...], ...] = ()
    """For each prompt its images, audio and video; empty if no prompt has any."""


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
        harmony_vocabulary: Path | None = None,
        computed_samples: bool = True,
        media_keys: bool = True,
        today: Callable[[], date] = date.today,
    ) -> None:
        self._today = today
        self._days: dict[str, date] = {}
        self._threads = threads
        self._harmony_vocabulary = harmony_vocabulary
        self._computed_samples = computed_samples
        self._media_keys = media_keys
        self._remote = RemoteTokenizer(client, flags)
        self._flags = flags or EngineFlags()
        self._cache_bytes = cache_bytes
        self._check_timeout_s = check_timeout_s
        self._allow_fastokens = allow_fastokens
        self._sources: dict[str, TokenSource] = {}
        self._local: dict[str, LocalTokenizer] = {}
        self._billing: dict[str, BillingRule] = {}

    @property
    def sources(self) -> Mapping[str, TokenSource]:
        return self._sources

    @property
    def shows_dates(self) -> bool:
        """Whether a model's prompts contain the date, which an engine may take from another clock."""
        return bool(self._days)

    def is_of_another_day(self, model: str) -> bool:
        """Whether the samples of `model` were compared on another day, and its prompts contain the date."""
        return self._days.get(model, today := self._today()) != today

    def turns(self) -> Mapping[str, Mapping[str, int]]:
        """Next turns of known chats by model and outcome; see `LocalTokenizer.turns`."""
        return {model: dict(local.turns) for model, local in self._local.items()}

    def is_remote(self, model: str) -> bool:
        """Whether workers tokenize for `model`."""
        source = self._sources.get(model)
        return source is not None and source.mode is Mode.REMOTE

    async def prepare(
        self,
        model: str,
        *,
        folder: Path | None,
        url: str,
        billing: BillingRule | None = None,
        root: str = "",
    ) -> TokenSource:
        """Choose the source of `model` by sample requests to the worker at `url`.

        `billing` is the rule of the worker's release.

        The first that gives what the engine computes with: the files in `folder`; the worker's render
        endpoints; its `/tokenize`. Where none does for all samples, the one with the fewest differing shapes,
        whose requests are refused. Call it again when workers change, or when no worker answered. Takes
        seconds for a large vocabulary; requests are served meanwhile. `root` is the worker's name of the
        model's files.
        """
        self._billing[model] = billing or self._flags.billing
        engine = _Engine(
            self._remote,
            model,
            url,
            self._check_timeout_s,
            self._billing[model],
            may_compute=self._computed_samples,
        )
        await engine.choose()
        local, source = await self._local_source(model, folder, engine, root)
        if source.mode is Mode.NONE or source.refused:
            remote = await self._worker_source(
                model, engine, source.explanation, is_harmony=engine.is_harmony
            )
            if source.mode is Mode.NONE or len(remote.refused) < len(source.refused):
                if remote.mode is not Mode.NONE:
                    local, source = None, remote
                elif source.mode is Mode.NONE:
                    source = remote
        replaced = self._local.pop(model, None)
        self._days.pop(model, None)
        if local is not None:
            self._local[model] = local
            if replaced is not None:
                local.turns.update(replaced.turns)
            if local.files.shows_dates:
                self._days[model] = self._today()
        self._sources[model] = source
        return source

    def prompts_if_quick(
        self, request: InferenceRequest, *, model: str
    ) -> ExactPrompts | TokensReason | None:
        """As `prompts` if that takes well under a millisecond; None if it may take longer."""
        local = self._local.get(model)
        if local is None or self._sources[model].refused:
            return None
        try:
            ids = local.prompts_if_quick(request)
        except Exception as error:  # noqa: BLE001 - as in `prompts`
            reason = _reason(model, error)
            return None if reason is TokensReason.MEDIA and self._shows_media(model) else reason
        return None if ids is None else ExactPrompts(ids, Mode.LOCAL)

    async def prompts(
        self,
        request: InferenceRequest,
        *,
        model: str,
        url: str,
        timeout_s: float | None = None,
        name: str | None = None,
    ) -> ExactPrompts | TokensReason:
        """The request's token ids, or the reason why there are none. Waits at most `timeout_s`.

        `url` is a worker of `model`, for a remote source; it knows the model as `name`, if that is given.
        Raises nothing except CancelledError.
        """
        source = self._sources.get(model)
        if source is None or source.mode is Mode.NONE:
            return TokensReason.NO_SOURCE
        try:
            if source.renders and any(prompt.has_media for prompt in prompts_of(request)):
                if not self._media_keys:
                    return TokensReason.MEDIA
                return await self._remote.with_media(
                    request, model=name or model, url=url, timeout_s=timeout_s
                )
            if source.refused and not source.refused.isdisjoint(
                await self._threads.run(shapes_of, request, timeout_s=timeout_s)
            ):
                return source.reason
            if source.mode is Mode.LOCAL:
                ids = await self._threads.run(self._local[model].prompts, request, timeout_s=timeout_s)
            else:
                endpoint = RemoteEndpoint(source.through)
                ids = await self._remote.prompts(
                    request,
                    model=name or model,
                    url=url,
                    endpoint=endpoint,
                    timeout_s=timeout_s,
                    billing=self._billing.get(model),
                )
        except Exception as error:  # noqa: BLE001 - without ids the choice is worse, but no request fails
            return _reason(model, error)
        return ExactPrompts(ids, source.mode)

    def _shows_media(self, model: str) -> bool:
        return self._media_keys and self._sources[model].renders

    async def _local_source(
        self, model: str, folder: Path | None, engine: _Engine, root: str
    ) -> tuple[LocalTokenizer | None, TokenSource]:
        """The tokenizer in this process, compared with the engine; mode NONE if there is none to use."""
        try:
            if folder is not None:
                files = await self._threads.run_long(self._load, folder)
            elif looks_like_harmony(root or model):
                files = await self._threads.run_long(harmony_files, self._harmony_vocabulary)
            else:
                return None, TokenSource(model, Mode.NONE, "no files of the model are known")
        except UnusableModel as error:
            engine.is_harmony = engine.is_harmony or looks_like_harmony(root or model)
            return None, TokenSource(model, Mode.NONE, str(error))
        except Inexact as error:
            explanation = f"the model's files could not be read: {error.reason}"
            return None, TokenSource(model, Mode.NONE, explanation)
        engine.is_harmony = files.is_harmony
        share = self._cache_bytes // 2
        flags = replace(self._flags, billing=self._billing[model])
        local = LocalTokenizer(files, SegmentCache(share), flags, Conversations(share))

        async def ours(request: InferenceRequest) -> tuple[Sequence[int], ...]:
            return await self._threads.run_long(local.prompts, request)

        if files.harmony is not None and (ids := await engine.first_ids()) is not None:
            files.harmony.follow(ids)
        agreement = await compare(model, ours, engine.ids)
        if not agreement.agreed and not agreement.differing:
            return None, TokenSource(model, Mode.NONE, "the worker answered no sample request")
        library = files.encoder
        refused, reason = agreement.shapes, TokensReason.DIFFERS
        explanation = _compared(agreement, engine)
        if files.is_harmony and (files.harmony is None or not engine.shows_chats):
            refused, reason = refused | _CHATS, TokensReason.HARMONY
            explanation += f"; chats get no exact tokens: {files.why_no_harmony or _UNPROVEN}"
        if Shape.TEXT in refused and Shape.CHAT in refused:
            return None, TokenSource(model, Mode.NONE, explanation)
        through = "harmony" if files.harmony is not None else library.name
        explanation = f"{explanation}; {library.name}, {library.explanation}"
        return local, TokenSource(model, Mode.LOCAL, explanation, through, refused, reason, engine.renders)

    def _load(self, folder: Path) -> ModelFiles:
        return load_model(
            folder,
            self._flags,
            allow_fastokens=self._allow_fastokens,
            harmony_vocabulary=self._harmony_vocabulary,
        )

    async def _worker_source(
        self, model: str, engine: _Engine, explanation: str, *, is_harmony: bool
    ) -> TokenSource:
        if engine.renders:
            return TokenSource(model, Mode.REMOTE, explanation, RemoteEndpoint.RENDER.value, renders=True)
        agreement = await compare(model, engine.tokenized, engine.ids)
        refused, reason = agreement.shapes, TokensReason.DIFFERS
        if not agreement.agreed and not agreement.differing:
            return TokenSource(model, Mode.NONE, f"{explanation}; the worker answered no sample request")
        if is_harmony:
            refused, reason = refused | _CHATS, TokensReason.HARMONY
        if agreement.differing:
            explanation = (
                f"{explanation}; its /tokenize gives other ids than it computes with for: {agreement.names}"
            )
        if Shape.TEXT in refused and Shape.CHAT in refused:
            return TokenSource(model, Mode.NONE, explanation)
        return TokenSource(model, Mode.REMOTE, explanation, RemoteEndpoint.TOKENIZE.value, refused, reason)


_CHATS = frozenset(Shape) - {Shape.TEXT}
_UNPROVEN = "the worker renders Harmony, and shows the ids of no chat (/tokenize renders the chat template)"


def _compared(agreement: Agreement, engine: _Engine) -> str:
    """The result of a comparison, in words."""
    if agreement.differing:
        return f"token ids are not the worker's for: {agreement.names}"
    return f"{agreement.agreed} samples agree with {engine}, which refused {agreement.unanswered}"


class _Engine:
    """What one worker computes with for sample requests.

    Mutable: `choose` finds out how it can be asked, and a late answer ends the questions that need a
    computation.
    """

    def __init__(
        self,
        remote: RemoteTokenizer,
        model: str,
        url: str,
        timeout_s: float,
        billing: BillingRule,
        *,
        may_compute: bool,
    ) -> None:
        self._remote = remote
        self._model = model
        self._url = url
        self._timeout_s = timeout_s
        self._billing = billing
        self._may_compute = may_compute
        self.renders = False
        self.computes = False
        self.is_harmony = False
        """Whether the chat endpoints render otherwise than `/tokenize`."""

    def __str__(self) -> str:
        how = "what it renders" if self.renders else "what it computes with" if self.computes else "/tokenize"
        return f"{self._url} ({how})"

    @property
    def shows_chats(self) -> bool:
        """Whether the worker shows the ids of its chat endpoint."""
        return self.renders or self.computes

    async def choose(self) -> None:
        for sample in samples(self._model):
            try:
                await self._prompts(sample.request, RemoteEndpoint.RENDER)
            except Inexact:
                continue
            self.renders = True
            return
        self.computes = await self.first_ids() is not None

    async def first_ids(self) -> Sequence[int] | None:
        """The ids of the first sample as the worker computes with them; None if it does not show them."""
        request = samples(self._model)[0].request
        try:
            if self.renders:
                return (await self._prompts(request, RemoteEndpoint.RENDER))[0]
            return (await self._computed(request))[0] if self._may_compute else None
        except Inexact:
            return None

    async def ids(self, request: InferenceRequest) -> tuple[Sequence[int], ...]:
        """The ids by the best way that this worker has. Raises Inexact."""
        if self.renders:
            return await self._prompts(request, RemoteEndpoint.RENDER)
        if self.computes:
            try:
                return await self._computed(request)
            except Inexact as error:
                self.computes = error.reason is not TokensReason.LATE
                if self.is_harmony:
                    raise
        return await self.tokenized(request)

    async def tokenized(self, request: InferenceRequest) -> tuple[Sequence[int], ...]:
        return await self._prompts(request, RemoteEndpoint.TOKENIZE)

    async def _prompts(self, request: InferenceRequest, endpoint: RemoteEndpoint) -> tuple[TokenIds, ...]:
        return await self._remote.prompts(
            request,
            model=self._model,
            url=self._url,
            endpoint=endpoint,
            timeout_s=self._timeout_s,
            billing=self._billing,
        )

    async def _computed(self, request: InferenceRequest) -> tuple[TokenIds, ...]:
        return await self._remote.computed(
            request, model=self._model, url=self._url, timeout_s=self._timeout_s
        )


def _reason(model: str, error: Exception) -> TokensReason:
    """The reason for an error; an unexpected error is logged."""
    if isinstance(error, Inexact):
        return error.reason
    # The error's text is not logged: it may contain parts of the prompt.
    log.error("tokenizing for %s failed: %s", model, type(error).__name__)
    return TokensReason.FAILED
