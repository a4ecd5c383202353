"""The official clients, unmodified, through the gateway."""

import anthropic
import openai
import pytest
from pydantic import BaseModel

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture
async def gateway(run_gateway):
    options = SimOptions(time_scale=0, models=("m",), loras={"ada": "m"})
    async with (
        run_sim(options) as one,
        run_sim(options) as two,
        run_gateway([one.url, two.url], fleet={"aliases": {"gpt-4o": "m"}}) as running,
    ):
        yield running


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat(client):
    answer = await client.chat.completions.create(model="m", messages=ASK, max_tokens=8)

    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


async def test_streamed_chat(client):
    stream = await client.chat.completions.create(
        model="m", messages=ASK, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens == 8


async def test_tools_and_several_choices_and_logprobs(client):
    called = await client.chat.completions.create(
        model="m", messages=ASK, tools=[TOOL], tool_choice="required"
    )
    several = await client.chat.completions.create(
        model="m", messages=ASK, n=3, logprobs=True, top_logprobs=2
    )

    assert called.choices[0].message.tool_calls[0].function.name == "weather"
    assert len(several.choices) == 3
    assert several.choices[0].logprobs.content


async def test_structured_output(client):
    class Weather(BaseModel):
        city: str
        degrees: int

    answer = await client.chat.completions.parse(model="m", messages=ASK, response_format=Weather)

    assert isinstance(answer.choices[0].message.parsed, Weather)


@pytest.mark.parametrize(
    ("prompt", "choices"), [("text", 1), (["one", "two"], 2), ([1, 2, 3], 1), ([[1, 2], [3, 4]], 2)]
)
async def test_completions_with_every_prompt_shape(client, prompt, choices):
    answer = await client.completions.create(model="m", prompt=prompt, max_tokens=4)

    assert len(answer.choices) == choices


async def test_embeddings(client):
    answer = await client.embeddings.create(model="m", input=["a", "b"])

    assert len(answer.data) == 2


async def test_responses_stay_with_the_worker_that_made_them(client, gateway):
    for strategy_turn in range(4):
        first = await client.responses.create(model="m", input=f"Remember {strategy_turn}.")
        held = await client.responses.with_raw_response.retrieve(first.id)
        second = await client.responses.with_raw_response.create(
            model="m", input="And now?", previous_response_id=first.id
        )

        assert held.parse().id == first.id
        assert second.headers["x-kvroute-reason"] in ("response_owner", "only_worker")
        assert second.headers["x-kvroute-worker"] == held.headers["x-kvroute-worker"]


async def test_streamed_responses_are_remembered_too(client):
    events = [event async for event in await client.responses.create(model="m", input="Hi.", stream=True)]
    response_id = events[-1].response.id

    again = await client.responses.with_raw_response.create(
        model="m", input="More.", previous_response_id=response_id
    )

    assert again.headers["x-kvroute-reason"] == "response_owner"


async def test_a_restarted_gateway_finds_a_stored_response_at_its_worker(client, gateway):
    first = await client.responses.create(model="m", input="Hi.")
    gateway.runtime.plane.deps.owners.forget_worker(gateway.runtime.fleet.workers()[0].id)
    gateway.runtime.plane.deps.owners.forget_worker(gateway.runtime.fleet.workers()[1].id)

    again = await client.responses.create(model="m", input="More.", previous_response_id=first.id)

    assert again.id


async def test_an_unknown_response_is_the_workers_404(client):
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_unknown")
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="m", input="x", previous_response_id="resp_unknown")


async def test_models_adapters_and_aliases_are_listed(client):
    listed = {model.id async for model in client.models.list()}

    assert listed == {"m", "ada", "gpt-4o"}
    assert (await client.models.retrieve("ada")).parent == "m"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("unknown")


async def test_an_alias_reaches_its_model(client):
    answer = await client.chat.completions.create(model="gpt-4o", messages=ASK, max_tokens=2)

    assert answer.model == "m"


async def test_errors_are_the_packages_own(client, gateway):
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nope", messages=ASK)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="m", prompt="")
    for worker in gateway.runtime.fleet.workers():
        await gateway.client.post(
            f"{worker.spec.url}/sim/faults", json={"kind": "status", "status": 429, "path": "/v1/chat"}
        )
    with pytest.raises(openai.InternalServerError) as busy:
        await client.chat.completions.create(model="m", messages=ASK)
    assert (busy.value.status_code, busy.value.code) == (503, "workers_busy")


async def test_a_broken_stream_raises_api_error(client, run_gateway):
    async with run_sim(SimOptions(time_scale=0)) as sim, run_gateway([sim.url]) as gateway:
        sim.worker.faults.add(Fault(kind="reset", after_chunks=2))
        stream = await client.with_options(base_url=gateway.url + "/v1").chat.completions.create(
            model="sim-model", messages=ASK, stream=True
        )
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in stream:
                pass


async def test_messages_of_anthropics_client(gateway):
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        answer = await client.messages.create(model="m", max_tokens=8, system="Be kind.", messages=ASK)
        count = await client.messages.count_tokens(model="m", messages=ASK)
        async with client.messages.stream(model="m", max_tokens=8, messages=ASK) as stream:
            text = "".join([part async for part in stream.text_stream])
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="nope", max_tokens=8, messages=ASK)

    assert answer.content[0].text
    assert count.input_tokens > 0
    assert text
