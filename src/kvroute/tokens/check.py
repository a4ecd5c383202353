"""Sample requests that show whether two ways of tokenizing agree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.tokens.encoders import SAMPLES
from kvroute.tokens.reason import Inexact

Tokenize = Callable[[InferenceRequest], Awaitable[tuple[Sequence[int], ...]]]

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
_ASKED = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_TOLD = {"role": "tool", "tool_call_id": "call_12345", "content": '{"celsius": 21}'}
_PARTS = {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two\n"}]}
_ANSWER = {"role": "assistant", "content": "Sunny, and\n\nwarm. "}

_SAMPLES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("a question", "chat/completions", {"messages": [_USER]}),
    ("a conversation", "chat/completions", {"messages": [_SYSTEM, _USER, _ANSWER, _USER]}),
    ("odd text", "chat/completions", {"messages": [{"role": "user", "content": _TEXT}]}),
    ("content in parts", "chat/completions", {"messages": [_SYSTEM, _PARTS, _ANSWER, _PARTS]}),
    ("tools", "chat/completions", {"messages": [_USER], "tools": [_WEATHER, _CLOCK]}),
    (
        "a tool's answer",
        "chat/completions",
        {"messages": [_SYSTEM, _USER, _ASKED, _TOLD, _ANSWER, _USER], "tools": [_WEATHER]},
    ),
    ("a developer message", "chat/completions", {"messages": [{**_SYSTEM, "role": "developer"}, _USER]}),
    (
        "a message to continue",
        "chat/completions",
        {"messages": [_USER, _ANSWER], "add_generation_prompt": False, "continue_final_message": True},
    ),
    ("no generation prompt", "chat/completions", {"messages": [_USER], "add_generation_prompt": False}),
    ("added special tokens", "chat/completions", {"messages": [_USER], "add_special_tokens": True}),
    ("reasoning", "chat/completions", {"messages": [_USER, {**_ANSWER, "reasoning": "Hm."}, _USER]}),
    ("an effort", "chat/completions", {"messages": [_USER], "reasoning_effort": "low"}),
    ("a text", "completions", {"prompt": _TEXT}),
    ("a bare text", "completions", {"prompt": "  " + _TEXT, "add_special_tokens": False}),
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """`differing` names samples whose ids are not the reference's, or that only the reference has."""

    agreed: int
    differing: tuple[str, ...]
    unanswered: int
    """Samples that the reference refused: they say nothing."""


def sample_requests(model: str) -> list[tuple[str, InferenceRequest]]:
    """What each sample shows, and the sample."""
    return [
        (shows, parse_request(ENDPOINTS[f"/v1/{path}"], msgspec.json.encode({"model": model, **body})))
        for shows, path, body in _SAMPLES
    ]


async def compare(model: str, ours: Tokenize, reference: Tokenize) -> Agreement:
    """Both ways on every sample, one after the other."""
    agreed = unanswered = 0
    differing = []
    for shows, request in sample_requests(model):
        expected = await _ids(reference, request)
        if expected is None:
            unanswered += 1
        elif await _ids(ours, request) == expected:
            agreed += 1
        else:
            differing.append(shows)
    return Agreement(agreed, tuple(differing), unanswered)


async def _ids(tokenize: Tokenize, request: InferenceRequest) -> tuple[Sequence[int], ...] | None:
    try:
        return await tokenize(request)
    except Inexact:
        return None
