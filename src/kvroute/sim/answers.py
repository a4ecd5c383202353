"""Answers without a model: the text is computed from the prompt, so that equal prompts get equal answers."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from kvroute.sim.prompts import encode

_WORDS = [
    "the",
    "cache",
    "holds",
    "what",
    "was",
    "seen",
    "before",
    "and",
    "a",
    "worker",
    "answers",
    "soon",
    "when",
    "its",
    "blocks",
    "are",
    "near",
    "so",
    "every",
    "prefix",
    "that",
    "returns",
    "home",
    "saves",
    "time",
    "while",
    "new",
    "words",
    "take",
    "their",
    "turn",
    "in",
    "line",
    "behind",
    "the",
    "long",
    "ones",
]


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer. `pieces`: the text of each token. `finish_reason`: vLLM's "stop" or
    "length"."""

    token_ids: array[int]
    pieces: tuple[str, ...]
    finish_reason: str
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def fingerprint(prompt: array[int], model: str, choice: int = 0) -> int:
    """A 64-bit seed of an answer: the same on every worker for the same prompt, model and choice."""
    return xxh3_64_intdigest(prompt.tobytes(), xxh3_64_intdigest(model.encode(), choice))


def plain(seed: int, limit: int | None, natural: int, stop: Sequence[str] = ()) -> Choice:
    """Words computed from `seed`: exactly `limit` tokens, or `natural` tokens if `limit` is None.

    The answer ends before the first `stop` string, as in vLLM.
    """
    count = natural if limit is None else limit
    return _cut(_words(seed, count * 3), limit, stop)


def fixed(text: str, limit: int | None, stop: Sequence[str] = ()) -> Choice:
    """An answer with this ASCII text (a tool's arguments, a JSON document), at most `limit` tokens."""
    return _cut(text, limit, stop, whole=True)


def _cut(text: str, limit: int | None, stop: Sequence[str], *, whole: bool = False) -> Choice:
    found = min(((text.find(s), s) for s in stop if s and s in text), default=None)
    stopped = found is not None and (limit is None or found[0] < limit * 3)
    if stopped:
        assert found is not None
        text = text[: found[0]]
    ids = encode(text)
    cut = limit is not None and not stopped and (len(ids) > limit or not whole)
    if limit is not None and len(ids) > limit:
        ids = ids[:limit]
        text = text[: limit * 3]
    pieces = tuple(text[start : start + 3] for start in range(0, len(text), 3))
    return Choice(ids, pieces, "length" if cut else "stop", found[1] if stopped and found else None)


def _words(seed: int, characters: int) -> str:
    parts: list[str] = []
    length, state = 0, seed
    while length < characters:
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        word = _WORDS[(state >> 33) % len(_WORDS)]
        parts.append(word)
        length += len(word) + 1
    return " ".join(parts)[:characters].ljust(characters, ".") if parts else ""


def instance_of(schema: Any, depth: int = 0, root: Any = None) -> Any:
    """A small value that a JSON schema accepts. Supports the part of JSON Schema that tests need."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > 16:
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    if "default" in schema:
        return schema["default"]
    if isinstance(reference := schema.get("$ref"), str):
        target = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(part, {}) if isinstance(target, Mapping) and part else target
        return instance_of(target, depth + 1, root)
    for combiner in ("anyOf", "oneOf", "allOf"):
        if schema.get(combiner):
            return instance_of(schema[combiner][0], depth + 1, root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = next((k for k in kind if k != "null"), "null")
    if kind == "object":
        properties = schema.get("properties") or {}
        required = schema.get("required") or list(properties)
        return {name: instance_of(properties.get(name, {}), depth + 1, root) for name in required}
    if kind == "array":
        item = instance_of(schema.get("items", {}), depth + 1, root)
        return [item] * int(schema.get("minItems") or 0)
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        number = low + 1 if "exclusiveMinimum" in schema else low
        return int(number) if kind == "integer" else number
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    return "x".ljust(int(schema.get("minLength") or 1), "x")


def document(schema: Any) -> str:
    """`instance_of` as ASCII JSON."""
    return json.dumps(instance_of(schema))
