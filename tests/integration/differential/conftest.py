"""One client and two workers alike: one asked directly, one through kvroute."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from urllib.parse import unquote

import httptools
import pytest

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault

LIMIT_BYTES = 17 * 1024 * 1024

# RFC 9110 section 7.6.1, and what belongs to one connection or to one body's framing.
PER_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
PER_HOP |= {b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", b"host", b"content-length"}


class Answer:
    """An HTTP answer as httptools reads it; its callbacks fill it in."""

    def __init__(self) -> None:
        self.status = 0
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.is_complete = self.keeps_open = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.headers, self.reason = [], b""

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = self.status >= 200
        self.keeps_open = self._parser.should_keep_alive()

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


class Wire:
    """One connection to one server, kept as long as the server keeps it."""

    def __init__(self, url: str) -> None:
        self.host = url.removeprefix("http://").encode()
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, parts: list[bytes]) -> Answer:
        if self._stream is None:
            name, port = self.host.decode().split(":")
            self._stream = await asyncio.open_connection(name, int(port))
        reader, writer = self._stream
        answer = Answer()
        async with asyncio.timeout(60):
            writer.writelines(parts)
            while not answer.is_complete:
                data = await reader.read(1 << 20)
                assert data, f"closed within the answer: {answer.status} {answer.body[-200:]!r}"
                answer.feed(data)
        if not answer.keeps_open:
            await self.close()
        return answer

    async def close(self) -> None:
        if self._stream is not None:
            writer, self._stream = self._stream[1], None
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def end_to_end(headers: list[tuple[bytes, bytes]], *also: bytes) -> list[tuple[bytes, bytes]]:
    """Headers, in order, without those of a single hop and those that `Connection` names."""
    named = {
        token.strip().lower() for key, value in headers if key == b"connection" for token in value.split(b",")
    }
    return [pair for pair in headers if pair[0] not in PER_HOP | named | set(also)]


class Pair:
    """Asks both and compares. Mutable: its two connections, kept as long as the servers keep them."""

    def __init__(self, alone, behind, gateway) -> None:
        self.alone, self.behind, self.gateway = alone, behind, gateway
        self._direct, self._through = Wire(alone.url), Wire(gateway.url)

    async def compare(
        self, wire: Callable[[bytes], Sequence[bytes]], own: int | None = None, fault: Fault | None = None
    ) -> tuple[Answer, Answer]:
        """Send the bytes that `wire` returns for a host's name to both.

        `own` is the status with which the gateway must refuse the request itself, None where it must
        forward it; both workers are given `fault`.
        """
        sims = (self.alone, self.behind)
        for sim in sims:
            sim.worker.received.clear()
            sim.worker.faults.clear()
            if fault is not None:
                sim.worker.faults.add(fault)
        direct = await self._direct.exchange(wire(self._direct.host))
        through = await self._through.exchange(wire(self._through.host))
        sent, arrived = ([r for r in sim.worker.received if r.method != "GET"] for sim in sims)
        if own is not None:
            assert not arrived
            check_own(own, direct, through)
        else:
            assert [len(sent), len(arrived)] == [1, 1], f"{through.status} {through.body[:300]!r}"
            check_forwarded(sent[0], arrived[0], self.behind.url, through)
            check_answers(direct, through)
        return direct, through

    @staticmethod
    def masked(body: bytes) -> bytes:
        """Without times and ids: ids are random or contain the request's id."""
        body = re.sub(rb'("created(?:_at)?":)\d+', rb"\g<1>0", body)
        body = re.sub(rb'("id":"[a-z]+-)(?:\\.|[^"])*', rb"\g<1><id>", body)
        return re.sub(rb"[0-9a-f]{32}", b"<id>", body)

    async def close(self) -> None:
        await self._direct.close()
        await self._through.close()


def check_own(own: int, direct: Answer, through: Answer) -> None:
    """The gateway's refusal: where it is due, of what a worker refuses too, in the shape of its API."""
    assert through.status == own, (through.status, through.body[:300])
    if own != 413:
        assert direct.status >= 400
    answer = json.loads(through.body)
    error = answer["error"]
    assert {key: type(error[key]) for key in ("message", "type", "code")} == dict.fromkeys(
        ("message", "type", "code"), str
    )
    assert error.keys() == {"message", "type", "param", "code"}
    if "type" in answer:  # Anthropic's shape, with Anthropic's types
        assert answer["type"] == "error"
        types = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}
        assert error["type"] == types[own]
    else:
        assert error["type"] == "invalid_request_error"
    assert error["code"] == {400: "invalid_request", 404: "model_not_found", 413: "body_too_large"}[own]
    assert through.values(b"content-type") == [b"application/json"]
    assert len(through.values(b"x-request-id")) == 1
    assert not through.values(b"x-kvroute-worker")


def check_forwarded(sent, arrived, url: str, through: Answer) -> None:
    """The worker behind the gateway was asked what the client asked."""
    assert arrived.body == sent.body
    path, question, query = sent.target.partition("?")
    # Workers get the endpoint's own path, however the client wrote it.
    assert (arrived.method, arrived.target) == (sent.method, unquote(path) + question + query)
    own = (b"x-request-id", b"x-amzn-sagemaker-adapter-identifier")  # written again, at another place
    assert end_to_end(arrived.headers, *own) == end_to_end(sent.headers, *own)
    got = Counter(key for key, _ in arrived.headers)
    assert got[b"host"] == got[b"content-length"] == got[b"x-request-id"] == 1
    values = dict(arrived.headers)
    assert values[b"host"] == url.removeprefix("http://").encode()
    assert int(values[b"content-length"]) == len(sent.body)
    asked = dict(reversed(sent.headers)).get(b"x-request-id", b"")
    if 0 < len(asked) <= 256 and asked.isascii():
        assert values[b"x-request-id"] == asked
    assert through.values(b"x-request-id") == [values[b"x-request-id"]]


def check_answers(direct: Answer, through: Answer) -> None:
    """The client got the worker's answer."""
    assert (through.status, through.reason) == (direct.status, direct.reason)
    assert Pair.masked(through.body) == Pair.masked(direct.body)
    names = ("worker", "strategy", "reason", "hit-tokens", "hit-tiers")
    added = (b"x-request-id", *(f"x-kvroute-{name}".encode() for name in names))
    assert end_to_end(through.headers, *added) == end_to_end(direct.headers)
    if direct.values(b"content-length"):
        assert through.values(b"content-length") == [b"%d" % len(through.body)]
    counts = [len(through.values(name)) for name in added]
    assert counts in ([1] * 6, [1, 1, 1, 1, 0, 0]), "a stored response is not predicted"


@pytest.fixture
async def pair(run_gateway):
    options = SimOptions(
        models=("sim-model", "second-name"), loras={"ada": "sim-model"}, time_scale=0, kv_events=False
    )
    sections = {
        "server": {"max_body_bytes": LIMIT_BYTES},
        "fleet": {"health": {"burst_failures": 1_000_000}},
        "lmcache": {"isolate_adapters": False},  # the one thing that would change what workers get
    }
    async with (
        run_sim(options) as alone,
        run_sim(options) as behind,
        run_gateway([behind.url], **sections) as gateway,
    ):
        pair = Pair(alone, behind, gateway)
        try:
            yield pair
        finally:
            await pair.close()
