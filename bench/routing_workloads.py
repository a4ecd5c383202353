"""The traffic of the routing benchmark, as requests of the virtual fleet. Lengths are tokens, times seconds.

Each `load` is called with a fleet and a seed and submits its requests; closed-loop clients continue by
`SimFleet.on_finish`. Blocks have 512 tokens; a key is unique for a block's content and all content before it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from random import Random

from kvroute.sim.fleet import FleetRequest, SimFleet

BLOCK = 512
TRACE = Path(__file__).parent / "data" / "mooncake_conversation_first30min.jsonl.gz"

Load = Callable[[SimFleet, int], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the trace; `quantum_s` is its time in steps of 3 s."""

    quantum_s: float
    prompt: int
    output: int
    keys: tuple[int, ...]
    session: int


@cache
def trace_rows() -> tuple[Row, ...]:
    """The conversation trace, in order of arrival."""
    with gzip.open(TRACE, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    users = Counter(key for row in rows for key in row["hash_ids"])
    return tuple(
        Row(
            row["timestamp"] / 1000,
            row["input_length"],
            max(1, row["output_length"]),
            tuple(key + 1 for key in row["hash_ids"][: row["input_length"] // BLOCK]),
            next((key for key in row["hash_ids"] if users[key] < 100), 0),
        )
        for row in rows
    )


def conversation(rate: float, requests: int | None = None) -> Load:
    """The conversation trace, or its first `requests`, scaled in time to `rate` requests per second.

    Quanta of 3 s are spread evenly.
    """

    def load(fleet: SimFleet, seed: int) -> None:
        rows, random = trace_rows()[:requests], Random(seed)
        scale = len(rows) / (rows[-1].quantum_s + 3.0) / rate
        for row in rows:
            request = FleetRequest(row.keys, row.prompt, row.output, conversation=row.session)
            fleet.submit(request, (row.quantum_s + random.uniform(0.0, 3.0)) * scale)

    return load


def tool(rate: float, requests: int = 6000) -> Load:
    """Agents whose calls share a hot tool prompt: few popular prefixes, short own parts, bursts."""

    def load(fleet: SimFleet, seed: int) -> None:
        random = Random(seed)
        keys = count(1)
        common = next(keys)
        prompts = [[common, *(next(keys) for _ in range(random.randint(4, 16)))] for _ in range(24)]
        weights = [1 / (rank + 1) ** 1.1 for rank in range(24)]
        mean_calls = 1 / (1 - 2.718281828 ** (-1 / 0.83))
        bursts_s = rate / mean_calls / 3.0
        calls: list[tuple[float, FleetRequest]] = []
        at = 0.0
        session = 0
        while at < requests / rate + 30.0:
            at += random.expovariate(bursts_s)
            for _ in range(random.randint(1, 5)):
                session += 1
                held = list(random.choices(prompts, weights)[0])
                held += [next(keys) for _ in range(max(1, round(random.lognormvariate(1.7, 0.9))))]
                when = at
                for _ in range(min(8, 1 + int(random.expovariate(1 / 0.83)))):
                    output = max(1, round(random.lognormvariate(4.8, 0.9)))
                    request = FleetRequest(list(held), BLOCK * len(held), output, conversation=session)
                    calls.append((when, request))
                    held += [next(keys) for _ in range(1 + int(random.expovariate(1 / 1.43)))]
                    when += 6.0 + random.expovariate(1 / 10.0)
        calls.sort(key=lambda call: call[0])
        for when, request in calls[:requests]:
            fleet.submit(request, when)

    return load


def chat(
    context: int,
    clients: int,
    *,
    system: int = 1024,
    private: int | None = None,
    answer: int = 256,
    each: int = 14,
) -> Load:
    """`clients` people per worker who read the answer, think, continue, and start a new chat; `each` requests
    of each."""

    def load(fleet: SimFleet, seed: int) -> None:
        random = Random(seed)
        people = clients * len(fleet.engines)
        left = each * people
        numbers = count(1)
        own = (context - 1024) if private is None else private
        talks: dict[int, list[int]] = {}  # number -> [turns left, tokens], and the keys of each number
        keys: dict[int, list[int]] = {}

        def begin() -> int:
            number = next(numbers)
            tokens = system + int(own * random.uniform(0.7, 1.3))
            talks[number] = [1 + int(random.expovariate(1 / 7.0)), tokens + 128]
            keys[number] = []
            return number

        def send(number: int, at: float) -> None:
            nonlocal left
            if left <= 0:
                return
            left -= 1
            tokens = talks[number][1]
            output = max(1, int(answer * random.uniform(0.5, 1.5)))
            held = keys[number]
            for place in range(len(held), (tokens + output) // BLOCK):
                held.append(place + 1 if place < system // BLOCK else number << 32 | place)
            fleet.submit(FleetRequest(list(held), tokens, output, conversation=number), at)

        def answered(request: FleetRequest, now: float) -> None:
            number = request.conversation
            talk = talks[number]
            talk[0] -= 1
            talk[1] += request.output_tokens + 128
            if not talk[0]:
                del talks[number], keys[number]
                number = begin()
            send(number, now + random.expovariate(1 / 5.0))

        fleet.on_finish = answered
        for _ in range(people):
            send(begin(), random.uniform(0.0, 5.0))

    return load


def l2post(rate: float = 8.0, seconds: float = 180.0) -> Load:
    """100 conversations one after another, the worst order for LRU: 2,048 common and 10,240 own tokens, then
    per turn 50 of question and 200 of answer, which remain in the conversation."""

    def load(fleet: SimFleet, seed: int) -> None:
        random, at = Random(seed), 0.0
        for number in count():
            at += random.expovariate(rate)
            if at > seconds:
                return
            turn, session = divmod(number, 100)
            prompt = 12_288 + 50 + 250 * turn
            keys = [
                place + 1 if place < 4 else (session + 1) << 32 | place
                for place in range((prompt + 200) // BLOCK)
            ]
            fleet.submit(FleetRequest(keys, prompt, 200, conversation=session), at)

    return load
