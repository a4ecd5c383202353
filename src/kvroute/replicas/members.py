"""The other members of the fleet: what a channel knows of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from kvroute.blocks.key_groups import KeyGroups
from kvroute.blocks.keys import BlockKey
from kvroute.errors import NotFound
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker
from kvroute.replicas.envelope import SPLIT_BYTES, Refusal
from kvroute.replicas.messages import (
    LearnedCosts,
    MemberState,
    RecentPrompts,
    pack_keys,
    unpack_keys,
)
from kvroute.routing.learned_costs import LearnedModel
from kvroute.routing.router import Router

_RECENT_BLOCKS: Final = 4_000_000
"""Most blocks, of all workers together, that a joining process gets: 32 MB."""
_RECENT_PROMPTS: Final = 256
"""Prompts in one message. It ends earlier at `SPLIT_BYTES`, because an envelope has at least one message."""
JOINS: Final = -1
"""In place of the number of a batch: this process does not have the member's state yet."""


class MessageLink(Protocol):
    """The transport of a channel: `RedisLink`, or a simulated one."""

    def wake(self) -> None:
        """Something waits to be written."""
        ...

    def reconnect(self) -> None:
        """Close the connections and open others."""
        ...

    def pause(self) -> None:
        """Receive nothing until `resume`."""
        ...

    def resume(self) -> None: ...

    async def run(self) -> None:
        """Keep the connections open until cancelled."""
        ...


@dataclass(slots=True)
class ChannelCounts:
    """Totals since the start. Mutable: incremented by the channel."""

    messages_sent: int = 0
    messages_received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    envelopes_sent: int = 0
    envelopes_received: int = 0
    missed: int = 0
    """Batches of other members that did not arrive."""
    dropped: int = 0
    """Own envelopes that were dropped because too many bytes waited."""
    outages: int = 0
    """Times that Redis could no longer be used."""
    deaths: int = 0
    """Members that fell silent without having left."""
    refused: dict[Refusal, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))


@dataclass(slots=True)
class Member:
    """Another member, by its epoch: a random number of its start. Mutable: by the channel."""

    sender: bytes
    gateway: bytes
    """All processes of one machine that serve one address have the same one."""
    seq: int
    """Of the last batch that arrived or was made up for."""
    met_at: float
    """When its first envelope arrived."""
    heard_at: float
    state: MemberState | None = None
    contiguous_seq: int = JOINS
    """The last batch before the first gap that is not made up for."""
    gap_end_seq: int = JOINS
    """The last batch of the gaps."""
    is_complete: bool = False
    """Whether the state has arrived and nothing was missed since."""
    is_linked: bool = False
    has_signed: bool = False
    """Whether an envelope of it had a right HMAC."""
    signs_all: bool = False
    """Whether it has said so in a signed envelope: an unsigned one is not its own."""
    is_authenticated: bool = False
    """Whether it has answered this process with an HMAC: so its signed batches are no recording."""
    lines: int = 0
    """Of the log, about its changes while it had signed nothing."""
    skipped_unauthenticated: int = 0
    """Signed messages that were skipped because it has not answered yet."""
    asked_at: float = -math.inf
    asked_until: int = JOINS
    gaps: int = 0
    missed: int = 0
    gone_at: float | None = None
    has_left: bool = False

    @property
    def id(self) -> str:
        return self.sender.hex()

    @property
    def name(self) -> str:
        return f"{self.state.name}/{self.state.process}" if self.state is not None else self.id

    @property
    def release(self) -> str:
        return self.state.release if self.state is not None else "?"

    @property
    def is_reporting(self) -> bool:
        """Whether it is linked and follows LMCache's reports."""
        return self.is_linked and self.state is not None and self.state.has_reports

    @property
    def standing(self) -> str:
        """alive, joining (its state has not arrived), silent, or left."""
        if self.gone_at is not None:
            return "left" if self.has_left else "silent"
        return "alive" if self.is_complete else "joining"

    def refused(self, now: float, longest_s: float) -> int:
        """`skipped_unauthenticated`, once: if the member has not answered `longest_s` after it was met."""
        if now - self.met_at <= longest_s:
            return 0
        number, self.skipped_unauthenticated = self.skipped_unauthenticated, 0
        return number

    def describe(self, now: float) -> dict[str, Any]:
        """The member as JSON values."""
        lag_s = None if self.state is None or self.state.lag_s < 0 else self.state.lag_s
        return {
            **describe_process(self.sender, self.gateway, self.state, self.standing, lag_s),
            "is_self": False,
            "silent_s": round(now - self.heard_at, 3),
            "gaps": self.gaps,
            "missed_batches": self.missed,
        }


def describe_process(
    member: bytes,
    gateway: bytes,
    state: MemberState | None,
    standing: str,
    lag_s: float | None,
    problem: str | None = None,
) -> dict[str, Any]:
    """A row of `/admin/members`, by default that of the process itself. `state`: None if it is not known."""
    return {
        "member": member.hex(),
        "name": state.name if state else None,
        "process": state.process if state else None,
        "gateway": gateway.hex(),
        "is_self": True,
        "state": standing,
        "problem": problem,
        "release": state.release if state else None,
        "has_key": state.has_key if state else None,
        "lag_ms": None if lag_s is None else round(1e3 * lag_s, 3),
        "silent_s": 0.0,
        "gaps": 0,
        "missed_batches": 0,
    }


def recent_prompts(router: Router, workers: Sequence[Worker]) -> Iterable[RecentPrompts]:
    """A snapshot of the route history, for a process that joins."""
    parts: list[tuple[Worker, int | None]] = [
        (worker, rank) for worker in workers for rank in (None, *worker.rank_units)
    ]
    blocks_per_part = _RECENT_BLOCKS // max(1, len(parts))
    for worker, rank in parts:
        packed, size = list[bytes](), 0
        for keys in router.recent_prompts(worker, blocks_per_part, rank):
            packed.append(pack_keys(keys))
            size += len(packed[-1])
            if size >= SPLIT_BYTES or len(packed) == _RECENT_PROMPTS:
                yield RecentPrompts(worker.id, packed, rank)
                packed, size = [], 0
        if packed:
            yield RecentPrompts(worker.id, packed, rank)


def apply_recent_prompts(router: Router, fleet: Fleet, groups: KeyGroups, recent: RecentPrompts) -> None:
    """Add another process's `recent_prompts` to this process's route history."""
    try:
        worker = fleet.get(recent.worker)
    except NotFound:
        return
    for packed in recent.prompts:
        keys = unpack_keys(packed)
        groups.learn(keys)
        router.replay_prompt(worker, cast("Sequence[BlockKey]", keys), recent.rank)


def learned_costs(router: Router, workers: Sequence[Worker]) -> list[LearnedCosts]:
    """What `router` has learned about each model and worker, for a process that joins."""
    learned, names = router.learned, {worker.index: worker.id for worker in workers}
    return [
        LearnedCosts(
            model,
            learned_model.prefills.sums(),
            {names[index]: sums for index, sums in learned_model.speeds.sums().items() if index in names},
        )
        for model, learned_model in ({} if learned is None else learned.models).items()
    ]


def apply_learned_costs(router: Router, fleet: Fleet, message: LearnedCosts) -> None:
    """Begin with another process's `learned_costs` of a model; skipped if it was learned here already."""
    if router.learned is None:
        return
    learned_model = router.learned.models.setdefault(message.model, LearnedModel())
    if learned_model.prefills.restore(message.sums):
        for name, sums in message.speeds.items():
            with contextlib.suppress(NotFound):
                learned_model.speeds.restore(fleet.get(name).index, *sums)
