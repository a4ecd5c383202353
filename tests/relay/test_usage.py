import json

import pytest

from kvroute.relay.usage import usage_in
from kvroute.request.record import Usage


def test_a_plain_answers_usage_is_read():
    body = json.dumps(
        {
            "id": "x",
            "choices": [{"text": "long " * 3000}],
            "usage": {"prompt_tokens": 12, "total_tokens": 15, "prompt_tokens_details": {"cached_tokens": 8}},
        }
    ).encode()

    assert usage_in(b"", body) == Usage(12, 8)


def test_a_streams_usage_may_be_split_over_its_last_two_chunks():
    event = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\ndata: [DONE]\n\n'

    assert usage_in(event[:40], event[40:]) == Usage(7, None, 2)


def test_responses_and_messages_call_them_input_tokens():
    body = b'{"usage":{"input_tokens": 5,"input_tokens_details":{"cached_tokens": 4},"output_tokens": 3}}'

    assert usage_in(b"", body) == Usage(5, 4, 3)
    assert usage_in(body[:20], body[20:]) == Usage(5, 4, 3)


def test_generated_text_that_looks_like_usage_is_not():
    body = json.dumps({"choices": [{"text": '"usage": {"prompt_tokens": 99}'}]}).encode()

    assert usage_in(b"", body) is None


def test_fields_may_come_in_any_order():
    body = b'{"usage": {"total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4},"prompt_tokens": 5}}'

    assert usage_in(b"", body) == Usage(5, 4)


@pytest.mark.parametrize("size", [1, 3000])
def test_small_answers_and_large_ones_are_read_alike(size):
    text = {"id": "x", "choices": [{"text": 'say "usage": {"prompt_tokens": 99}' * size}]}
    for usage, expected in (
        ({"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}}, Usage(12, 8)),
        ({"prompt_tokens": 12, "prompt_tokens_details": None, "total_tokens": 13}, Usage(12, None)),
        ({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 0}}, Usage(5, 0)),
        ({"prompt_tokens": 5, "cached_tokens": 4}, Usage(5, 4)),
        ({"prompt_tokens": 5, "completion_tokens": 6, "completion_tokens_details": None}, Usage(5, None, 6)),
        ({"input_tokens": 5, "output_tokens": 7}, Usage(5, None, 7)),
        (
            {
                "input_tokens": 5,
                "output_tokens": 7,
                "cache_creation_input_tokens": 32,
                "cache_read_input_tokens": 64,
            },
            Usage(101, 64, 7),
        ),
        ({"input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": 0}, Usage(5, 0, 7)),
        ({"input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": None}, Usage(5, None, 7)),
        ({"prompt_tokens": 5, "completion_tokens": -6}, Usage(5, None, 0)),
        ({"prompt_tokens": -5}, None),
        ({"prompt_tokens": 10**400}, None),
        ({"prompt_tokens": 10**9}, None),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 10**400}}, Usage(5, None)),
        ({"prompt_tokens": 5, "completion_tokens": 10**400}, Usage(5, None, 0)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": -4}}, Usage(5, None)),
        ({"prompt_tokens": "5"}, None),
        ({}, None),
        (None, None),
    ):
        assert usage_in(b"", json.dumps({**text, "usage": usage}).encode()) == expected
    assert usage_in(b"", json.dumps(text).encode()) is None
    broken = json.dumps({**text, "usage": {"prompt_tokens": 6, "completion_tokens": 2}}).encode()[:-1]
    assert usage_in(b"", broken) == Usage(6, None, 2)


def test_null_usage_and_missing_details_are_none():
    assert usage_in(b"", b'{"usage":null}') is None
    assert usage_in(b"", b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}') == Usage(3, None)
