"""What an answer's last bytes say: `usage`, without parsing the stream."""

from __future__ import annotations

import re
from typing import NamedTuple

_TAIL_BYTES = 4096
# Inside generated text the quotes would be escaped, so these match only the worker's own fields.
_first_prompt_tokens = re.compile(rb'"usage"\s*:\s*\{\s*"(?:prompt|input)_tokens"\s*:\s*(\d+)').match
_prompt_tokens = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)').search
_cached_tokens = re.compile(rb'"cached_tokens"\s*:\s*(\d+)').search


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
    # It is the first field of all engines' usage; to search for it costs three times as much.
    prompt = _first_prompt_tokens(tail, start) or _prompt_tokens(tail, start)
    if prompt is None:
        return None
    # Most engines do not tell by default, and to find a literal absent costs less than a pattern.
    cached = _cached_tokens(tail, start) if tail.find(b'"cached_tokens"', start) >= 0 else None
    return tuple.__new__(Usage, (int(prompt[1]), int(cached[1]) if cached else None))
