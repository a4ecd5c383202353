"""The traffic of the chaos run: requests with the answers that the simulator must give, and a client that
checks each byte of text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from chaos_setting import Killed
from kvroute.sim.prompts import chat_tokens, encode, fingerprint, plain

MODEL = "sim-model"


@dataclass(frozen=True, slots=True)
class Limits:
    """`deadline_s`: longest time of a request, its answer included. `notice_s`: until a client notices that
    the kernel has reset the connections of a killed process."""

    deadline_s: float = 30.0
    notice_s: float = 1.5


UNTIMED = Limits(deadline_s=300.0, notice_s=60.0)
"""For machines that are too slow or too busy to judge times."""
STATED = frozenset({429, 503, 504})
"""Statuses with which the gateway may refuse a request that has not begun its answer."""
CONVERSATIONS = 24
MOST_TURNS = 6


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: seconds after the start, its body, the text and the number of tokens of its answer."""

    at_s: float
    path: str
    body: dict[str, Any]
    text: str
    tokens: int
    key: str


class End(Enum):
    """How a request ended. The last three are failures of the gateway."""

    COMPLETE = "complete"
    REFUSED = "refused with 429, 503 or 504"
    BROKEN = "broke off after its beginning, with a stated error"
    KILLED = "inside the killed gateway process"
    LOST = "lost with both workers that another request killed"
    WRONG = "wrong bytes"
    LATE = "no end within the deadline"
    UNSTATED = "an error that is not stated"


FAILURES = (End.WRONG, End.LATE, End.UNSTATED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended; `detail` says what is wrong with a failure. Times are the event loop's."""

    end: End
    sent_s: float
    ended_s: float
    tokens: int = 0
    detail: str = ""


def chat_text(messages: list[dict[str, Any]], tokens: int) -> str:
    """The text that each simulated worker must answer to a chat."""
    return plain(fingerprint(chat_tokens(messages), MODEL), tokens, tokens).text


def words(random: Random, count: int) -> str:
    return " ".join(f"{random.getrandbits(24):x}" for _ in range(count))


class Traffic:
    """Makes requests: turns of conversations, chats and completions, streamed or not. Mutable: the turns, and
    how many were made."""

    def __init__(self, seed: int, keys: list[str]) -> None:
        self._random = Random(seed)
        self._keys = keys
        self._system = words(self._random, 120)
        self._made = 0
        self._live: list[list[dict[str, Any]]] = [[] for _ in range(CONVERSATIONS)]

    def plan(self, rate: float, seconds: float) -> list[Planned]:
        """Poisson arrivals at `rate` per second."""
        at_s, found = 0.0, []
        while (at_s := at_s + self._random.expovariate(rate)) < seconds:
            found.append(self._next(at_s))
        return found

    def _next(self, at_s: float) -> Planned:
        random = self._random
        tokens = random.choice((8, 24, 24, 32, 48))
        key = random.choice(self._keys)
        streamed = random.random() < 0.6
        kind = random.random()
        self._made += 1
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": streamed,
            "request_id": f"chaos-{self._made}",
        }
        if streamed and random.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if kind < 0.2:
            prompt = words(random, random.choice((20, 400)))
            text = plain(fingerprint(encode(prompt), MODEL), tokens, tokens).text
            return Planned(at_s, "/v1/completions", {**body, "prompt": prompt}, text, tokens, key)
        if kind < 0.4:
            messages = [{"role": "user", "content": words(random, random.choice((10, 100, 600)))}]
            text = chat_text(messages, tokens)
        else:
            place = random.randrange(CONVERSATIONS)
            turns = self._live[place]
            if not turns or len(turns) > 2 * MOST_TURNS:
                turns = [{"role": "system", "content": self._system + words(random, 4)}]
            messages = [*turns, {"role": "user", "content": words(random, random.choice((10, 40, 150)))}]
            text = chat_text(messages, tokens)
            self._live[place] = [*messages, {"role": "assistant", "content": text}]
        return Planned(at_s, "/v1/chat/completions", {**body, "messages": messages}, text, tokens, key)


