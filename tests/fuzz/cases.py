"""Mutated HTTP requests from a grammar: the same seed gives the same bytes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvroute.openai.endpoints import ENDPOINTS, BodyKind

PLACE = b"@markmarkmark@"
"""Placeholder for the mark of a case; each case gets its own mark before it is sent."""
MARK = re.compile(rb"@[0-9a-f]{12}@")
KEY = b"client-key-of-the-fuzzer"
ADMIN_KEY = b"admin-key-of-the-fuzzer"
OWN_KEYS = re.compile(rb"%b|%b" % (KEY, ADMIN_KEY))
MARKED_KEYS = re.compile(rb"(?im)^(?:authorization: bearer |x-api-key: )(?:%b|%b)" % (KEY, ADMIN_KEY))
"""Keys where they belong. A key elsewhere, such as in a request's id, may come back to its client."""


def strange_marks(written: bytes, data: bytes, mark: bytes) -> set[bytes]:
    """The marks of other clients in an answer to `data`.

    A request for the last decisions with the admin key returns the request ids of all
    clients, which the marks are part of.
    """
    if b"/admin/decisions" in data and ADMIN_KEY in data:
        return set()
    return {each for each in MARK.findall(written) if each != mark and each not in data}


"""Where keys belong; what a mutation has put elsewhere may come back in a refusal."""
BOUNDARY = "fuzzBoundary"


def marked(data: bytes, number: int) -> tuple[bytes, bytes]:
    """The bytes with the mark of this number in all places, and the mark. Lengths do not change."""
    mark = b"@%012x@" % number
    return data.replace(PLACE, mark), mark


