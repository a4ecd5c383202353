"""Sample requests: by them a tokenizer is compared with what an engine computes, for each shape of requests.

A shape is what a sample has besides plain messages. Where ids differ for a sample, the requests of its
shape have no exact tokens; all others keep theirs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.tokens.encoders import SAMPLES
from kvroute.tokens.options import Inexact
from kvroute.tokens.reading import decoded


class Shape(StrEnum):
    """What a request has that may change how an engine renders it."""

    TEXT = "texts"
    CHAT = "chats"
    SYSTEM = "system messages"
    DEVELOPER = "developer messages"
    PARTS = "contents in parts"
    TOOLS = "tools"
    CALLS = "tool calls"
    REASONING = "reasoning"
    CONTINUED = "messages to continue"
    OPEN = "no generation prompt"
    SPECIAL = "added special tokens"
    EFFORT = "an effort"
    FORMAT = "a response format"
    CHOICE = "a tool choice"


_TEXT = "\n".join(SAMPLES).replace("\x00", "")
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CLOCK = {"type": "function", "function": {"name": "clock"}}
_SYSTEM = {"role": "system", "content": "  You are helpful.\n"}
_USER = {"role": "user", "content": "What is the weather in Zürich?  "}
_CALL = {
    "id": "call_12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": [1, 2.5]}'},
}
_TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_TOOL_RESULT = {"role": "tool", "tool_call_id": "call_12345", "content": '{"celsius": 21}'}
_PARTS = {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two\n"}]}
_ANSWER = {"role": "assistant", "content": "Sunny, and\n\nwarm. "}

_SAMPLES: tuple[tuple[str, Shape, str, dict[str, object]], ...] = (
    ("a question", Shape.CHAT, "chat/completions", {"messages": [_USER]}),
    ("an answered question", Shape.CHAT, "chat/completions", {"messages": [_USER, _ANSWER, _USER]}),
    ("odd text", Shape.CHAT, "chat/completions", {"messages": [{"role": "user", "content": _TEXT}]}),
    ("a conversation", Shape.SYSTEM, "chat/completions", {"messages": [_SYSTEM, _USER, _ANSWER, _USER]}),
    ("content in parts", Shape.PARTS, "chat/completions", {"messages": [_PARTS, _ANSWER, _PARTS]}),
    ("tools", Shape.TOOLS, "chat/completions", {"messages": [_USER], "tools": [_WEATHER, _CLOCK]}),
    (
        "a tool's answer",
        Shape.CALLS,
        "chat/completions",
        {"messages": [_SYSTEM, _USER, _TOOL_CALL, _TOOL_RESULT, _ANSWER, _USER], "tools": [_WEATHER]},
    ),
    (
        "a developer message",
        Shape.DEVELOPER,
        "chat/completions",
        {"messages": [{**_SYSTEM, "role": "developer"}, _USER]},
    ),
    (
        "a message to continue",
        Shape.CONTINUED,
        "chat/completions",
        {"messages": [_USER, _ANSWER], "add_generation_prompt": False, "continue_final_message": True},
    ),
    (
        "no generation prompt",
        Shape.OPEN,
        "chat/completions",
        {"messages": [_USER], "add_generation_prompt": False},
    ),
    (
        "added special tokens",
        Shape.SPECIAL,
        "chat/completions",
        {"messages": [_USER], "add_special_tokens": True},
    ),
    (
        "reasoning",
        Shape.REASONING,
        "chat/completions",
        {"messages": [_USER, {**_ANSWER, "reasoning": "Hm."}, _USER]},
    ),
    ("an effort", Shape.EFFORT, "chat/completions", {"messages": [_USER], "reasoning_effort": "low"}),
    (
        "a response format",
        Shape.FORMAT,
        "chat/completions",
        {"messages": [_USER], "response_format": {"type": "json_object"}},
    ),
    (
        "a tool choice",
        Shape.CHOICE,
        "chat/completions",
        {"messages": [_USER], "tools": [_WEATHER], "tool_choice": "required"},
    ),
    ("a text", Shape.TEXT, "completions", {"prompt": _TEXT}),
    ("a bare text", Shape.TEXT, "completions", {"prompt": "  " + _TEXT, "add_special_tokens": False}),
)
# A message's field -> the shape of chats that have it.
_FIELDS: Mapping[str, Shape] = {
    "tool_calls": Shape.CALLS,
    "reasoning": Shape.REASONING,
    "reasoning_content": Shape.REASONING,
}
_ROLES: Mapping[str, Shape] = {
    "system": Shape.SYSTEM,
    "developer": Shape.DEVELOPER,
    "tool": Shape.CALLS,
}


def shapes_of(request: InferenceRequest) -> frozenset[Shape]:
    """The shapes of a request. Decodes the body. Raises Inexact."""
    path = request.endpoint.path
    body = decoded(request)
    if path == "/v1/completions" or ("messages" not in body and "input" not in body):
        return frozenset((Shape.TEXT,))
    if path not in ("/v1/chat/completions", "/invocations"):
        # Samples do not cover these endpoints, which become chats of any shape.
        return frozenset(Shape) - {Shape.TEXT}
    shapes = {Shape.CHAT}
    for message in body.get("messages") or ():
        if not isinstance(message, dict):
            continue
        shapes.update(shape for name, shape in _FIELDS.items() if message.get(name))
        if isinstance(message.get("content"), list):
            shapes.add(Shape.PARTS)
        if (shape := _ROLES.get(str(message.get("role")))) is not None:
            shapes.add(shape)
    has = {
        Shape.TOOLS: body.get("tools") is not None,
        Shape.CONTINUED: body.get("continue_final_message") is True,
        Shape.OPEN: body.get("add_generation_prompt") is False,
        Shape.SPECIAL: body.get("add_special_tokens") is True,
        Shape.EFFORT: body.get("reasoning_effort") is not None,
        Shape.FORMAT: _kind(body.get("response_format")) not in (None, "text"),
        Shape.CHOICE: body.get("tool_choice") not in (None, "auto", "none"),
    }
    return frozenset(shapes | {shape for shape, is_there in has.items() if is_there})


def _kind(response_format: Any) -> Any:
    return response_format.get("type") if isinstance(response_format, dict) else response_format


Tokenize = Callable[[InferenceRequest], Awaitable[tuple[Sequence[int], ...]]]


@dataclass(frozen=True, slots=True)
class Sample:
    """A request and what it shows."""

    name: str
    shape: Shape
    request: InferenceRequest


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of a comparison of token ids with a reference, by sample."""

    agreed: int
    differing: tuple[Sample, ...]
    """Samples with different ids, or with ids by the reference only."""
    unanswered: int
    """Number of samples that the reference refused; these do not count."""

    @property
    def shapes(self) -> frozenset[Shape]:
        """The shapes of requests for which the ids differ."""
        return frozenset(sample.shape for sample in self.differing)

    @property
    def names(self) -> str:
        return ", ".join(sample.name for sample in self.differing)


def samples(model: str) -> list[Sample]:
    return [
        Sample(
            name,
            shape,
            parse_request(ENDPOINTS[f"/v1/{path}"], msgspec.json.encode({"model": model, **body})),
        )
        for name, shape, path, body in _SAMPLES
    ]


async def compare(model: str, ours: Tokenize, reference: Tokenize) -> Agreement:
    """Tokenize every sample with both functions, one after another, and compare the ids."""
    agreed = unanswered = 0
    differing = []
    for sample in samples(model):
        expected = await _ids(reference, sample.request)
        if expected is None:
            unanswered += 1
        elif await _ids(ours, sample.request) == expected:
            agreed += 1
        else:
            differing.append(sample)
    return Agreement(agreed, tuple(differing), unanswered)


async def _ids(tokenize: Tokenize, request: InferenceRequest) -> tuple[Sequence[int], ...] | None:
    try:
        return await tokenize(request)
    except Inexact:
        return None
