import pytest

from kvroute.errors import InvalidRequest, OverLimit
from kvroute.openai.request import form_spans

KIND = "multipart/form-data; boundary=b0"


def part(name, value, more=b""):
    return b'--b0\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name, more, value)


def fields(body, most=1000):
    return {name: body[span] for name, span in form_spans(body, KIND, most).items()}


def test_text_parts_are_found_and_files_are_not():
    body = (
        part(b"model", b"m")
        + part(b"file", b"\r\n--b\r\n" * 9, b'; filename="a"')
        + part(b"e", b"")
        + b"--b0--"
    )

    assert fields(body) == {b"model".decode(): b"m", "e": b""}


def test_of_equal_names_the_last_wins():
    assert fields(part(b"a", b"1") + part(b"a", b"2") + b"--b0--") == {"a": b"2"}


def test_a_form_that_is_cut_off_has_the_parts_that_are_whole():
    assert fields(part(b"a", b"1") + part(b"b", b"2")[:-2]) == {"a": b"1"}
    assert fields(part(b"a", b"1") + b"--b0\r\nContent-Dis") == {"a": b"1"}


@pytest.mark.parametrize("body", [b"", b"x", b"x\r\n--b0\r\n", b"--b0 \r\n\r\n", b"--b1\r\n\r\n"])
def test_a_body_that_is_no_multipart_form_is_refused(body):
    with pytest.raises(InvalidRequest):
        fields(body)


def test_reading_ends_at_the_first_part_too_many():
    body = part(b"a", b"") * 1001

    with pytest.raises(OverLimit, match=r"server\.max_form_parts"):
        fields(body + b"--b0--")
    assert fields(part(b"a", b"") * 1000 + b"--b0--") == {"a": b""}


def test_a_large_head_is_refused():
    with pytest.raises(InvalidRequest, match="head"):
        fields(part(b"a" * 20_000, b"") + b"--b0--")