@dataclass(frozen=True)
class Case:
    """What one client sends: `data`, cut into segments at `cuts`.

    `leaves`: the client closes the connection right behind its last segment. `stalls`: the client does not
    read for some time after the first bytes of an answer. `is_valid`: the request must be answered with 200.
    """

    data: bytes
    cuts: tuple[int, ...] = ()
    leaves: bool = False
    stalls: bool = False
    is_valid: bool = False

    def segments(self, data: bytes) -> list[bytes]:
        """`data` is `self.data` with its mark."""
        ends = [*sorted({cut for cut in self.cuts if 0 < cut < len(data)}), len(data)]
        return [data[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]

    def save(self, file: Path, **more: object) -> None:
        fields = asdict(self) | {"data": self.data.decode("latin-1")} | more
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> tuple[Case, dict[str, object]]:
        """A saved case, and what else was saved with it."""
        fields = json.loads(file.read_text(encoding="utf-8"))
        known = {name: fields.pop(name) for name in cls.__dataclass_fields__ if name in fields}
        known["data"] = known["data"].encode("latin-1")
        known["cuts"] = tuple(known.get("cuts", ()))
        return cls(**known), fields


_TEXT = PLACE.decode()
_MODELS = ("m", "m", "m", "alias", "unknown", "")
_TARGETS = (
    "/v1/chat/completions?x=1", "/v1/chat/completions/", "//v1/chat/completions", "/v1/chat/../chat/completions",
    "/v1%2fcompletions", "/v1/%2e%2e/admin/config", "/v1/responses/..", "/v1/responses/%2e%2e", "*", "/",
    "http://worker/v1/completions", "http://[::1/v1/completions", "/v1/completions#f", "/v1/completions\x00",
    "/v1/responses/resp_@markmarkmark@", "/v1/responses/resp_1/cancel", "/v1/models", "/v1/models/m",
    "/v1/models/%ff", "/v1/models/" + "a/" * 50, "/health", "/ready", "/metrics", "/version", "/ping",
    "/openapi.json", "/docs", "/v1/route/explain", "/sessions/@markmarkmark@", "/sessions/%00", "/admin/config",
    "/admin/workers", "/admin/workers/w0", "/admin/workers/%2e%2e", "/admin/decisions?limit=0",
    "/admin/decisions?limit=99999999999999999999", "/admin/index", "/admin/audit", "/admin/workers/w0/drain?wait_s=nan",
    "/admin/workers/w9/drain?wait_s=-1", "/ui", "/v1/completions?" + "a=b&" * 300, "", "v1/completions",
    "/v1/completions?%", "/\xff", "/\xc3\xa4", "/" + "x" * 9000,
)  # fmt: skip
_METHODS = (
    "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PATCH", "PRI", "post", "P\x00ST", "M-SEARCH",
    "POST POST", "", "GET\t", "SOURCE", "QUERY", "X" * 300,
)  # fmt: skip
_VERSIONS = (
    "HTTP/1.0", "HTTP/1.1", "HTTP/2.0", "HTTP/0.9", "HTTP/1.2", "HTTP/9.9", "http/1.1", "HTTP/1.1 ", "HTTP/11",
    "", "HTTP/1.1\x00", "RTSP/1.0", "ICE/1.0",
)  # fmt: skip
_NUMBERS = (
    "0", "-1", "+5", "5 ", "0x10", "1e3", "18446744073709551616", "9" * 400, "00000000000000000002", "2, 2", "2,3",
    "", "NaN", "\u0662", "4294967296", "67108865", "1_0", "5;x",
)  # fmt: skip
_HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Host", ("", "a", "a b", "a,b", "[::1]:x", "\x00", "evil\r\nX-Smuggled: 1", "a:99999", "\xff")),
    ("Content-Length", _NUMBERS),
    ("Transfer-Encoding", ("chunked", "gzip, chunked", "chunked, gzip", "identity", "xchunked", "chunked\x0b", "", " chunked ")),
    ("Connection", ("close", "keep-alive", "upgrade", "content-length", "x-a, close", "Keep-Alive, Upgrade", "")),
    ("Upgrade", ("h2c", "websocket", "TLS/1.0")),
    ("HTTP2-Settings", ("AAMAAABkAARAAAAAAAIAAAAA",)),
    ("Expect", ("100-continue", "200-ok", "100-Continue, x")),
    ("Content-Type", ("text/plain", "multipart/form-data", "application/json; charset=utf-16", "multipart/form-data; boundary=", f"multipart/form-data; boundary={BOUNDARY}", "x" * 5000, "")),
    ("Content-Encoding", ("gzip", "identity", "br, gzip")),
    ("Authorization", ("Bearer wrong", "Bearer", "Basic Zm9vOmJhcg==", "bearer " + KEY.decode(), "\xff")),
    ("X-Api-Key", (KEY.decode(), "wrong", "")),
    ("X-Request-Id", ("@markmarkmark@", "a\tb", "\xff", "x" * 300, "", "a\x00b")),
    ("X-Kvroute-Strategy", ("roundrobin", "session", "prefixaware", "kvaware", "none", "\xff", "")),
    ("X-Session-Id", ("@markmarkmark@", "\xff", "x" * 4000, "")),
    ("X-Forwarded-For", ("127.0.0.1", "1.2.3.4, 127.0.0.1", "[", "\xff", "")),
    ("X-Forwarded-Proto", ("https", "", "\xff")),
    ("X-Forwarded-Host", ("evil",)),
    ("Origin", ("https://evil.example", "null")),
    ("Cookie", ("a=b; " * 100,)),
    ("Te", ("trailers",)),
    ("Trailer", ("X-Trailer",)),
    ("Accept", ("text/event-stream", "application/openmetrics-text; version=1.0.0", "\xff")),
    ("X-Fuzz-Worker", ("1", "2", "3")),
    ("X\x00Y", ("1",)),
    ("X Y", ("1",)),
    ("", ("no name",)),
    ("X-Empty", ("",)),
    ("X-Long", ("y" * 20_000,)),
    (" folded", (" line",)),
)  # fmt: skip
_RAW_JSON = (
    b"NaN", b"-Infinity", b"1e999", b"-0", b"1" * 400, b"1e-400", b'"\\ud800"', b'"\\udc00\\ud800"',
    b'"\xed\xa0\x80"', b'"\xff\xfe"', b'"\x00"', b'"\\u0000"', b"null", b"true", b"{}", b"[]", b"[[]]", b'""', b"-1",
    b"2147483648", b"18446744073709551616", b"0.5", b"[1,2,3]", b'[{"role":"user"}]', b'{"model":"alias"}',
    b'[{"role":"user","content":null}]', b'[{"role":7,"content":[{"type":"text"}]}]', b'[{"type":"text","text":1}]',
    b'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]',
    b"[[1,2],[3]]", b"[[1],\"a\"]", b"[-1,99999999999]", b'["a",["b"]]', b"'single'", b"undefined", b"/*c*/1", b"01",
    b'"' + b"a" * 5000 + b'"', b"[" + b"1," * 3000 + b"1]", b"[" * 60 + b"]" * 60, b'{"a":' * 60 + b"1" + b"}" * 60,
    b"[" * 1200 + b"]" * 1200, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 100_000,
)  # fmt: skip
_KEYS = (
    "model", "stream", "prompt", "messages", "input", "n", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "cache_salt", "user", "metadata", "kv_transfer_params", "previous_response_id", "stream_options", "tools",
    "tool_choice", "chat_template_kwargs", "system", "add_special_tokens", "truncate_prompt_tokens", "documents", "query",
    "text_1", "text_2", "tokens", "echo", "suffix", "best_of", "session_id", "store", "background", "role", "content",
    "instructions", "conversation", "lora", "chat_template", "documents", "reasoning_effort", "mm_processor_kwargs",
    "mod\\u0065l", "MODEL", "", "__class__",
)  # fmt: skip


