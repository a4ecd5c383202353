"""The token counts that an answer reports: read from its last bytes."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Struct

from kvroute.openai.bounded import UNREADABLE
from kvroute.request.record import Usage

_TAIL_BYTES = 4096
_SMALL_BYTES = 2048
"""Up to this size, to decode an answer costs less than to search it."""
_MAX_TOKENS = 10**9 - 1
"""More tokens than any answer has. A larger figure of a worker is none: sums of it would not be finite."""

# These match only fields of the worker: inside generated text the quotes are escaped.
_first_prompt_tokens = re.compile(
    rb'"usage"\s*:\s*\{\s*"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})(?!\d)'
).match
_prompt_tokens = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})(?!\d)').search
_cached_tokens = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})(?!\d)').search
_completion_tokens = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})(?!\d)').search
_cache_read_tokens = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,9})(?!\d)').search
_cache_creation_tokens = re.compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,9})(?!\d)').search
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]


class _Details(Struct, gc=False):
    cached_tokens: _Count | None = None


class AnswerUsage(Struct, gc=False):
    """The `usage` of an answer, as engines write it. With a count that none can be, it is not decoded."""

    prompt_tokens: _Count | None = None
    input_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    output_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cached_tokens: _Count | None = None
    # Anthropic's API counts cached tokens apart: `input_tokens` has neither those that were read nor those
    # that were stored (vLLM 0.32, entrypoints/anthropic/serving.py, `_build_anthropic_usage`).
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None


class _Answer(Struct, gc=False):
    usage: AnswerUsage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def usage_in(before_last: bytes, last: bytes) -> Usage | None:
    """The usage in the last two chunks of an answer; None if there is none. A few us, once per answer."""
    if not before_last and len(last) <= _SMALL_BYTES and last.startswith(b"{"):
        try:
            whole = _decode_answer(last).usage
        except UNREADABLE:
            whole = None
        if whole is not None and (usage := usage_of(whole)) is not None:
            return usage
    tail = (before_last + last if len(last) < _TAIL_BYTES else last)[-_TAIL_BYTES:]
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None
    # In all engines' usage this field comes first. To search for it costs three times as much.
    prompt = _first_prompt_tokens(tail, start) or _prompt_tokens(tail, start)
    if prompt is None:
        return None
    # Most engines omit it by default, and a search for a literal costs less than a pattern.
    cached = _cached_tokens(tail, start) if tail.find(b'"cached_tokens"', start) >= 0 else None
    completion = _completion_tokens(tail, start)
    tokens, produced = int(prompt[1]), int(completion[1]) if completion else 0
    if cached is None and tail.find(b'"cache_read_input_tokens"', start) >= 0:
        read, stored = _cache_read_tokens(tail, start), _cache_creation_tokens(tail, start)
        if read is not None:
            found = int(read[1])
            return Usage(tokens + found + (int(stored[1]) if stored else 0), found, produced)
    return Usage(tokens, int(cached[1]) if cached else None, produced)


def usage_of_whole(answer: bytes) -> Usage | None:
    """The usage of a whole answer; None if the answer has none or is not JSON."""
    try:
        usage = _decode_answer(answer).usage
    except UNREADABLE:
        return None
    return None if usage is None else usage_of(usage)


def usage_of(usage: AnswerUsage) -> Usage | None:
    """The usage with the names of this gateway; None if it has no count of prompt tokens."""
    tokens, details = usage.prompt_tokens, usage.prompt_tokens_details
    if tokens is None:
        tokens, details = usage.input_tokens, usage.input_tokens_details
    completion = usage.completion_tokens
    if completion is None:
        completion = usage.output_tokens or 0
    if tokens is None:
        return None
    cached = usage.cached_tokens if details is None else details.cached_tokens
    if cached is None and (read := usage.cache_read_input_tokens) is not None:
        cached = read
        tokens += read + (usage.cache_creation_input_tokens or 0)
    return Usage(tokens, cached, completion)
