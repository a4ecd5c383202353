"""A fleet in virtual time in which one worker may compute the prompt of a request and another one its answer.

As with vLLM's NixlConnector (0.32, pull): the prefill worker generates one token and keeps its blocks until
they are fetched; the decode worker fetches the tokens that it lacks and computes the last token of the prompt
itself. Links and latency are the caller's. The decode worker allocates its blocks after the transfer; a real
one does so before, so its memory is used a little later here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from kvroute.sim.cache import Chain
from kvroute.sim.engine import EngineRequest
from kvroute.sim.fleet import FleetRequest, Placement, SimFleet
from kvroute.sim.tier_memory import Link

_TRANSFER_ENDS = -1
"""An entry of the fleet's queue; other entries are requests and numbers of workers."""


@runtime_checkable
class HandoverPlacement(Placement, Protocol):
    """A placement whose `place` may set `FleetRequest.prefill_worker`: the worker that computes the prompt."""

    def prefilled(self, request: FleetRequest, now: float) -> None:
        """The prefill worker has computed the prompt; the transfer begins."""
        ...

    def moved(self, request: FleetRequest, tokens: int, seconds: float, now: float) -> None:
        """The decode worker has fetched `tokens` tokens. It took `seconds`."""
        ...


class _Leg(NamedTuple):
    """The owner of a request on a prefill worker."""

    request: FleetRequest


class _Transfer(NamedTuple):
    end_s: float
    order: int
    leg: EngineRequest
    start_s: float
    tokens: int


@dataclass(slots=True, eq=False)
class HandoverFleet(SimFleet):
    """Runs engines of both roles. `links` has the network into each worker; its transfers follow one
    another."""

    links: Sequence[Link] = ()
    token_bytes: int = 327_680
    latency_s: float = 0.0
    """Time of a transfer in addition to that of its bytes."""
    moved_tokens: int = 0
    """Tokens of all transfers."""
    _transfers: list[_Transfer] = field(default_factory=list)

    def _place(self, request: FleetRequest) -> None:
        request.worker = self.placement.place(request, self.now)
        chain = Chain(request.keys)
        if request.prefill_worker < 0:
            item = EngineRequest(chain, request.prompt_tokens, request.output_tokens, owner=request)
            self._add(item, request.worker)
        else:
            item = EngineRequest(chain, request.prompt_tokens, 1, keeps_blocks=True, owner=_Leg(request))
            self._add(item, request.prefill_worker)

    def _add(self, item: EngineRequest, worker: int) -> None:
        self.engines[worker].add(item)
        if not self._busy[worker]:
            self._start_iteration(worker)

    def _finish_iteration(self, worker: int) -> None:
        if worker == _TRANSFER_ENDS:
            self._end_transfer()
        else:
            SimFleet._finish_iteration(self, worker)

    def _first_token(self, item: EngineRequest) -> None:
        if not isinstance(item.owner, _Leg):
            SimFleet._first_token(self, item)

    def _finished(self, item: EngineRequest) -> None:
        if isinstance(item.owner, _Leg):
            self._begin_transfer(item, item.owner.request)
        else:
            SimFleet._finished(self, item)

    def _begin_transfer(self, leg: EngineRequest, request: FleetRequest) -> None:
        placement = self.placement
        assert isinstance(placement, HandoverPlacement)
        placement.prefilled(request, self.now)
        cache = self.engines[request.worker].cache
        full_blocks = request.prompt_tokens // cache.block_size
        tokens = request.prompt_tokens - cache.match(request.keys, full_blocks) * cache.block_size
        link = self.links[request.worker]
        end_s = link.transfer(tokens * self.token_bytes, self.now) + self.latency_s
        self._order += 1
        heapq.heappush(self._transfers, _Transfer(end_s, self._order, leg, self.now, tokens))
        self._push(end_s, _TRANSFER_ENDS)

    def _end_transfer(self) -> None:
        _, _, leg, start_s, tokens = heapq.heappop(self._transfers)
        assert isinstance(leg.owner, _Leg)
        request = leg.owner.request
        self.engines[request.prefill_worker].free_kept(leg)
        self.moved_tokens += tokens
        placement = self.placement
        assert isinstance(placement, HandoverPlacement)
        placement.moved(request, tokens, self.now - start_s, self.now)
        item = EngineRequest(
            Chain(request.keys),
            request.prompt_tokens,
            request.output_tokens,
            moved_tokens=request.prompt_tokens,
            owner=request,
        )
        self._add(item, request.worker)
