"""The bodies of the two legs of a request that is handed over."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import InvalidRequest
from kvroute.openai.bounded import UNREADABLE
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.kv_transfer import (
    CONNECTORS,
    LegBody,
    NixlPull,
    ParamsMask,
    SharedCache,
    cached_tokens_in,
    can_hand_over,
    check_params,
    release_leg,
    split_params,
)
from kvroute.openai.prefix_cache import SeenBodies
from kvroute.openai.request import parse_request
from kvroute.openai.rewriting import isolated

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
GIVEN = b'{"do_remote_prefill":true, "remote_block_ids":[[4,5]],"remote_engine_id":"e","new":{"a":1}}'


def request_of(body: object, path: str = CHAT):
    return parse_request(ENDPOINTS[path], body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "limits"),
    [
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 1}),
        (COMPLETIONS, {"max_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 1, "store": False}),
        ("/v1/messages", {"max_tokens": 1}),
        ("/invocations", {"max_tokens": 1}),
    ],
)
def test_the_first_leg_asks_for_one_token_in_one_piece(path, limits) -> None:
    request = request_of({"model": "m", "prompt": "x", "stream": True, "temperature": 0.5}, path)

    first = json.loads(NixlPull().first_leg(request.body, request).joined())

    assert first == {
        "model": "m",
        "prompt": "x",
        "temperature": 0.5,
        "stream": False,
        "kv_transfer_params": ASKED,
        **limits,
    }


def test_the_first_leg_drops_what_does_not_fit_one_token() -> None:
    request = request_of(
        {"n": 2, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5, "max_tokens": 9}
    )

    first = json.loads(NixlPull().first_leg(request.body, request).joined())

    assert (first["n"], first["stream_options"], first["min_tokens"], first["max_tokens"]) == (1, None, 0, 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [], "logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS, {"prompt": "x", "logprobs": 2}),
    ],
)
def test_only_the_second_leg_asks_for_logprobs(path, body) -> None:
    request = request_of(body, path)

    first = json.loads(NixlPull().first_leg(request.body, request).joined())
    second = json.loads(NixlPull().second_leg(request.body, request, GIVEN).joined())

    assert [first[name] for name in ("logprobs", "top_logprobs") if name in body] == [None] * (len(body) - 1)
    assert {name: second[name] for name in body} == body


def test_the_json_of_other_members_stays_as_it_came() -> None:
    messages = b'[ {"role":"user","content":"\\u00e9 \\"stream\\":1"} ]'
    body = b'{ "messages" : ' + messages + b',"\\u0073tream" :true , "x":1.50, "y":1, "y":{ } }'
    request = request_of(body)

    first = NixlPull().first_leg(body, request).joined()
    second = NixlPull().second_leg(body, request, GIVEN).joined()

    assert first.startswith(b'{"messages":' + messages + b',"stream":false,"x":1.50,"y":{ },')
    assert second == body[:-1] + b',"kv_transfer_params":' + GIVEN + b"}"


def test_a_body_that_is_not_decoded_gets_its_members_appended_and_the_last_one_counts() -> None:
    body = json.dumps({"prompt": "x" * 40_000, "max_tokens": 500, "stream": True}).encode()
    request = request_of(body, COMPLETIONS)
    isolated_body = isolated(body, request, "space")

    first = NixlPull().first_leg(isolated_body, request).joined()

    assert first.startswith(body[:-1])
    assert json.loads(first)["max_tokens"] == 1
    assert json.loads(first)["stream"] is False


def test_a_known_conversation_is_not_decoded_again() -> None:
    """Its members are those of the part that is decoded, and the messages stay in the body."""
    bodies = SeenBodies(seed=1, cut_bytes=512, min_bytes=1, block_bytes=1024)
    turns = [{"role": "user", "content": f"{number} " * 200} for number in range(40)]
    sent = {"messages": turns, "n": 2, "stream": True, "max_tokens": 9, "logprobs": True}
    body = json.dumps(sent).encode()
    for _ in range(3):
        request = bodies.read(ENDPOINTS[CHAT], body)

    leg = NixlPull().first_leg(body, request).joined()
    first = json.loads(leg)

    assert leg.startswith(body[:-1]), "appended, and not encoded again"
    assert can_hand_over(request)
    assert (first["n"], first["stream"], first["max_tokens"], first["logprobs"]) == (1, False, 1, None)
    assert first["messages"] == turns
    sent["echo"] = True
    assert not can_hand_over(bodies.read(ENDPOINTS[CHAT], json.dumps(sent).encode()))


def test_members_of_lmcache_and_of_key_spaces_stay_in_both_legs() -> None:
    request = request_of({"prompt": "x", "kv_transfer_params": {"lmcache.tag.user": "u"}}, COMPLETIONS)
    body = isolated(request.body, request, "space")

    first = json.loads(NixlPull().first_leg(body, request).joined())
    second = json.loads(NixlPull().second_leg(body, request, GIVEN).joined())

    own = {"lmcache.tag.user": "u", "lmcache.tag.kvroute": "space"}
    assert first["kv_transfer_params"] == own | ASKED
    assert second["kv_transfer_params"] == own | json.loads(GIVEN)


@pytest.mark.parametrize("present", [None, {}])
def test_empty_parameters_of_a_client_are_replaced(present) -> None:
    request = request_of({"prompt": "x", "kv_transfer_params": present}, COMPLETIONS)

    second = NixlPull().second_leg(request.body, request, GIVEN).joined()

    assert second.count(b"kv_transfer_params") == 1
    assert json.loads(second)["kv_transfer_params"] == json.loads(GIVEN)


@pytest.mark.parametrize(
    ("params", "found"),
    [
        (GIVEN, GIVEN),
        (b"null", None),
        (b"{}", None),
        (b"{ }", None),
        (b'"x"', None),
        (b"[1]", None),
        (b"", None),
    ],
)
def test_the_parameters_of_an_answer_are_passed_on_byte_for_byte(params, found) -> None:
    assert NixlPull().params_in(params) == found


AS_VLLM = b'{"do_remote_prefill":true,"remote_block_ids":[[4,5]],"remote_engine_id":"e"}'
TEXT = b'"text":"\\"kv_transfer_params\\":{"'


@pytest.mark.parametrize(
    ("answer", "params"),
    [
        (
            b'{"usage":{"prompt_tokens":3},%b,"kv_transfer_params":%b}' % (TEXT, AS_VLLM),
            AS_VLLM,
        ),
        (b'{"usage":{"prompt_tokens":3},"kv_transfer_params":%b}\n' % AS_VLLM, AS_VLLM),
        (b'{"usage":{"prompt_tokens":3}, "kv_transfer_params": %b }' % AS_VLLM, AS_VLLM),
        (b'{"kv_transfer_params":%b,"usage":{"prompt_tokens":3}}' % AS_VLLM, AS_VLLM),
        (b'{"usage":{"prompt_tokens":3},"kv_transfer_params":%b,"x":{}}' % AS_VLLM, AS_VLLM),
        (b'{"usage":{"prompt_tokens":3},"kv_transfer_params":%b}' % GIVEN, GIVEN),
        (b'{"usage":{"prompt_tokens":3},"kv_transfer_params":{"a":"}{"}}', b'{"a":"}{"}'),
        (b'{"usage":{"prompt_tokens":3},"kv_transfer_params":{"a":"{"}}', b'{"a":"{"}'),
        (b'{"usage":{"prompt_tokens":3},"kv_transfer_params":null}', b"null"),
        (b'{"usage":{"prompt_tokens":3},%b}' % TEXT, b""),
    ],
)
def test_the_answer_of_a_first_leg_is_split(answer, params) -> None:
    others, found = split_params(answer)

    assert found == params
    whole = json.loads(answer)
    assert json.loads(others) in (
        whole,
        {name: whole[name] for name in whole if name != "kv_transfer_params"},
    )


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_an_answer_of_a_first_leg_that_broke_off_is_unreadable(cut) -> None:
    answer = b'{"usage":{"prompt_tokens":3},"kv_transfer_params":%b}' % AS_VLLM

    with pytest.raises(UNREADABLE):
        split_params(answer[:-cut])


def test_a_released_second_leg_generates_one_token() -> None:
    request = request_of({"prompt": "x", "max_tokens": 800, "stream": True, "n": 3}, COMPLETIONS)

    released = json.loads(release_leg(NixlPull(), request.body, request, GIVEN))

    assert (released["max_tokens"], released["stream"], released["n"]) == (1, False, 1)
    assert released["kv_transfer_params"] == json.loads(GIVEN)


def test_a_shared_cache_needs_no_parameters() -> None:
    request, connector = request_of({"prompt": "x", "max_tokens": 9}, COMPLETIONS), SharedCache()

    assert json.loads(connector.first_leg(request.body, request).joined())["max_tokens"] == 1
    assert connector.params_in(b"") == b""
    assert connector.second_leg(request.body, request, b"") == LegBody(request.body)
    assert set(CONNECTORS) == {"nixl", "shared_cache"}


@pytest.mark.parametrize("name", ["remote_host", "do_remote_prefill", "anything", "", "LMCACHE.tag"])
def test_a_clients_parameters_are_refused_by_name(name) -> None:
    request = request_of({"prompt": "x", "kv_transfer_params": {"lmcache.tag.a": "b", name: 1}}, COMPLETIONS)

    with pytest.raises(InvalidRequest) as refused:
        check_params(request)

    assert refused.value.param == f"kv_transfer_params.{name}"


@pytest.mark.parametrize("value", [None, {}, {"lmcache.tag.user": "u", "lmcache.skip_save": True}])
def test_parameters_of_lmcache_pass(value) -> None:
    check_params(request_of({"prompt": "x", "kv_transfer_params": value}, COMPLETIONS))


@pytest.mark.parametrize("value", [{"remote_host": "h"}, 0, "", None])
def test_parameters_among_the_engines_own_arguments_are_refused(value) -> None:
    body = {"prompt": "x", "vllm_xargs": {"a": 1, "kv_transfer_params": value}}

    with pytest.raises(InvalidRequest) as refused:
        check_params(request_of(body, COMPLETIONS))

    assert refused.value.param == "vllm_xargs.kv_transfer_params"


@pytest.mark.parametrize("value", [{"a": 1}, "x", None])
def test_other_arguments_of_the_engine_pass(value) -> None:
    check_params(request_of({"prompt": "x", "vllm_xargs": value}, COMPLETIONS))


@pytest.mark.parametrize("value", ["x", [1], 5])
def test_parameters_that_are_no_object_are_refused(value) -> None:
    with pytest.raises(InvalidRequest, match="object"):
        check_params(request_of({"prompt": "x", "kv_transfer_params": value}, COMPLETIONS))


@pytest.mark.parametrize(
    ("path", "body", "can"),
    [
        (CHAT, {"messages": []}, True),
        (CHAT, {"messages": [], "prompt_logprobs": None, "echo": False}, True),
        (CHAT, {"messages": [], "prompt_logprobs": 1}, False),
        (CHAT, {"messages": [], "logprobs": True, "top_logprobs": 2}, True),
        (COMPLETIONS, {"prompt": "x", "echo": True}, False),
        (COMPLETIONS, {"prompt": "x", "use_beam_search": True}, False),
        ("/v1/responses", {"input": "x", "previous_response_id": "r"}, False),
        ("/v1/responses", {"input": "x"}, True),
        ("/invocations", {"prompt": "x"}, True),
        ("/invocations", {"input": "x"}, False),
        ("/v1/embeddings", {"input": "x"}, False),
        ("/tokenize", {"prompt": "x"}, False),
    ],
)
def test_only_requests_whose_cache_can_move_are_handed_over(path, body, can) -> None:
    assert can_hand_over(request_of(body, path)) is can


def test_a_body_that_was_not_read_is_not_handed_over() -> None:
    assert not can_hand_over(request_of(b'{"prompt":"x","temperature":NaN}', COMPLETIONS))


SECRET = b'{"remote_host":"10.0.0.1", "remote_block_ids":[[4,5]],"text":"\\"}{ \\\\","new":{"a":{}}}'
ANSWERS = [
    b'{"id":"a","kv_transfer_params":%b,"usage":{"prompt_tokens":7}}',
    b'{"id":"a", "kv_transfer_params" : %b}',
    b'event: response.completed\ndata: {"response":{"id":"a","kv_transfer_params":%b},"n":1}\n\n',
    b'data: {"kv_transfer_params":%b}\n\ndata: {"kv_transfer_params":null}\n\ndata: [DONE]\n\n',
]


@pytest.mark.parametrize("answer", ANSWERS)
@given(cuts=st.lists(st.integers(1, 250), max_size=4))
def test_clients_get_an_empty_object_instead_of_the_parameters_however_the_answer_is_cut(
    answer, cuts
) -> None:
    whole, mask = (answer * 2) % (SECRET, SECRET), ParamsMask()
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]

    shown = b"".join(mask.blanked(whole[start:end]) for start, end in pairwise(edges))

    empty = b"{%b}" % (b" " * (len(SECRET) - 2))
    assert shown == (answer * 2) % (empty, empty)


@pytest.mark.parametrize("cut", range(1, 60))
def test_parameters_that_are_cut_anywhere_are_not_shown(cut) -> None:
    whole, mask = ANSWERS[0] % SECRET, ParamsMask()

    shown = mask.blanked(whole[:cut]) + mask.blanked(whole[cut:])

    assert json.loads(shown) == {"id": "a", "kv_transfer_params": {}, "usage": {"prompt_tokens": 7}}


@pytest.mark.parametrize("cut", range(30, 110))
def test_the_error_event_of_a_stream_that_breaks_off_is_shown(cut) -> None:
    mask, error = ParamsMask(), b'\n\ndata: {"error":{"message":"broke off"}}\n\n'

    shown = mask.blanked((b'data: {"kv_transfer_params":%b}' % SECRET)[:cut]) + mask.blanked(error)

    assert shown.endswith(error)
    assert b"10.0.0.1" not in shown


@pytest.mark.parametrize(
    "answer",
    [
        b'{"kv_transfer_params":null,"id":"a"}',
        b'{"kv_transfer_params":{}}',
        rb'{"content":"{\"kv_transfer_params\":{\"a\":1}}"}',
        b'{"content":"kv_transfer_params","x":{"a":1}}',
        b'data: {"content":"kv_transfer_params: {1}"}\n\n',
    ],
)
def test_other_answers_stay_the_same_object(answer) -> None:
    assert ParamsMask().blanked(answer) is answer


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'{"remote_prefill_cached_tokens":64,"remote_host":"h"}', 64),
        (b'{"remote_prefill_cached_tokens":null}', None),
        (b'{"remote_prefill_cached_tokens":-1}', None),
        (b'{"remote_prefill_cached_tokens":"64"}', None),
        (b"null", None),
        (b"{}", None),
        (b"", None),
    ],
)
def test_the_prefill_workers_cached_tokens_are_among_the_parameters(answer, tokens) -> None:
    assert cached_tokens_in(answer) == tokens
