"""Probes that make workers announce their blocks again, after events were lost or while blocks are orphans.

vLLM (0.32) announces the blocks that a request hits again, from the start of the prompt, if the request has
`kv_cache_report_mode: full`. The gateway never changes a client's request for this. It sends requests of its
own, called probes: earlier prompts, with one token of output, one at a time, to workers with little load. A
probe's prompt ends one token after a full block, so the worker stores no new block unless it has evicted
some.

Blocks of prompts that did not pass this gateway, or that it no longer remembers, stay unknown until the
worker evicts or clears them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import httpx
import msgspec

from kvroute.blocks.keys import KEY_TOKENS, BlockKey
from kvroute.clock import Clock
from kvroute.events.ledger import Ledger
from kvroute.events.options import ProbeOptions
from kvroute.events.subscriber import KvEventSubscriber
from kvroute.fleet.worker import Worker
from kvroute.index.map_trust import MapTrust
from kvroute.openai.rewriting import is_key_space, transfer_params

log = logging.getLogger(__name__)

_MISSES: Final = 2
"""After this many prompts in a row that the worker has mostly evicted, older prompts are not probed."""
_FAILURES: Final = 3
"""Failed probes after which a round ends."""


class KnownPrompt(NamedTuple):
    """A prompt that was sent to a worker. `model` is the request's model or adapter name.

    `keys` are `blocks.keys.prompt_keys` of `token_ids`.
    """

    model: str
    token_ids: Sequence[int]
    keys: Sequence[BlockKey]
    salt: str = ""


class PromptMemory:
    """The newest prompts, at most `max_tokens` tokens in all. Mutable: `note`. Keeps prompts without
    copies."""

    def __init__(self, max_tokens: int) -> None:
        self.noted = 0
        """The number of prompts since the start."""
        self.is_complete = True
        """No prompt was dropped for lack of room."""
        self._max_tokens = max_tokens
        self._tokens = 0
        self._prompts: deque[KnownPrompt] = deque()

    def note(self, prompt: KnownPrompt) -> None:
        """Remember a prompt. It replaces the newest one if it continues that conversation."""
        if self._prompts and _continues(prompt, self._prompts[-1]):
            self._tokens -= len(self._prompts.pop().token_ids)
        self.noted += 1
        self._prompts.append(prompt)
        self._tokens += len(prompt.token_ids)
        while self._tokens > self._max_tokens:
            self._tokens -= len(self._prompts.popleft().token_ids)
            self.is_complete = False

    def newest(self, count: int | None = None) -> list[KnownPrompt]:
        """The prompts, newest last; only the newest `count` if given."""
        prompts = list(self._prompts)
        return prompts if count is None else prompts[len(prompts) - min(count, len(prompts)) :]


class ProbedStream(Protocol):
    """The members of a stream that a `Prober` uses."""

    @property
    def rank(self) -> int: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def subscriber(self) -> KvEventSubscriber: ...
    @property
    def prompts(self) -> PromptMemory: ...


@dataclass(slots=True)
class _Round:
    """One pass over the prompts, newest first. Mutable: the `Prober` changes it."""

    generation: int
    noted: int
    waiting: list[KnownPrompt]
    probed: KnownPrompt | None = None
    cached: int | None = None
    probes: int = 0
    misses: int = 0
    failures: int = 0


@dataclass(slots=True)
class ProbeCounts:
    """Counts of probes. Mutable: its `Prober` counts."""

    probes: int = 0
    failures: int = 0
    """No answer, or an error."""
    ignored: int = 0
    """Answered, but the blocks were not announced again: a release before 0.32."""


@dataclass(slots=True)
class Prober:
    """Sends probes to one worker. Mutable; `run` owns all waiting.

    The client belongs to the caller and sends the workers' key.
    """

    worker: Worker
    streams: Sequence[ProbedStream]
    client: httpx.AsyncClient
    clock: Clock
    options: ProbeOptions
    counts: ProbeCounts = field(default_factory=ProbeCounts)
    _rounds: dict[int, _Round] = field(default_factory=dict)

    async def run(self) -> None:
        """Send probes while a stream's map is partial; ends only by cancellation."""
        while True:
            await self.clock.sleep(self.options.interval_s)
            if not self.worker.is_routable or self.worker.load.in_flight > self.options.max_in_flight:
                continue
            try:
                for stream in self.streams:
                    if stream.subscriber.trust is MapTrust.PARTIAL and await self._step(stream):
                        break
            except Exception:
                self.counts.failures += 1
                log.exception("an error while probing worker %s", self.worker.id)

    async def _step(self, stream: ProbedStream) -> bool:
        """Send the next probe of this stream; False if there is nothing to probe."""
        ledger, size = stream.ledger, stream.ledger.block_tokens
        state = self._rounds.get(stream.rank)
        if state is None or state.generation != ledger.generation:
            state = _Round(ledger.generation, stream.prompts.noted, stream.prompts.newest())
            self._rounds[stream.rank] = state
        self._evaluate_probe(stream, state)
        if not size or state.failures >= _FAILURES:
            return False
        if not state.waiting and state.noted < stream.prompts.noted and ledger.orphan_blocks:
            # Prompts noted since the round started may lead to the blocks that are still orphans.
            state.waiting = stream.prompts.newest(stream.prompts.noted - state.noted)
            state.noted = stream.prompts.noted
            state.misses = 0
        while state.waiting and state.misses < _MISSES:
            prompt = state.waiting.pop()
            tokens = min(len(prompt.token_ids), self.options.max_prompt_tokens) // size * size
            if tokens and ledger.reach(prompt.keys[: tokens // KEY_TOKENS]) < tokens - size:
                await self._send_probe(stream, state, prompt, tokens)
                return True
        state.waiting.clear()
        reaches_back = state.misses > 0 or (stream.prompts.is_complete and stream.subscriber.was_whole)
        if not ledger.orphan_blocks and state.probes and reaches_back and not state.failures:
            stream.subscriber.heal()
        return False

    def _evaluate_probe(self, stream: ProbedStream, state: _Round) -> None:
        """Compare the last probe's answer with the map. Its events have had `interval_s` to arrive."""
        prompt, state.probed = state.probed, None
        if prompt is None or state.cached is None:
            return
        tokens = min(len(prompt.token_ids), self.options.max_prompt_tokens)
        if state.cached > stream.ledger.reach(prompt.keys):
            self.counts.ignored += 1
            state.failures += 1
            if state.failures == _FAILURES:
                log.warning(
                    "worker %s does not announce its blocks again on request (vLLM 0.32 does): its map lacks "
                    "blocks until the worker evicts or clears them",
                    self.worker.id,
                )
        elif 2 * state.cached < tokens:
            state.misses += 1
        else:
            state.misses = 0

    async def _send_probe(
        self, stream: ProbedStream, state: _Round, prompt: KnownPrompt, tokens: int
    ) -> None:
        self.counts.probes += 1
        state.probes += 1
        state.probed, state.cached = prompt, None
        stream.subscriber.note_reannounce_requested(tokens // stream.ledger.block_tokens)
        # One more token than the blocks: the last token of a prompt is never served from the cache.
        ids = [*prompt.token_ids[:tokens], prompt.token_ids[0]]
        body: dict[str, object] = {
            "model": prompt.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "vllm_xargs": {"kv_cache_report_mode": "full"},
        }
        if prompt.salt:
            body["cache_salt"] = prompt.salt
            if is_key_space(prompt.salt):
                body["kv_transfer_params"] = transfer_params(prompt.salt)
        headers = {"content-type": "application/json"}
        if len(self.streams) > 1:
            headers["x-data-parallel-rank"] = str(self.worker.sent_rank(stream.rank))
        try:
            answer = await self.client.post(
                self.worker.spec.url + "/v1/completions",
                content=msgspec.json.encode(body),
                headers=headers,
                timeout=self.options.timeout_s,
            )
            answer.raise_for_status()
            state.cached = _cached_tokens(answer.json())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            self.counts.failures += 1
            state.failures += 1
            log.info("the probe to worker %s failed: %s", self.worker.id, type(error).__name__)


def _continues(prompt: KnownPrompt, earlier: KnownPrompt) -> bool:
    """Is `prompt` a later turn of the conversation of `earlier`?"""
    last = len(earlier.keys) - 1
    return 0 <= last < len(prompt.keys) and prompt.keys[last] == earlier.keys[last]


def _cached_tokens(answer: object) -> int | None:
    """`cached_tokens` of the answer's usage; None if absent."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None
