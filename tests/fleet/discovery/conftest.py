"""A Kubernetes API server as far as discovery needs one: list and watch over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.support.sockets import tcp_server

Object = dict[str, Any]


def matches(selector: str, labels: dict[str, str]) -> bool:
    """Equality, `in` and existence, as the API has them."""
    for term in re.split(r",(?![^(]*\))", selector):
        key, _, values = term.partition(" in ")
        if values:
            if labels.get(key) not in [value.strip() for value in values.strip(" ()").split(",")]:
                return False
        elif "=" in term:
            key, _, value = term.partition("=")
            if labels.get(key) != value.lstrip("="):
                return False
        elif term and term not in labels:
            return False
    return True


def is_selected(params: dict[str, str], metadata: Object) -> bool:
    """Whether an object is among those that the parameters of a request ask for."""
    field = params.get("fieldSelector", "")
    is_named = not field or field == f"metadata.name={metadata['name']}"
    return is_named and matches(params.get("labelSelector", ""), metadata.get("labels", {}))


@dataclass
class FakeApi:
    """Objects of one collection, and the log of their changes. Tests change it by its methods and fields."""

    url: str = ""
    collection: str = "/api/v1/namespaces/llm/pods"
    others: list[FakeApi] = field(default_factory=list)
    """Other collections of the same server."""
    tokens: set[str] = field(default_factory=set)
    """Those that are accepted; empty: no token is asked for."""
    fails: tuple[int, str] | None = None
    """Answered to everything: status and message."""
    fails_watches: tuple[int, str] | None = None
    page: int = 500
    """Most objects in a page, also if the client asks for more."""
    asked: list[dict[str, str]] = field(default_factory=list)
    """Parameters of each accepted request."""
    refused: int = 0
    objects: dict[str, Object] = field(default_factory=dict)
    version: int = 100
    kept_from: int = 100
    """Changes before this version are forgotten: asking for them is 410."""
    log: list[tuple[int, bytes]] = field(default_factory=list)
    _writers: dict[asyncio.StreamWriter, bool] = field(default_factory=dict)
    """Whether each is a watch."""
    _endings: dict[asyncio.StreamWriter, asyncio.Event] = field(default_factory=dict)
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    # What happens in the cluster

    def put(self, *items: Object) -> None:
        """Add or change objects."""
        for item in items:
            name = item["metadata"]["name"]
            kind = "MODIFIED" if name in self.objects else "ADDED"
            self.version += 1
            item["metadata"]["resourceVersion"] = str(self.version)
            self.objects[name] = item
            self._append(kind, item)

    def delete(self, name: str) -> None:
        self.version += 1
        item = json.loads(json.dumps(self.objects.pop(name)))
        item["metadata"]["resourceVersion"] = str(self.version)
        self._append("DELETED", item)

    def bookmark(self) -> None:
        """As if much had happened to other objects."""
        self.version += 50
        item = {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}}
        self._append("BOOKMARK", item)

    def send(self, line: bytes) -> None:
        """Any line to every watch."""
        self.version += 1
        self.log.append((self.version, line))
        self._wake()

    def forget_history(self) -> None:
        """Compaction: watches that start from before now are 410."""
        self.kept_from = self.version

    # What happens to the server

    @property
    def watches(self) -> int:
        return sum(self._writers.values())

    def cut(self) -> None:
        """Break every connection."""
        for other in self.others:
            other.cut()
        for writer in list(self._writers):
            writer.transport.abort()

    def end_watches(self) -> None:
        """End every watch in an orderly way, as when its time is over."""
        for ending in self._endings.values():
            ending.set()

    @property
    def lists(self) -> int:
        return sum("watch" not in params and "continue" not in params for params in self.asked)

    # Serving

    def _append(self, kind: str, item: Object) -> None:
        self.log.append((self.version, json.dumps({"type": kind, "object": item}).encode()))
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[writer] = False
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            self._writers.pop(writer, None)
            self._endings.pop(writer, None)
            writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = urlsplit(head.split(" ")[1])
        params = {key: values[0] for key, values in parse_qs(target.query).items()}
        token = re.search(r"(?im)^authorization: Bearer (.*?)\r?$", head)
        other = next((each for each in self.others if each.collection == target.path), None)
        if self.fails is not None:
            self._status(writer, *self.fails)
        elif other is not None:
            await other._answer(head, reader, writer)
        elif self.tokens and (token is None or token[1] not in self.tokens):
            self._status(writer, 401, "Unauthorized")
        elif target.path != self.collection:
            self._status(writer, 404, f"no such collection: {target.path}")
        else:
            self.asked.append(params)
            if "watch" not in params:
                self._list(writer, params)
            elif self.fails_watches is not None:
                self._status(writer, *self.fails_watches)
            else:
                await self._watch(reader, writer, params)

    def _status(self, writer: asyncio.StreamWriter, code: int, message: str) -> None:
        self.refused += 1
        self._json(writer, {"kind": "Status", "code": code, "message": message}, code)

    def _json(self, writer: asyncio.StreamWriter, body: Object, code: int = 200) -> None:
        text = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (code, len(text), text))

    def _list(self, writer: asyncio.StreamWriter, params: dict[str, str]) -> None:
        wanted = [item for _, item in sorted(self.objects.items()) if is_selected(params, item["metadata"])]
        start = int(params.get("continue", 0))
        end = start + min(self.page, int(params["limit"]))
        metadata = {"resourceVersion": str(self.version)}
        if end < len(wanted):
            metadata["continue"] = str(end)
        self._json(writer, {"kind": "List", "metadata": metadata, "items": wanted[start:end]})

    async def _watch(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, params: dict[str, str]
    ) -> None:
        seen = int(params["resourceVersion"])
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if seen < self.kept_from:
            expired = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
            self._chunk(writer, json.dumps(expired).encode())
            writer.write(b"0\r\n\r\n")
            return
        ending = self._endings[writer] = asyncio.Event()
        self._writers[writer] = True
        left = asyncio.ensure_future(reader.read(1))
        try:
            while not left.done():
                grown = asyncio.ensure_future(self._grown.wait())
                ended = asyncio.ensure_future(ending.wait())
                for version, line in self.log:
                    if version > seen:
                        seen = version
                        if self._concerns(line, params):
                            self._chunk(writer, line)
                try:
                    if ending.is_set():
                        break
                    await asyncio.wait((grown, ended, left), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    grown.cancel()
                    ended.cancel()
        finally:
            self._writers[writer] = False
            if left.done() and not left.cancelled():
                left.exception()
            left.cancel()
        writer.write(b"0\r\n\r\n")

    def _concerns(self, line: bytes, params: dict[str, str]) -> bool:
        try:
            event = json.loads(line)
            metadata = event["object"]["metadata"]
        except (ValueError, KeyError, TypeError):
            return True
        return event["type"] == "BOOKMARK" or is_selected(params, metadata)

    def _chunk(self, writer: asyncio.StreamWriter, line: bytes) -> None:
        # In two pieces: a line does not come as one.
        for piece in (line[:7], line[7:] + b"\n"):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))


@pytest.fixture
def serving() -> Callable[..., Any]:
    """`async with serving(api, port=, tls=)`: the server is up; `api.url` says where."""

    @asynccontextmanager
    async def start(
        api: FakeApi, *, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[FakeApi]:
        async with tcp_server(api.serve, port=port, tls=tls) as served:
            api.url = f"{'https' if tls else 'http'}://127.0.0.1:{served}"
            try:
                yield api
            finally:
                api.cut()

    return start


@pytest.fixture
def fake_api() -> FakeApi:
    return FakeApi()


@pytest.fixture
async def api(fake_api: FakeApi, serving: Callable[..., Any]) -> AsyncIterator[FakeApi]:
    async with serving(fake_api):
        yield fake_api


@pytest.fixture
def pod() -> Callable[..., Object]:
    """`pod("a")`: a running worker's pod; keyword arguments say what is different about it."""

    def make(
        name: str,
        ip: str | None = "10.0.0.1",
        *,
        ready: bool = True,
        terminating: bool = False,
        phase: str = "Running",
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        ports: list[Object] | None = None,
    ) -> Object:
        metadata: Object = {"name": name, "labels": {"app": "vllm", **(labels or {})}}
        if annotations:
            metadata["annotations"] = annotations
        if terminating:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        status: Object = {"phase": phase}
        if ip is not None:
            status["podIP"] = ip
        status["conditions"] = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False"},
        ]
        if ports is None:
            ports = [{"name": "metrics", "containerPort": 9}, {"name": "http", "containerPort": 8000}]
        spec = {"containers": [{"name": "worker", "ports": ports}]}
        return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}

    return make


@pytest.fixture
def pools(fake_api: FakeApi) -> FakeApi:
    """The InferencePools of the server `fake_api`."""
    other = FakeApi(collection="/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools")
    fake_api.others.append(other)
    return other


def inference_pool(name: str, labels: dict[str, str], *ports: int, **spec: Any) -> Object:
    """An InferencePool as the API server has it."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
            **spec,
        },
    }
