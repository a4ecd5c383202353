"""Reads the prompt from a request's body: a chat to render, texts to encode, or token ids."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from kvroute.openai.bounded import STEPWISE_BYTES, UNREADABLE, separators
from kvroute.openai.request import InferenceRequest
from kvroute.tokens.chat import Chat, EngineFlags, chat_completion
from kvroute.tokens.options import Inexact, TokensReason
from kvroute.tokens.other_apis import messages_request, responses_request
from kvroute.tokens.template import ChatTemplate

TokenIds: TypeAlias = "array[int]"
"""An array of type code "I": 4 bytes per token, in the form that is hashed."""
_MOST_VALUES = 262_144
_FIELDS_BESIDE_IDS = ("suffix", "prompt_embeds", "truncate_prompt_tokens", "truncation_side")
PickTemplate = Callable[[bool], ChatTemplate | None]
"""has tools -> the model's chat template for such chats."""


@dataclass(frozen=True, slots=True)
class Plain:
    """The prompts of a completion: either texts or token ids."""

    texts: tuple[str, ...] = ()
    ids: tuple[TokenIds, ...] = ()
    add_special_tokens: bool = True
    truncate_to: int | None = None
    truncation_side: str | None = None


def read(request: InferenceRequest, flags: EngineFlags, pick: PickTemplate) -> Chat | Plain:
    """Read the prompt. Raises Inexact. Takes about 0.2 ms for a chat of 130 KB."""
    if request.fields is None:
        raise Inexact(TokensReason.UNREADABLE)
    reader = _READERS.get(request.endpoint.path)
    if reader is None:
        raise Inexact(TokensReason.UNSUPPORTED)
    try:
        if len(request.body) <= STEPWISE_BYTES:
            body = msgspec.json.decode(request.body)
        elif request.prompts and request.prompts[0].is_token_ids and reader is _completion:
            return _known_ids(request)
        elif _is_simple(request):
            body = msgspec.json.decode(request.body)
        else:
            raise Inexact(TokensReason.STRUCTURE)
    except UNREADABLE:
        raise Inexact(TokensReason.UNREADABLE) from None
    return reader(body, flags, pick)


def _is_simple(request: InferenceRequest) -> bool:
    """Whether a large body is mostly text, so that it can be decoded in about 30 ms."""
    # No other thread runs during the decoding.
    values = separators(request.body)
    if values <= _MOST_VALUES:
        return True
    contents = [message.content for message in request.messages or ()]
    texts = [content for content in contents if content is not msgspec.UNSET and bytes(content)[:1] == b'"']
    prompt = (request.fields or {}).get("prompt")
    if prompt is not None and bytes(prompt)[:1] == b'"':
        texts.append(prompt)
    return values - sum(map(separators, texts)) <= _MOST_VALUES


def _known_ids(request: InferenceRequest) -> Plain:
    """As `_completion`, for a large body whose token ids have been parsed already."""
    fields = request.fields or {}
    body = {name: msgspec.json.decode(fields[name]) for name in _FIELDS_BESIDE_IDS if name in fields}
    _refuse_embeds(body)
    return Plain(
        ids=tuple(array("I", prompt.data) for prompt in request.prompts or ()),
        truncate_to=body.get("truncate_prompt_tokens"),
        truncation_side=body.get("truncation_side"),
    )


def _chat(body: Mapping[str, Any], flags: EngineFlags, _: PickTemplate) -> Chat:
    return chat_completion(body, flags)


def _messages(body: Mapping[str, Any], flags: EngineFlags, pick: PickTemplate) -> Chat:
    return messages_request(body, flags, pick(body.get("tools") is not None))


def _responses(body: Mapping[str, Any], flags: EngineFlags, _: PickTemplate) -> Chat:
    return responses_request(body, flags)


def _completion(body: Mapping[str, Any], _flags: EngineFlags, _pick: PickTemplate) -> Plain:
    _refuse_embeds(body)
    texts, ids = _prompts(body.get("prompt"))
    return Plain(
        texts=texts,
        ids=ids,
        add_special_tokens=body.get("add_special_tokens", True) is True,
        truncate_to=body.get("truncate_prompt_tokens"),
        truncation_side=body.get("truncation_side"),
    )


def _refuse_embeds(body: Mapping[str, Any]) -> None:
    if body.get("suffix") is not None:
        raise Inexact(TokensReason.UNSUPPORTED)
    if body.get("prompt_embeds") is not None:
        raise Inexact(TokensReason.MEDIA)


def _invocation(body: Mapping[str, Any], flags: EngineFlags, pick: PickTemplate) -> Chat | Plain:
    if "messages" in body:
        return _chat(body, flags, pick)
    if "prompt" in body:
        return _completion(body, flags, pick)
    raise Inexact(TokensReason.UNSUPPORTED)


_READERS: Mapping[str, Callable[[Mapping[str, Any], EngineFlags, PickTemplate], Chat | Plain]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
    "/invocations": _invocation,
}


def _prompts(prompt: Any) -> tuple[tuple[str, ...], tuple[TokenIds, ...]]:
    if isinstance(prompt, str):
        return (prompt,), ()
    if not isinstance(prompt, list) or not prompt:
        raise Inexact(TokensReason.UNREADABLE)
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt), ()
    try:
        if isinstance(prompt[0], list):
            return (), tuple(array("I", ids) for ids in prompt)
        return (), (array("I", prompt),)
    except (TypeError, OverflowError):
        raise Inexact(TokensReason.UNREADABLE) from None


def truncated(ids: TokenIds, keep: Any, side: Any) -> TokenIds:
    """The ids after `truncate_prompt_tokens`. vLLM's generating workers keep the last ones by default."""
    if keep is None:
        return ids
    if not isinstance(keep, int) or keep <= 0:  # -1 means the worker's context length
        raise Inexact(TokensReason.TRUNCATION)
    if side not in (None, "left", "right"):
        raise Inexact(TokensReason.UNREADABLE)
    return ids if keep >= len(ids) else ids[:keep] if side == "right" else ids[-keep:]
