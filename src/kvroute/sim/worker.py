"""The state of a simulated worker, and its side of a transfer of KV between workers.

The state has the model names, engine, counters, received requests and stored responses. A transfer follows
vLLM's NixlConnector, over HTTP: a first leg (`do_remote_decode`) keeps its blocks after its end and reports
where they are. A second leg (`do_remote_prefill`) asks the other worker for them before it is queued; then
they count as computed. Member names, defaults and errors are those of vLLM 0.32; the side channel is
`POST /sim/kv/{remote_request_id}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from kvroute.blocks.keys import CacheSpace, block_keys, lookahead_seed
from kvroute.clock import Clock
from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.engine import EngineDriver, EngineRequest, Generation, SimEngine
from kvroute.sim.groups import GroupedCache, GroupedEngine
from kvroute.sim.http import SSE, ApiError, Call, ExchangeEnded
from kvroute.sim.options import SimOptions
from kvroute.sim.prompts import Choice, Sampling, with_placeholders
from kvroute.sim.publisher import EventPublisher, Faults
from kvroute.sim.sagemaker import Sessions

if TYPE_CHECKING:
    from kvroute.sim.engine import EngineRequest, Generation


log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0


@dataclass(slots=True)
class TransferState:
    """The blocks that wait for a decode worker, and counters. Mutable: by the functions of this module."""

    engine_id: str = ""
    kept: dict[str, EngineRequest] = field(default_factory=dict)
    """Finished first legs whose blocks no worker has read yet, by request id."""
    reads: int = 0
    """Transfers into this worker."""
    failed: int = 0
    """Transfers into this worker that failed."""
    expired: int = 0
    """First legs whose blocks nobody read within the lease."""
    seconds: float = 0.0
    """Simulated time of the transfers into this worker."""


async def fetched_tokens(call: Call, worker: SimWorker, params: Mapping[str, Any], *, streamed: bool) -> int:
    """The number of prompt tokens that another worker has sent for this request; 0 if it names no worker.

    After a failed read vLLM ends the request with an error (`kv_load_failure_policy: fail`) or computes the
    prompt (`recompute`). A stream then has status 200 and an error event. Raises `ApiError` and
    `ExchangeEnded`.
    """
    if not worker.options.nixl or not params.get("do_remote_prefill"):
        return 0
    state = worker.transfers
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            tokens = await _read(params)
    except (OSError, ValueError, TimeoutError, LookupError):
        state.failed += 1
        if worker.options.kv_load_failure_policy == "recompute":
            return 0
        error = ApiError(500, "InternalServerError", "KV load failure: remote blocks could not be read.")
        if not streamed:
            raise error from None
        await call.start(200, [SSE])
        await call.chunk(b"data: " + msgspec.json.encode(error.body()) + b"\n\ndata: [DONE]\n\n")
        await call.end()
        raise ExchangeEnded from None
    seconds = tokens * worker.options.transfer_token_s * worker.options.time_scale
    state.reads += 1
    state.seconds += seconds
    if seconds:
        await worker.clock.sleep(seconds)
    return tokens


async def _read(params: Mapping[str, Any]) -> int:
    """Ask the prefill worker for the blocks; it frees them. Raises OSError, ValueError and LookupError."""
    host, port, request_id = params["remote_host"], int(params["remote_port"]), params["remote_request_id"]
    reader, writer = await asyncio.open_connection(str(host), port)
    try:
        writer.write(
            f"POST /sim/kv/{request_id}?engine={params['remote_engine_id']} HTTP/1.1\r\nhost: {host}\r\n"
            "content-length: 0\r\nconnection: close\r\n\r\n".encode()
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise LookupError(request_id)
    return int(json.loads(body)["tokens"])


def kept_params(call: Call, worker: SimWorker, generation: Generation) -> dict[str, Any] | None:
    """The `kv_transfer_params` of an answer: where its blocks are; None if it was no first leg."""
    first_request = generation.requests[0]
    if not first_request.keeps_blocks:
        return None
    state = worker.transfers
    # vLLM returns the parameters of the last sequence; blocks of the others stay until the lease ends.
    ids = [f"{call.header(b'x-request-id') or 'request'}-{id(request):x}" for request in generation.requests]
    for request_id, request in zip(ids, generation.requests, strict=True):
        state.kept[request_id] = request
        worker.run_in_background(_expire(worker, request_id, request))
    last = generation.requests[-1]
    host, port = worker.address
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[id(block) % 100_000 for block in last.blocks]],
        "remote_engine_id": state.engine_id,
        "remote_request_id": ids[-1],
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": last.prompt_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": last.cached_tokens,
    }


async def _expire(worker: SimWorker, request_id: str, request: EngineRequest) -> None:
    await worker.clock.sleep(worker.options.kv_lease_s)
    if worker.transfers.kept.get(request_id) is request:
        worker.transfers.expired += 1
        _free(worker, request_id)


def _free(worker: SimWorker, request_id: str) -> EngineRequest:
    request = worker.transfers.kept.pop(request_id)
    generation = request.owner
    assert isinstance(generation, Generation)
    assert generation.driver is not None
    generation.driver.engine.free_kept(request)
    return request


async def read_blocks(call: Call, worker: SimWorker) -> None:
    """POST /sim/kv/{request id}: another worker reads the blocks of a first leg, which are then free."""
    request_id = call.path.rpartition("/")[2]
    engine = call.scope["query_string"].decode("latin-1").partition("=")[2]
    if request_id not in worker.transfers.kept or engine != worker.transfers.engine_id:
        raise ApiError.not_found("These blocks are not here.")
    await call.respond({"tokens": _free(worker, request_id).prompt_tokens})


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

    def __init__(self, options: SimOptions, clock: Clock, publishers: Sequence[EventPublisher] = ()) -> None:
        """`publishers`: one per rank, or none."""
        self.options = options
        self.clock = clock
        self.publishers = publishers
        self.faults = Faults()
        self.counters = ServerCounters()
        self.received: deque[ReceivedRequest] = deque(maxlen=options.recorded_requests)
        self.responses: dict[str, StoredResponse] = {}
        """Stored /v1/responses answers by id; lost at a restart."""
        self.sessions = Sessions(clock, enabled=options.stateful_sessions)
        """SageMaker's stateful sessions; lost at a restart."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Tasks in the background. `RunningSim.stop` cancels and awaits them."""
        self.start_time = clock.wall()
        self.address = (options.host, options.port)
        """Where the worker listens."""
        self._random = Random()
        self.transfers = TransferState(f"{self._random.getrandbits(64):016x}")
        self.drivers = [
            EngineDriver(self._new_engine(), clock, partial(self._publish, rank))
            for rank in range(options.data_parallel_size)
        ]
        """One per data-parallel rank."""
        self.sleep_level: int | None = None
        """The level of /sleep; None while the engine is awake."""
        self.sleeps = 0
        """Calls of /sleep since the start."""
        self._next_rank = 0

    @property
    def publisher(self) -> EventPublisher | None:
        """The publisher of the first rank; None without events."""
        return self.publishers[0] if self.publishers else None

    @property
    def driver(self) -> EngineDriver:
        """The driver of the first rank."""
        return self.drivers[0]

    @property
    def engine(self) -> SimEngine:
        """The engine of the first rank."""
        return self.driver.engine

    @property
    def engines(self) -> Sequence[SimEngine]:
        return [driver.engine for driver in self.drivers]

    def driver_for(self, call: Call, *, takes_rank: bool = True) -> EngineDriver:
        """The driver for a request: of the rank in its header, else the one with the fewest generations.

        `takes_rank`: vLLM reads the header at this endpoint. Raises `ApiError` for a rank that does not
        exist.
        """
        given = call.header(b"x-data-parallel-rank") if takes_rank else None
        if given is not None and given.strip().isdigit():
            if int(given) >= len(self.drivers):
                raise ApiError.invalid(
                    f"data_parallel_rank {given} is out of range [0, {len(self.drivers)})."
                )
            return self.drivers[int(given)]
        # Equal loads take turns, as in vLLM's balancer (0.32, v1/engine/core_client.py).
        start = self._next_rank
        self._next_rank = (start + 1) % len(self.drivers)
        return min([*self.drivers[start:], *self.drivers[:start]], key=lambda driver: driver.unfinished)

    def close(self, generation: Generation) -> None:
        """End a generation: see `EngineDriver.close`."""
        if generation.driver is not None:
            generation.driver.close(generation)

    @property
    def max_model_len(self) -> int:
        """The smaller one of the configured limit and the cache's size, in tokens."""
        return min(self.options.max_model_len, self.options.capacity_tokens)

    def restart(self) -> None:
        """Simulate that the process is killed and started again.

        Streams end; cache, responses and counters are empty; event numbers start at 0; the start time is
        later.
        """
        for driver in self.drivers:
            driver.cancel_all(self._new_engine())
        self.sleep_level, self.sleeps = None, 0
        self.counters = ServerCounters()
        self.transfers = TransferState(f"{self._random.getrandbits(64):016x}")
        self.responses.clear()
        self.sessions = Sessions(self.clock, enabled=self.options.stateful_sessions)
        self.start_time = max(self.clock.wall(), self.start_time + 0.01)
        for publisher in self.publishers:
            publisher.restart()

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
        room = longest - len(prompt)
        if requested is None:
            return None if room > self.options.answer_tokens else room
        return min(room, requested)

    async def submit(
        self,
        call: Call,
        prompts: Sequence[array[int]],
        answers: Sequence[Sequence[Choice]],
        params: Sampling,
        model: str,
    ) -> Generation:
        """Queue each choice of each prompt, in order. The caller ends the generation with `close`.

        A request whose KV is on another worker fetches it first: see `transfer.fetched_tokens`.
        """
        moved = await fetched_tokens(call, self, params.transfer, streamed=params.stream)
        requests = [
            self.sequence(prompt, answer.token_ids, model, params)
            for prompt, choices in zip(prompts, answers, strict=True)
            for answer in choices
        ]
        transfer = params.transfer
        others = transfer.get("remote_prefill_cached_tokens") if transfer.get("do_remote_prefill") else None
        for request in requests:
            request.moved_tokens = moved
            request.other_cached_tokens = others if isinstance(others, int) else None
            request.keeps_blocks = self.options.nixl and transfer.get("do_remote_decode") is True
        reasons = [answer.finish_reason for choices in answers for answer in choices]
        self.admit(len(requests))
        self.note_begun(call)
        driver = self.driver_for(call, takes_rank=call.path != "/v1/responses")
        return driver.submit(requests, reasons, streamed=params.stream)

    def note_begun(self, call: Call) -> None:
        """Log the body's `request_id` of a request that the engine gets, if it has one."""
        if log.isEnabledFor(logging.INFO) and (request_id := call.json().get("request_id")):
            log.info("begins request %r", request_id)

    def admit(self, count: int) -> None:
        """Raise `ApiError` 503 if `count` more sequences exceed a limit of the queue.

        Texts and order of the checks are those of vLLM 0.32 (v1/engine/async_llm.py, `check_admission`).
        """
        most_requests, most_tokens = self.options.max_queued_requests, self.options.max_queued_tokens
        if most_requests:
            unfinished = sum(engine.running + engine.waiting for engine in self.engines)
            if unfinished + count > most_requests:
                raise ApiError.unavailable(
                    "The engine is currently busy and cannot accept new requests. "
                    "Please try again later or on a different instance."
                )
        if most_tokens and sum(engine.queued_tokens for engine in self.engines) >= most_tokens:
            raise ApiError.unavailable(
                "The engine has reached its prefill token backlog limit. "
                "Please try again later or on a different instance."
            )

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
        shown, media = with_placeholders(tokens) if self.publishers else ((), ())
        chain = Chain(
            keys=block_keys(keyed.tobytes(), block_bytes=4 * self.options.key_tokens, seed=seed),
            token_ids=shown,
            media=media,
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
            self.close(generation)

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
        self.close(generation)

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
                "cached_tokens": reported.reported_cached_tokens,
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
        options, layout = self.options, self.options.layout
        blocks = options.pool_blocks(options.capacity_tokens)
        if layout is not None:
            grouped = GroupedCache(
                blocks,
                layout.unit,
                record=bool(self.publishers) and options.prefix_caching,
                byte_hashes=options.byte_hashes,
                layout=layout,
            )
            return GroupedEngine(grouped, options.timing)
        cache = PagedCache(
            blocks,
            options.block_size,
            record=bool(self.publishers) and options.prefix_caching,
            byte_hashes=options.byte_hashes,
            lookahead=options.lookahead_tokens,
        )
        return SimEngine(cache, options.timing)

    def _publish(self, rank: int, events: list[Any]) -> None:
        if self.publishers:
            self.publishers[rank].publish(events, self.faults.for_batch())
