"""Reads `tests/data/captures/models`: what real engines of several architectures found and published."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "captures" / "models"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, its answer, and how much of the prompt the engine found in its cache."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that were sent at once, and the messages that they caused: topic, number, payload."""

    requests: tuple[Asked, ...]
    messages: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """`engine`: its release, pool and KV cache groups, as the engine has them (tests/engine/recorder.py)."""

    name: str
    engine: dict[str, Any]
    steps: tuple[Step, ...]


def names() -> list[str]:
    """All recordings."""
    return sorted(path.name.removesuffix(".jsonl.xz") for path in FOLDER.glob("*.jsonl.xz"))


def read(name: str) -> Recording:
    """The recording `name`."""
    with lzma.open(FOLDER / f"{name}.jsonl.xz", "rt") as file:
        first, *lines = [json.loads(line) for line in file]
    steps: list[tuple[list[Asked], list[tuple[bytes, ...]]]] = []
    for line in lines:
        if "requests" in line:
            asked = [
                Asked(
                    tuple(each["prompt_token_ids"]),
                    tuple(each["output_token_ids"]),
                    each["cached_tokens"] or 0,
                )
                for each in line["requests"]
            ]
            steps.append((asked, []))
        else:
            steps[-1][1].append(tuple(bytes.fromhex(frame) for frame in line["frames"]))
    return Recording(
        name, first["engine"], tuple(Step(tuple(asked), tuple(messages)) for asked, messages in steps)
    )
