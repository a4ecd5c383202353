"""Caches the prefixes of chats, so that only the new part of a known conversation is parsed and rendered.

A chain of 64-bit hashes over blocks of a body identifies its prefix. When a prefix arrives for the
second time, its complete messages are rendered and stored. Every message must be valid JSON by
itself, so that leaving them out does not change how the rest is parsed. Of a later body with that prefix,
only the part before the messages and the part after the prefix are decoded.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import Any, Final

from msgspec import UNSET, Raw
from xxhash import xxh3_64_intdigest

from kvroute.openai.bounded import UNREADABLE, Body, Bounded, Message, head_of, not_plain_json
from kvroute.openai.endpoints import BodyKind, Endpoint
from kvroute.openai.prompt import MEDIA_MARK, PromptPrefix, SeenPrompt, rendered, rendered_head
from kvroute.openai.request import InferenceRequest, as_request, loose_request, parse_request, prompt_steps

_NAME: Final = b'"messages"'
_MESSAGES_START = re.compile(rb'"messages"[ \t\r\n]*:[ \t\r\n]*\[[ \t\r\n]*({)').match
_KEY = re.compile(rb'{[ \t\r\n]*"[a-z_]{1,32}"').match
"""The start of a message. Within a JSON string these bytes cannot occur."""
_BLANK: Final = b" \t\r\n"
_COMMA: Final = ord(",")
_SEARCH_BYTES: Final = 65_536
"""If `messages` starts later in the body, or a message is longer, the body is parsed as a whole."""
_MAX_TRIES: Final = 3
_MAX_BLANKS: Final = 1024
"""Longest white space between two messages."""
_OVERHEAD_BYTES: Final = 2_000
_EMPTY: Final = PromptPrefix(0, 0, b"", b"")
_view: Callable[[Any], Any] = memoryview


class SeenBodies:
    """Reads request bodies with the same result as `parse_request`, faster if their prefix is known.

    `seed` makes the hashes secret: a client that does not know it cannot construct two prefixes with the
    same hash. Readers of a prompt can start at multiples of `cut_bytes`. Bodies below `min_bytes` are always
    parsed as a whole, because a search for their prefix costs as much. Mutable: an LRU cache of at most
    `max_blocks` hashes (about 200 bytes each) and of the prefixes that arrived twice (estimated `max_bytes`
    in total).
    """

    # Of prompts it keeps only the part before the messages and the end of each prefix, below `cut_bytes`.
    # A 256 KB turn, its keys and a match in the history take 250 us without this cache. With it they take 70
    # us for the next turn of a known chat, 320 us when a prefix arrives for the second time, and 262 us
    # before.

    def __init__(
        self,
        *,
        seed: int,
        cut_bytes: int,
        bounded: Bounded | None = None,
        max_bytes: int = 16 << 20,
        max_blocks: int = 32_768,
        min_bytes: int = 32_768,
        block_bytes: int = 8_192,
    ) -> None:
        self._seed = seed
        self._bounded = bounded or Bounded()
        self._cut_bytes = cut_bytes
        self._max_bytes = max_bytes
        self._max_blocks = max_blocks
        self.min_bytes = min_bytes
        self._block_bytes = block_bytes
        role = b'"%016x"' % xxh3_64_intdigest(b"role", seed)
        self._placeholder_role = Raw(role)
        self._placeholder = b'{"role":%b},' % role
        """Replaces the messages that are left out. Clients cannot know it."""
        # An OrderedDict: in a large dict with deletions, the oldest key is found slowly.
        self._prefixes: OrderedDict[int, PromptPrefix | None] = OrderedDict()
        """Known prefixes by the hash of the body up to a block's end; None for those that arrived once."""
        self._kept_bytes = 0

    def __len__(self) -> int:
        """Number of cached hashes."""
        return len(self._prefixes)

    @property
    def kept_bytes(self) -> int:
        """Estimated memory of the prefixes, in bytes."""
        return self._kept_bytes

    def read(self, endpoint: Endpoint, body: bytes) -> InferenceRequest:
        """Parse a JSON body. Raises the same errors as `parse_request`."""
        if len(body) < self.min_bytes or not endpoint.fills_kv_cache:
            return parse_request(endpoint, body)
        return self.continued(endpoint, body) or parse_request(endpoint, body, bounded=self._bounded)

    def continued(self, endpoint: Endpoint, body: bytes) -> InferenceRequest | None:
        """Like `read` if the body's prefix is known; otherwise None, and nothing has been decoded."""
        prefixes, hashed, view = self._prefixes, xxh3_64_intdigest, memoryview(body)
        # A prefix is rendered by the rules of its endpoint.
        digest, size = self._seed ^ endpoint.is_anthropic, self._block_bytes
        digests = [
            digest := hashed(view[start : start + size], digest)
            for start in range(0, len(body) - size + 1, size)
        ]
        deepest = len(digests)
        while deepest and digests[deepest - 1] not in prefixes:
            deepest -= 1
        for new in digests[deepest:]:
            prefixes[new] = None
        request = None
        if deepest:
            latest = digests[deepest - 1]
            prefix = prefixes[latest]
            prefixes.move_to_end(latest)
            if prefix is not None:
                request = self._continue(endpoint, body, prefix)
            else:
                request = self._learn(endpoint, body, digests[:deepest])
        while len(prefixes) > self._max_blocks or self._kept_bytes > self._max_bytes:
            self._store(next(iter(prefixes)), None)
        return request

    def _continue(self, endpoint: Endpoint, body: bytes, base: PromptPrefix) -> InferenceRequest | None:
        """Parse a body that starts with the prefix `base`; None if it must be parsed as a whole."""
        remainder = self._decode_rest(body, base.opened, base.end)
        if remainder is None:
            return None
        decoded, messages, outline = remainder
        if self._head(endpoint, decoded) != base.head:
            return None
        self._check_count(base.messages + len(messages))
        parts = rendered(messages, self._bounded, endpoint.is_anthropic)
        request, tail = _request_and_tail(endpoint, body, decoded, base, parts)
        request.seen = SeenPrompt(body, base, tail, is_anthropic=endpoint.is_anthropic)
        request.outline = outline
        return request

    def _head(self, endpoint: Endpoint, decoded: Body) -> bytes:
        return b"".join(rendered_head(head_of(decoded), self._bounded, endpoint.is_anthropic))

    def _learn(self, endpoint: Endpoint, body: bytes, digests: list[int]) -> InferenceRequest | None:
        """Parse a body whose blocks with `digests` have arrived before, and store that prefix.

        The prefix ends with the last complete message in these blocks. None if there is none.
        """
        latest, shorter = digests[-1], _EMPTY
        for digest in reversed(digests[:-1]):
            candidate = self._prefixes.get(digest)  # a shorter prefix may have been evicted earlier
            if candidate is not None:
                shorter = candidate
                break
        self._store(latest, shorter)  # replaced below if a longer prefix is found
        limit = len(digests) * self._block_bytes
        request = None
        if shorter.end:
            request = self._learn_from(endpoint, body, shorter, shorter.opened, limit, latest)
        if request is None:
            at = body.find(_NAME, 0, _SEARCH_BYTES)
            match = _MESSAGES_START(body, at) if at >= 0 else None
            if match is not None:
                request = self._learn_from(endpoint, body, None, match.start(1), limit, latest)
        return request

    def _learn_from(
        self, endpoint: Endpoint, body: bytes, base: PromptPrefix | None, opened: int, limit: int, digest: int
    ) -> InferenceRequest | None:
        complete, end = self._complete_messages(body, opened if base is None else base.end, opened, limit)
        remainder = self._decode_rest(body, opened, end) if complete else None
        if remainder is None:
            return None
        decoded, messages, outline = remainder
        head = self._head(endpoint, decoded)
        if base is None:
            base = PromptPrefix(opened, opened, head, head)
        elif head != base.head:
            return None
        count = base.messages + len(complete)
        self._check_count(count + len(messages))
        added = rendered(complete, self._bounded, endpoint.is_anthropic)
        others = rendered(messages, self._bounded, endpoint.is_anthropic)
        request, tail = _request_and_tail(endpoint, body, decoded, base, [*added, *others])
        size = len(base.kept_tail) + sum(map(len, map(_view, added)))
        cut = size - size % self._cut_bytes
        grown = PromptPrefix(opened, end, head, tail[cut:size], base.whole_bytes + cut, messages=count)
        grown.has_media = base.has_media or MEDIA_MARK in tail[:size]
        self._store(digest, grown)
        request.seen = SeenPrompt(body, base, tail, grown, is_anthropic=endpoint.is_anthropic)
        request.outline = outline
        return request

    def _complete_messages(
        self, body: bytes, start: int, opened: int, limit: int
    ) -> tuple[list[Message], int]:
        """The complete messages between `start` and `limit`, and where the next one begins.

        No messages if their end cannot be found.
        """
        match = _KEY(body, opened)
        if match is None:
            return [], 0
        end, least = limit, max(start + 1, limit - _SEARCH_BYTES)
        for _ in range(_MAX_TRIES):
            end = stop = body.rfind(match[0], least, end)
            if end < 0:
                break
            while body[stop - 1] in _BLANK and end - stop < _MAX_BLANKS:
                stop -= 1
            if body[stop - 1] == _COMMA:
                try:
                    # Decoding fails unless these bytes are elements of one array.
                    messages = self._bounded.messages(
                        b"".join([b"[", memoryview(body)[start : stop - 1], b"]"])
                    )
                except UNREADABLE:
                    continue
                return messages, end
        return [], 0

    def _decode_rest(self, body: bytes, opened: int, end: int) -> tuple[Body, list[Message], bytes] | None:
        """Decode the body without its messages before `end`.

        Returns it, the later messages, and the bytes that were decoded.

        None if the messages before `end` are less than half of the body, or if the rest is not valid without
        them.
        """
        if end - opened < len(body) // 2:
            return None
        view = memoryview(body)
        outline = b"".join([view[:opened], self._placeholder, view[end:]])
        try:
            decoded = self._bounded.body(outline)
        except UNREADABLE:
            return None
        messages = decoded.messages
        # Otherwise the placeholder is in another field, or the body has `messages` twice.
        if messages is UNSET or not messages or messages[0].role != self._placeholder_role:
            return None
        return decoded, messages[1:], outline

    def _check_count(self, messages: int) -> None:
        if messages > self._bounded.limits.max_messages:
            raise self._bounded.over("max_messages", "messages", "messages")

    def _store(self, digest: int, prefix: PromptPrefix | None) -> None:
        """Store `prefix` under `digest`; None removes the entry."""
        replaced = self._prefixes.pop(digest, None)
        if replaced is not None:
            self._kept_bytes -= self._size(replaced)
        if prefix is not None:
            self._prefixes[digest] = prefix
            self._kept_bytes += self._size(prefix)

    def _size(self, prefix: PromptPrefix) -> int:
        # 90 bytes per cut: block keys that readers of the prompt keep in `notes`.
        return (
            _OVERHEAD_BYTES
            + len(prefix.head)
            + len(prefix.kept_tail)
            + 90 * (prefix.whole_bytes // self._cut_bytes)
        )


def _request_and_tail(
    endpoint: Endpoint, body: bytes, decoded: Body, base: PromptPrefix, parts: list[bytes | Raw]
) -> tuple[InferenceRequest, bytes]:
    """The request without its prompt, and the rendered prompt from byte `base.whole_bytes` on."""
    decoded.messages = UNSET
    return as_request(endpoint, body, decoded, is_chat=True), b"".join([base.kept_tail, *parts])


_MAX_SEARCHED_BYTES: Final = 4_194_304
"""No prefix is searched in larger bodies, because the search would read most of the body twice."""


def large_request(
    endpoint: Endpoint, body: bytes, content_type: str, bounded: Bounded, bodies: SeenBodies | None = None
) -> Generator[None, None, InferenceRequest]:
    """Parse a large body, with its prompts, in steps. Raises InvalidRequest and OverLimit."""
    if endpoint.body is BodyKind.MULTIPART:
        return parse_request(endpoint, body, content_type, bounded)
    yield from bounded.values(body)
    request = None
    if bodies is not None and endpoint.fills_kv_cache and len(body) <= _MAX_SEARCHED_BYTES:
        request = bodies.continued(endpoint, body)
        yield
    if request is None:
        fields = bounded.fields(body)
        yield
        try:
            request = loose_request(endpoint, body, fields)
        except UNREADABLE:
            raise not_plain_json() from None
        request.bounded = bounded
        messages = fields.get("messages")
        if messages is not None:
            try:
                request.read_messages = bounded.messages(messages)
            except UNREADABLE:
                pass  # no list of objects: the worker reports the error
            yield
    request.bounded = bounded
    request.prompts = yield from prompt_steps(request)
    return request