class Cases:
    """An endless supply."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._paths = list(ENDPOINTS)

    def case(self) -> Case:
        rng = self.rng
        kind = rng.random()
        if kind < 0.06:
            return replace(self._cut(self.request(hostile_worker=False)), is_valid=True)
        data = self.request(mutate_head=rng.random() < 0.45, mutate_body=rng.random() < 0.45)
        if rng.random() < 0.22:
            for _ in range(rng.choice([1, 1, 1, 2, 5])):
                data += self.request(mutate_head=rng.random() < 0.2, mutate_body=rng.random() < 0.2)
        if rng.random() < 0.35:
            for _ in range(rng.choice([1, 1, 1, 2, 4, 20])):
                data = rng.choice(_BYTES)(rng, data, self.request)
        case = self._cut(data)
        if rng.random() < 0.06:
            return replace(case, leaves=True)
        return replace(case, stalls=rng.random() < 0.1)

    def _cut(self, data: bytes) -> Case:
        rng, size = self.rng, len(data)
        way = rng.random()
        if way < 0.5 or size < 2:
            return Case(data)
        if way < 0.6:
            return Case(data, (rng.randrange(1, size),))
        if way < 0.7:
            return Case(data, tuple(sorted(rng.randrange(1, size) for _ in range(rng.choice([2, 5, 20])))))
        if way < 0.8:
            end = data.find(b"\r\n\r\n")
            return Case(data, tuple(sorted(max(1, end + offset) for offset in rng.sample(range(6), 2))))
        if way < 0.9:
            return Case(data, tuple(match.end() for match in re.finditer(rb"\r\n", data[:4000]))[:60])
        start = rng.randrange(size)
        return Case(data, tuple(range(start, min(size, start + 40))))

    # Requests

    def request(
        self, *, mutate_head: bool = False, mutate_body: bool = False, hostile_worker: bool = True
    ) -> bytes:
        rng = self.rng
        path = rng.choice(self._paths) if rng.random() < 0.6 else "/v1/chat/completions"
        multipart = ENDPOINTS[path].body is BodyKind.MULTIPART
        strict = not (mutate_head or mutate_body or hostile_worker)
        body = self.form(mutate_body) if multipart else self.json_body(path, mutate_body, strict)
        method, target, version = "POST", path, "HTTP/1.1"
        content_type = f"multipart/form-data; boundary={BOUNDARY}" if multipart else "application/json"
        headers = [
            ("Host", "127.0.0.1:8080"),
            ("Content-Type", content_type),
            ("Authorization", "Bearer " + KEY.decode()),
        ]
        if rng.random() < 0.5:
            headers.append(("User-Agent", f"fuzz {_TEXT}"))
        if rng.random() < 0.3:
            headers.append(("X-Request-Id", _TEXT))
        if hostile_worker and rng.random() < 0.25:
            headers.append(("X-Fuzz-Worker", str(rng.randrange(1 << 30))))
        chunked = rng.random() < 0.2
        framing = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(body)))
        headers.insert(rng.randrange(len(headers) + 1), framing)
        if mutate_head:
            for _ in range(rng.choice([1, 1, 2, 4])):
                way = rng.random()
                if way < 0.12:
                    method = rng.choice(_METHODS)
                elif way < 0.32:
                    target = rng.choice(_TARGETS)
                    method = rng.choice(["POST", "GET", "GET", "DELETE", method])
                    if target.startswith("/admin"):
                        headers.append(("Authorization", "Bearer " + ADMIN_KEY.decode()))
                elif way < 0.4:
                    version = rng.choice(_VERSIONS)
                elif way < 0.5 and headers:
                    headers.pop(rng.randrange(len(headers)))
                elif way < 0.6 and headers:
                    headers.append(rng.choice(headers))
                elif way < 0.65:
                    headers.extend((f"X-{number}", "v") for number in range(rng.choice([10, 120, 1000])))
                else:
                    name, values = rng.choice(_HEADERS)
                    headers.insert(rng.randrange(len(headers) + 1), (name, rng.choice(values)))
        end = (
            "\r\n" if not mutate_head or rng.random() < 0.93 else rng.choice(["\n", "\r", "\r\r\n", "\0\r\n"])
        )
        colon = ": " if not mutate_head or rng.random() < 0.93 else rng.choice([":", " : ", ":\t", "", ":\0"])
        lines = [" ".join((method, target, version)), *(name + colon + value for name, value in headers)]
        head = (end.join(lines) + end + end).encode("utf-8" if rng.random() < 0.5 else "latin-1", "replace")
        return head + (self.chunks(body, mutate_body) if chunked else body)

    def chunks(self, body: bytes, mutate: bool) -> bytes:
        rng, out = self.rng, b""
        for part in _parts(body, max(1, len(body) // rng.choice([1, 2, 5, 30]))):
            line = b"%x" % len(part)
            if mutate and rng.random() < 0.15:
                line = rng.choice(
                    [b"0", b"-1", b"ffffffffffffffff", b"10000000000000000", b"%x ;x" % len(part), b"%x;" % len(part) + b"e" * 9000,
                     b"0x%x" % len(part), b"%X" % len(part), b"00000000%x" % len(part), b"", b"g", b"%x" % (len(part) + 1), b"%x" % max(0, len(part) - 1)]
                )  # fmt: skip
            out += line + b"\r\n" + part + b"\r\n"
        if mutate and rng.random() < 0.1:
            return out
        trailer = (
            rng.choice([b"X-Trailer: a\r\n", b"Content-Length: 3\r\n", b"X" * 9000, b":\r\n"])
            if mutate and rng.random() < 0.15
            else b""
        )
        return out + b"0\r\n" + trailer + b"\r\n"

    # Bodies

    def fields(self, path: str) -> dict[str, object]:
        rng = self.rng
        text = _TEXT + " word" * rng.choice([0, 3, 3, 40, 400])
        texts = [text, "other"]
        prompt: object = rng.choice([text, text, [text, text], [1, 2, 3, 4] * 30, [[1, 2], [3]]])
        match path.rpartition("/")[2]:
            case "invocations" | "tokenize":
                fields: dict[str, object] = (
                    {"messages": self.messages(text)} if rng.random() < 0.5 else {"prompt": text}
                )
            case "completions":
                fields = {"messages": self.messages(text)} if "chat" in path else {"prompt": prompt}
            case "responses":
                fields = {"input": rng.choice([text, [{"role": "user", "content": text}]])}
            case "messages" | "count_tokens":
                fields = {
                    "system": text,
                    "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
                }
            case "detokenize":
                fields = {"tokens": [1, 2, 3]}
            case "rerank":
                fields = {"query": text, "documents": texts}
            case "score":
                fields = {"text_1": text, "text_2": texts}
            case _:
                fields = {"input": prompt}
        fields["user"] = _TEXT
        if rng.random() < 0.4:
            fields["stream"] = True
        if rng.random() < 0.3:
            fields |= {"max_tokens": 5, "cache_salt": "s", "metadata": {"session_id": text}}
        return fields

    def messages(self, text: str) -> list[object]:
        content: object = text
        if self.rng.random() < 0.3:
            image = {"url": "data:image/png;base64," + "iVBORw0K" * self.rng.choice([1, 400])}
            content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": image}]
        turns = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": content}]
        return [turns, turns[1:], [*turns, {"role": "assistant", "content": text}] * 3][self.rng.randrange(3)]

    def json_body(self, path: str, mutate: bool, strict: bool) -> bytes:
        rng = self.rng
        fields: dict[str, object] = {"model": "m" if strict else rng.choice(_MODELS), **self.fields(path)}
        if not mutate:
            return json.dumps(fields).encode()
        raw: list[bytes] = []
        for number in range(rng.choice([0, 1, 1, 1, 2, 3])):
            where = fields
            lists = [
                each
                for each in fields.values()
                if isinstance(each, list) and each and isinstance(each[0], dict)
            ]
            if lists and rng.random() < 0.3:
                where = rng.choice(lists)[0]
            name = rng.choice([*where]) if where and rng.random() < 0.5 else rng.choice(_KEYS)
            where[name] = f"~raw{number}~"
            raw.append(rng.choice(_RAW_JSON))
        body = json.dumps(fields).encode()
        for number, value in enumerate(raw):
            body = body.replace(b'"~raw%d~"' % number, value)
        way = rng.random()
        if way < 0.1:
            twice = b'"%b":%b,' % (rng.choice(_KEYS).encode(), rng.choice(_RAW_JSON))
            body = body.replace(b"{", b"{" + twice, 1)
        elif way < 0.15:
            body = body[: rng.randrange(len(body) + 1)]
        elif way < 0.2:
            body = rng.choice(_RAW_JSON)
        elif way < 0.25:
            body = body.decode("utf-8", "replace").encode(
                rng.choice(["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"])
            )
        elif way < 0.28:
            body = rng.choice(
                [b"", b" ", b"\0", b"\xef\xbb\xbf", body + body, body + b"}", b"\n" * 5000 + body]
            )
        return body

    def form(self, mutate: bool) -> bytes:
        rng = self.rng
        parts = [("model", "m"), ("prompt", _TEXT), ("language", "en")]
        if mutate:
            parts += [
                (rng.choice(["model", "", "stream", "x" * 3000, 'q"', "\xe4"]), rng.choice(["", "\0", "m"]))
            ] * rng.choice([1, 1, 3, 300])
        line = rng.choice(["\r\n", "\r\n", "\n"]) if mutate else "\r\n"
        text = ""
        for name, value in parts:
            extra = (
                rng.choice(["", "", '; filename="a"', "; filename*=utf-8''%ff", '; name="other"'])
                if mutate
                else ""
            )
            text += f'--{BOUNDARY}{line}Content-Disposition: form-data; name="{name}"{extra}{line}{line}{value}{line}'
        text += f'--{BOUNDARY}{line}Content-Disposition: form-data; name="file"; filename="a.wav"{line}Content-Type: audio/wav{line}{line}'
        body = text.encode("latin-1", "replace") + bytes(
            rng.randrange(256) for _ in range(rng.choice([0, 20, 300]))
        )
        if not mutate or rng.random() < 0.7:
            body += f"{line}--{BOUNDARY}--{line}".encode()
        if mutate and rng.random() < 0.2:
            body = body[rng.randrange(len(body)) :]
        return body


def _parts(body: bytes, size: int) -> Iterator[bytes]:
    """Of about this size; none ends within a `PLACE`, which must be found in the request as a whole."""
    start = 0
    while start < len(body):
        end = min(start + size, len(body))
        at = body.find(PLACE, max(start, end - len(PLACE) + 1), end + len(PLACE) - 1)
        if at >= 0:
            end = max(end, at + len(PLACE))
        yield body[start:end]
        start = end


# Bytes

_Request = Callable[[], bytes]


def _flip(rng: random.Random, data: bytes, _: _Request) -> bytes:
    if not data:
        return data
    at = rng.randrange(min(len(data), 400) if rng.random() < 0.6 else len(data))
    return data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]


def _replace(rng: random.Random, data: bytes, _: _Request) -> bytes:
    at = rng.randrange(len(data) + 1)
    odd = rng.choice(
        [
            b"\0",
            b"\r",
            b"\n",
            b"\r\n",
            b"\r\n\r\n",
            b"\xff",
            b" ",
            b":",
            b",",
            b'"',
            b"\\",
            b"%",
            b"/",
            b"\x80",
            b"0",
            b"9" * 30,
        ]
    )
    return data[:at] + odd + data[at + rng.randrange(2) :]


def _remove(rng: random.Random, data: bytes, _: _Request) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice([1, 1, 2, 10, 100]) :]


def _repeat(rng: random.Random, data: bytes, _: _Request) -> bytes:
    at = rng.randrange(len(data) + 1)
    piece = data[at : at + rng.choice([1, 5, 50, 500])]
    return data[:at] + piece * rng.choice([2, 2, 3, 20]) + data[at:]


def _truncate(rng: random.Random, data: bytes, _: _Request) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _splice(rng: random.Random, data: bytes, request: _Request) -> bytes:
    other = request()
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other)) :]


def _lines(rng: random.Random, data: bytes, _: _Request) -> bytes:
    head, blank, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    rng.shuffle(lines)
    return b"\r\n".join(lines) + blank + body


_BYTES = (_flip, _flip, _flip, _replace, _replace, _remove, _repeat, _truncate, _splice, _lines)
