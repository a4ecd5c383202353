"""What an answer's last bytes say: `usage`, without parsing the stream."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
from msgspec import Struct

from kvroute.openai.json import UNREADABLE

_TAIL_BYTES = 4096
_SMALL_BYTES = 2048
"""Up to here it costs less to decode an answer than to search it."""
# Inside generated text the quotes would be escaped, so these match only the worker's own fields.
_first_prompt_tokens = re.compile(rb'"usage"\s*:\s*\{\s*"(?:prompt|input)_tokens"\s*:\s*(\d+)').match
_prompt_tokens = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)').search
_cached_tokens = re.compile(rb'"cached_tokens"\s*:\s*(\d+)').search


class _Details(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cached_tokens: int | None = None


class _Answer(Struct, gc=False):
    usage: _Usage | None = None


_new = tuple.__new__
_decode_answer = msgspec.json.Decoder(_Answer).decode


class Usage(NamedTuple):
    """`cached_tokens` is None when the worker does not tell (vLLM without --enable-prompt-tokens-details)."""

    prompt_tokens: int
    cached_tokens: int | None


def usage_in(before_last: bytes, last: bytes) -> Usage | None:
    """The usage in an answer's last two chunks, None where it has none. A few us, once an answer."""
    if not before_last and len(last) <= _SMALL_BYTES and last.startswith(b"{"):
        usage = _decoded(last)
        if usage is not None:
            return usage
    tail = (before_last + last if len(last) < _TAIL_BYTES else last)[-_TAIL_BYTES:]
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None
    # It is the first field of all engines' usage; to search for it costs three times as much.
    prompt = _first_prompt_tokens(tail, start) or _prompt_tokens(tail, start)
    if prompt is None:
        return None
    # Most engines do not tell by default, and to find a literal absent costs less than a pattern.
    cached = _cached_tokens(tail, start) if tail.find(b'"cached_tokens"', start) >= 0 else None
    return _new(Usage, (int(prompt[1]), int(cached[1]) if cached else None))


def _decoded(answer: bytes) -> Usage | None:
    """Of a whole answer; None where it is not to be had in this way."""
    try:
        usage = _decode_answer(answer).usage
    except UNREADABLE:
        return None
    if usage is None:
        return None
    tokens, details = usage.prompt_tokens, usage.prompt_tokens_details
    if tokens is None:
        tokens, details = usage.input_tokens, usage.input_tokens_details
    if tokens is None or tokens < 0:
        return None
    cached = usage.cached_tokens if details is None else details.cached_tokens
    if cached is not None and cached < 0:
        cached = None
    # As `Usage(...)`, without its Python-level constructor.
    return _new(Usage, (tokens, cached))
