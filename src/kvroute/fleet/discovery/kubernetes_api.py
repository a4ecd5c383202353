"""A client that lists and watches one collection of a Kubernetes API server, and the workers in its objects.

Pods, EndpointSlices and InferencePools are read by pure functions. Their shapes are those of v1 Pod,
discovery.k8s.io/v1 EndpointSlice (Kubernetes 1.21 and later) and inference.networking.k8s.io/v1
InferencePool. A missing part of an object counts as empty.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec

from kvroute.answers import LIMIT, BoundedTransport
from kvroute.errors import ConfigError, DiscoveryError, WatchExpired
from kvroute.fleet.options import KubernetesOptions
from kvroute.fleet.worker import WorkerId, WorkerSpec
from kvroute.json_values import check_values

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ObjectReader:
    """The settings for reading objects; see `KubernetesOptions` for the fields."""

    port: int | str
    scheme: str = "http"
    role_label: str = ""
    roles: tuple[str, ...] = ()
    model_label: str | None = None
    meanings: Mapping[str, str] = field(default_factory=dict)
    """Value of the role label -> `WorkerSpec.role`; other values stay as they are."""
    target_ports: tuple[int, ...] = ()
    """If there are any: each one is a worker of a pod, instead of `port`."""


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """One worker as one object describes it."""

    name: str
    url: str
    is_ready: bool
    is_terminating: bool
    models: tuple[str, ...] = ()
    role: str | None = None
    node: str | None = None

    def spec(self, *, draining: bool) -> WorkerSpec:
        return WorkerSpec(
            WorkerId(self.name), self.url, self.models, role=self.role, draining=draining, node=self.node
        )


@dataclass(frozen=True, slots=True)
class ObjectReading:
    """All workers of one object. `trouble` is the reason why the object is unusable, for an operator."""

    workers: tuple[FoundWorker, ...] = ()
    trouble: str = ""


def name_of(item: Object) -> str:
    """The object's name, unique among the objects of one kind in one namespace."""
    return str(_inner(item, "metadata").get("name", ""))


def read_pod(pod: Object, reader: ObjectReader) -> ObjectReading:
    """The workers in a pod; no worker while the pod has no address, or after its containers have ended.

    There is one worker, or one for each target port of the reader.
    """
    metadata, status = _inner(pod, "metadata"), _inner(pod, "status")
    address = status.get("podIP")
    role = _role(metadata, reader)
    if not address or status.get("phase") in ("Succeeded", "Failed") or not _is_wanted(role, reader):
        return ObjectReading()
    name, ports = name_of(pod), reader.target_ports
    if not ports:
        port = _pod_port(pod, reader.port)
        if port is None:
            return ObjectReading(trouble=f"no container of the pod {name} has a port named {reader.port!r}")
        ports = (port,)
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in _items(status, "conditions")
    )
    return ObjectReading(
        tuple(
            FoundWorker(
                name if len(ports) == 1 else f"{name}:{port}",
                _url(reader, address, port),
                is_ready=ready,
                is_terminating=metadata.get("deletionTimestamp") is not None,
                models=_models(metadata, reader),
                role=reader.meanings.get(role or "", role),
                node=_text(_inner(pod, "spec").get("nodeName")),
            )
            for port in ports
        )
    )


