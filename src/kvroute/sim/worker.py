"""The state of a simulated worker: model names, engine, counters, received requests, stored responses."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvroute.blocks.keys import CacheSpace, block_keys, lookahead_seed
from kvroute.clock import Clock
from kvroute.sim.answers import Choice
from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.driver import EngineDriver, Generation
from kvroute.sim.engine import EngineRequest, SimEngine
from kvroute.sim.http import ApiError, Call, ExchangeEnded
from kvroute.sim.options import SimOptions
from kvroute.sim.prompts import Sampling
from kvroute.sim.publisher import EventPublisher, Faults
from kvroute.sim.transfer import TransferState, fetched_tokens


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request as received, for differential tests. Header names are in lower case, in order."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(slots=True)
class ServerCounters:
    """Counters of the HTTP side. Mutable."""

    requests: int = 0
    by_path: Counter[str] = field(default_factory=Counter)
    chunks: int = 0
    """Streamed events that were passed to the transport."""


@dataclass(slots=True, eq=False)
class StoredResponse:
    """An answer of /v1/responses and its conversation. Mutable until the answer is complete."""

    record: dict[str, Any]
    messages: list[dict[str, Any]]
    generation: Generation | None = None
    """The generation that runs in the background, if any."""


class SimWorker:
    """The state of one worker process. Mutable; `restart` restores the initial state."""

    def __init__(self, options: SimOptions, clock: Clock, publisher: EventPublisher | None) -> None:
        self.options = options
        self.clock = clock
        self.publisher = publisher
        self.faults = Faults()
        self.counters = ServerCounters()
        self.received: deque[ReceivedRequest] = deque(maxlen=options.recorded_requests)
        self.responses: dict[str, StoredResponse] = {}
        """Stored /v1/responses answers by id; lost at a restart."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Tasks in the background. `RunningSim.stop` cancels and awaits them."""
        self.start_time = clock.wall()
        self.place = (options.host, options.port)
        """Where the worker listens."""
        self._random = Random()
        self.transfers = TransferState(f"{self._random.getrandbits(64):016x}")
        self.driver = EngineDriver(self._new_engine(), clock, self._publish)

    @property
    def engine(self) -> SimEngine:
        return self.driver.engine

    @property
    def max_model_len(self) -> int:
        """The smaller one of the configured limit and the cache's size, in tokens."""
        return min(self.options.max_model_len, self.options.capacity_tokens)

    def restart(self) -> None:
        """Simulate that the process is killed and started again.

        Streams end; cache, responses and counters are empty; event numbers start at 0; the start time is
        later.
        """
        self.driver.cancel_all(self._new_engine())
        self.counters = ServerCounters()
        self.transfers = TransferState(f"{self._random.getrandbits(64):016x}")
        self.responses.clear()
        self.start_time = max(self.clock.wall(), self.start_time + 0.01)
        if self.publisher is not None:
            self.publisher.restart()

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that may last longer than its request."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def new_id(self, prefix: str, call: Call | None = None) -> str:
        """An id in vLLM's form: a prefix, then the call's X-Request-Id or 32 random hex digits."""
        given = call.header(b"x-request-id") if call is not None else None
        return prefix + (given or f"{self._random.getrandbits(128):032x}")

    def model(self, body: dict[str, Any]) -> str:
        """The model name for the answer. Raises `ApiError` 404 if the model is not served here."""
        name = body.get("model")
        if name is None or name == "":
            return self.options.models[0]
        if not isinstance(name, str):
            raise ApiError.validation("string_type", "body.model", "Input should be a valid string")
        if name not in self.options.models and name not in self.options.loras:
            raise ApiError.not_found(f"The model `{name}` does not exist.", "model")
        return name

    def limit(self, prompt: array[int], requested: int | None) -> int | None:
        """The answer's limit in tokens after the context limit; None if there is no limit to apply.

        Raises `ApiError` if the prompt is empty or already too long.
        """
        longest = self.max_model_len
        if not prompt:
            raise ApiError.invalid("The decoder prompt cannot be empty")
        if len(prompt) >= longest:
            raise ApiError.invalid(
                f"This model's maximum context length is {longest} tokens. However, your prompt contains "
                f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt.",
                "input_tokens",
            )
        left = longest - len(prompt)
        if requested is None:
            return None if left > self.options.answer_tokens else left
        return min(left, requested)

    async def submit(
        self,
        call: Call,
        prompts: Sequence[array[int]],
        answers: Sequence[Sequence[Choice]],
        params: Sampling,
        model: str,
    ) -> Generation:
        """Queue each choice of each prompt, in order. The caller ends the generation with `driver.close`.

        A request whose KV is on another worker fetches it first: see `transfer.fetched_tokens`.
        """
        moved = await fetched_tokens(call, self, params.transfer, streamed=params.stream)
        requests = [
            self.sequence(prompt, answer.token_ids, model, params)
            for prompt, choices in zip(prompts, answers, strict=True)
            for answer in choices
        ]
        for request in requests:
            request.moved_tokens = moved
            request.keeps_blocks = self.options.nixl and params.transfer.get("do_remote_decode") is True
        reasons = [answer.finish_reason for choices in answers for answer in choices]
        return self.driver.submit(requests, reasons, streamed=params.stream)

    def sequence(
        self, prompt: array[int], output: array[int], model: str, params: Sampling | None = None
    ) -> EngineRequest:
        """One engine request for a prompt and its answer."""
        adapter = model if model in self.options.loras else None
        salt = (params and params.cache_salt) or ""
        tokens = prompt + output
        seed, ahead, keyed = CacheSpace(adapter or "", salt).seed, self.options.lookahead_tokens, tokens
        if ahead:
            seed, keyed = lookahead_seed(tokens[:ahead], seed), tokens[ahead:]
        chain = Chain(
            keys=block_keys(keyed.tobytes(), block_bytes=4 * self.options.block_size, seed=seed),
            token_ids=tokens if self.publisher is not None else (),
            lora_id=None if adapter is None else 1 + list(self.options.loras).index(adapter),
            lora_name=adapter,
            cache_salt=salt or None,
            session_id=params.session_id if params else None,
        )
        return EngineRequest(
            chain=chain,
            prompt_tokens=len(prompt),
            # With an empty answer (echo without generation) the engine still generates one token.
            output_tokens=max(len(output), 1 if params else 0),
            reads_cache=self.options.prefix_caching and (params is None or params.reads_cache),
            report_full=params is not None and params.report_full,
        )

    @asynccontextmanager
    async def abort_on_disconnect(self, call: Call, generation: Generation) -> AsyncIterator[None]:
        """Abort the generation if the client leaves inside the context. The exit always ends the
        generation."""
        watcher = asyncio.create_task(self._watch(call, generation))
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            self.driver.close(generation)

    async def wait_until_done(self, call: Call, generation: Generation) -> None:
        """Wait until the generation is done.

        Raises `ExchangeEnded` if the client leaves first, and `ApiError` if the generation cannot run.
        """
        async with self.abort_on_disconnect(call, generation):
            while not generation.done:
                await generation.wait()
            self.raise_if_ended(generation)

    @staticmethod
    def raise_if_ended(generation: Generation) -> None:
        """Raise `ExchangeEnded` if the generation was cancelled, and `ApiError` if the engine refused it."""
        if generation.cancelled:
            raise ExchangeEnded
        if generation.refused:
            raise ApiError(500, "InternalServerError", "The request does not fit into the KV cache.")

    async def _watch(self, call: Call, generation: Generation) -> None:
        await call.wait_for_disconnect()
        self.driver.close(generation)

    def usage(
        self, prompts: Sequence[array[int]], generation: Generation, produced: int, *, created: bool
    ) -> dict[str, Any]:
        """vLLM's usage object.

        With several prompts vLLM 0.32 reports the cached tokens of the last prompt, in a stream those of the
        first. `created` adds the count of newly cached tokens, which only chats report.
        """
        tokens = sum(len(prompt) for prompt in prompts)
        details = None
        if self.options.report_cached_tokens:
            reported = generation.requests[0 if generation.streamed else -1]
            details = {
                "cached_tokens": reported.cached_tokens,
                "created_cache_tokens": reported.stored_tokens if created else None,
                "multimodal_tokens": None,
            }
        return {
            "prompt_tokens": tokens,
            "total_tokens": tokens + produced,
            "completion_tokens": produced,
            "prompt_tokens_details": details,
            "completion_tokens_details": None,
        }

    def _new_engine(self) -> SimEngine:
        options = self.options
        cache = PagedCache(
            max(1, options.capacity_tokens // options.block_size),
            options.block_size,
            record=self.publisher is not None,
            byte_hashes=options.byte_hashes,
            lookahead=options.lookahead_tokens,
        )
        return SimEngine(cache, options.timing)

    def _publish(self, events: list[Any]) -> None:
        if self.publisher is not None:
            self.publisher.publish(events, self.faults.for_batch())
