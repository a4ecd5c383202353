"""What the engine leaves out of the bodies that agents send, although it changes with each turn.

Claude Code begins its system prompt with a billing header whose digits differ in every request. vLLM drops
it: since 0.18.0 each text block of `/v1/messages` that begins with it (vllm-project/vllm #36829), in later
releases inline system messages there too (entrypoints/anthropic/serving.py), and since 0.32.0 the first line
of any other system text (renderers/chat_utils.py). Only the role `system` counts, not `developer`.

Marks for a provider's own cache (`cache_control`) move to the newest parts of each turn; no template prints
them.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

_BILLING: Final = "x-anthropic-billing-header"
_START: Final = b'"' + _BILLING.encode()
_QUOTE, _BACKSLASH = b'"\\'


class BillingRule(NamedTuple):
    """Which system texts an engine drops for their billing header."""

    blocks: bool = True
    """Whole texts of `/v1/messages`."""
    lines: bool = True
    """The first line of any other system text."""


NEWEST_RULE: Final = BillingRule()
_BLOCKS_SINCE: Final = (0, 18, 0)
_LINES_SINCE: Final = (0, 32, 0)


def billing_rule(release: tuple[int, ...] | None) -> BillingRule:
    """The rule of a release of vLLM; of an unknown release (None) that of the newest one."""
    if release is None:
        return NEWEST_RULE
    return BillingRule(release >= _BLOCKS_SINCE, release >= _LINES_SINCE)


def without_billing(text: str, *, whole: bool) -> str | None:
    """A system text as the model sees it; None if nothing is left of it.

    `whole`: it is a block or an inline message of `/v1/messages`.
    """
    if not text.startswith(_BILLING):
        return text
    return None if whole else text.partition("\n")[2] or None


_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


def shown_system_text(text: Raw, *, whole: bool) -> Raw | bytes:
    """`without_billing` for a JSON string, as JSON; b"" if nothing is left."""
    start = bytes(memoryview(text)[: len(_START)])
    if start != _START and _BACKSLASH not in start:
        return text
    try:
        decoded = _decode_text(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text
    kept = without_billing(decoded, whole=whole)
    return text if kept is decoded else b"" if kept is None else _encode(kept)


_MARK: Final = b'"cache_control"'
_MARKED_BYTES: Final = 512
"""A mark is looked for in the first and in the last bytes of a long value: to search all bytes would cost ten
times as much as to hash them."""
# A quote within a JSON string follows a backslash, so these bytes are always a member and its value.
_marks = re.compile(
    rb',[ \t\r\n]*"cache_control"[ \t\r\n]*:[ \t\r\n]*(?:null|{[^{}]*})'
    rb'|(?<={)[ \t\r\n]*"cache_control"[ \t\r\n]*:[ \t\r\n]*(?:null|{[^{}]*})[ \t\r\n]*,?[ \t\r\n]*'
).sub


def without_marks(value: Raw) -> Raw | bytes:
    """A JSON object or list without the members `cache_control` of its beginning and of its end."""
    view = memoryview(value)
    if len(view) <= 2 * _MARKED_BYTES:
        data = bytes(view)
        return _marks(b"", data) if _MARK in data else value
    head, tail = bytes(view[:_MARKED_BYTES]), bytes(view[-_MARKED_BYTES:])
    if _MARK not in head and _MARK not in tail:
        return value
    return b"".join([_marks(b"", head), view[_MARKED_BYTES:-_MARKED_BYTES], _marks(b"", tail)])
