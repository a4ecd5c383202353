import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import InvalidRequest
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request

CHAT = ENDPOINTS["/v1/chat/completions"]
AUDIO = ENDPOINTS["/v1/audio/transcriptions"]


def test_model_and_stream_are_read():
    request = parse_request(CHAT, b'{"model": "m", "stream": true, "messages": []}')

    assert (request.model, request.stream) == ("m", True)


@pytest.mark.parametrize(
    "body", [b'{"messages": []}', b'{"model": null}', b'{"model": ""}', b'{"model": "", "x": NaN}']
)
def test_a_missing_model_is_none(body):
    assert parse_request(CHAT, body).model is None


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"3", b"null", b"\xff\xfe", b'{"a": 01}', b"[" * 100_000]
    + [
        b'{"model": "m", "%b": ' % name + b"[" * 100_000 + b"]" * 100_000 + b"}"
        for name in (b"a", b"messages")
    ]
    + [b'{"model": "\xff"}'],
)
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(InvalidRequest):
        parse_request(CHAT, body)


@pytest.mark.parametrize("body", [b'{"model": 3}', b'{"model": ["m"]}', b'{"model": {}, "x": NaN}'])
def test_a_model_that_is_no_string_is_refused_by_name(body):
    with pytest.raises(InvalidRequest) as refused:
        parse_request(CHAT, body)

    assert refused.value.param == "model"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "temperature": NaN}',
        b'{"model": "m", "x": "\\ud800"}',
        '{"model": "m"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"model": "m"}',
        b'{"model": "m", "\\ud800": 1}',
    ],
)
def test_a_body_that_only_pythons_json_accepts_is_read_for_its_model(body):
    request = parse_request(CHAT, body)

    assert request.model == "m"
    assert request.fields is None


def test_a_model_that_only_pythons_json_takes_is_a_string_all_the_same():
    assert parse_request(CHAT, b'{"model": "\\ud800"}').model == "\ud800"


@pytest.mark.parametrize(
    ("body", "user"),
    [
        (b'{"model": "m", "user": "\xff"}', None),
        (b'{"model": "m", "\xff": 1, "user": "u"}', "u"),  # fields of sessions are read in the first pass
        (b'{"model": "m", "\xff": 1, "safety_identifier": "u"}', None),
    ],
)
def test_invalid_utf_8_in_a_skipped_field_is_left_to_the_worker(body, user):
    request = parse_request(CHAT, body)

    assert request.model == "m"
    name = "safety_identifier" if b"safety" in body else "user"
    assert request.text(name) == user


def test_wrong_types_elsewhere_are_the_workers_business():
    request = parse_request(CHAT, b'{"model": "m", "stream": "yes", "messages": 3}')

    assert request.model == "m"
    assert request.stream is False


def test_the_last_of_duplicate_keys_counts_as_in_python():
    assert parse_request(CHAT, b'{"model": "a", "model": "b"}').model == "b"


def test_nested_text_is_found_by_its_path():
    request = parse_request(CHAT, b'{"user": "u", "metadata": {"session_id": "s", "n": 1}, "n": 2}')

    assert request.text("user") == "u"
    assert request.text("metadata.session_id") == "s"
    assert request.text("metadata.n") is None
    assert request.text("metadata.session_id.x") is None
    assert request.text("absent") is None
    assert request.text("n") is None


def multipart(fields: dict[str, bytes], *, boundary: bytes = b"XbX") -> bytes:
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (boundary, name.encode(), value)
        for name, value in fields.items()
    ]
    parts.append(
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\nRIFF\x00\r\n--%b--\r\n" % (boundary, boundary)
    )
    return b"".join(parts)


def test_a_forms_model_is_read_and_its_file_is_not():
    request = parse_request(
        AUDIO, multipart({"model": b"whisper", "language": b"de"}), "multipart/form-data; boundary=XbX"
    )

    assert request.model == "whisper"
    assert request.form == {"model": "whisper", "language": "de"}
    assert request.text("language") == "de"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"{}", "application/json"),
        (b"x", "multipart/form-data"),
        (b"no form", "multipart/form-data; boundary=b"),
    ],
)
def test_a_body_that_is_no_form_is_refused(body, content_type):
    with pytest.raises(InvalidRequest):
        parse_request(AUDIO, body, content_type)


@pytest.mark.heavy
@given(
    st.dictionaries(
        st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists), max_size=5
    )
)
def test_every_json_object_is_taken(value):
    value.pop("model", None)

    assert parse_request(CHAT, json.dumps(value).encode()).model is None
