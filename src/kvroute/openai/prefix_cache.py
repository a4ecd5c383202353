"""Chats whose beginning was seen before: of a known conversation only what is new is parsed and rendered.

The beginning of a body is known by a chain of 64-bit hashes over its blocks. When one comes for the second
time, what it holds is worked out up to the end of a message: its messages must be JSON by themselves, so that
a parser that had read them would stand where it stood before them. Of a body that comes with it then, only
what is before its messages and what is behind the beginning is decoded.
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
from kvroute.openai.prompt import PromptPrefix, SeenPrompt, rendered
from kvroute.openai.request import InferenceRequest, as_request, loose_request, parse_request, prompt_steps

_NAME: Final = b'"messages"'
_OPENED = re.compile(rb'"messages"[ \t\r\n]*:[ \t\r\n]*\[[ \t\r\n]*({)').match
_KEY = re.compile(rb'{[ \t\r\n]*"[a-z_]{1,32}"').match
"""How messages begin. In JSON this is no part of a string."""
_BLANK: Final = b" \t\r\n"
_COMMA: Final = ord(",")
_LOOKED_AT_BYTES: Final = 65_536
"""Where `messages` begin later, or a message is longer, a body is parsed as a whole."""
_TRIES: Final = 3
_MOST_BLANKS: Final = 1024
"""Between two messages."""
_OVERHEAD_BYTES: Final = 2_000
_NOTHING: Final = PromptPrefix(0, 0, b"", b"")
_view: Callable[[Any], Any] = memoryview


class SeenBodies:
    """Reads the bodies of requests as `parse_request` does, with the same result.

    Mutable: remembers hashes of what came, at most `most_blocks` (about 200 B each), and what the beginnings
    hold that came twice, an estimated `max_bytes` in all; the least recently used are forgotten first. Of
    prompts it keeps no more than the end of a beginning, less than `cut_bytes`, and what is before messages.

    `seed` makes the hashes this object's own: who does not know it cannot make two beginnings that are taken
    for one another. `cut_bytes` is where readers of a prompt can begin. Bodies below `least_bytes` are parsed
    as they are: looking for their beginning costs as much. `bounded` decodes.

    Where a plain reading of a 256 KB turn, its keys and a match in the history took 250 us, this took 70 for
    the next turn of a known chat, 320 where a beginning came for the second time, 12 more at first.
    """

    def __init__(
        self,
        *,
        seed: int,
        cut_bytes: int,
        bounded: Bounded | None = None,
        max_bytes: int = 16 << 20,
        most_blocks: int = 32_768,
        least_bytes: int = 32_768,
        block_bytes: int = 8_192,
    ) -> None:
        self._seed = seed
        self._bounded = bounded or Bounded()
        self._cut_bytes = cut_bytes
        self._max_bytes = max_bytes
        self._most_blocks = most_blocks
        self.least_bytes = least_bytes
        self._block_bytes = block_bytes
        role = b'"%016x"' % xxh3_64_intdigest(b"role", seed)
        self._stand_in_role = Raw(role)
        self._stand_in = b'{"role":%b},' % role
        """Stands for the messages that are left out. No client knows it."""
        # Of a plain dict the oldest of many is found slowly.
        self._known: OrderedDict[int, PromptPrefix | None] = OrderedDict()
        """By the hash of all that is before a block's end; None where that came once."""
        self._kept_bytes = 0

    def __len__(self) -> int:
        """Hashes that are remembered."""
        return len(self._known)

    @property
    def kept_bytes(self) -> int:
        """Estimated memory of the beginnings."""
        return self._kept_bytes

    def read(self, endpoint: Endpoint, body: bytes) -> InferenceRequest:
        """A JSON body. Raises InvalidRequest as `parse_request` does."""
        if len(body) < self.least_bytes or not endpoint.fills_kv_cache:
            return parse_request(endpoint, body)
        return self.continued(endpoint, body) or parse_request(endpoint, body, bounded=self._bounded)

    def continued(self, endpoint: Endpoint, body: bytes) -> InferenceRequest | None:
        """The same where the body's beginning came before, else None: nothing of it has been decoded then."""
        known, hashed, view = self._known, xxh3_64_intdigest, memoryview(body)
        digest, size = self._seed, self._block_bytes
        digests = [
            digest := hashed(view[start : start + size], digest)
            for start in range(0, len(body) - size + 1, size)
        ]
        deepest = len(digests)
        while deepest and digests[deepest - 1] not in known:
            deepest -= 1
        for new in digests[deepest:]:
            known[new] = None
        request = None
        if deepest:
            latest = digests[deepest - 1]
            found = known[latest]
            known.move_to_end(latest)
            if found is not None:
                request = self._continue(endpoint, body, found)
            else:
                request = self._grow(endpoint, body, digests[:deepest])
        while len(known) > self._most_blocks or self._kept_bytes > self._max_bytes:
            self._keep(next(iter(known)), None)
        return request

    def _continue(self, endpoint: Endpoint, body: bytes, base: PromptPrefix) -> InferenceRequest | None:
        """A body that begins with all of `base`."""
        rest = self._rest(body, base.opened, base.end)
        if rest is None:
            return None
        decoded, messages = rest
        if b"".join(head_of(decoded)) != base.head:
            return None
        self._check(base.messages + len(messages))
        request, tail = _seen(endpoint, body, decoded, base, rendered(messages, self._bounded))
        request.seen = SeenPrompt(body, base, tail)
        return request

    def _grow(self, endpoint: Endpoint, body: bytes, digests: list[int]) -> InferenceRequest | None:
        """The same where more than a beginning is known: up to a message's end before that of the last block
        of `digests`. What that holds is kept from now on."""
        latest, before = digests[-1], _NOTHING
        for digest in reversed(digests[:-1]):
            found = self._known.get(digest)  # that of a shorter beginning may be forgotten before
            if found is not None:
                before = found
                break
        self._keep(latest, before)  # unless there is more to be found
        limit = len(digests) * self._block_bytes
        request = None
        if before.end:
            request = self._grown(endpoint, body, before, before.opened, limit, latest)
        if request is None:
            at = body.find(_NAME, 0, _LOOKED_AT_BYTES)
            match = _OPENED(body, at) if at >= 0 else None
            if match is not None:
                request = self._grown(endpoint, body, None, match.start(1), limit, latest)
        return request

    def _grown(
        self, endpoint: Endpoint, body: bytes, base: PromptPrefix | None, opened: int, limit: int, digest: int
    ) -> InferenceRequest | None:
        said, end = self._between(body, opened if base is None else base.end, opened, limit)
        rest = self._rest(body, opened, end) if said else None
        if rest is None:
            return None
        decoded, messages = rest
        head = b"".join(head_of(decoded))
        if base is None:
            base = PromptPrefix(opened, opened, head, head)
        elif head != base.head:
            return None
        count = base.messages + len(said)
        self._check(count + len(messages))
        added = rendered(said, self._bounded)
        others = rendered(messages, self._bounded)
        request, tail = _seen(endpoint, body, decoded, base, [*added, *others])
        size = len(base.rest) + sum(map(len, map(_view, added)))
        cut = size - size % self._cut_bytes
        grown = PromptPrefix(opened, end, head, tail[cut:size], base.whole_bytes + cut, messages=count)
        self._keep(digest, grown)
        request.seen = SeenPrompt(body, base, tail, grown)
        return request

    def _between(self, body: bytes, start: int, opened: int, limit: int) -> tuple[list[Message], int]:
        """The messages from `start` on that end, with their commas, before `limit`, and where the next one
        begins; none where they cannot be told from other text."""
        match = _KEY(body, opened)
        if match is None:
            return [], 0
        end, least = limit, max(start + 1, limit - _LOOKED_AT_BYTES)
        for _ in range(_TRIES):
            end = stop = body.rfind(match[0], least, end)
            if end < 0:
                break
            while body[stop - 1] in _BLANK and end - stop < _MOST_BLANKS:
                stop -= 1
            if body[stop - 1] == _COMMA:
                try:
                    # Nothing but the elements of one array can stand here.
                    said = self._bounded.messages(b"".join([b"[", memoryview(body)[start : stop - 1], b"]"]))
                except UNREADABLE:
                    continue
                return said, end
        return [], 0

    def _rest(self, body: bytes, opened: int, end: int) -> tuple[Body, list[Message]] | None:
        """The body without the messages before `end`, and the others; None where these are too many for that
        to be of use, or what is left is nothing that those could have been taken from."""
        if end - opened < len(body) // 2:
            return None
        view = memoryview(body)
        try:
            decoded = self._bounded.body(b"".join([view[:opened], self._stand_in, view[end:]]))
        except UNREADABLE:
            return None
        messages = decoded.messages
        # Else they are of another field, or `messages` come again.
        if messages is UNSET or not messages or messages[0].role != self._stand_in_role:
            return None
        return decoded, messages[1:]

    def _check(self, messages: int) -> None:
        if messages > self._bounded.limits.max_messages:
            raise self._bounded.over("max_messages", "messages", "messages")

    def _keep(self, digest: int, beginning: PromptPrefix | None) -> None:
        """Put `beginning` for what is known under `digest`; with None forget that."""
        before = self._known.pop(digest, None)
        if before is not None:
            self._kept_bytes -= self._size(before)
        if beginning is not None:
            self._known[digest] = beginning
            self._kept_bytes += self._size(beginning)

    def _size(self, beginning: PromptPrefix) -> int:
        # Two notes of an anchor a cut, and what is asked for.
        return (
            _OVERHEAD_BYTES
            + len(beginning.head)
            + len(beginning.rest)
            + 90 * (beginning.whole_bytes // self._cut_bytes)
        )


def _seen(
    endpoint: Endpoint, body: bytes, decoded: Body, base: PromptPrefix, parts: list[bytes | Raw]
) -> tuple[InferenceRequest, bytes]:
    """The request without its prompt, and what of that follows the part that is not kept."""
    decoded.messages = UNSET
    return as_request(endpoint, body, decoded), b"".join([base.rest, *parts])


_REMEMBERED_BYTES: Final = 4_194_304
"""Of a larger body no beginning is looked for: that reads most of it twice."""


def large_request(
    endpoint: Endpoint, body: bytes, content_type: str, bounded: Bounded, bodies: SeenBodies | None = None
) -> Generator[None, None, InferenceRequest]:
    """The request with its prompts. Raises InvalidRequest and OverLimit."""
    if endpoint.body is BodyKind.MULTIPART:
        return parse_request(endpoint, body, content_type, bounded)
    yield from bounded.values(body)
    request = None
    if bodies is not None and endpoint.fills_kv_cache and len(body) <= _REMEMBERED_BYTES:
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
                pass  # no list of objects, which is the worker's to report
            yield
    request.bounded = bounded
    request.prompts = yield from prompt_steps(request)
    return request
