"""A worker whose answers are a function of the request, so that every byte of them can be traced.

It repeats the marks of the request that it got and takes nothing but well-formed requests. A header
`x-fuzz-worker: N` makes it answer in another framing, refuse, or misbehave, as a function of N.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import cast

from tests.fuzz.cases import ADMIN_KEY, KEY, MARK

_FIELD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[ \t]*[\t\x20-\x7e\x80-\xff]*")
_START = re.compile(rb"[A-Z]+ /[\x21-\x7e\x80-\xff]* HTTP/1\.1")
_HOSTILE = re.compile(rb"\r\nx-fuzz-worker: *(\d+)(?=\r|$)")  # names come in lower case
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)(?=\r|$)")
_KEYS = re.compile(rb"(?i)\r\n(?:authorization|x-api-key):[^\r]*(?:%b|%b)" % (KEY, ADMIN_KEY))
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":4096}]}'
_METRICS = (
    b'process_start_time_seconds 1.0\nvllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
)


class EchoWorker:
    """Listens on `url`. `faults`: what was wrong with requests that came, in words."""

    def __init__(self) -> None:
        self.url = ""
        self.faults: list[str] = []
        self.requests = 0
        self.activity = 0
        self.hides_keys = False
        """The client's keys must not come here."""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> EchoWorker:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()


class _Connection(asyncio.Protocol):
    def __init__(self, worker: EchoWorker) -> None:
        self._worker = worker
        self._transport: asyncio.Transport | None = None
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._worker.activity += 1
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end]
            lines = head.split(b"\r\n")
            fault = "" if _START.fullmatch(lines[0]) else f"request line {lines[0][:100]!r}"
            names = [line.partition(b":")[0].lower() for line in lines[1:]]
            for line in lines[1:]:
                if not _FIELD.fullmatch(line):
                    fault = fault or f"header line {line[:100]!r}"
            if (
                names.count(b"content-length") > 1
                or b"transfer-encoding" in names
                or names.count(b"host") != 1
            ):
                fault = fault or f"framing: {sorted(names)!r}"
            if self._worker.hides_keys and _KEYS.search(head):
                fault = fault or "key of a client"
            length = _LENGTH.search(head)
            size = int(length[1]) if length else 0
            if len(self._data) < end + 4 + size:
                return
            body = self._data[end + 4 : end + 4 + size]
            self._data = self._data[end + 4 + size :]
            if fault:
                self._worker.faults.append(fault)
            self._answer(lines[0], head, body)

    def _answer(self, line: bytes, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        target = line.split(b" ")[1] if b" " in line else b""
        if line.startswith(b"GET ") and target in (
            b"/health",
            b"/metrics",
            b"/v1/models",
            b"/status",
            b"/server_info",
        ):
            known = {b"/v1/models": _MODELS, b"/metrics": _METRICS}.get(target, b"")
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(known), known))
            return
        self._worker.requests += 1
        marks = MARK.findall(head + body)
        asked = _HOSTILE.search(head)
        data, ends = answer_of(marks, b'"stream": true' in body, target, int(asked[1]) if asked else None)
        self._transport.write(data)
        if ends:
            self._transport.close()


def answer_of(marks: list[bytes], streams: bool, target: bytes, seed: int | None) -> tuple[bytes, bool]:
    """The bytes of an answer, and whether the connection ends behind them."""
    first = marks[0].decode() if marks else "unmarked"
    rng = random.Random(seed)
    way = rng.random() if seed is not None else 0.0
    fields: dict[str, object] = {"id": f"resp_{first}", "echo": [mark.decode() for mark in marks]}
    fields["usage"] = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    if target.startswith(b"/tokenize"):
        fields |= {"tokens": list(range(40)), "count": 40, "max_model_len": 4096}
    text = json.dumps(fields).encode()
    if streams:
        pieces = [b'data: {"text":"%b"}\n\n' % mark for mark in marks] + [
            b"data: %b\n\n" % text,
            b"data: [DONE]\n\n",
        ]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        plain = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            + chunks
        )
    else:
        plain = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
            len(text),
            text,
        )
    if way < 0.1:
        return plain, False
    if way < 0.3:
        parts = [text[at : at + 7] for at in range(0, len(text), 7)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n", False
    if way < 0.5:
        status = rng.choice([201, 204, 206, 304, 400, 404, 418, 422, 429, 500, 503, 599])
        sized = b"" if status in (204, 304) else text
        length = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(sized)
        return b"HTTP/1.1 %d Odd\r\n%bx-mark: %b\r\n\r\n%b" % (status, length, first.encode(), sized), False
    if way < 0.6:
        return b"HTTP/1.0 200 OK\r\nx-mark: %b\r\n\r\n%b" % (first.encode(), text), True
    if way < 0.65:
        return b"", True
    if way < 0.72:  # one answer too many: what follows must not become anybody's
        return plain + plain.replace(first.encode(), b"@stray-answer@"), False
    data = plain
    for _ in range(rng.choice([1, 1, 2, 6])):
        at = rng.randrange(min(len(data), 120)) if data else 0
        turn = rng.random()
        if turn < 0.3:
            data = data[:at] + bytes((rng.randrange(256),)) + data[at + 1 :]
        elif turn < 0.5:
            data = data[: rng.randrange(len(data) + 1)]
        elif turn < 0.7:
            odd = rng.choice(
                [
                    b"\r\n",
                    b"\0",
                    b"content-length: 3\r\n",
                    b"transfer-encoding: gzip\r\n",
                    b"HTTP/1.1 100 Continue\r\n\r\n",
                    b"HTTP/1.1 101 Switching\r\n\r\n",
                    b"\r\nx: y",
                    b"9" * 40,
                ]
            )
            data = data[:at] + odd + data[at:]
        else:
            status = rng.choice([b"600", b"999", b"000", b"099", b"20", b"2000", b"+20", b"101", b"199"])
            data = data.replace(b"200", status, 1)
    # A changed byte must not make a mark that another client has.
    return MARK.sub(lambda found: found[0] if found[0] in marks else b"<changed mark>", data), True
