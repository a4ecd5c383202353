"""The requests of the gateway benchmark, as the files that `native/load.c` replays."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

MODEL = "bench"
VOCABULARY = """
about after again all also and any are back because been before being between both but came can come
could day did different does down each end even every few find first for found from get give good great
had hand has have her here him his home house how into its just keep know large last left life like line
little long look made make man many may might more most much must name never new next not now number off
old one only other our out over own part people place point right said same saw say school see set she
should show small some something sound still such take tell than that the their them then there these
they thing think this those thought three through time together too two under until use very was water
way well went were what when where which while who why will with without word work world would write
year you your
"""
WORDS = VOCABULARY.split()

Body = dict[str, Any]
Turns = Iterator[tuple[int, Body]]
"""Pairs of conversation number and body; the turns of a conversation are in order."""


def text(rng: random.Random, size: int) -> str:
    """`size` characters of common words."""
    words = rng.choices(
        WORDS, k=size // 4 + 8
    )  # words have at least four characters on average, including the blank
    return " ".join(words).ljust(size)[:size]


def chat(messages: list[dict[str, str]], **fields: Any) -> Body:
    return {"model": MODEL, "messages": [*messages], "max_tokens": 64, "temperature": 0.7, **fields}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def short(rng: random.Random) -> Turns:
    """512 prompts of 200 bytes."""
    for number in range(512):
        yield number, chat([said("user", text(rng, 200))])


def streamed(rng: random.Random) -> Turns:
    """The same prompts, with a stream and usage."""
    for number, body in short(rng):
        yield number, body | {"stream": True, "stream_options": {"include_usage": True}}


def medium(rng: random.Random) -> Turns:
    """256 bodies of 32 KB over two system prompts of 8 KB, 128 bodies each."""
    systems = [text(rng, 8_000), text(rng, 8_000)]
    for number in range(256):
        yield number, chat([said("system", systems[number % 2]), said("user", text(rng, 24_000))])


def conversation(rng: random.Random, system: str, history: int, turns: int) -> Iterator[Body]:
    """The turns of a conversation: each adds a question of 1 KB and the answer to the question before, of 3.1
    KB."""
    messages = [said("system", system)]
    for _ in range(history):
        messages += [said("user", text(rng, 1_000)), said("assistant", text(rng, 3_100))]
    for _ in range(turns):
        messages.append(said("user", text(rng, 1_000)))
        yield chat(messages)
        messages.append(said("assistant", text(rng, 3_100)))


def long(rng: random.Random) -> Turns:
    """48 conversations of 8 turns, 228 to 256 KB, over one system prompt of 32 KB."""
    system = text(rng, 32_000)
    for number in range(48):
        for body in conversation(rng, system, 46, 8):
            yield number, body


FILES: dict[str, Callable[[random.Random], Turns]] = {
    "a": short,
    "b": medium,
    "c": long,
    "d": streamed,
}


def encoded(number: int, body: Body) -> bytes:
    """One record: conversation, length, and the request as sent."""
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer sk-1234\r\nx-session-id: s{number}\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    request = head.encode() + payload
    return struct.pack("<II", number, len(request)) + request


def write(turns: Turns, file: BinaryIO) -> None:
    for number, body in turns:
        file.write(encoded(number, body))


def write_all(folder: Path, names: set[str]) -> dict[str, Path]:
    """Write the files in `names`; their content never changes."""
    paths = {}
    for name in sorted(names):
        paths[name] = folder / f"{name}.requests"
        with paths[name].open("wb") as file:
            write(FILES[name](random.Random(7)), file)
    return paths
