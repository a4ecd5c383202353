"""The official clients, through the gateway, answered by real vLLM workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

# The first test waits for the engines.
pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Say hello to the gardener."}]
COLOURS = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "amount": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["colour", "amount"],
    "additionalProperties": False,
}
PAINT = {"name": "paint", "description": "Paint something.", "parameters": COLOURS, "strict": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway.openai() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def claude(gateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="unused", max_retries=0) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as made:
        yield made


@pytest.fixture(scope="module")
def no_spaces(model_folder: Path) -> dict[str, int]:
    """A bias against white space: left to itself, noise fills a tool call with it."""
    vocabulary = json.loads((model_folder / "tokenizer.json").read_text())["model"]["vocab"]
    blank = [token for text, token in vocabulary.items() if not text.strip("ĠĊčĉ")]
    return {str(token): -100 for token in blank}


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)

    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


async def test_a_chat_answer_names_its_worker_and_reason(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=1)

    assert raw.headers["x-kvroute-worker"] in {"a", "b"}
    assert raw.headers["x-kvroute-strategy"] == "prefixaware"
    assert raw.headers["x-kvroute-reason"]
    assert raw.headers["x-request-id"]


async def test_streamed_chat_equals_the_plain_one(client: openai.AsyncOpenAI) -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 64, "temperature": 0}
    plain = await client.chat.completions.create(**asked)

    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == plain.choices[0].message.content
    assert len(pieces) > 1
    assert chunks[-1].usage.completion_tokens == 64


async def test_tools(client: openai.AsyncOpenAI, no_spaces: dict[str, int]) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[{"type": "function", "function": PAINT}],
        tool_choice={"type": "function", "function": {"name": "paint"}},
        max_tokens=200,
        logit_bias=no_spaces,
    )

    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in {"red", "blue"}


async def test_a_tool_result_goes_back(client: openai.AsyncOpenAI) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "paint", "arguments": '{"amount": 3}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "painted"},
    ]

    answer = await client.chat.completions.create(
        model=MODEL, messages=history, tools=[{"type": "function", "function": PAINT}], max_tokens=4
    )

    assert answer.usage.completion_tokens == 4


async def test_several_choices(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, n=3)

    assert [choice.index for choice in answer.choices] == [0, 1, 2]


async def test_log_probabilities(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
    )

    content = answer.choices[0].logprobs.content
    assert len(content) == 3
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in content)


async def test_structured_output(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "paint", "schema": COLOURS}},
    )

    painted = json.loads(answer.choices[0].message.content)
    assert painted["colour"] in {"red", "blue"}
    assert 0 <= painted["amount"] <= 9


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [
        ("The careful gardener", 1),
        (["The careful gardener", "The river"], 2),
        ([400, 401, 402], 1),
        ([[400, 401, 402], [500, 501]], 2),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_completions_take_every_shape_of_prompt(
    client: openai.AsyncOpenAI, prompt: object, choices: int
) -> None:
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=5)

    assert len(answer.choices) == choices
    assert answer.usage.completion_tokens == 5 * choices


async def test_streamed_completion(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt="The river", max_tokens=64, stream=True)

    # A busy engine sends several tokens at a time.
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert len(pieces) > 1
    assert "".join(pieces)


async def test_models(client: openai.AsyncOpenAI) -> None:
    listed = [model.id async for model in client.models.list()]

    assert listed == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody/serves-this")


async def test_responses_are_found_where_they_were_made(client: openai.AsyncOpenAI) -> None:
    """Six conversations: by chance alone all would hit their worker once in 64 runs."""
    for _ in range(6):
        first = await client.responses.create(model=MODEL, input="Hello there.", max_output_tokens=8)
        second = await client.responses.create(
            model=MODEL, input="And now?", previous_response_id=first.id, max_output_tokens=8
        )

        assert second.previous_response_id == first.id
        assert (await client.responses.retrieve(first.id)).id == first.id
        assert (await client.responses.retrieve(second.id)).output_text == second.output_text


async def test_streamed_responses(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model=MODEL, input="Hello.", max_output_tokens=64, stream=True)

    kinds = [event.type async for event in stream]
    assert kinds[0] == "response.created"
    assert kinds.count("response.output_text.delta") > 1


async def test_a_streamed_response_is_found_again(client: openai.AsyncOpenAI) -> None:
    for _ in range(4):
        stream = await client.responses.create(model=MODEL, input="Hi.", max_output_tokens=4, stream=True)
        made = [event.response.id async for event in stream if event.type == "response.created"]

        assert (await client.responses.retrieve(made[0])).id == made[0]


async def test_an_unknown_model_is_the_gateways_own_404(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        await client.chat.completions.create(model="nobody", messages=HELLO)

    assert error.value.code == "model_not_found"


async def test_the_engines_errors_come_back_as_they_are(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model=MODEL, prompt=[400] * 5000)
    with pytest.raises(openai.BadRequestError, match="non-empty"):
        await client.completions.create(model=MODEL, prompt="")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)


async def test_an_endpoint_that_the_model_does_not_have_is_the_engines_404(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model=MODEL, input="hello")


async def test_messages(claude: anthropic.AsyncAnthropic) -> None:
    answer = await claude.messages.create(model=MODEL, system="Be kind.", messages=HELLO, max_tokens=8)

    assert answer.content[0].type == "text"
    assert answer.usage.output_tokens == 8
    assert answer.stop_reason == "max_tokens"


async def test_streamed_messages(claude: anthropic.AsyncAnthropic) -> None:
    async with claude.messages.stream(model=MODEL, messages=HELLO, max_tokens=64) as stream:
        pieces = [text async for text in stream.text_stream]
        final = await stream.get_final_message()

    assert "".join(pieces) == final.content[0].text
    assert len(pieces) > 1


async def test_counted_messages(claude: anthropic.AsyncAnthropic) -> None:
    short = await claude.messages.count_tokens(model=MODEL, messages=HELLO)
    long = await claude.messages.count_tokens(model=MODEL, system="Be kind.", messages=HELLO)

    assert 0 < short.input_tokens < long.input_tokens


async def test_an_unknown_model_is_an_error_for_messages_too(claude: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="nobody", messages=HELLO, max_tokens=8)


async def test_tokens_go_there_and_back(http: httpx.AsyncClient) -> None:
    tokens = (await http.post("/tokenize", json={"model": MODEL, "prompt": "The river waits."})).json()[
        "tokens"
    ]
    text = (await http.post("/detokenize", json={"model": MODEL, "tokens": tokens})).json()["prompt"]

    assert text == "The river waits."


async def test_chats_are_tokenized_with_their_tools(http: httpx.AsyncClient) -> None:
    chat = {"model": MODEL, "messages": HELLO}
    plain = (await http.post("/tokenize", json=chat)).json()
    tools = [{"type": "function", "function": PAINT}]
    equipped = (await http.post("/tokenize", json={**chat, "tools": tools})).json()

    assert plain["count"] < equipped["count"]


async def test_invocations(http: httpx.AsyncClient) -> None:
    answer = await http.post("/invocations", json={"model": MODEL, "prompt": "The river", "max_tokens": 2})

    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_work_at_the_engine(
    http: httpx.AsyncClient, engines, stream: bool
) -> None:
    """Otherwise a gateway keeps engines busy with answers that no client reads.

    vLLM 0.32 does not count requests that its own client left as aborted, so the proof is in the
    tokens that it did not generate. Where its server and its engine fight for one core, the server may be
    silent until the answer is nearly complete, and the client leaves too late: the test tries again. A
    gateway that does not end the work lets the engine generate every answer whole: no attempt succeeds.
    """

    async def total(name: str) -> float:
        return sum(await asyncio.gather(*(engine.metric(name) for engine in engines)))

    # Four choices: the engine needs longer for them than its server needs to answer `/metrics`.
    body = {
        "model": MODEL,
        "prompt": "The river",
        "max_tokens": 3900,
        "ignore_eos": True,
        "stream": stream,
        "n": 4,
    }
    whole = 4 * 3900
    generated = []
    while len(generated) < 5 and min(generated, default=whole) >= whole / 2:
        before = await total("vllm:generation_tokens_total")
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        async with asyncio.timeout(30):
            while not await total("vllm:num_requests_running") and not asking.done():
                await asyncio.sleep(0.1)  # `/metrics` takes the server's time, too
        if asking.done():
            assert asking.result().status_code == 200
        asking.cancel()
        await asyncio.wait({asking})
        async with asyncio.timeout(30):
            while await total("vllm:num_requests_running"):
                await asyncio.sleep(0.01)
        generated.append(await total("vllm:generation_tokens_total") - before)

    assert min(generated) < whole / 2, f"tokens per attempt: {generated}"
