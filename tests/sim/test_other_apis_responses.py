"""The openai package against /v1/responses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from tests.support.waiting import until

from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault


async def test_an_answer_is_stored_and_can_be_continued(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="sim-model", input="hello " * 30, instructions="Be brief.")
    again = await client.responses.retrieve(first.id)
    second = await client.responses.create(model="sim-model", input="more", previous_response_id=first.id)

    assert first.status == "completed"
    assert again == first
    assert second.previous_response_id == first.id
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.output_tokens + 60


async def test_a_continued_conversation_hits_the_cache(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="sim-model", input="hello " * 30)
    second = await client.responses.create(model="sim-model", input="more", previous_response_id=first.id)

    assert first.usage is not None
    assert second.usage is not None
    computed = first.usage.input_tokens + first.usage.output_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens == computed // 16 * 16


async def test_an_unknown_response_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as create:
        await client.responses.create(model="sim-model", input="x", previous_response_id="resp_no")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_no")
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_no")

    assert create.value.param == "response_id"
    assert create.value.type == "invalid_request_error"


async def test_a_response_with_store_false_is_not_stored(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="sim-model", input="x", store=False)

    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)


async def test_responses_belong_to_one_process(client: openai.AsyncOpenAI, options: SimOptions) -> None:
    answer = await client.responses.create(model="sim-model", input="x")
    async with run_sim(options) as other, httpx.AsyncClient(base_url=other.url) as http:
        assert (await http.get(f"/v1/responses/{answer.id}")).status_code == 404


async def test_a_stream_has_the_packages_events_in_order(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="sim-model", input="hello", max_output_tokens=3) as stream:
        events = [event.type async for event in stream]

    assert events == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


async def test_a_streamed_answer_is_the_plain_one_and_is_stored(client: openai.AsyncOpenAI) -> None:
    plain = await client.responses.create(model="sim-model", input="hello")
    async with client.responses.stream(model="sim-model", input="hello") as stream:
        final = await stream.get_final_response()

    assert final.output_text == plain.output_text
    assert (await client.responses.retrieve(final.id)).output_text == plain.output_text


async def test_functions_are_called_plain_and_streamed(
    client: openai.AsyncOpenAI, weather: dict[str, Any]
) -> None:
    tool: Any = {"type": "function", **weather}
    named: Any = {"type": "function", "name": "weather"}
    plain = await client.responses.create(model="sim-model", input="x", tools=[tool], tool_choice="required")
    async with client.responses.stream(
        model="sim-model", input="x", tools=[tool], tool_choice=named
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()

    for response in (plain, final):
        call = response.output[0]
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "x"})
    assert "response.function_call_arguments.done" in kinds

    answered = await client.responses.create(
        model="sim-model",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
        ],
    )
    assert answered.output_text
    follow = await client.responses.create(model="sim-model", input="and?", previous_response_id=plain.id)
    assert follow.output_text


class Person(BaseModel):
    name: str


async def test_structured_output_is_an_instance_of_the_schema(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.parse(model="sim-model", input="x", text_format=Person)
    plain = await client.responses.create(
        model="sim-model", input="x", text={"format": {"type": "json_object"}}
    )

    assert answer.output_parsed == Person(name="x")
    assert plain.output_text == "{}"


async def test_a_background_answer_completes_by_itself(client: openai.AsyncOpenAI, sim: RunningSim) -> None:
    queued = await client.responses.create(model="sim-model", input="x", background=True)
    assert queued.status == "queued"

    await until(lambda: not sim.worker.tasks)

    assert (await client.responses.retrieve(queued.id)).output_text


async def test_only_a_response_in_the_background_can_be_cancelled(
    client: openai.AsyncOpenAI, sim: RunningSim
) -> None:
    done = await client.responses.create(model="sim-model", input="x")
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(done.id)

    running = await client.responses.create(
        model="sim-model", input="x", background=True, max_output_tokens=100_000
    )
    cancelled = await client.responses.cancel(running.id)

    assert cancelled.status == "cancelled"
    await until(lambda: not sim.worker.tasks and not sim.engine.has_work)
    assert sim.worker.driver.finished["abort"] == 1


@pytest.mark.parametrize("given", [None, 7, [7], [{"type": "unheard_of"}], [{"content": "no role"}]])
async def test_wrong_inputs_are_refused(http: httpx.AsyncClient, given: object) -> None:
    answer = await http.post("/v1/responses", json={"input": given})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("body.input")


async def test_a_cut_stream_leaves_no_complete_answer_behind(
    sim: RunningSim, http: httpx.AsyncClient
) -> None:
    sim.worker.faults.add(Fault(kind="reset", after_chunks=3))

    with pytest.raises(httpx.TransportError):
        await http.post("/v1/responses", json={"input": "x", "stream": True})

    (stored,) = sim.worker.responses.values()
    assert stored.record["status"] == "in_progress"
