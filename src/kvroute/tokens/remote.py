"""Gets token ids from a worker: by its `/tokenize`, or by its render endpoints.

vLLM 0.32: every worker has `/tokenize`, for chats and texts. `/v1/.../render` accepts every unchanged body,
but answers 403 unless the worker runs with --enable-scale-out (`vllm launch render` always does).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import httpx
import msgspec

from kvroute.openai.members import with_model
from kvroute.openai.request import InferenceRequest
from kvroute.tokens.chat import Chat, EngineFlags, refuse_media
from kvroute.tokens.options import Inexact, TokensReason
from kvroute.tokens.reading import Plain, TokenIds, read, truncated

_MOST_TEXTS = 32
_RENDERED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


class RemoteEndpoint(StrEnum):
    TOKENIZE = "/tokenize"
    RENDER = "/render"


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: object = None
    """The hashes and positions of media; None without media."""

    def ids(self) -> TokenIds:
        if self.features is not None:
            raise Inexact(TokensReason.MEDIA)
        return array("I", self.token_ids)


_decode_tokens = msgspec.json.Decoder(_Tokens).decode
_decode_rendered = msgspec.json.Decoder(_Rendered).decode
_decode_rendered_list = msgspec.json.Decoder(list[_Rendered]).decode


class RemoteTokenizer:
    """Requests token ids from workers. Stateless; `client` belongs to the caller."""

    def __init__(self, client: httpx.AsyncClient, flags: EngineFlags | None = None) -> None:
        self._client = client
        self._flags = flags or EngineFlags()

    async def prompts(
        self,
        request: InferenceRequest,
        *,
        model: str,
        url: str,
        endpoint: RemoteEndpoint = RemoteEndpoint.TOKENIZE,
        timeout_s: float | None = None,
    ) -> tuple[TokenIds, ...]:
        """The token ids of the request's prompts, in order. Raises Inexact: LATE after `timeout_s`.

        `model` is the model's name on the worker at `url`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                if endpoint is RemoteEndpoint.RENDER and request.endpoint.path in _RENDERED:
                    return await self._render(request, model, url)
                prompt = read(request, self._flags, lambda _: None)
                if request.endpoint.path == "/v1/responses":
                    _refuse_tool_calls(prompt)
                return await self._tokenize_all(prompt, model, url)
        except TimeoutError:
            raise Inexact(TokensReason.LATE) from None
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, OverflowError, RecursionError):
            raise Inexact(TokensReason.WORKER_FAILED) from None

    async def _render(self, request: InferenceRequest, model: str, url: str) -> tuple[TokenIds, ...]:
        body = request.body if request.model == model else with_model(request, model)
        answer = await self._post(f"{url}{request.endpoint.path}/render", body)
        if request.endpoint.path == "/v1/completions":
            return tuple(prompt.ids() for prompt in _decode_rendered_list(answer))
        return (_decode_rendered(answer).ids(),)

    async def _tokenize_all(self, prompt: Chat | Plain, model: str, url: str) -> tuple[TokenIds, ...]:
        if isinstance(prompt, Chat):
            refuse_media(prompt.messages)
            return (await self._tokenize_chat(prompt, model, url),)
        if prompt.ids:
            return tuple(truncated(ids, prompt.truncate_to, prompt.truncation_side) for ids in prompt.ids)
        return await self._tokenize_texts(prompt, model, url)

    async def _tokenize_chat(self, chat: Chat, model: str, url: str) -> TokenIds:
        kwargs = dict(chat.kwargs)
        fields: dict[str, Any] = {
            "model": model,
            "messages": chat.messages,
            "add_generation_prompt": kwargs.pop("add_generation_prompt", True),
            "continue_final_message": kwargs.pop("continue_final_message", False),
            "add_special_tokens": chat.add_special_tokens,
        }
        if chat.tools is not None:
            fields["tools"] = chat.tools
        if kwargs:
            fields["chat_template_kwargs"] = kwargs
        if chat.add_special_tokens and chat.truncate_to is not None and chat.truncation_side is None:
            raise Inexact(TokensReason.TRUNCATION)  # only the tokenizer knows how many tokens it adds
        return truncated(await self._tokenize(url, fields), chat.truncate_to, chat.truncation_side)

    async def _tokenize_texts(self, prompt: Plain, model: str, url: str) -> tuple[TokenIds, ...]:
        if len(prompt.texts) > _MOST_TEXTS:
            raise Inexact(TokensReason.BUSY)
        special = prompt.add_special_tokens
        if special and prompt.truncate_to is not None and prompt.truncation_side is None:
            raise Inexact(TokensReason.TRUNCATION)
        bodies = [{"model": model, "prompt": text, "add_special_tokens": special} for text in prompt.texts]
        answers = await self._tokenize_each(url, bodies)
        return tuple(truncated(ids, prompt.truncate_to, prompt.truncation_side) for ids in answers)

    async def _tokenize_each(self, url: str, bodies: Sequence[Mapping[str, Any]]) -> list[TokenIds]:
        tasks = [asyncio.ensure_future(self._tokenize(url, fields)) for fields in bodies]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tokenize(self, url: str, fields: Mapping[str, Any]) -> TokenIds:
        return array(
            "I", _decode_tokens(await self._post(f"{url}/tokenize", msgspec.json.encode(fields))).tokens
        )

    async def _post(self, url: str, body: bytes) -> bytes:
        headers = {"content-type": "application/json"}
        answer = await self._client.post(url, content=body, headers=headers)
        if answer.status_code != httpx.codes.OK:
            raise Inexact(TokensReason.WORKER_FAILED)
        return answer.content


def _refuse_tool_calls(prompt: Chat | Plain) -> None:
    """Raise Inexact for a chat with tool calls."""
    # `/tokenize` puts the fields of a tool call into another order than `/v1/responses`; a template may print
    # them.
    if isinstance(prompt, Chat) and any("tool_calls" in message for message in prompt.messages):
        raise Inexact(TokensReason.UNSUPPORTED)
