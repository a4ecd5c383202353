"""Reading what a gateway wrote to one client: strict, because what cannot be read is a finding."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEAD = re.compile(rb"HTTP/1\.1 ([0-9]{3}) [\t\x20-\x7e\x80-\xff]*\r\n")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    is_complete: bool

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


class Unreadable(Exception):
    """These bytes are no HTTP/1.1."""


def read_answers(data: bytes, *, was_closed: bool, may_be_head: bool) -> list[Answer]:
    """All answers of a connection, interim ones left out. The last one may be incomplete.

    `may_be_head`: one of the requests may have been a HEAD, whose answer has no body. Raises Unreadable.
    """
    answers: list[Answer] = []
    at = 0
    while at < len(data):
        end = data.find(b"\r\n\r\n", at)
        if end < 0:
            raise Unreadable(f"half a head: {data[at : at + 80]!r}")
        head = data[at : end + 2]
        line = _HEAD.match(head)
        if line is None:
            raise Unreadable(f"no status line: {head[:80]!r}")
        headers = []
        for text in head[line.end() :].split(b"\r\n")[:-1]:
            field = _FIELD.fullmatch(text)
            if field is None:
                raise Unreadable(f"no header: {text[:80]!r}")
            headers.append((field[1].lower(), field[2]))
        at = end + 4
        status = int(line[1])
        if 100 <= status < 200:
            continue
        if may_be_head and (at == len(data) or data.startswith(b"HTTP/1.1 ", at)):
            answers.append(Answer(status, tuple(headers), b"", True))
            continue
        body, at, is_complete = _body(data, at, status, headers, was_closed)
        answers.append(Answer(status, tuple(headers), body, is_complete))
    return answers


def _body(
    data: bytes, at: int, status: int, headers: list[tuple[bytes, bytes]], was_closed: bool
) -> tuple[bytes, int, bool]:
    framing = [pair for pair in headers if pair[0] in (b"content-length", b"transfer-encoding")]
    if status in (204, 304):
        return b"", at, True
    if len(framing) > 1:
        raise Unreadable(f"framed twice: {framing!r}")
    if not framing:
        return data[at:], len(data), was_closed
    (name, value), *_ = framing
    if name == b"content-length":
        if not value.isdigit():
            raise Unreadable(f"length {value!r}")
        end = at + int(value)
        return data[at:end], min(end, len(data)), end <= len(data)
    if value.lower() != b"chunked":
        raise Unreadable(f"transfer encoding {value!r}")
    parts = []
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return b"".join(parts), len(data), False
        try:
            size = int(data[at:end], 16)
        except ValueError:
            raise Unreadable(f"chunk size {data[at:end][:40]!r}") from None
        at = end + 2
        if at + size + 2 > len(data):
            return b"".join([*parts, data[at : at + size]]), len(data), False
        if data[at + size : at + size + 2] != b"\r\n":
            raise Unreadable("a chunk without its end")
        parts.append(data[at : at + size])
        at += size + 2
        if size == 0:
            return b"".join(parts), at, True
