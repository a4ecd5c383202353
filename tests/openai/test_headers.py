"""Known heads give the same headers as lists of pairs."""

import pytest

from kvroute.openai.headers import FirstHeader, HeaderPlaces, KnownHeaders, header

PAIRS = [(b"host", b"h"), (b"b", b"2"), (b"a", b"1"), (b"empty", b""), (b"long", b"x" * 5)]


def known(varying: tuple[bytes, ...]) -> KnownHeaders:
    """PAIRS as a known head in which the values of `varying` differ, behind a length that is no header."""
    values = dict(PAIRS)
    fixed = {name: value for name, value in PAIRS if name not in varying}
    places = HeaderPlaces((name for name, _ in PAIRS), fixed, (None, *varying))
    return KnownHeaders(places, (b"17", *(values[name] for name in varying)))


HEADS = [PAIRS, known(()), known((b"a",)), known((b"b", b"a", b"empty", b"long"))]


@pytest.mark.parametrize("headers", HEADS)
def test_each_header_has_its_value_and_an_absent_one_none(headers):
    assert list(headers) == PAIRS
    assert [header(headers, name) for name, _ in PAIRS] == [value for _, value in PAIRS]
    assert header(headers, b"absent") == b""


@pytest.mark.parametrize("headers", HEADS)
@pytest.mark.parametrize(
    ("names", "found"),
    [
        ((b"a", b"b"), b"1"),
        ((b"b", b"a"), b"2"),
        ((b"absent", b"empty", b"long", b"a"), b"1"),  # no value, and a value above the limit, are none
        ((b"absent", b"empty", b"long"), b""),
        ((), b""),
    ],
)
def test_the_first_one_with_a_value_counts(headers, names, found):
    first = FirstHeader(names, 4)

    assert first.read(headers) == first.read(headers) == found
