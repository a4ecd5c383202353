"""Embeddings, scores and classes: endpoints that compute a prompt and generate no tokens."""

from __future__ import annotations

import base64
import struct
from typing import Any

import httpx
import openai
import pytest

from kvroute.sim.app import RunningSim


async def test_embeddings_follow_from_the_text_and_have_length_one(client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model="sim-model", input=["one", "two", "one"], dimensions=8)

    one, two, again = (item.embedding for item in answer.data)
    assert one == again != two
    assert len(one) == 8
    assert sum(value * value for value in one) == pytest.approx(1.0, abs=1e-6)
    assert answer.usage.prompt_tokens == 3


async def test_base64_is_the_same_vector(http: httpx.AsyncClient) -> None:
    plain = (await http.post("/v1/embeddings", json={"input": "one"})).json()["data"][0]["embedding"]
    packed = (await http.post("/v1/embeddings", json={"input": "one", "encoding_format": "base64"})).json()

    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(plain)}f", raw) == pytest.approx(plain)


@pytest.mark.parametrize(
    "body", [{"input": [1, 2]}, {"input": [[1], [2, 3]]}, {"messages": [{"role": "user"}]}]
)
async def test_embeddings_take_ids_and_chats(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await http.post("/v1/embeddings", json=body)).status_code == 200


async def test_embedded_prompts_are_cached_too(http: httpx.AsyncClient, sim: RunningSim) -> None:
    for _ in range(2):
        await http.post("/v1/embeddings", json={"input": "a long text " * 20})

    assert sim.engine.counters.cache_hits == 64
    assert sim.engine.counters.generation_tokens == 0


async def test_pooling_and_classes(http: httpx.AsyncClient) -> None:
    pooled = (await http.post("/pooling", json={"input": "abcdef"})).json()
    classes = (await http.post("/classify", json={"input": ["a", "b"]})).json()

    assert [len(item["data"]) for item in pooled["data"]] == [2]
    assert pooled["object"] == "list"
    for item in classes["data"]:
        assert sum(item["probs"]) == pytest.approx(1.0)
        assert item["label"] == f"LABEL_{item['probs'].index(max(item['probs']))}"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_back_best_first(http: httpx.AsyncClient, path: str) -> None:
    body = {"query": "q", "documents": ["a", "b", "c", "d"], "top_n": 3}
    answer = (await http.post(path, json=body)).json()

    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
    assert all(r["document"]["text"] == body["documents"][r["index"]] for r in answer["results"])


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("names", "count"),
    [
        (("text_1", "text_2"), 2),
        (("data_1", "data_2"), 2),
        (("queries", "items"), 2),
        (("queries", "documents"), 2),
    ],
)
async def test_scores_under_every_name(
    http: httpx.AsyncClient, path: str, names: tuple[str, str], count: int
) -> None:
    answer = (await http.post(path, json={names[0]: "q", names[1]: ["a", "b"]})).json()

    assert [item["index"] for item in answer["data"]] == list(range(count))
    assert answer["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {}),
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}),
        ("/v1/embeddings", {"input": "a", "dimensions": "many"}),
        ("/rerank", {"documents": ["a"]}),
        ("/rerank", {"query": "a"}),
        ("/rerank", {"query": "a", "documents": []}),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": "x"}),
        ("/score", {"text_1": "a"}),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}),
        ("/score", {"text_1": 7, "text_2": "b"}),
        ("/classify", {}),
    ],
)
async def test_wrong_requests_are_refused(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    answer = await http.post(path, json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)
