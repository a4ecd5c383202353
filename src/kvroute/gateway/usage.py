"""What an answer's last bytes say: `usage`, without parsing the stream."""

from __future__ import annotations

import re
from typing import NamedTuple

_TAIL_BYTES = 4096
# Inside generated text the quotes would be escaped, so these match only the worker's own fields.
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')


class Usage(NamedTuple):
    """`cached_tokens` is None when the worker does not tell (vLLM without --enable-prompt-tokens-details)."""

    prompt_tokens: int
    cached_tokens: int | None


def usage_in(before_last: bytes, last: bytes) -> Usage | None:
    """The usage in an answer's last two chunks, None where it has none. A few us, once an answer."""
    tail = (before_last + last if len(last) < _TAIL_BYTES else last)[-_TAIL_BYTES:]
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None
    prompt = _PROMPT_TOKENS.search(tail, start)
    if prompt is None:
        return None
    cached = _CACHED_TOKENS.search(tail, start)
    return Usage(int(prompt[1]), int(cached[1]) if cached else None)
