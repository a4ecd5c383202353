"""Choosing how a model is tokenized, against a worker that is another tokenizer behind HTTP."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.blocks.media import MediaItem
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.exact import (
    ExactPrompts,
    ExactTokens,
    Mode,
    RemoteEndpoint,
    RemoteTokenizer,
    TokenThreads,
)
from kvroute.tokens.local import LocalTokenizer, load_model
from kvroute.tokens.options import Inexact, TokensReason
from kvroute.tokens.samples import Shape

URL = "http://worker"
USER = {"role": "user", "content": "Hi there"}


class Worker:
    """Answers as vLLM does. Mutable: `asked` grows; the other attributes are set by tests.

    `computes` tokenizes what the worker computes with; None: it does not show these ids.
    """

    def __init__(self, tokenizer: LocalTokenizer, *, renders: bool = False) -> None:
        self.tokenizer = tokenizer
        self.renders = renders
        self.asked: list[tuple[str, Any]] = []
        self.delay_s = 0.0
        self.features: Any = None
        self.media: Any = None
        """The features of chats with images, which are the ids 1, 2, 2, 3, 4, 4 for this worker."""
        self.computes: LocalTokenizer | None = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append((request.url.path, body))
        await asyncio.sleep(self.delay_s)
        path = request.url.path
        if self.media is not None and path.endswith("/render") and b"image_url" in request.content:
            return httpx.Response(200, json={"token_ids": [1, 2, 2, 3, 4, 4], "features": self.media})
        if path.startswith("/v1/") and not path.endswith("render") and self.computes is not None:
            return self.compute(path, body)
        if path == "/tokenize":
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        elif self.renders:
            path = path.removesuffix("/render")
        else:
            return httpx.Response(403)
        try:
            prompts = self.tokenizer.prompts(parse_request(ENDPOINTS[path], json.dumps(body).encode()))
        except Inexact:
            return httpx.Response(400)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"count": len(prompts[0]), "tokens": list(prompts[0])})
        answers = [{"token_ids": list(ids), "features": self.features} for ids in prompts]
        return httpx.Response(200, json=answers if path == "/v1/completions" else answers[0])

    def compute(self, path: str, body: dict[str, Any]) -> httpx.Response:
        assert (body["max_tokens"], body["return_token_ids"]) == (1, True)
        assert self.computes is not None
        try:
            (ids,) = self.computes.prompts(parse_request(ENDPOINTS[path], json.dumps(body).encode()))
        except Inexact:
            return httpx.Response(400)
        if path == "/v1/completions":
            return httpx.Response(200, json={"choices": [{"prompt_token_ids": list(ids)}]})
        return httpx.Response(200, json={"choices": [{}], "prompt_token_ids": list(ids)})


@pytest.fixture
def make_worker(write_model: Callable[..., Any]) -> Callable[..., Worker]:
    def make(template: str = "plain", *, renders: bool = False, **config: Any) -> Worker:
        files = load_model(write_model(template, **config), allow_fastokens=False)
        return Worker(LocalTokenizer(files, SegmentCache(0)), renders=renders)

    return make


@pytest.fixture
async def threads() -> AsyncIterator[TokenThreads]:
    async with TokenThreads(1) as pool:
        yield pool


def client(worker: Worker) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(worker))


async def test_a_model_whose_files_agree_with_the_worker_is_tokenized_here(
    threads: TokenThreads, make_worker: Any, write_model: Any, make_request: Any
) -> None:
    worker = make_worker()
    async with client(worker) as http:
        exact = ExactTokens(threads, http)
        source = await exact.prepare("tiny", folder=write_model(), url=URL)
        worker.asked.clear()
        request = make_request(messages=[USER])
        found = await exact.prompts(request, model="tiny", url=URL)

    assert source.mode is Mode.LOCAL
    assert "17 samples agree" in source.explanation
    assert exact.sources == {"tiny": source}
    assert found == ExactPrompts(worker.tokenizer.prompts(request), Mode.LOCAL)
    assert worker.asked == []


async def test_nothing_is_computed_for_the_comparison_where_the_option_says_so(
    threads: TokenThreads, make_worker: Any, write_model: Any
) -> None:
    worker = make_worker()
    worker.computes = worker.tokenizer
    async with client(worker) as http:
        exact = ExactTokens(threads, http, computed_samples=False)
        source = await exact.prepare("tiny", folder=write_model(), url=URL)

    assert source.mode is Mode.LOCAL
    assert "(/tokenize)" in source.explanation
    assert not [path for path, body in worker.asked if "return_token_ids" in body]


async def test_files_are_compared_with_what_the_worker_computes_with_and_not_with_its_tokenize(
    threads: TokenThreads, make_worker: Any, write_model: Any, make_request: Any
) -> None:
    worker = make_worker("plain")
    worker.computes = make_worker("parts").tokenizer
    async with client(worker) as http:
        exact = ExactTokens(threads, http)
        source = await exact.prepare("tiny", folder=write_model("plain"), url=URL)
        chat = await exact.prompts(make_request(messages=[USER]), model="tiny", url=URL)
        quick = exact.prompts_if_quick(make_request(messages=[USER]), model="tiny")
        text = await exact.prompts(make_request("completions", prompt="Hi"), model="tiny", url=URL)

    assert "samples agree" not in source.explanation
    assert chat is TokensReason.DIFFERS
    assert quick is None
    assert isinstance(text, ExactPrompts)
    assert source.refused == frozenset(Shape) - {Shape.TEXT}


@pytest.mark.parametrize("has_files", [True, False])
async def test_only_requests_of_a_shape_that_differs_have_no_exact_tokens(
    threads: TokenThreads, make_worker: Any, write_model: Any, make_request: Any, has_files: bool
) -> None:
    worker = make_worker("plain")
    shows_effort = (write_model() / "tokenizer_config.json").read_text()
    template = json.loads(shows_effort)["chat_template"] + "{{ reasoning_effort or '' }}"
    worker.computes = make_worker(template).tokenizer
    low = make_request(messages=[USER], reasoning_effort="low")
    async with client(worker) as http:
        exact = ExactTokens(threads, http)
        source = await exact.prepare("tiny", folder=write_model() if has_files else None, url=URL)
        with_effort = await exact.prompts(low, model="tiny", url=URL)
        without = await exact.prompts(make_request(messages=[USER]), model="tiny", url=URL)

    assert source.mode is (Mode.LOCAL if has_files else Mode.REMOTE)
    assert source.refused == {Shape.EFFORT}
    assert with_effort is TokensReason.DIFFERS
    assert isinstance(without, ExactPrompts)
    assert "an effort" in source.explanation


def as_gpt_oss(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))
    return folder


async def test_a_model_with_harmony_never_agrees_by_tokenize_alone(
    threads: TokenThreads, make_worker: Any, write_model: Any, make_request: Any
) -> None:
    async with client(make_worker()) as http:
        exact = ExactTokens(threads, http)
        source = await exact.prepare("tiny", folder=as_gpt_oss(write_model()), url=URL)
        chat = await exact.prompts(make_request(messages=[USER]), model="tiny", url=URL)
        text = await exact.prompts(make_request("completions", prompt="Hi"), model="tiny", url=URL)

    assert "samples agree" not in source.explanation
    assert chat is TokensReason.HARMONY
    assert isinstance(text, ExactPrompts)


async def test_a_model_with_harmony_is_exact_if_the_worker_computes_with_the_same_ids(
    threads: TokenThreads, make_worker: Any, write_model: Any, make_request: Any
) -> None:
    folder = as_gpt_oss(write_model())
    worker = make_worker()
    worker.computes = LocalTokenizer(load_model(folder), SegmentCache(0))
    async with client(worker) as http:
        exact = ExactTokens(threads, http)
        source = await exact.prepare("tiny", folder=folder, url=URL)
        request = make_request(messages=[USER])
        found = await exact.prompts(request, model="tiny", url=URL)

    assert (source.mode, source.through, source.refused) == (Mode.LOCAL, "harmony", frozenset())
    assert "17 samples agree" in source.explanation
    assert found == ExactPrompts(worker.computes.prompts(request), Mode.LOCAL)


async def test_a_model_whose_prompts_have_the_date_is_compared_again_on_another_day(
    threads: TokenThreads, make_worker: Any, write_model: Any
) -> None:
    day = date(2026, 11, 28)
    dated = write_model("{{ strftime_now('%d') }}{{ messages[0].content }}")
    async with client(make_worker()) as http:
        exact = ExactTokens(threads, http, today=lambda: day)
        await exact.prepare("plain", folder=write_model(), url=URL)
        assert not exact.shows_dates
    worker = make_worker()
    worker.tokenizer = LocalTokenizer(load_model(dated), SegmentCache(0))
    async with client(worker) as http:
        exact = ExactTokens(threads, http, today=lambda: day)
        await exact.prepare("dated", folder=dated, url=URL)
        assert exact.shows_dates
        assert not exact.is_of_another_day("dated")
        day = date(2026, 11, 29)
        assert exact.is_of_another_day("dated")
        await exact.prepare("dated", folder=dated, url=URL)
        assert not exact.is_of_another_day("dated")


async def test_files_that_disagree_leave_tokenizing_to_the_worker_and_name_the_difference(
    threads: TokenThreads, make_worker: Any, write_model: Any, make_request: Any
) -> None:
    worker = make_worker("parts")
    async with client(worker) as http:
        exact = ExactTokens(threads, http)
        source = await exact.prepare("tiny", folder=write_model("plain"), url=URL)
        request = make_request(messages=[USER])
        found = await exact.prompts(request, model="tiny", url=URL)

    assert (source.mode, source.through) == (Mode.REMOTE, "/tokenize")
    assert "a question" in source.explanation
    assert found == ExactPrompts(worker.tokenizer.prompts(request), Mode.REMOTE)


@pytest.mark.parametrize("folder_is_broken", [False, True])
async def test_without_usable_files_the_render_endpoints_are_preferred(
    threads: TokenThreads, make_worker: Any, write_model: Any, folder_is_broken: bool
) -> None:
    folder = write_model()
    (folder / "tokenizer.json").unlink()
    async with client(make_worker(renders=True)) as http:
        exact = ExactTokens(threads, http)
        source = await exact.prepare("tiny", folder=folder if folder_is_broken else None, url=URL)

    assert (source.mode, source.through) == (Mode.REMOTE, "/render")
    assert ("no tokenizer.json" in source.explanation) == folder_is_broken


async def test_a_worker_that_answers_nothing_leaves_no_source(
    threads: TokenThreads, write_model: Any, make_request: Any
) -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(500))) as http:
        exact = ExactTokens(threads, http)
        source = await exact.prepare("tiny", folder=write_model(), url=URL)
        found = await exact.prompts(make_request(messages=[USER]), model="tiny", url=URL)

    assert source.mode is Mode.NONE
    assert "answered no sample" in source.explanation
    assert found is TokensReason.NO_SOURCE


async def test_prompts_without_exact_tokens_give_a_reason_and_no_error(
    threads: TokenThreads, make_worker: Any, write_model: Any, make_request: Any
) -> None:
    async with client(make_worker()) as http:
        exact = ExactTokens(threads, http)
        await exact.prepare("tiny", folder=write_model(), url=URL)
        found = await exact.prompts(make_request("score", text_1="Hi", text_2="Ho"), model="tiny", url=URL)

    assert found is TokensReason.UNSUPPORTED


async def test_a_tokenizer_that_fails_is_a_reason_and_its_text_is_not_logged(
    threads: TokenThreads,
    make_worker: Any,
    write_model: Any,
    make_request: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client(make_worker()) as http:
        exact = ExactTokens(threads, http)
        await exact.prepare("tiny", folder=write_model(), url=URL)

        def fails(_: LocalTokenizer, request: Any) -> None:
            raise KeyError(request.body)

        monkeypatch.setattr(LocalTokenizer, "prompts", fails)
        request = make_request(messages=[{"role": "user", "content": "a secret"}])
        found = await exact.prompts(request, model="tiny", url=URL)

    assert found is TokensReason.FAILED
    assert "tokenizing for tiny failed: KeyError" in caplog.text
    assert "a secret" not in caplog.text


@pytest.fixture
def bodies() -> list[tuple[str, dict[str, Any]]]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}]
    return [
        ("chat/completions", {"messages": [USER], "tools": tools, "reasoning_effort": "low"}),
        ("chat/completions", {"messages": [{**USER, "role": "assistant", "reasoning_content": "hm"}]}),
        ("chat/completions", {"messages": [USER], "truncate_prompt_tokens": 2}),
        ("messages", {"messages": [USER], "system": "Be kind.", "max_tokens": 1}),
        ("responses", {"input": "Hi", "instructions": "Be kind."}),
        ("completions", {"prompt": ["Hi", "you"]}),
        ("completions", {"prompt": [1, 2, 3]}),
    ]


@pytest.mark.parametrize("endpoint", RemoteEndpoint)
async def test_workers_tokenize_every_kind_of_body(
    make_worker: Any, make_request: Any, endpoint: RemoteEndpoint, bodies: list[tuple[str, dict[str, Any]]]
) -> None:
    worker = make_worker("parts", renders=True, adds_bos=True)
    async with client(worker) as http:
        remote = RemoteTokenizer(http)
        for path, body in bodies:
            request = make_request(path, **body)
            ids = await remote.prompts(request, model="tiny", url=URL, endpoint=endpoint)
            assert ids == worker.tokenizer.prompts(request)
            assert all(isinstance(prompt, array) for prompt in ids)


async def test_an_alias_is_tokenized_under_the_workers_name(make_worker: Any, make_request: Any) -> None:
    worker = make_worker(renders=True)
    async with client(worker) as http:
        remote = RemoteTokenizer(http)
        for endpoint in RemoteEndpoint:
            await remote.prompts(make_request(messages=[USER]), model="real", url=URL, endpoint=endpoint)

    assert [body["model"] for _, body in worker.asked] == ["real", "real"]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("completions", {"prompt": ["a"] * 33}, TokensReason.BUSY),
        ("completions", {"prompt": "a", "truncate_prompt_tokens": 1}, TokensReason.TRUNCATION),
        (
            "chat/completions",
            {"messages": [USER], "truncate_prompt_tokens": 1, "add_special_tokens": True},
            TokensReason.TRUNCATION,
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            TokensReason.MEDIA,
        ),
        ("responses", {"input": [{"type": "function_call", "name": "f"}]}, TokensReason.UNSUPPORTED),
        ("chat/completions", {"messages": []}, TokensReason.WORKER_FAILED),
    ],
)
async def test_a_body_that_tokenize_does_not_support_gives_a_reason(
    make_worker: Any, make_request: Any, path: str, body: dict[str, Any], reason: TokensReason
) -> None:
    async with client(make_worker()) as http:
        with pytest.raises(Inexact) as refused:
            await RemoteTokenizer(http).prompts(make_request(path, **body), model="tiny", url=URL)

    assert refused.value.reason is reason


async def test_rendered_media_give_no_tokens(make_worker: Any, make_request: Any) -> None:
    worker = make_worker(renders=True)
    worker.features = {"mm_hashes": {}, "mm_placeholders": {}}
    async with client(worker) as http:
        with pytest.raises(Inexact) as refused:
            await RemoteTokenizer(http).prompts(
                make_request(messages=[USER]), model="tiny", url=URL, endpoint=RemoteEndpoint.RENDER
            )

    assert refused.value.reason is TokensReason.MEDIA


IMAGES = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("has_files", [True, False])
async def test_a_request_with_images_has_the_ids_and_media_that_the_worker_renders(
    threads: TokenThreads, make_worker: Any, write_model: Any, make_request: Any, has_files: bool
) -> None:
    worker = make_worker(renders=True)
    worker.media = {
        "mm_hashes": {"video": ["v"], "image": ["a"]},
        "mm_placeholders": {"video": [{"offset": 4, "length": 2}], "image": [{"offset": 1, "length": 2}]},
    }
    request = make_request(messages=[{"role": "user", "content": [IMAGES]}])
    async with client(worker) as http:
        exact = ExactTokens(threads, http)
        source = await exact.prepare("tiny", folder=write_model() if has_files else None, url=URL)
        quick = exact.prompts_if_quick(request, model="tiny")
        found = await exact.prompts(request, model="tiny", url=URL)
        off = ExactTokens(threads, http, media_keys=False)
        await off.prepare("tiny", folder=write_model() if has_files else None, url=URL)
        not_asked = await off.prompts(request, model="tiny", url=URL)

    assert source.mode is (Mode.LOCAL if has_files else Mode.REMOTE)
    assert quick is None
    assert found == ExactPrompts(
        (array("I", [1, 2, 2, 3, 4, 4]),), Mode.REMOTE, ((MediaItem(1, "a"), MediaItem(4, "v")),)
    )
    assert not_asked is TokensReason.MEDIA
    asked = [body["mm_payload"] for path, body in worker.asked if "image_url" in json.dumps(body)]
    assert asked == ["none"]


@pytest.mark.parametrize(
    ("hashes", "places"), [({"image": ["a"]}, {}), ({"image": ["a", "b"]}, {"image": [{"offset": 1}]})]
)
async def test_media_without_their_places_give_no_tokens(
    threads: TokenThreads, make_worker: Any, make_request: Any, hashes: Any, places: Any
) -> None:
    worker = make_worker(renders=True)
    worker.media = {"mm_hashes": hashes, "mm_placeholders": places}
    request = make_request(messages=[{"role": "user", "content": [IMAGES]}])
    async with client(worker) as http:
        exact = ExactTokens(threads, http)
        await exact.prepare("tiny", folder=None, url=URL)

        assert await exact.prompts(request, model="tiny", url=URL) is TokensReason.WORKER_FAILED


async def test_images_that_are_rendered_late_are_not_counted_as_a_slow_tokenizer(
    make_worker: Any, make_request: Any
) -> None:
    worker = make_worker(renders=True)
    worker.delay_s = 30
    request = make_request(messages=[{"role": "user", "content": [IMAGES]}])
    async with client(worker) as http:
        with pytest.raises(Inexact) as refused:
            await RemoteTokenizer(http).with_media(request, model="tiny", url=URL, timeout_s=0.001)

    assert refused.value.reason is TokensReason.MEDIA_LATE


async def test_a_slow_worker_is_late(make_worker: Any, make_request: Any) -> None:
    worker = make_worker()
    worker.delay_s = 30
    async with client(worker) as http:
        with pytest.raises(Inexact) as refused:
            await RemoteTokenizer(http).prompts(
                make_request("completions", prompt=["a", "b"]), model="tiny", url=URL, timeout_s=0.001
            )

    assert refused.value.reason is TokensReason.LATE