def read_endpoint_slice(item: Object, reader: ObjectReader) -> ObjectReading:
    """The workers in an EndpointSlice. All endpoints of a slice have the same port."""
    metadata = _inner(item, "metadata")
    role = _role(metadata, reader)
    endpoints = _items(item, "endpoints")
    if len(endpoints) > _MOST_ENDPOINTS:
        return ObjectReading(
            trouble=f"the EndpointSlice {name_of(item)} has more than {_MOST_ENDPOINTS} endpoints"
        )
    if item.get("addressType") == "FQDN" or not endpoints or not _is_wanted(role, reader):
        return ObjectReading()
    port = _slice_port(item, reader.port)
    if port is None:
        return ObjectReading(trouble=f"the EndpointSlice {name_of(item)} has no port named {reader.port!r}")
    models = _models(metadata, reader)
    workers = []
    for endpoint in endpoints:
        addresses = endpoint.get("addresses")
        if not isinstance(addresses, list) or not addresses:
            continue
        conditions, target = _inner(endpoint, "conditions"), _inner(endpoint, "targetRef")
        authority = _authority(addresses[0], port)  # "clients may ignore the others" (API reference)
        name = target.get("name") if target.get("kind") == "Pod" else None
        workers.append(
            FoundWorker(
                str(name or authority),
                f"{reader.scheme}://{authority}",
                is_ready=conditions.get("ready") is not False,  # unknown counts as ready (API reference)
                is_terminating=conditions.get("terminating") is True,
                models=models,
                role=reader.meanings.get(role or "", role),
                node=_text(endpoint.get("nodeName")),
            )
        )
    return ObjectReading(tuple(workers))


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """Which pods an InferencePool has, and which of their ports are workers."""

    selector: str
    """Label selector, as the API takes it."""
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolReading:
    """The target of an InferencePool. `trouble` is the reason why there is none, for an operator."""

    target: PoolTarget | None = None
    trouble: str = ""


def read_pool(pool: Object) -> PoolReading:
    """The pods and ports of an InferencePool."""
    spec = _inner(pool, "spec")
    labels = _inner(_inner(spec, "selector"), "matchLabels")
    numbers = [port.get("number") for port in _items(spec, "targetPorts")]
    ports = tuple(dict.fromkeys(number for number in numbers if isinstance(number, int)))
    if not labels or not ports:
        # An empty selector would select every pod of the namespace.
        return PoolReading(trouble=f"the InferencePool {name_of(pool)} has no matchLabels or no targetPorts")
    if spec.get("appProtocol") == "kubernetes.io/h2c":
        return PoolReading(trouble=f"the InferencePool {name_of(pool)} is for HTTP/2; kvroute needs HTTP/1.1")
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return PoolReading(PoolTarget(selector, ports))


def by_name(workers: Iterable[FoundWorker]) -> dict[str, FoundWorker]:
    """One worker per name, ordered by name."""
    # A pod may be in several slices: one per address family, and two while it moves between slices.
    chosen: dict[str, FoundWorker] = {}
    for worker in workers:
        chosen_worker = chosen.get(worker.name)
        if chosen_worker is None or _rank(worker) < _rank(chosen_worker):
            chosen[worker.name] = worker
    return dict(sorted(chosen.items()))


def _rank(worker: FoundWorker) -> tuple[object, ...]:
    return (
        worker.url.endswith("]") or "[" in worker.url,
        worker.is_terminating,
        not worker.is_ready,
        worker.url,
    )


def _role(metadata: Object, reader: ObjectReader) -> str | None:
    role = _inner(metadata, "labels").get(reader.role_label)
    return str(role) if role else None


def _is_wanted(role: str | None, reader: ObjectReader) -> bool:
    return not reader.roles or role in reader.roles


def _models(metadata: Object, reader: ObjectReader) -> tuple[str, ...]:
    key = reader.model_label
    if key is None:
        return ()
    text = _inner(metadata, "annotations").get(key) or _inner(metadata, "labels").get(key) or ""
    return tuple(name.strip() for name in str(text).split(",") if name.strip())


def _pod_port(pod: Object, wanted: int | str) -> int | None:
    if isinstance(wanted, int):
        return wanted
    for container in _running_containers(_inner(pod, "spec")):
        for port in _items(container, "ports"):
            if port.get("name") == wanted and isinstance(port.get("containerPort"), int):
                return int(port["containerPort"])
    return None


def _running_containers(spec: Object) -> Iterator[Object]:
    """The containers, and the init containers that keep running (sidecars)."""
    yield from _items(spec, "containers")
    yield from (
        container
        for container in _items(spec, "initContainers")
        if container.get("restartPolicy") == "Always"
    )


def _slice_port(item: Object, wanted: int | str) -> int | None:
    if isinstance(wanted, int):
        return wanted
    for port in _items(item, "ports"):
        if port.get("name") == wanted and isinstance(port.get("port"), int):
            return int(port["port"])
    return None


