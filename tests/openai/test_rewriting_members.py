import json

import msgspec
import pytest

from kvroute.openai.rewriting import TopLevelMember, with_members


def members(body):
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw])


def changed(body, **values):
    fields = members(body)
    named = {TopLevelMember(name): json.dumps(value).encode() for name, value in values.items()}
    return with_members(body, {member: fields.get(member.name) for member in named}, named)


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
        (b'{"a":{"s":"old"},"\\u0073":"old"}', b'{"a":{"s":"old"},"\\u0073":"old","s":"x"}'),
    ],
)
def test_one_member_is_set_and_every_other_byte_stays(body, expected):
    assert changed(body, s="x") == expected


def test_several_are_set_in_one_go():
    assert changed(b'{"a":1,"s":2}', s="x", t=[1]) == b'{"a":1,"s":"x","t":[1]}'


class CountedMember(TopLevelMember):
    """Counts the bodies that it decodes."""

    def __init__(self, name):
        super().__init__(name)
        self.decoded = 0
        decode = self._decode
        self._decode = lambda body: self._count() or decode(body)

    def _count(self):
        self.decoded += 1


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_a_body_full_of_lookalikes_is_decoded_once(blank):
    lookalikes = ",".join([f'{{"s":{blank}"old"}}'] * 900)
    body = f'{{"a":[{lookalikes}],"s":{blank}"old","b":[]}}'.encode()
    member = CountedMember("s")

    result = with_members(body, {member: members(body)["s"]}, {member: b'"x"'})

    assert result == body.replace(f'],"s":{blank}"old"'.encode(), f'],"s":{blank}"x"'.encode())
    assert member.decoded == 1


def test_a_body_with_one_such_name_is_not_decoded():
    body = b'{"a":[{"t":"x"}],"s" : "old","b":[]}'
    member = CountedMember("s")

    assert with_members(body, {member: members(body)["s"]}, {member: b'"x"'}) == body.replace(b"old", b"x")
    assert member.decoded == 0


def test_among_too_many_lookalikes_no_member_is_searched():
    body = b'{"a":[%b],"s":"old"}' % b",".join([b'{"s":"old"}'] * 1001)
    member = CountedMember("s")

    result = with_members(body, {member: members(body)["s"]}, {member: b'"x"'})

    assert result == body[:-1] + b',"s":"x"}'
    assert member.decoded == 0


def test_a_number_value_is_not_read_as_a_position():
    assert changed(b'{"a":{"s":5},"\\u0073":5}', s=6) == b'{"a":{"s":5},"\\u0073":5,"s":6}'


def test_python_and_our_parser_agree_on_the_values():
    body = b'{"s":"a","x":1,"s":"b","x":[2]}'

    result = changed(body, s="new", y=None)

    assert json.loads(result) == {"s": "new", "x": [2], "y": None}
    assert {name: json.loads(bytes(raw)) for name, raw in members(result).items()} == json.loads(result)


def test_a_large_body_is_not_decoded_for_the_place_of_a_member():
    body = b'{"s":"old","a":"%b"}' % (b"x" * (1 << 20))
    member = CountedMember("s")

    result = with_members(body, {member: members(body)["s"]}, {member: b'"new"'})

    assert result == body[:-1] + b',"s":"new"}'
    assert json.loads(result)["s"] == "new"
    assert member.decoded == 0
