"""Tokenize, detokenize, audio and SageMaker's invocations."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions


async def test_detokenize_reverses_tokenize(http: httpx.AsyncClient) -> None:
    body = {"model": "sim-model", "prompt": "Grüße, 世界", "return_token_strs": True}
    tokens = (await http.post("/tokenize", json=body)).json()
    text = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()

    assert text == {"prompt": "Grüße, 世界"}
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 131_072


async def test_tools_come_before_the_messages(http: httpx.AsyncClient, weather: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "hello"}]
    plain = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    tools = [{"type": "function", "function": weather}]
    tooled = (await http.post("/tokenize", json={"messages": messages, "tools": tools})).json()["tokens"]

    assert tooled[-len(plain) :] == plain
    assert len(tooled) > len(plain)


async def test_content_parts_are_joined_by_newlines(http: httpx.AsyncClient) -> None:
    def body(content: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}]}

    parts = [{"type": "text", "text": "one"}, "two"]
    joined = (await http.post("/tokenize", json=body(parts))).json()
    plain = (await http.post("/tokenize", json=body("one\ntwo"))).json()
    image = [*parts, {"type": "image_url", "image_url": {"url": "data:x"}}]
    pictured = (await http.post("/tokenize", json=body(image))).json()

    assert joined["tokens"] == plain["tokens"]
    assert pictured["count"] > plain["count"] + 30


async def test_audio_becomes_a_text_with_its_size(client: openai.AsyncOpenAI) -> None:
    transcript = await client.audio.transcriptions.create(model="sim-model", file=("a.wav", b"RIFF" * 10))
    stream = await client.audio.transcriptions.create(
        model="sim-model", file=("a.wav", b"RIFF" * 10), stream=True
    )
    pieces = [chunk.model_dump()["choices"][0]["delta"]["content"] async for chunk in stream]

    assert transcript.text == "Simulated transcription of 40 bytes."
    assert "".join(pieces) == transcript.text


async def test_audio_formats_and_translation(http: httpx.AsyncClient) -> None:
    files = {"file": ("a.wav", b"\r\n--x\r\n\0\xff" * 3)}
    plain = await http.post("/v1/audio/transcriptions", files=files, data={"response_format": "text"})
    verbose = await http.post(
        "/v1/audio/transcriptions", files=files, data={"response_format": "verbose_json"}
    )
    translated = await http.post("/v1/audio/translations", files=files, data={"model": "sim-model"})

    assert plain.text == '"Simulated transcription of 27 bytes."'
    assert verbose.json()["language"] == "en"
    assert translated.json() == {"text": "Simulated translation of 27 bytes."}


async def test_wrong_forms_are_refused(http: httpx.AsyncClient) -> None:
    path = "/v1/audio/transcriptions"
    answers = [
        await http.post(path, json={}),
        await http.post(path, files={"other": b"x"}),
        await http.post(path, content=b"x", headers={"content-type": "multipart/form-data"}),
        await http.post(path, files={"file": b"x"}, data={"model": "nobody"}),
    ]

    assert [answer.status_code for answer in answers] == [400, 400, 400, 404]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "chat.completion"),
        ({"prompt": "x"}, "text_completion"),
        ({"input": "x"}, "list"),
        ({"text_1": "x", "text_2": "y"}, "list"),
    ],
)
async def test_invocations_find_the_endpoint(
    http: httpx.AsyncClient, body: dict[str, Any], kind: str
) -> None:
    assert (await http.post("/invocations", json=body)).json()["object"] == kind


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", {}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 7}),
        ("/tokenize", {"messages": 7}),
        ("/tokenize", {"messages": [{"role": "user", "content": 7}]}),
        ("/tokenize", {"messages": [{"content": "x"}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [1 << 30]}),
    ],
)
async def test_wrong_requests_are_refused(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    assert (await http.post(path, json=body)).status_code == 400


async def test_invocations_take_the_model_from_the_header_and_never_from_the_body() -> None:
    options = SimOptions(loras={"ada": "sim-model"}, kv_events=False, time_scale=0)
    async with run_sim(options) as sim, httpx.AsyncClient(base_url=sim.url) as client:
        for headers, model in (({}, "sim-model"), ({"X-Amzn-SageMaker-Adapter-Identifier": "ada"}, "ada")):
            for named in ("sim-model", "ada", "unknown"):
                body = {"model": named, "prompt": "x", "max_tokens": 1}
                answer = await client.post("/invocations", json=body, headers=headers)
                assert answer.json()["model"] == model


async def test_a_session_is_opened_used_and_closed() -> None:
    options = SimOptions(stateful_sessions=True, kv_events=False, time_scale=0)
    async with run_sim(options) as sim, httpx.AsyncClient(base_url=sim.url) as client:
        opened = await client.post("/invocations", json={"requestType": "NEW_SESSION"})
        session = opened.headers["x-amzn-sagemaker-new-session-id"].partition("; Expires=")[0]
        headers = {"x-amzn-sagemaker-session-id": session}

        assert (await client.post("/invocations", json={"prompt": "x"}, headers=headers)).status_code == 200
        closed = await client.post("/invocations", json={"requestType": "CLOSE"}, headers=headers)
        assert closed.headers["x-amzn-sagemaker-closed-session-id"] == session
        assert (await client.post("/invocations", json={"prompt": "x"}, headers=headers)).status_code == 400
