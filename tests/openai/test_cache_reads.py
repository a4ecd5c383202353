"""Which requests read the engine's prefix cache, for every way in which a body is parsed."""

from __future__ import annotations

import json

import pytest

from kvroute.openai.bounded import Bounded
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.prefix_cache import SeenBodies, large_request
from kvroute.openai.request import parse_request

PROMPT, CHAT = {"prompt": "hello"}, {"messages": [{"role": "user", "content": "hello"}]}


def reads(path: str, body: dict[str, object]) -> bool:
    return parse_request(ENDPOINTS[path], json.dumps(body).encode()).reads_cache


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT | {"prompt_logprobs": 0}),
        ("/v1/completions", PROMPT | {"prompt_logprobs": -1}),
        ("/v1/completions", PROMPT | {"echo": True, "logprobs": 0}),
        ("/v1/completions", PROMPT | {"echo": "true", "logprobs": 1}),
        ("/v1/completions", PROMPT | {"use_beam_search": True}),
        ("/v1/chat/completions", CHAT | {"prompt_logprobs": 5}),
        ("/v1/chat/completions", CHAT | {"echo": True}),
        ("/v1/chat/completions", CHAT | {"echo": True, "top_logprobs": 0}),
        ("/v1/chat/completions", CHAT | {"use_beam_search": True}),
        ("/invocations", CHAT | {"echo": True}),
        ("/invocations", PROMPT | {"echo": True, "logprobs": 2}),
        ("/invocations", {"input": "x", "task": "token_embed"}),
        ("/pooling", {"input": "x", "task": "token_embed"}),
        ("/pooling", {"input": "x", "task": "token_classify"}),
        ("/pooling", {"input": "x", "task": "plugin"}),
    ],
)
def test_results_for_each_prompt_token_need_the_whole_prompt(path, body):
    assert not reads(path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT),
        ("/v1/completions", PROMPT | {"prompt_logprobs": None, "echo": False, "use_beam_search": None}),
        ("/v1/completions", PROMPT | {"echo": True}),
        ("/v1/completions", PROMPT | {"echo": True, "top_logprobs": 3}),
        ("/v1/completions", PROMPT | {"logprobs": 5}),
        ("/v1/chat/completions", CHAT | {"echo": True, "top_logprobs": None}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 5}),
        ("/invocations", PROMPT | {"echo": True}),
        ("/v1/messages", CHAT | {"echo": True, "prompt_logprobs": 1}),
        ("/v1/responses", {"input": "x", "prompt_logprobs": 1}),
        ("/pooling", {"input": "x"}),
        ("/pooling", {"input": "x", "task": "embed"}),
        ("/v1/embeddings", {"input": "x", "task": "token_embed"}),
    ],
)
def test_all_others_read_the_cache(path, body):
    assert reads(path, body)


def outcome(steps):
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("extra", [{"echo": True}, {"prompt_logprobs": 0}, {"logprobs": True}])
@pytest.mark.parametrize("first", [True, False], ids=["before the messages", "after them"])
def test_every_way_of_parsing_gives_the_same(extra, first):
    """Of a conversation that came before, most of the messages are not decoded."""
    messages = [{"role": "user", "content": f"{number} " * 4000} for number in range(8)]
    body = {**extra, "messages": messages} if first else {"messages": messages, **extra}
    data, endpoint = json.dumps(body).encode(), ENDPOINTS["/v1/chat/completions"]
    seen = SeenBodies(seed=1, cut_bytes=64)
    expected = "logprobs" in extra

    assert parse_request(endpoint, data).reads_cache is expected
    found = [seen.read(endpoint, data) for _ in range(4)]
    assert found[-1].seen is not None
    assert {each.reads_cache for each in found} == {expected}
    steps = large_request(endpoint, data, "", Bounded())
    assert outcome(steps).reads_cache is expected
