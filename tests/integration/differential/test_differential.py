"""The same bytes sent to a worker and through kvroute to another one like it: nothing may differ.

500 requests from a seeded generator go over raw sockets, because HTTP clients normalise requests. They go one
after the other, so that both workers' caches pass the same states; ids and times are masked.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote

import pytest

from kvroute.openai.endpoints import ENDPOINTS, BodyKind
from kvroute.sim.publisher import Fault

MODELS = ("sim-model", "second-name", "ada")


def model_in(body: bytes) -> object:
    """The model that a body names for Python's parser; None without one."""
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    return fields.get("model") if isinstance(fields, dict) else None


@dataclass
class Request:
    """What is sent, and the status with which the gateway must refuse it itself (None: it forwards)."""

    target: bytes
    body: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    own: int | None = None
    note: str = ""
    chunked: bool = False
    version: bytes = b"1.1"
    fault: Fault | None = None

    def wire(self, host: bytes) -> list[bytes]:
        framing = (b"Transfer-Encoding", b"chunked")
        if not self.chunked:
            framing = (b"Content-Length", b"%d" % len(self.body))
        lines = [b"POST %b HTTP/%b" % (self.target, self.version)]
        lines += [b"%b: %b" % pair for pair in [(b"Host", host), *self.headers, framing]]
        head = b"\r\n".join([*lines, b"", b""])
        if not self.chunked:
            return [head, self.body]
        size = max(1, len(self.body) // 5)
        parts = [self.body[start : start + size] for start in range(0, len(self.body), size)]
        return [head, *(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


class Generator:
    """Requests of every kind; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def requests(self, count: int) -> Iterator[Request]:
        kinds = [self.plain] * 12 + [self.misread] * 5 + [self.mistyped] * 4 + [self.refused] * 5
        for number in range(count):
            endpoint = list(ENDPOINTS.values())[number % len(ENDPOINTS)]
            if endpoint.body is BodyKind.MULTIPART:
                request = self.form(endpoint.path)
            else:
                request = self.rng.choice(kinds)(endpoint.path)
            yield self.dressed(request)

    # Bodies.

    def text(self) -> str:
        rng = self.rng
        alphabet = rng.choice(
            [
                "abc def ",
                "äöü é ñ ",
                "日本語 漢字",
                "😀👩‍👩‍👧 🇩🇪",
                '"\\/\b\n\t\x7f',
                "\u2028\ufeff\uffff\u0000",
            ]
        )
        return "".join(rng.choice(alphabet) for _ in range(rng.choice([0, 1, 20, 20, 200, 3000]))) or "x"

    def ids(self) -> list[int]:
        return [self.rng.randrange(50_000) for _ in range(self.rng.choice([1, 20, 300]))]

    def messages(self) -> list[object]:
        rng, out = self.rng, []
        for role in ("system", "user", "assistant", "user")[rng.randrange(2) :]:
            content: object = self.text()
            if rng.random() < 0.2:
                image = {"url": "data:image/png;base64," + "iVBORw0K" * rng.choice([1, 5000])}
                content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": image}]
            out.append({"role": role, "content": content})
        return out

    def fields(self, path: str) -> dict[str, object]:
        """A body that the endpoint takes."""
        rng = self.rng
        sampling = {"max_tokens": rng.randrange(1, 12), "stream": rng.random() < 0.4}
        if rng.random() < 0.3:
            sampling |= {"n": 2, "temperature": 0.5, "stop": ["zzz"], "user": self.text()}
        prompt = rng.choice([self.text(), [self.text(), self.text()], self.ids(), [self.ids(), self.ids()]])
        texts = [self.text() for _ in range(3)]
        if path == "/invocations":
            path = rng.choice(["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/score"])
        match path.rpartition("/")[2]:
            case "completions" if "chat" in path:
                function = {
                    "name": "look",
                    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
                }
                extra = rng.choice(
                    [
                        {},
                        {"logprobs": True, "top_logprobs": 2},
                        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
                        {"response_format": {"type": "json_object"}, "metadata": {"session_id": self.text()}},
                        {"cache_salt": "s", "stream": True, "stream_options": {"include_usage": True}},
                    ]
                )
                return {"messages": self.messages(), **sampling, **extra}
            case "completions":
                return {"prompt": prompt, **sampling, "echo": rng.random() < 0.3}
            case "responses":
                limit = sampling.pop("max_tokens")
                given = rng.choice([self.text(), [{"role": "user", "content": self.text()}]])
                return {"input": given, "max_output_tokens": limit, "stream": sampling["stream"]}
            case "messages" | "count_tokens":
                user_message = [{"role": "user", "content": [{"type": "text", "text": self.text()}]}]
                return {
                    "system": self.text(),
                    "messages": user_message,
                    "max_tokens": 5,
                    "stream": sampling["stream"],
                }
            case "tokenize":
                return rng.choice([{"prompt": self.text()}, {"messages": self.messages()}])
            case "detokenize":
                return {"tokens": self.ids()}
            case "rerank":
                return {"query": self.text(), "documents": texts, "top_n": 2}
            case "score":
                return {"text_1": self.text(), "text_2": texts}
            case _:
                return {"input": prompt, "encoding_format": "float"}

    def named(self, fields: dict[str, object]) -> dict[str, object]:
        """With a model, in any place among the fields, or without."""
        items = [*fields.items()]
        if self.rng.random() < 0.85:
            items.insert(self.rng.randrange(len(items) + 1), ("model", self.rng.choice(MODELS)))
        return dict(items)

    def written(self, fields: object) -> bytes:
        """As JSON, in one of the ways in which clients write it."""
        rng = self.rng
        separators = rng.choice([None, (",", ":"), (" ,\t", " :\r\n ")])
        text = json.dumps(
            fields, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 2]), separators=separators
        )
        return rng.choice(["", "", " \n"]).encode() + text.encode()

    def plain(self, path: str) -> Request:
        return Request(path.encode(), self.written(self.named(self.fields(path))), note="plain")

    def with_field(self, path: str, value: bytes) -> bytes:
        """A body with `value` as the raw text of one more field."""
        fields = self.named(self.fields(path))
        where: object = fields
        if path != "/v1/responses":  # which would have to echo it
            where = self.rng.choice([fields, fields.setdefault("metadata", {})])
        if isinstance(where, dict):
            where["odd"] = "@odd@"
        return json.dumps(fields).encode().replace(b'"@odd@"', value)

    def misread(self, path: str) -> Request:
        """JSON objects in Python's eyes that other parsers see differently or not at all."""
        rng = self.rng
        if rng.random() < 0.3:
            coding = rng.choice(["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"])
            return Request(
                path.encode(), json.dumps(self.named(self.fields(path))).encode(coding), note=coding
            )
        if rng.random() < 0.3:
            body = self.written(self.fields(path))
            twice = rng.choice(
                [b'"model":3,"model":"ada",', b'"mod\\u0065l":"ada",', b'"stream":7,"user":1,"user":2,']
            )
            return Request(path.encode(), body.replace(b"{", b"{" + twice, 1), note="keys")
        numbers = [b"NaN", b"-Infinity", b"1e999", b"-0.0", b"1" * 400, b"1e-400"]
        strings = [
            b'"\\ud800"',
            b'"\\udc00\\ud800"',
            b'"\xed\xa0\x80"',
            b'"\\u0000"',
            b'"' + b"x" * 70_000 + b'"',
        ]
        nested = [b"[" * 300 + b"]" * 300, b'{"a":' * 200 + b"1" + b"}" * 200, b'{"a":1,"a":2}']
        odd = rng.choice([*numbers, *strings, *nested])
        return Request(path.encode(), self.with_field(path, odd), note=f"odd {odd[:12]!r}")

    def mistyped(self, path: str) -> Request:
        """Fields of the wrong type or missing: the worker's to refuse, or to take."""
        fields, rng = self.named(self.fields(path)), self.rng
        victim = rng.choice([key for key in fields if key != "model"])
        wrong = rng.choice([None, 1, -1, 1.5, True, "", "x", [], [1, "x"], [[]], [None], {}, {"a": []}, ...])
        if wrong is ...:
            del fields[victim]
        else:
            fields[victim] = wrong
        return Request(path.encode(), self.written(fields), note=f"{victim}={wrong!r}")

    def refused(self, path: str) -> Request:
        """What the gateway answers itself."""
        rng = self.rng
        fields = self.named(self.fields(path))
        whole = json.dumps(fields).encode()
        not_json = [b"", b" \r\n", whole[:-1], whole + b"}", whole + b"\0", b"\xff\xfe", b"{'model': 'x'}"]
        not_json += [
            self.with_field(path, odd) for odd in (b"01", b"+1", b"[1,]", b"tru", b'"\\x41"', b'"a\tb"')
        ]
        not_json += [
            self.with_field(path, b"[" * 100_000 + b"]" * 100_000),
            b"[" * 100_000,
            b"--x\r\n\r\n--x--",
        ]
        not_object = [b"[1]", b"null", b"3", b'"model"', b"true", json.dumps([fields]).encode()]
        wrong_models = [3, 1.5, True, [], ["sim-model"], {"id": "sim-model"}]
        unknown = [
            " sim-model",
            "SIM-MODEL",
            "gpt-4",
            "sim-model/",
            "sim\0model",
            "modèle",
            "\ud800",
            "x" * 5000,
        ]
        match rng.randrange(4):
            case 0:
                return Request(path.encode(), rng.choice(not_json), own=400, note="not JSON")
            case 1:
                return Request(path.encode(), rng.choice(not_object), own=400, note="not an object")
            case 2:
                body = json.dumps({**fields, "model": rng.choice(wrong_models)}).encode()
                return Request(path.encode(), body, own=400, note="model's type")
            case _:
                body = json.dumps({**fields, "model": rng.choice(unknown)}).encode()
                if path == "/invocations":  # computes the base model, whatever the body names
                    path = "/v1/chat/completions"
                return Request(path.encode(), body, own=404, note="unknown model")

    def form(self, path: str) -> Request:
        """A multipart form, good in most cases."""
        rng = self.rng
        boundary = rng.choice([b"x", b"----WebKitFormBoundary7MA4", b"a'()+_,-./:=?b"])
        fields = {
            "model": rng.choice(MODELS),
            "response_format": rng.choice(["json", "text"]),
            "prompt": self.text(),
        }
        if rng.random() < 0.3:
            fields["stream"] = rng.choice(["true", "false"])
        own = None
        match rng.randrange(10):
            case 0:
                fields["model"], own = "gpt-4", 404
            case 1:
                del fields["model"]
            case 2:
                fields["model"] = ""
        disposition = b"Content-Disposition: form-data; name="
        parts = [
            disposition + b'"%b"\r\n\r\n%b' % (key.encode(), value.encode()) for key, value in fields.items()
        ]
        sound = rng.randbytes(rng.choice([0, 100, 200_000])) + b"\r\n--" + boundary[:-1] + b"\r\n"
        name = rng.choice([b"a.wav", "ü.wav".encode(), b""])
        parts.append(
            disposition + b'"file"; filename="%b"\r\nContent-Type: audio/wav\r\n\r\n%b' % (name, sound)
        )
        rng.shuffle(parts)
        body = b"".join(b"--%b\r\n%b\r\n" % (boundary, part) for part in parts) + b"--%b--\r\n" % boundary
        kind = b'multipart/form-data; charset=utf-8; boundary="%b"' % boundary
        if rng.random() < 0.15:
            kind, own = rng.choice([b"application/json", b"multipart/form-data", b"", b"text/plain"]), 400
        return Request(path.encode(), body, [(b"Content-Type", kind)], own, f"form {kind!r}")

    # What is around the body.

    def dressed(self, request: Request) -> Request:
        rng, headers = self.rng, request.headers
        kinds = [b"application/json"] * 9 + [
            b"application/json; charset=utf-8",
            b"APPLICATION/JSON",
            b"text/plain",
            b"",
        ]
        if not headers:
            headers.append((rng.choice([b"Content-Type", b"content-type"]), rng.choice(kinds)))
        if request.target.startswith(b"/invocations") and model_in(request.body) == "ada":
            # There an adapter is named by a header. The body's alone would be replaced by the base model.
            headers.append((b"X-Amzn-SageMaker-Adapter-Identifier", b"ada"))
        odd = self.odd_headers()
        headers += [rng.choice(odd) for _ in range(rng.randrange(6))]
        rng.shuffle(headers)
        if rng.random() < 0.1:
            headers += [(b"Connection", b"keep-alive, X-Private"), (b"X-Private", b"1"), (b"TE", b"trailers")]
            headers += [(b"Keep-Alive", b"timeout=5"), (b"Proxy-Authorization", b"Basic eA==")]
        elif rng.random() < 0.1:
            headers.append((b"Connection", b"close"))
        if rng.random() < 0.1:
            request.target += rng.choice([b"?api-version=1", b"?a=%20+%C3%A9&a=&b", b"?//?"])
        if rng.random() < 0.03:
            request.target = request.target.replace(b"e", b"%65", 1)
        request.chunked = rng.random() < 0.15
        if not request.chunked and rng.random() < 0.05:
            request.version = b"1.0"
        elif rng.random() < 0.05:
            headers.append((b"Expect", b"100-continue"))
        if request.own is None and rng.random() < 0.05:
            status, retry_after_s = rng.choice([(400, None), (401, 7), (500, 7), (503, None)])
            path = unquote(request.target.decode()).partition("?")[0]  # probes do not use it up
            request.fault = Fault(kind="status", status=status, retry_after_s=retry_after_s, path=path)
        return request

    def odd_headers(self) -> list[tuple[bytes, bytes]]:
        rng = self.rng
        latin = bytes(rng.randrange(0xA1, 0x100) for _ in range(8))
        return [
            (b"Authorization", b"Bearer sk-" + b"x" * 20),
            (b"x-REQUEST-id", rng.choice([b"mine", b"", b"x" * 300, latin, b"a b,c"])),
            (b"X-Session-ID", rng.choice([b"s1", latin, b""])),
            (b"Cookie", b"a=1; session=" + latin),
            (b"cookie", b"b=2"),
            (b"Accept-Encoding", b"gzip, br"),
            (b"ACCEPT", b"text/event-stream"),
            (b"X-Empty", b""),
            (b"X-Twice", b"1"),
            (b"x-twice", b"2, 3"),
            (b"X-Latin", latin),
            (b"X-Tabs", b"a\tb  c"),
            (b"X-Large", b"y" * rng.choice([5_000, 16_000])),
            (b"!#$%&'*+-.^_`|~09az", b'"quoted, \\" ; value"'),
            (b"X-Forwarded-For", b"203.0.113.9"),
            (b"Traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
            (b"X-Kvroute-Strategy", b"nonsense"),
            (b"Content-Encoding", b"identity"),
            (b"Content-Language", b"de"),
        ]


@pytest.mark.heavy
async def test_500_generated_requests_are_the_same_direct_and_through_kvroute(pair) -> None:
    outcomes: Counter[bool] = Counter()
    for number, request in enumerate(Generator(seed=20).requests(500)):
        try:
            await pair.compare(request.wire, request.own, request.fault)
        except AssertionError as error:
            head = b"".join(request.wire(b"host"))[:1500]
            raise AssertionError(f"request {number} ({request.note}): {error}\n{head!r}") from error
        outcomes[request.own is None] += 1

    assert outcomes[True] >= 350
    assert outcomes[False] >= 50
    assert pair.gateway.runtime.plane.entry_control.in_flight == 0