async def send(
    port: int, planned: Planned, kills: Sequence[Killed], lethal: Sequence[Killed], limits: Limits
) -> Outcome:
    """Send one request on its own connection. `lethal`: times at which requests killed workers."""
    loop = asyncio.get_running_loop()
    sent_s = loop.time()
    received = bytearray()
    try:
        async with asyncio.timeout(limits.deadline_s):
            await _exchange(port, planned, received)
        problem = ""
    except TimeoutError:
        return Outcome(End.LATE, sent_s, loop.time(), detail=bytes(received[-300:]).decode(errors="replace"))
    except OSError as error:
        problem = repr(error)
    now = loop.time()
    end, detail = judge(planned, bytes(received), problem)
    if end is End.UNSTATED and any(killed.ended(sent_s, now, limits.notice_s) for killed in kills):
        whole = b"\r\n\r\n" in received
        if not whole or text_of(planned, bytes(received))[0] is not None:
            return Outcome(End.KILLED, sent_s, now, detail=detail)
    # The gateway cannot know which of a lost worker's requests has killed it.
    is_lethal = any(killed.ended(sent_s, now, limits.notice_s) for killed in lethal)
    if is_lethal and end is End.UNSTATED and detail.startswith("status 502, code"):
        return Outcome(End.LOST, sent_s, now, detail=detail)
    return Outcome(end, sent_s, now, planned.tokens if end is End.COMPLETE else 0, detail)


async def _exchange(port: int, planned: Planned, received: bytearray) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(planned.body).encode()
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: chaos\r\nconnection: close\r\nauthorization: Bearer %b\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (planned.path.encode(), planned.key.encode(), len(body), body)
        )
        while chunk := await reader.read(65536):
            received += chunk
    finally:
        writer.close()


def judge(planned: Planned, received: bytes, problem: str) -> tuple[End, str]:
    """Compare an answer with the text that the simulator must give."""
    head, found, body = received.partition(b"\r\n\r\n")
    if not found:
        return End.UNSTATED, f"no answer ({problem or 'the connection was closed'})"
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        try:
            code = json.loads(body)["error"]["code"]
        except (ValueError, LookupError, TypeError):
            return End.UNSTATED, f"status {status} without an error object: {body[:200]!r}"
        return End.REFUSED if status in STATED else End.UNSTATED, f"status {status}, code {code}"
    text, ended = text_of(planned, received)
    if text is None or not planned.text.startswith(text):
        return End.WRONG, f"the answer {text!r} is not {planned.text!r}: {body[-300:]!r}"
    if ended == "complete" and text == planned.text:
        return End.COMPLETE, ""
    if ended == "complete":
        return End.WRONG, f"the answer ends early: {text!r} instead of {planned.text!r}"
    if ended == "error":
        return End.BROKEN, ""
    return (
        End.UNSTATED,
        f"the answer ends after {len(text)} of {len(planned.text)} characters, no error stated",
    )


def text_of(planned: Planned, received: bytes) -> tuple[str | None, str]:
    """The text of a 200 answer so far (None: not readable), and how it ended: complete, error or cut."""
    head, _, body = received.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body, is_whole = unchunked(body)
    else:
        sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        is_whole = not sizes or len(body) == int(sizes[0].split(b":")[1])
    is_chat = planned.path.endswith("chat/completions")
    if not planned.body["stream"]:
        if not is_whole:
            return "", "error"  # a short body is how HTTP states it
        try:
            choice = json.loads(body)["choices"][0]
            return (choice["message"]["content"] if is_chat else choice["text"]), "complete"
        except (ValueError, LookupError, TypeError):
            return None, "cut"
    text, ended = "", "cut"
    events = body.split(b"\n\n")
    for event in events[:-1]:  # the last one has no end
        data = event.lstrip(b"\n").removeprefix(b"data: ")
        if data == b"[DONE]":
            ended = "complete" if is_whole else "cut"
        elif data:
            try:
                value = json.loads(data)
            except ValueError:
                # The gateway ends an event that was cut off, and states the error in the next one.
                if b'"error"' in events[-2]:
                    continue
                return None, "cut"
            if "error" in value:
                ended = "error"
            elif value["choices"]:
                choice = value["choices"][0]
                text += (choice["delta"].get("content") or "") if is_chat else choice["text"]
    return text, ended


def unchunked(body: bytes) -> tuple[bytes, bool]:
    """The content of a chunked body, and whether its last chunk has arrived."""
    parts = list[bytes]()
    while True:
        size, found, rest = body.partition(b"\r\n")
        if not found:
            return b"".join(parts), False
        length = int(size.split(b";")[0], 16)
        if length == 0:
            return b"".join(parts), True
        parts.append(rest[:length])
        body = rest[length + 2 :]
