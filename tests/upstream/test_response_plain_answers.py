import pytest
from tests.support.memory import growth_bytes

from kvroute.upstream import response
from kvroute.upstream.connection import MAX_HEAD_BYTES
from kvroute.upstream.response import PlainAnswers

ANSWERS = PlainAnswers()


def head(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([start, *lines, b"", b""])


def test_a_plain_answer_is_read_with_what_clients_get():
    lines = (
        b"Server: v",
        b"X-Request-Id: w",
        b"Connection: keep-alive",
        b"x-a:  1",
        b"x-a: 2",
        b"Content-Length: 2",
    )
    for _ in range(2):  # the second time from memory
        answer = ANSWERS.read(head(*lines) + b"{}")

        assert answer is not None
        assert (answer.status, answer.reason, answer.body_bytes) == (200, b"OK", 2)
        assert answer.headers[0] == (b"Server", b"v")
        assert len(answer.headers) == len(lines)
        assert answer.fields == b"server: v\r\nx-a: 1\r\nx-a: 2\r\ncontent-length: 2\r\n"
        assert (head(*lines) + b"{}")[answer.body_at :] == b"{}"


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (b"x: 1",),
        (b"content-length: 0",),
        (b"content-length: 02",),
        (b"content-length: 2", b"content-length: 2"),
        (b"content-length: 2", b"Content-Length: 3"),
        (b"content-length: 2, 2",),
        (b"content-length: 2", b"transfer-encoding: chunked"),
        (b"content-length: 2", b"connection: close"),
        (b"content-length: 2", b"connection: keep-alive, x"),
        (b"content-length: 2", b"keep-alive: timeout=5"),
        (b"content-length: 2", b"content-type: Text/event-stream"),
        (b"content-length: 2", b"x : 1"),
        (b"content-length: 2", b" folded"),
        (b"content-length: 2", b"x: 1\n"),
        (b"content-length: 2", b"x: 1\x00"),
        (b"content-length: 2", b"x:"),
        (b"content-length: 2", b"x: " + b"y" * MAX_HEAD_BYTES),
    ],
)
def test_anything_unusual_is_not_plain(lines):
    assert ANSWERS.read(head(*lines) + b"{}") is None


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 100 Continue",
        b"HTTP/1.1 204 No Content",
        b"HTTP/1.1 304 Not Modified",
        b"HTTP/1.1 200",
        b"HTTP/1.1  200 OK",
        b"http/1.1 200 OK",
        b"HTTP/1.1 2000 OK",
    ],
)
def test_only_final_answers_with_a_body_are_plain(start):
    assert ANSWERS.read(head(b"content-length: 2", start=start) + b"{}") is None


def test_an_incomplete_head_is_not_plain():
    assert ANSWERS.read(head(b"content-length: 2")[:-1]) is None


def is_known(answers, data):
    """Whether `answers` reads a head without parsing any of its lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(response, "FIELD", lambda line: pytest.fail("parsed"))
        return answers.read(data) is not None


def test_no_number_of_different_lines_fills_the_memory():
    answers = PlainAnswers()

    def read(number):
        line = b"x-trace: %d" % number
        assert answers.read(head(b"content-length: 2", line, start=b"HTTP/1.1 200 OK%d" % number))

    assert growth_bytes(read, 3000) < 100_000


def test_a_known_head_is_read_with_its_new_length():
    answers = PlainAnswers()
    lines = (b"a: content-length: 2", b"Content-Length: %d", b"x-a: 1", b"server: v")
    first, *others = (answers.read(head(*lines) % length) for length in (2, 3, 40, 500))

    assert is_known(answers, head(*lines) % 6)
    for answer, length in zip((first, *others), (2, 3, 40, 500), strict=True):
        assert answer is not None
        assert answer.body_bytes == length
        assert (
            answer.fields == b"a: content-length: 2\r\ncontent-length: %d\r\nx-a: 1\r\nserver: v\r\n" % length
        )
        assert answer.headers[1] == (b"Content-Length", b"%d" % length)
        assert [name for name, _ in answer.headers] == [b"a", b"Content-Length", b"x-a", b"server"]
        assert answer.body_at == len(head(*lines) % length)


def test_a_head_that_came_before_is_not_plain_with_an_odd_length():
    answers = PlainAnswers()
    for _ in range(3):
        assert answers.read(head(b"x-a: 1", b"content-length: 2"))
    assert is_known(answers, head(b"x-a: 1", b"content-length: 3"))

    for odd in (b"0", b"02", b"+2", b"2 ", b"", b"1" * 17):
        assert answers.read(head(b"x-a: 1", b"content-length: " + odd)) is None
    assert answers.read(head(b"x-a: 1", b"content-length: 2", b"content-length: 2")) is None


def test_a_head_like_the_last_one_is_read_with_care():
    answers = PlainAnswers()
    lines = (b"server: v", b"Content-Length: %d", b"x-a: 1")
    for length in (2, 3, 4):
        whole = head(*lines) % length
        assert answers.read(whole)
    assert is_known(answers, head(*lines) % 5)

    assert all(answers.read(whole[:size]) is None for size in range(len(whole)))
    for other in ((*lines[:2], b"x-a: 2"), lines[:2], (b"server: w", *lines[1:]), (*lines, b"x-b: 1")):
        for length in (7, 123456789012345):
            answer = answers.read(head(*other) % length + b"1\r\n\r\n")
            fresh = PlainAnswers().read(head(*other) % length)
            assert answer == fresh
            assert answer is not None
            assert answer.headers == fresh.headers
    assert answers.read(head(*lines) % 1234567890123456) is None


def test_the_head_of_a_stream_that_came_before_is_read_again():
    answers = PlainAnswers()
    whole = head(b"server: v", b"Content-Type: text/event-stream", b"Transfer-Encoding: chunked")
    first, second, third = (answers.read(whole + rest) for rest in (b"", b"1\r\n", b"1\r\nx\r\n"))

    assert first == second == third
    assert second is third
    assert third is not None
    assert (third.body_at, third.body_bytes, third.is_event_stream) == (len(whole), None, True)
    assert third.fields == b"server: v\r\ncontent-type: text/event-stream\r\n"
    assert third.headers[2] == (b"Transfer-Encoding", b"chunked")


def test_no_number_of_different_heads_fills_the_memory():
    answers = PlainAnswers()

    def read(number):
        one, other, third = (b"x-%d: 1" % (number // 20**place % 20) for place in range(3))
        for last in (b"content-length: 2", b"transfer-encoding: chunked"):
            answers.read(head(one, other, third, last))

    assert growth_bytes(read, 4000) < 300_000
