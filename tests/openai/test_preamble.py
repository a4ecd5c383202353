"""The start of an event stream, before its first token."""

import json

import pytest

from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.preamble import Preamble

RESPONSES = ENDPOINTS["/v1/responses"].preamble
MESSAGES = ENDPOINTS["/v1/messages"].preamble
CHAT = ENDPOINTS["/v1/chat/completions"].preamble


def event(kind: str, end: bytes = b"\n", **fields: object) -> bytes:
    data = json.dumps({**fields, "type": kind}).encode()
    return b"event: " + kind.encode() + end + b"data: " + data + end + end


PREAMBLES = [
    (RESPONSES, event("response.created", response={"id": "r"}) + event("response.in_progress")),
    (RESPONSES, event("response.created", b"\r\n") + event("response.in_progress", b"\r\n")),
    (RESPONSES, event("response.created", b"\r") + event("response.in_progress", b"\r")),
    (RESPONSES, b'id: 1\nretry: 3000\ndata: {"sequence_number":0,"type":"response.created"}\n\n'),
    (RESPONSES, b": waiting\n\n" + event("response.created") + b":\n:data: x\n\n"),
    (MESSAGES, event("message_start", message={"id": "m"}) + event("ping") + b"event:ping\ndata:{}\n\n"),
    (CHAT, b": OPENROUTER PROCESSING\n\n\n: again\r\n\r\n"),
]
TOKENS = [
    (RESPONSES, event("response.output_item.added")),
    (RESPONSES, event("error")),
    (RESPONSES, b'data: {"type":"response.output_text.delta"}\n\n'),
    (RESPONSES, b"data: [DONE]\n\n"),
    (MESSAGES, event("content_block_start")),
    (MESSAGES, b'data: {"type":"content_block_delta"}\r\n\r\n'),
    (CHAT, b'data: {"choices":[]}\n\n'),
    (CHAT, b"\x1f\x8b\x08gzip"),
]


@pytest.mark.parametrize(("kinds", "preamble"), PREAMBLES)
def test_a_preamble_has_no_token_however_it_is_split(kinds, preamble):
    for cut in range(len(preamble) + 1):
        state = Preamble(kinds)

        assert state.lasts(preamble[:cut])
        assert state.lasts(preamble[cut:])


@pytest.mark.parametrize(("kinds", "token"), TOKENS)
def test_the_first_other_event_is_the_first_token_behind_any_preamble(kinds, token):
    preambles = [b"", *[each for its, each in PREAMBLES if its == kinds]]
    for preamble in preambles:
        state = Preamble(kinds)

        assert not state.lasts(preamble + token)
        assert state.token_at == len(preamble)


@pytest.mark.parametrize(("kinds", "token"), TOKENS)
def test_a_token_is_found_byte_by_byte_and_where_it_begins(kinds, token):
    for preamble in [each for its, each in PREAMBLES if its == kinds]:
        state = Preamble(kinds)
        found = [state.lasts(bytes([byte])) for byte in preamble + token]

        assert found.index(False) >= len(preamble)
        assert state.token_at == len(preamble)
        assert not state.lasts(event("ping"))


def test_a_preamble_is_measured_in_bytes_and_events():
    state = Preamble(RESPONSES)
    text = b": hi\n\n" + event("response.created") + event("response.in_progress")

    assert state.lasts(text)

    assert (state.size, state.events) == (len(text), 2)
