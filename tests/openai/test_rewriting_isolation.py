import json
import re

import pytest

from kvroute.errors import AdapterNotIsolated, InvalidRequest, NotFound
from kvroute.openai import rewriting
from kvroute.openai.endpoints import ENDPOINTS, Isolation
from kvroute.openai.request import parse_request
from kvroute.openai.rewriting import (
    PREFIX,
    TAG,
    TENANT_PREFIX,
    check_can_be_isolated,
    check_response_owner,
    check_uses_no_key_space,
    client_salt,
    is_key_space,
    isolated,
    key_space,
    new_response_id,
)

COMPLETIONS = ENDPOINTS["/v1/completions"]
SPACE = key_space("", "ada", "/a")


def request(body, endpoint=COMPLETIONS):
    return parse_request(endpoint, body if isinstance(body, bytes) else json.dumps(body).encode())


def test_a_key_space_is_a_salt_that_vllm_takes():
    space = key_space("t" * 500, "org/bob@1", "/a\\b\0")

    assert re.fullmatch(r"[a-z0-9-]{1,128}", space)
    assert is_key_space(space)
    assert not is_key_space("tenant")


def test_everything_that_decides_over_kv_makes_another_key_space_and_no_two_run_together():
    parts = [("", "ada", "/a"), ("t", "ada", "/a"), ("", "bob", "/a"), ("", "ada", "/b"), ("", "ada", "")]
    parts += [("ada", "", "/a"), ("a", "da", "/a"), ("", "ada/a", ""), ("", "ad", "a/a")]

    assert len({key_space(*each) for each in parts}) == len(parts)


def test_a_key_space_is_the_same_in_every_process():
    """A gateway that is updated, or another one, must find what is stored."""
    assert key_space("tenant", "ada", "/adapters/ada") == PREFIX + "cedc3d141fd6a96e81bc4c5e55187d26d7d5c1b8"


def test_the_clients_parameters_stay_as_they_came():
    body = b'{"model":"ada","kv_transfer_params":{"lmcache.tag.u":"1","n":1.50,"n":1.0,"deep":{"a":[ 1 ]}}}'

    result = isolated(body, request(body), SPACE)

    assert b'"n":1.0,"deep":{"a":[ 1 ]}' in result
    assert json.loads(result)["kv_transfer_params"] == {
        "lmcache.tag.u": "1",
        "n": 1.0,
        "deep": {"a": [1]},
        TAG: SPACE,
    }


@pytest.mark.parametrize("params", ["null", "{}"])
def test_empty_parameters_become_the_tag(params):
    body = f'{{"model":"ada","kv_transfer_params":{params}}}'.encode()

    assert json.loads(isolated(body, request(body), SPACE))["kv_transfer_params"] == {TAG: SPACE}


def test_a_body_without_the_two_members_is_copied_and_not_read_again(monkeypatch):
    def refuse(*_):
        raise AssertionError("read again")

    body = b'{"model":"ada","prompt":"' + b"x" * 1_000_000 + b'"}'
    asked = request(body)
    monkeypatch.setattr(rewriting.TopLevelMember, "locate", refuse)
    monkeypatch.setattr(type(asked), "fields", property(refuse))

    assert isolated(body, asked, SPACE).startswith(body[:-1] + b',"cache_salt":"' + SPACE.encode())


def test_pooling_requests_have_no_transfer_parameters():
    body = b'{"model":"ada","input":"x"}'

    result = isolated(body, request(body, ENDPOINTS["/v1/embeddings"]), SPACE)

    assert json.loads(result) == {"model": "ada", "input": "x", "cache_salt": SPACE}


@pytest.mark.parametrize("params", ["5", '"x"', "[]"])
def test_parameters_that_are_no_object_are_refused_by_name(params):
    body = f'{{"model":"ada","kv_transfer_params":{params}}}'.encode()
    with pytest.raises(InvalidRequest) as refused:
        isolated(body, request(body), SPACE)

    assert refused.value.param == "kv_transfer_params"


@pytest.mark.parametrize(("salt", "expected"), [("null", ""), ('"t"', "t"), ('"a\\u0062"', "ab")])
def test_a_clients_salt_is_read_as_the_worker_reads_it(salt, expected):
    assert client_salt(request(f'{{"cache_salt":{salt}}}'.encode())) == expected


@pytest.mark.parametrize("salt", ["5", '""', "{}", '"\\ud800"'])
def test_a_salt_that_is_no_text_is_refused(salt):
    with pytest.raises(InvalidRequest) as refused:
        client_salt(request(f'{{"cache_salt":{salt}}}'.encode()))

    assert refused.value.param == "cache_salt"


