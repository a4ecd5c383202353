import json

import msgspec
import pytest

from kvroute.openai.members import with_members


def members(body):
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw])


def changed(body, **values):
    return with_members(body, members(body), {name: json.dumps(v).encode() for name, v in values.items()})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1}', b'{"a":1,"s":"x"}'),
        (b' { "a" : 1 }\r\n\t ', b' { "a" : 1 ,"s":"x"}\r\n\t '),
        (b'{"s":"old","a":1}', b'{"s":"x","a":1}'),
        (b'{"s" :\n null}', b'{"s" :\n "x"}'),
        (b'{"a":{"s":"old"},"s":"old"}', b'{"a":{"s":"old"},"s":"x"}'),
        (b'{"a":"\\"s\\":\\"old\\"","s":"old"}', b'{"a":"\\"s\\":\\"old\\"","s":"x"}'),
        (b'{"s":"first","s":"old"}', b'{"s":"first","s":"x"}'),
        # Its name is written in another way: the last one counts.
        (b'{"\\u0073":"old"}', b'{"\\u0073":"old","s":"x"}'),
    ],
)
def test_one_member_is_set_and_every_other_byte_stays(body, expected):
    assert changed(body, s="x") == expected


def test_several_are_set_in_one_go():
    assert changed(b'{"a":1,"s":2}', s="x", t=[1]) == b'{"a":1,"s":"x","t":[1]}'


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_a_body_full_of_lookalikes_is_decoded_a_few_times_only(blank, monkeypatch):
    import kvroute.openai.members as module

    decoded = []
    decode = module._decode_fields
    monkeypatch.setattr(module, "_decode_fields", lambda body: decoded.append(1) or decode(body))
    lookalikes = ",".join([f'{{"s":{blank}"old"}}'] * 1000)
    body = f'{{"a":[{lookalikes}],"s":{blank}"old"}}'.encode()

    result = changed(body, s="x")

    assert json.loads(result)["s"] == "x"
    assert json.loads(result)["a"] == json.loads(body)["a"]
    assert len(decoded) <= 6


def test_python_and_our_parser_agree_on_what_was_set():
    body = b'{"s":"a","x":1,"s":"b","x":[2]}'

    result = changed(body, s="new", y=None)

    assert json.loads(result) == {"s": "new", "x": [2], "y": None}
    assert {name: json.loads(bytes(raw)) for name, raw in members(result).items()} == json.loads(result)


def test_a_large_body_is_not_decoded_for_the_place_of_a_member(monkeypatch):
    import kvroute.openai.members as module

    body = b'{"s":"old","a":"%b"}' % (b"x" * (1 << 20))
    fields = members(body)
    monkeypatch.setattr(module, "_decode_fields", lambda body: pytest.fail("decoded"))

    result = with_members(body, fields, {"s": b'"new"'})

    assert result == body[:-1] + b',"s":"new"}'
    assert json.loads(result)["s"] == "new"
