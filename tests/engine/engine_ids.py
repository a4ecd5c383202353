"""Runs in the engine's environment: the token ids by vLLM's own renderer, without an engine.

    python engine_ids.py < jobs > answers

A line on stdin is a job: `{"folder": ..., "requests": [[path, body], ...], "env": {...}, "now": TIME}`, with
an optional time (ISO 8601) that chat templates are told instead of the clock's. A line on
stdout is its answer: for each request the token ids, or a text that says why vLLM refuses it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from typing import Any


def renderer_of(folder: str) -> Any:
    """vLLM's render server for a model; a text if vLLM does not start with it."""
    try:
        return serving_of(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def serving_of(folder: str) -> Any:
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
    from vllm.entrypoints.scale_out.render.serving import ServingRender
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    model = AsyncEngineArgs(model=folder, max_model_len=8192).create_model_config()
    model.quantization = None
    config = VllmConfig(model_config=model, device_config=DeviceConfig(device="cpu"))
    parser = config.structured_outputs_config.reasoning_parser
    online = OnlineRenderer(
        model_config=model,
        renderer=renderer_from_config(config),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        # A tool parser that needs nothing of the vocabulary: without one vLLM refuses tools.
        tool_parser="openai" if model.hf_config.model_type == "gpt_oss" else "pythonic",
        reasoning_parser=parser or None,
    )
    registry = OpenAIModelRegistry(model_config=model, base_model_paths=[BaseModelPath("tiny", folder)])
    return ServingRender(registry, online)


def spare_mistral_common() -> None:
    """Lets vLLM render Harmony without the package mistral_common, which this environment may lack."""
    from types import SimpleNamespace

    from vllm.renderers import online_renderer

    def maybe_serialize_tool_calls(request: Any) -> None:
        """As vllm.tokenizers.mistral: pydantic's iterators become lists."""
        for message in request.messages:
            if message.get("role") == "assistant":
                message["tool_calls"] = list(message.get("tool_calls") or [])

    online_renderer._mt = SimpleNamespace(maybe_serialize_tool_calls=maybe_serialize_tool_calls)


def tell_templates(now: str | None) -> None:
    """Set the time that templates are told; None: the clock's."""
    from datetime import datetime
    from types import SimpleNamespace

    from transformers.utils import chat_template_utils

    def told() -> datetime:
        return datetime.now() if now is None else datetime.fromisoformat(now)

    chat_template_utils.datetime = SimpleNamespace(now=told)


def asked_by_messages(serving: Any) -> Any:
    """As the server's /v1/messages: its render endpoint does not find out how thinking is disabled."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    server = object.__new__(AnthropicServingMessages)
    server.online_renderer, server._disabled_thinking_effort = serving.online_renderer, None

    async def asked(request: Any) -> Any:
        chat = AnthropicServingMessages.to_chat_completion_request(
            request,
            merge_inline_system=serving._merge_inline_system,
            disabled_thinking_effort=await server._get_disabled_thinking_effort(),
        )
        return await serving.render_chat_request(chat)

    return asked


async def ids_of(serving: Any, path: str, body: dict[str, Any]) -> list[list[int]] | str:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    calls = {
        "chat/completions": (ChatCompletionRequest, serving.render_chat_request),
        "completions": (CompletionRequest, serving.render_completion_request),
        "messages": (AnthropicMessagesRequest, asked_by_messages(serving)),
        "responses": (ResponsesRequest, serving.render_responses_request),
    }
    kind, call = calls[path]
    try:
        answer = await call(kind.model_validate({"model": "tiny", "max_tokens": 1, **body}))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    answers = answer if isinstance(answer, list) else [answer]
    if not all(hasattr(each, "token_ids") for each in answers):
        return str(answer)
    return [list(each.token_ids) for each in answers]


async def main() -> None:
    # What vLLM prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    known: dict[str, Any] = {}
    if importlib.util.find_spec("mistral_common") is None:
        spare_mistral_common()
    for line in sys.stdin:
        job = json.loads(line)
        os.environ.update(job.get("env", {}))
        tell_templates(job.get("now"))
        if job["folder"] not in known:
            known[job["folder"]] = renderer_of(job["folder"])
        serving = known[job["folder"]]
        found = [
            serving if isinstance(serving, str) else await ids_of(serving, path, body)
            for path, body in job["requests"]
        ]
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    asyncio.run(main())
