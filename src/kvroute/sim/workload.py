"""Synthetic traffic for the virtual fleet: closed-loop chats over a common system prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from kvroute.sim.fleet import Fleet, FleetRequest


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What a chat looks like; lengths in tokens, times in seconds.

    `context_tokens` is the first prompt in all; what is not the common system prompt varies by 30%. Later
    turns add what was answered and `turn_tokens` of question. Turns are 1 + floor(Exp(`mean_turns`)).
    """

    system_tokens: int = 1024
    context_tokens: int = 8192
    mean_turns: float = 7.0
    turn_tokens: int = 128
    output_tokens: int = 256
    think_s: float = 5.0


@dataclass(slots=True, eq=False)
class _Chat:
    number: int
    turns: int
    tokens: int
    turn: int = 0
    keys: list[int] = field(default_factory=list)


class ChatClients:
    """`clients` people who chat, think, and start anew, until `requests` requests have been sent in all.

    Mutable: who is at which turn. Install with `start`; it drives itself through `Fleet.on_finish`.
    """

    def __init__(
        self, fleet: Fleet, *, clients: int, requests: int, shape: ChatShape | None = None, seed: int = 0
    ) -> None:
        self._fleet = fleet
        self._shape = shape or ChatShape()
        self._random = Random(seed)
        self._clients = clients
        self._left = requests
        self._chats: dict[int, _Chat] = {}
        self._numbers = 0
        self._block = fleet.engines[0].cache.block_size

    def start(self) -> None:
        """Let every client begin at a random moment of the first think time."""
        self._fleet.on_finish = self._answered
        for _ in range(self._clients):
            self._send(self._begin(), self._random.uniform(0.0, self._shape.think_s))

    def _begin(self) -> _Chat:
        shape, random = self._shape, self._random
        self._numbers += 1
        private = (shape.context_tokens - shape.system_tokens) * random.uniform(0.7, 1.3)
        turns = 1 + int(random.expovariate(1 / shape.mean_turns))
        chat = _Chat(self._numbers, turns, shape.system_tokens + int(private))
        self._chats[chat.number] = chat
        return chat

    def _send(self, chat: _Chat, at: float) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        output = max(1, int(self._shape.output_tokens * self._random.uniform(0.5, 1.5)))
        self._extend(chat, chat.tokens + output)
        request = FleetRequest(
            chat.keys, chat.tokens, output, conversation=chat.number, turn=chat.turn, arrival_s=at
        )
        self._fleet.submit(request, at)

    def _extend(self, chat: _Chat, tokens: int) -> None:
        common = self._shape.system_tokens // self._block
        for position in range(len(chat.keys), tokens // self._block):
            # Unique per chat and place is all that a chained key has to be.
            chat.keys.append(position + 1 if position < common else chat.number << 32 | position)

    def _answered(self, request: FleetRequest, now: float) -> None:
        chat = self._chats[request.conversation]
        chat.turn += 1
        chat.tokens += request.output_tokens + self._shape.turn_tokens
        if chat.turn >= chat.turns:
            del self._chats[chat.number]
            chat = self._begin()
        self._send(chat, now + self._random.expovariate(1 / self._shape.think_s))


def returned_share(done: list[FleetRequest]) -> float:
    """Share of follow-up turns that went to the worker of the turn before."""
    where: dict[int, int] = {}
    followed = returned = 0
    for request in sorted(done, key=lambda r: r.arrival_s):
        if request.turn:
            followed += 1
            returned += where.get(request.conversation) == request.worker
        where[request.conversation] = request.worker
    return returned / followed if followed else 1.0


def imbalance(amounts: list[int]) -> float:
    """The largest over the mean; 1 when all are equal or nothing was done."""
    return max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else 1.0
