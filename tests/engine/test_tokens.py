"""The gateway's token ids are the ids that an engine computes with."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.exact import ExactPrompts, ExactTokens, Mode, TokenThreads
from kvroute.tokens.local import LocalTokenizer, load_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

MODEL = "tiny"
GENERATED = 1000
USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "  You are helpful.\n"}
PARTS = {"role": "user", "content": [{"type": "text", "text": " one"}, {"type": "text", "text": "two "}]}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Zürich", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "é"}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "call_1", "content": "4"}
ANSWER = {"role": "assistant", "content": "Four, "}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "a question": ("chat/completions", {"messages": [USER]}),
    "a system prompt": ("chat/completions", {"messages": [SYSTEM, USER]}),
    "several turns": ("chat/completions", {"messages": [SYSTEM, USER, ANSWER, USER]}),
    "content in parts": ("chat/completions", {"messages": [PARTS, ANSWER, PARTS]}),
    "tools": ("chat/completions", {"messages": [USER], "tools": [TOOL]}),
    "tools that may not be called": (
        "chat/completions",
        {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    ),
    "a tool's answer": ("chat/completions", {"messages": [USER, ASKED, TOLD], "tools": [TOOL]}),
    "a developer message": ("chat/completions", {"messages": [{**SYSTEM, "role": "developer"}, USER]}),
    "names": ("chat/completions", {"messages": [{**USER, "name": "ada"}]}),
    "an answer to continue": (
        "chat/completions",
        {"messages": [USER, ANSWER], "continue_final_message": True, "add_generation_prompt": False},
    ),
    "no generation prompt": ("chat/completions", {"messages": [USER], "add_generation_prompt": False}),
    "template kwargs": (
        "chat/completions",
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    ),
    "added special tokens": ("chat/completions", {"messages": [USER], "add_special_tokens": True}),
    "a truncated chat": ("chat/completions", {"messages": [SYSTEM, USER], "truncate_prompt_tokens": 9}),
    "an effort and documents": (
        "chat/completions",
        {"messages": [USER], "reasoning_effort": "low", "documents": [{"title": "a", "text": "b"}]},
    ),
    "a text": ("completions", {"prompt": "def f(x):\n    return '你好'"}),
    "a bare text": ("completions", {"prompt": "Hello", "add_special_tokens": False}),
    "texts": ("completions", {"prompt": ["Hello", " world"]}),
    "token ids": ("completions", {"prompt": [5, 6, 7, 8]}),
    "lists of token ids": ("completions", {"prompt": [[5, 6], [7, 8, 9]]}),
    "a truncated text": ("completions", {"prompt": "one two three four", "truncate_prompt_tokens": 3}),
    "echo": ("completions", {"prompt": "Hello", "echo": True}),
}

WORDS = [
    "the",
    "fox",
    "def",
    "return",
    "42",
    "3.14",
    "naïve",
    "你好",
    "👍",
    "\n",
    "\n\n\n",
    "\t",
    "{}",
    "[]",
    "()",
]
WORDS += ["<|end|>", "<|turn|>", "<tool_call>", "I'll", ""]


@pytest.fixture(scope="module")
def local(model_folder: Path) -> LocalTokenizer:
    return LocalTokenizer(load_model(model_folder), SegmentCache(10_000_000))


def request_of(path: str, body: dict[str, Any]) -> InferenceRequest:
    return parse_request(ENDPOINTS[f"/v1/{path}"], json.dumps({"model": MODEL, **body}).encode())


@pytest.mark.parametrize("shape", SHAPES)
async def test_ids_are_the_engines_for_every_shape(
    engines: list[Any], local: LocalTokenizer, shape: str
) -> None:
    path, body = SHAPES[shape]
    asked = {"model": MODEL, **body, "max_tokens": 1, "return_token_ids": True}
    answer = await engines[0].http.post(f"{engines[0].url}/v1/{path}", json=asked)
    assert answer.status_code == 200, answer.text
    given = answer.json()
    choices = given["choices"]
    seen = (
        [given["prompt_token_ids"]]
        if "prompt_token_ids" in given
        else [c["prompt_token_ids"] for c in choices]
    )

    assert [list(ids) for ids in local.prompts(request_of(path, body))] == seen


async def test_ids_are_the_engines_for_a_thousand_generated_chats(
    engines: list[Any], local: LocalTokenizer
) -> None:
    rng, kinds, wrong = random.Random(5), Counter[str](), []
    for number in range(GENERATED):
        body = generated_chat(rng)
        kinds["tools" if "tools" in body else "no tools"] += 1
        answer = await engines[0].http.post(f"{engines[0].url}/tokenize", json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        if local.prompts(request_of("chat/completions", body)) != (array("I", answer.json()["tokens"]),):
            wrong.append(number)

    assert wrong == []
    assert min(kinds.values()) > GENERATED / 4


async def test_the_choice_is_local_with_the_models_files_and_remote_without(
    engines: list[Any], model_folder: Path
) -> None:
    request = request_of("chat/completions", {"messages": [SYSTEM, USER, ASKED, TOLD], "tools": [TOOL]})
    found = []
    async with httpx.AsyncClient(trust_env=False) as http, TokenThreads() as threads:
        for folder in (model_folder, None):
            exact = ExactTokens(threads, http)
            source = await exact.prepare(MODEL, folder=folder, url=engines[0].url)
            assert source.mode is (Mode.LOCAL if folder else Mode.REMOTE), source.explanation
            found.append(await exact.prompts(request, model=MODEL, url=engines[0].url))

    assert isinstance(found[0], ExactPrompts)
    assert isinstance(found[1], ExactPrompts)
    assert found[0].prompts == found[1].prompts


def generated_chat(rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.6:
        messages.append({"role": rng.choice(["system", "developer"]), "content": text(rng)})
    for turn in range(rng.randint(1, 5)):
        messages.append({"role": "user", "content": content(rng)})
        answer: dict[str, Any] = {"role": "assistant", "content": content(rng)}
        if rng.random() < 0.4:
            arguments = rng.choice([json.dumps({"q": text(rng), "n": rng.random()}), "{}", "not json"])
            call = {"function": {"name": "f", "arguments": arguments}, "id": f"c{turn}", "type": "function"}
            answer |= {"tool_calls": [call], "content": rng.choice([None, text(rng)])}
            messages += [answer, {"role": "tool", "tool_call_id": f"c{turn}", "content": content(rng)}]
        else:
            messages.append(answer)
    messages.append({"role": "user", "content": content(rng)})
    body: dict[str, Any] = {"messages": messages}
    if rng.random() < 0.5:
        schema = {"type": "object", text(rng): {"enum": [text(rng), rng.randint(-9, 10**12), None, 0.1]}}
        function = {"parameters": schema, "name": "f", "description": text(rng), "strict": True}
        body["tools"] = [{"function": function, "type": "function"}, TOOL][: rng.randint(1, 2)]
    return body


def content(rng: random.Random) -> Any:
    if rng.random() < 0.7:
        return text(rng)
    return [{"type": "text", "text": text(rng)} for _ in range(rng.randint(1, 3))]


def text(rng: random.Random) -> str:
    return rng.choice(["", " ", "\n"]) + rng.choice([" ", "", "\n"]).join(
        rng.choices(WORDS, k=rng.randint(0, 25))
    )
