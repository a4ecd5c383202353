import json

import pytest

from kvroute.errors import InvalidRequest
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request
from kvroute.openai.rewriting import with_model

CHAT = ENDPOINTS["/v1/chat/completions"]
AUDIO = ENDPOINTS["/v1/audio/transcriptions"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"fast","x":1}', b'{"model":"real","x":1}'),
        (b'{ "x": 1, "model" :\n "fast" }', b'{ "x": 1, "model" :\n "real" }'),
        (b'{"a":{"model":"fast"},"model":"fast"}', b'{"a":{"model":"fast"},"model":"real"}'),
        (
            b'{"a":"\\"model\\": \\"fast\\"","model":"fast"}',
            b'{"a":"\\"model\\": \\"fast\\"","model":"real"}',
        ),
        (b'{"model":"other","model":"fast"}', b'{"model":"other","model":"real"}'),
        (b'{"model":"f\\u0061st"}', b'{"model":"real"}'),
    ],
)
def test_only_the_model_changes(body, expected):
    assert with_model(parse_request(CHAT, body), "real") == expected


def test_a_name_that_needs_escaping_stays_json():
    body = with_model(parse_request(CHAT, b'{"model":"fast"}'), 'we"ird')

    assert json.loads(body) == {"model": 'we"ird'}


@pytest.mark.parametrize("body", [b'{"model":"fast","x":NaN}', b'{"mod\\u0065l":"fast"}'])
def test_a_body_whose_model_cannot_be_found_is_refused(body):
    with pytest.raises(InvalidRequest):
        with_model(parse_request(CHAT, body), "real")


def test_a_forms_model_changes_too():
    form = (
        b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nfast\r\n'
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nfast\r\n--B--\r\n'
    )

    changed = with_model(parse_request(AUDIO, form, "multipart/form-data; boundary=B"), "real")

    assert changed == form.replace(b"fast", b"real", 1)


def test_a_field_with_too_many_namesakes_is_not_searched():
    body = b'{"a":[%b],"model":"fast"}' % b",".join([b'{"model":"fast"}'] * 2000)

    with pytest.raises(InvalidRequest):
        with_model(parse_request(CHAT, body), "real")