def _url(reader: ObjectReader, address: object, port: int) -> str:
    return f"{reader.scheme}://{_authority(address, port)}"


def _authority(address: object, port: int) -> str:
    host = str(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _inner(item: Object, key: str) -> Object:
    inner = item.get(key)
    return inner if isinstance(inner, Mapping) else {}


def _items(item: Object, key: str) -> list[Object]:
    inner = item.get(key)
    return [member for member in inner if isinstance(member, Mapping)] if isinstance(inner, list) else []


SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts `token`, `ca.crt` and `namespace`."""

_PAGE: Final = 100
"""Objects for each request of a list: two megabytes of pods."""
_MAX_PAGE_BYTES: Final = 16 << 20
"""Longest answer; a server may ignore the limit of objects."""
_MAX_LIST_BYTES: Final = 64 << 20
_MAX_PAGES: Final = 1000
_MAX_EVENT_BYTES: Final = 4 << 20
"""Longest event of a watch: etcd's objects have at most 1.5 MB."""
_MOST_OBJECTS: Final = 10_000
"""Most objects of a list: each costs some 10 us, however small it is."""
_MOST_ENDPOINTS: Final = 1000
"""Most endpoints of an EndpointSlice (API reference)."""
_UNPAUSED_BYTES: Final = 1 << 18
"""Bytes that are parsed before the event loop gets a turn: 3 ms, and as long as the last object takes."""
_MOST_PAGE_VALUES: Final = 1_500_000
"""Most JSON values of a page. Pods have about one for each 20 bytes, and most of them are not decoded."""
_GONE: Final = 410
_ABSENT: Final = 404
_COLLECTIONS: Final = {
    "pods": "/api/v1/namespaces/{}/pods",
    "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
    "inferencepools": "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools",
}


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Address and credentials of the API server.

    The files are read when they are needed, because Kubernetes changes them in place.
    """

    url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None


def access_of(
    options: KubernetesOptions, environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT
) -> ApiAccess:
    """The access that `options` set, completed from the service account mounted at `account`.

    Raises ConfigError if neither has the URL or the namespace. Reads the namespace's file; blocks.
    """
    url, token, ca = options.api_url, options.token_file, options.ca_file
    if url is None:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "fleet.kubernetes.api_url", "must be set: this is not a pod (no KUBERNETES_SERVICE_HOST)"
            )
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        token, ca = token or account / "token", ca or account / "ca.crt"
    namespace = options.namespace
    if namespace is None:
        try:
            namespace = (account / "namespace").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(
                "fleet.kubernetes.namespace", "must be set: there is no service account with a namespace"
            ) from error
    return ApiAccess(url, namespace, token, ca)


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects at the resource version `version`."""

    items: tuple[Object, ...]
    version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change of an object. `item` is None for a bookmark, which only has a newer `version`."""

    version: str
    item: Object | None = None
    is_deleted: bool = False


class KubernetesApi:
    """Lists and watches objects of one collection, and annotates objects.

    The objects are those that match a label selector, or the one called `name`.

    Every method raises DiscoveryError; WatchExpired means that the caller must list again. Mutable: a changed
    CA file replaces the HTTP client. The caller calls `aclose` at the end.
    """

    def __init__(
        self,
        access: ApiAccess,
        *,
        resource: str,
        selector: str,
        timeout_s: float,
        watch_s: float,
        name: str | None = None,
    ) -> None:
        self._access = access
        self._path = _COLLECTIONS[resource].format(access.namespace)
        self._selector = {"labelSelector": selector} if selector else {}
        if name is not None:
            self._selector["fieldSelector"] = f"metadata.name={name}"
        self._timeout_s = timeout_s
        self._watch_s = watch_s
        self._client: httpx.AsyncClient | None = None
        self._ca: object = None

    @property
    def url(self) -> str:
        """The URL of the collection, for log lines."""
        return self._access.url + self._path

    async def list(self) -> Listing:
        """Read all objects as of one moment, page by page."""
        items: list[Object] = []
        following: dict[str, str] = {}
        read = 0
        for _ in range(_MAX_PAGES):
            text = await self._get({"limit": str(_PAGE), **self._selector, **following})
            read += len(text)
            if read > _MAX_LIST_BYTES:
                raise DiscoveryError(f"the list is longer than {_MAX_LIST_BYTES} bytes")
            metadata = await _read_page(text, items)
            if not metadata.get("continue"):
                return Listing(tuple(items), str(metadata.get("resourceVersion", "")))
            following = {"continue": str(metadata["continue"])}
        raise DiscoveryError(f"the list has more than {_MAX_PAGES} pages")

    @asynccontextmanager
    async def watching(self, version: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """The changes after `version`, for `watch_s`. Entered when the head of the answer has arrived."""
        params = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(self._watch_s))),
            **self._selector,
        }
        client, headers = await self._prepared()
        timeout = httpx.Timeout(self._timeout_s, read=self._watch_s + self._timeout_s)
        try:
            async with client.stream(
                "GET",
                self._path,
                params=params,
                headers=headers,
                timeout=timeout,
                extensions={LIMIT: sys.maxsize},  # the length of each event is limited
            ) as answer:
                if not answer.is_success:
                    raise _refusal(answer.status_code, await _beginning(answer))
                async with aclosing(_events(answer)) as events:
                    yield events
        except (httpx.HTTPError, OSError) as error:
            raise _unavailable(error) from error

    async def annotate(self, name: str, annotations: Mapping[str, str]) -> bool:
        """Set annotations of one object and keep its others; False if there is no such object."""
        client, headers = await self._prepared()
        headers["content-type"] = "application/merge-patch+json"
        patch = json.dumps({"metadata": {"annotations": dict(annotations)}})
        try:
            path = f"{self._path}/{quote(name, safe='')}"
            answer = await client.patch(path, content=patch, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            raise _unavailable(error) from error
        if answer.status_code == _ABSENT:
            return False
        if not answer.is_success:
            raise _refusal(answer.status_code, answer.content)
        return True

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _get(self, params: dict[str, str]) -> bytes:
        client, headers = await self._prepared()
        try:
            answer = await client.get(self._path, params=params, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            raise _unavailable(error) from error
        if not answer.is_success:
            raise _refusal(answer.status_code, answer.content)
        return answer.content

    async def _prepared(self) -> tuple[httpx.AsyncClient, dict[str, str]]:
        """A client with the current CA file, and the request headers with the current token."""
        try:
            token = await asyncio.to_thread(_read, self._access.token_file)
            ca = await asyncio.to_thread(_signature, self._access.ca_file)
            if self._client is None or ca != self._ca:
                verify = await asyncio.to_thread(_context, self._access)
                await self.aclose()
                self._client = httpx.AsyncClient(
                    base_url=self._access.url,
                    timeout=self._timeout_s,
                    trust_env=False,
                    transport=BoundedTransport(
                        httpx.AsyncHTTPTransport(verify=verify, trust_env=False), max_bytes=_MAX_PAGE_BYTES
                    ),
                )
                self._ca = ca
        except (OSError, UnicodeDecodeError) as error:
            raise DiscoveryError(f"token or CA file: {error}") from error
        headers = {"accept": "application/json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        return self._client, headers


async def _events(answer: httpx.Response) -> AsyncGenerator[WatchEvent, None]:
    async with aclosing(_lines(answer)) as lines:
        async for line in lines:
            yield _event(_object(line))


async def _lines(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The lines of an answer. An incomplete last line is dropped: the next watch sends it again."""
    # Split at newlines only: httpx's `aiter_lines` also splits at characters that JSON strings may contain.
    incomplete = bytearray()
    async with aclosing(answer.aiter_raw()) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            head, *following = chunk.split(b"\n")
            incomplete += head
            for beginning in following:
                if incomplete.strip():
                    yield bytes(incomplete)
                incomplete = bytearray(beginning)
            if len(incomplete) > _MAX_EVENT_BYTES:
                raise DiscoveryError(f"an event is longer than {_MAX_EVENT_BYTES} bytes")


async def _beginning(answer: httpx.Response) -> bytes:
    """The first 64 KiB of a refusal."""
    text = b""
    async with aclosing(answer.aiter_raw()) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            text += chunk
            if len(text) > 65_536:
                break
    return text


class _Page(msgspec.Struct):
    metadata: msgspec.Raw
    items: list[msgspec.Raw] | None = None


_decode_page = msgspec.json.Decoder(_Page).decode


def _check_objects(text: bytes) -> None:
    """Raise ValueError as soon as a page has more than `_MOST_OBJECTS`, or an error of msgspec."""
    budget = _MOST_OBJECTS + 1  # and the metadata

    class Counted(msgspec.Struct, gc=False):
        def __post_init__(self) -> None:
            nonlocal budget
            budget -= 1
            if budget < 0:
                raise ValueError  # stops the decoding

    objects: Any = list[Counted]
    page = msgspec.defstruct("Page", [("metadata", Counted), ("items", objects | None, None)])
    msgspec.json.decode(text, type=page)


async def _read_page(text: bytes, items: list[Object]) -> dict[str, Any]:
    """Append the objects of a page to `items`, with pauses for the event loop; return its metadata."""
    try:
        check_values(text, _MOST_PAGE_VALUES)
        await asyncio.sleep(0)
        if text.count(b",") >= _MOST_OBJECTS:
            _check_objects(text)
            await asyncio.sleep(0)
        page = _decode_page(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DiscoveryError(f"the answer is not a list of at most {_MOST_OBJECTS} objects") from error
    metadata = _object(page.metadata)
    page_objects = page.items or ()
    if len(items) + len(page_objects) > _MOST_OBJECTS:
        raise DiscoveryError(f"the list has more than {_MOST_OBJECTS} objects")
    parsed = 0
    for raw in page_objects:
        item = _value(raw)
        if isinstance(item, dict):
            items.append(item)
        parsed += len(memoryview(raw))
        if parsed > _UNPAUSED_BYTES:
            parsed = 0
            await asyncio.sleep(0)
    return metadata


def _event(event: dict[str, Any]) -> WatchEvent:
    kind, item = event.get("type"), event.get("object")
    if not isinstance(item, dict):
        raise DiscoveryError("an event has no object")
    if kind == "ERROR":
        raise _failure(item, item.get("code"))
    metadata = item.get("metadata")
    version = str(metadata.get("resourceVersion", "")) if isinstance(metadata, dict) else ""
    if kind == "BOOKMARK":
        return WatchEvent(version)
    if kind not in ("ADDED", "MODIFIED", "DELETED"):
        raise DiscoveryError("an event has an unknown type")
    return WatchEvent(version, item, is_deleted=kind == "DELETED")


def _refusal(code: int, text: bytes) -> DiscoveryError:
    try:
        status = _object(text[:65_537])
    except DiscoveryError:
        status = {}
    return _failure(status, code)


def _failure(status: Mapping[str, Any], code: object) -> DiscoveryError:
    """The error for a `Status` object, whose message names the account and the permission that it lacks."""
    message = " ".join(str(status.get("message") or status.get("reason") or "").split())[:300]
    text = f"answered {code}" + (f": {message}" if message else "")
    return WatchExpired(text) if code == _GONE else DiscoveryError(text)


def _unavailable(error: Exception) -> DiscoveryError:
    return DiscoveryError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _object(text: bytes | msgspec.Raw) -> dict[str, Any]:
    value = _value(text)
    if not isinstance(value, dict):
        raise DiscoveryError("the answer is not a JSON object")
    return value


def _value(text: bytes | msgspec.Raw) -> object:
    try:
        check_values(memoryview(text))
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DiscoveryError("the answer is not JSON that can be read") from error


def _read(file: Path | None) -> str:
    return file.read_text(encoding="utf-8").strip() if file is not None else ""


def _signature(file: Path | None) -> object:
    if file is None:
        return None
    status = os.stat(file)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _context(access: ApiAccess) -> ssl.SSLContext | bool:
    if not access.url.startswith("https:"):
        return False
    context = ssl.create_default_context(cafile=str(access.ca_file) if access.ca_file is not None else None)
    if access.ca_file is not None:
        # Python 3.13 requires extensions that the certificates of many clusters' own CAs do not have
        # (kubernetes-client/python #2394).
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