@pytest.mark.parametrize(
    "body",
    [
        {"cache_salt": SPACE},
        {"cache_salt": "x" + SPACE},
        {"kv_transfer_params": {TAG: "x"}},
        {"kv_transfer_params": {"lmcache.tag.a": f"1@kvroute%{SPACE}"}},
        json.dumps({"cache_salt": SPACE}).replace("kvroute", "\\u006bvroute").encode(),
        json.dumps({"kv_transfer_params": {TAG: 1}}).replace("kvroute", "kvr\\u006fute").encode(),
        # Python's json takes these, our parser does not.
        json.dumps({"cache_salt": SPACE, "x": float("nan")}).encode(),
        json.dumps({"kv_transfer_params": {TAG: float("nan")}}).encode(),
        json.dumps({"cache_salt": SPACE}).encode("utf-16"),
    ],
)
def test_a_client_cannot_name_an_adapters_key_space(body):
    with pytest.raises(InvalidRequest):
        check_uses_no_key_space(request(body))


@pytest.mark.parametrize("member", ["cache_salt", "kv_transfer_params"])
def test_long_salts_and_parameters_are_refused_before_they_are_decoded(monkeypatch, member):
    monkeypatch.setattr("kvroute.openai.rewriting._mentions", None)
    body = {member: {"lmcache.tag.a": [1] * 300_000}}

    with pytest.raises(InvalidRequest, match="is longer than") as caught:
        check_uses_no_key_space(request(body))
    assert caught.value.param == member


def test_other_salts_and_tags_are_the_clients_own():
    check_uses_no_key_space(request({"cache_salt": "t", "kv_transfer_params": {"lmcache.tag.a": "kvroute"}}))


def test_a_body_that_cannot_be_changed_is_refused():
    unread = b'{"model":"ada","temperature":NaN}'
    with pytest.raises(AdapterNotIsolated):
        check_can_be_isolated(request(unread))
    form = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nada\r\n--B--\r\n'
    audio = parse_request(ENDPOINTS["/v1/audio/transcriptions"], form, "multipart/form-data; boundary=B")
    with pytest.raises(AdapterNotIsolated):
        check_can_be_isolated(audio)


def test_every_endpoint_that_computes_kv_is_isolated_or_refused():
    for endpoint in ENDPOINTS.values():
        if endpoint.fills_kv_cache:
            assert endpoint.isolation in (Isolation.SALT_AND_TAG, Isolation.SALT), endpoint.path


# --- tenants ----------------------------------------------------------------------------------------------


def test_a_tenants_key_space_depends_on_tenant_salt_adapter_and_revision():
    parts = [
        ("", "", "", "a"),
        ("", "", "", "b"),
        ("t", "", "", "a"),
        ("", "ada", "/a", "a"),
        ("", "ada", "", "a"),
    ]
    parts += [("a", "", "", "t"), ("", "a", "", "ada"), ("", "ada", "/a", "")]
    spaces = {key_space(*each) for each in parts}

    assert len(spaces) == len(parts)
    assert all(is_key_space(space) and len(space) <= 128 for space in spaces)
    assert key_space("", "", "", "a") == TENANT_PREFIX + "e2c66da684ddad3a2d7183a41968f299d4eafe4b"


def test_a_response_id_is_one_of_its_own_tenant_only():
    first, second = new_response_id("a"), new_response_id("a")

    assert first != second
    assert re.fullmatch(r"resp_[0-9a-f]{48}", first)
    check_response_owner("a", first, "id")
    check_response_owner("", "resp_any", "id")
    for other in ("resp_any", new_response_id("b"), "", first.removeprefix("resp_")):
        with pytest.raises(NotFound):
            check_response_owner("a", other, "id")


@pytest.mark.parametrize("given", ['"resp_x"', "null", "[1]", '"re\\u0073p_x"'])
def test_a_client_does_not_choose_the_id_of_its_stored_response(given):
    asked = request(f'{{"input":"p","request_id":{given},"n":1.0}}'.encode(), ENDPOINTS["/v1/responses"])
    asked.tenant = "a"

    result = isolated(asked.body, asked, key_space("", "", "", "a"))

    check_response_owner("a", json.loads(result)["request_id"], "id")
    assert b'"n":1.0' in result


@pytest.mark.parametrize(
    "forged", [TENANT_PREFIX, PREFIX + "x", "x" + TENANT_PREFIX, {"kvroute": TENANT_PREFIX}, {TAG: "x"}]
)
def test_a_clients_salt_or_tag_never_looks_like_a_key_space(forged):
    member = "cache_salt" if isinstance(forged, str) else "kv_transfer_params"
    escaped = (
        json.dumps({member: forged}).replace("k", "\\u006b").replace(member.replace("k", "\\u006b"), member)
    )

    with pytest.raises(InvalidRequest) as caught:
        check_uses_no_key_space(request(escaped.encode()))

    assert caught.value.param == member
