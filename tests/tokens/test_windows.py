"""Chats that go on for many turns, with templates that look at more than one message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.support.chat_shapes import TOOLS, asks, call, told
from tests.support.chat_templates import MANNERS, with_template, write_model

from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.tokens.conversations import Conversations
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.local import LocalTokenizer, ModelFiles, load_model

TURNS = 24
PROMPT = {"role": "system", "content": "You are helpful. " * 20}


def request_of(messages: list[Any], **more: Any) -> InferenceRequest:
    body = json.dumps({"model": "tiny", **more, "messages": messages}).encode()
    return parse_request(ENDPOINTS["/v1/chat/completions"], body)


def chatting() -> Iterator[list[Any]]:
    """The new messages of each turn of a plain chat."""
    yield [PROMPT, {"role": "user", "content": "Question 0?"}]
    for number in range(1, TURNS):
        yield [
            {"role": "assistant", "content": f"Answer {number}. " * 9},
            {"role": "user", "content": f"Question {number}?"},
        ]


def looping() -> Iterator[list[Any]]:
    """An agent: one question, then a tool call in each turn."""
    yield [PROMPT, {"role": "user", "content": "Do it."}]
    for number in range(1, TURNS):
        yield [asks({**call(number), "id": f"call{number:05d}"}), result(number)]


def result(number: int) -> dict[str, Any]:
    return {**told(number, f"Result {number}. " * 9), "tool_call_id": f"call{number:05d}"}


def reasoning() -> Iterator[list[Any]]:
    """An agent that thinks: each question leads to two calls and an answer."""
    yield [PROMPT, {"role": "user", "content": "Do 0."}]
    for number in range(1, TURNS):
        one, two = 2 * number, 2 * number + 1
        yield [asks({**call(one), "id": f"call{one:05d}"}, reasoning=f"Thought {one}"), result(one)]
        yield [asks({**call(two), "id": f"call{two:05d}"}, reasoning=f"Thought {two}"), result(two)]
        yield [
            {"role": "assistant", "content": f"Done {number}.", "reasoning": "So."},
            {"role": "user", "content": f"Do {number}."},
        ]


WORKLOADS = {"chat": chatting, "loop": looping, "reasoning": reasoning}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, ModelFiles] = {}

    def load(manner: str) -> ModelFiles:
        if manner not in known:
            folder = write_model(manner, tmp_path_factory.mktemp(manner))
            known[manner] = load_model(folder, now=lambda: datetime(2026, 11, 28))
        return known[manner]

    return load


def remembering(files: ModelFiles) -> LocalTokenizer:
    return LocalTokenizer(files, SegmentCache(10_000_000), None, Conversations(10_000_000, least_bytes=0))


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("has_tools", [False, True])
def test_next_turns_have_the_ids_of_the_whole_chat_and_most_are_served_from_memory(
    files: Any, manner: str, workload: str, has_tools: bool
) -> None:
    model = files(manner)
    tokenizer, bare = remembering(model), LocalTokenizer(model, SegmentCache(10_000_000))
    more = {"tools": TOOLS} if has_tools else {}
    messages: list[Any] = []
    asked = 0
    for new in WORKLOADS[workload]():
        messages = [*messages, *new]
        request = request_of(messages, **more)
        quick = tokenizer.prompts_if_quick(request)
        found = quick if quick is not None else tokenizer.prompts(request)
        asked += 1
        assert found == bare.prompts(request)

    assert tokenizer.turns["differed"] == 0
    served = tokenizer.turns["continued"]
    assert served >= 0.6 * asked, (served, tokenizer.turns["compared"], asked)


COUNTS_MESSAGES = """{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}
{{ m.content }}{% if loop.index == 3 and messages | length > 30 %} (old){% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|turn|>assistant
{% endif %}"""


def test_a_template_that_changes_the_middle_of_a_chat_is_found_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(with_template(COUNTS_MESSAGES, tmp_path))
    tokenizer, bare = remembering(model), LocalTokenizer(model, SegmentCache(0))
    messages: list[Any] = []
    wrong = 0
    for new in [*chatting()] + [*chatting()][1:] * 6:
        messages = [*messages, *new]
        request = request_of(messages)
        wrong += tokenizer.prompts(request) != bare.prompts(request)

    assert tokenizer.turns["differed"] == 1
    assert wrong <= 64  # one of 64 turns is compared
    assert "rendered as a whole" in caplog.text
    assert "Question" not in caplog.text
