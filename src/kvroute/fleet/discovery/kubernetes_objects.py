"""Reads workers from pods and EndpointSlices. Pure.

The shapes are those of v1 Pod and discovery.k8s.io/v1 EndpointSlice (Kubernetes 1.21 and later). A missing
part of an object counts as empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvroute.fleet.worker import WorkerId, WorkerSpec

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

    found: tuple[FoundWorker, ...] = ()
    trouble: str = ""


def name_of(item: Object) -> str:
    """The object's name, unique among the objects of one kind in one namespace."""
    return str(_inner(item, "metadata").get("name", ""))


def read_pod(pod: Object, reader: ObjectReader) -> ObjectReading:
    """The worker in a pod; no worker while the pod has no address, or after its containers have ended."""
    metadata, status = _inner(pod, "metadata"), _inner(pod, "status")
    address = status.get("podIP")
    role = _role(metadata, reader)
    if not address or status.get("phase") in ("Succeeded", "Failed") or not _is_wanted(role, reader):
        return ObjectReading()
    port = _pod_port(pod, reader.port)
    if port is None:
        return ObjectReading(
            trouble=f"no container of the pod {name_of(pod)} has a port named {reader.port!r}"
        )
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in _items(status, "conditions")
    )
    return ObjectReading(
        (
            FoundWorker(
                name_of(pod),
                _url(reader, address, port),
                is_ready=ready,
                is_terminating=metadata.get("deletionTimestamp") is not None,
                models=_models(metadata, reader),
                role=reader.meanings.get(role or "", role),
                node=_text(_inner(pod, "spec").get("nodeName")),
            ),
        )
    )


def read_endpoint_slice(item: Object, reader: ObjectReader) -> ObjectReading:
    """The workers in an EndpointSlice. All endpoints of a slice have the same port."""
    metadata = _inner(item, "metadata")
    role = _role(metadata, reader)
    endpoints = _items(item, "endpoints")
    if item.get("addressType") == "FQDN" or not endpoints or not _is_wanted(role, reader):
        return ObjectReading()
    port = _slice_port(item, reader.port)
    if port is None:
        return ObjectReading(trouble=f"the EndpointSlice {name_of(item)} has no port named {reader.port!r}")
    models = _models(metadata, reader)
    found = []
    for endpoint in endpoints:
        addresses = endpoint.get("addresses")
        if not isinstance(addresses, list) or not addresses:
            continue
        conditions, target = _inner(endpoint, "conditions"), _inner(endpoint, "targetRef")
        place = _place(addresses[0], port)  # "clients may ignore the others" (API reference)
        name = target.get("name") if target.get("kind") == "Pod" else None
        found.append(
            FoundWorker(
                str(name or place),
                f"{reader.scheme}://{place}",
                is_ready=conditions.get("ready") is not False,  # unknown counts as ready (API reference)
                is_terminating=conditions.get("terminating") is True,
                models=models,
                role=reader.meanings.get(role or "", role),
                node=_text(endpoint.get("nodeName")),
            )
        )
    return ObjectReading(tuple(found))


def by_name(found: Iterable[FoundWorker]) -> dict[str, FoundWorker]:
    """One worker per name, ordered by name."""
    # A pod may be in several slices: one per address family, and two while it moves between slices.
    chosen: dict[str, FoundWorker] = {}
    for each in found:
        known = chosen.get(each.name)
        if known is None or _rank(each) < _rank(known):
            chosen[each.name] = each
    return dict(sorted(chosen.items()))


def _rank(found: FoundWorker) -> tuple[object, ...]:
    return found.url.endswith("]") or "[" in found.url, found.is_terminating, not found.is_ready, found.url


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
    yield from (each for each in _items(spec, "initContainers") if each.get("restartPolicy") == "Always")


def _slice_port(item: Object, wanted: int | str) -> int | None:
    if isinstance(wanted, int):
        return wanted
    for port in _items(item, "ports"):
        if port.get("name") == wanted and isinstance(port.get("port"), int):
            return int(port["port"])
    return None


def _url(reader: ObjectReader, address: object, port: int) -> str:
    return f"{reader.scheme}://{_place(address, port)}"


def _place(address: object, port: int) -> str:
    host = str(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _inner(item: Object, key: str) -> Object:
    inner = item.get(key)
    return inner if isinstance(inner, Mapping) else {}


def _items(item: Object, key: str) -> list[Object]:
    inner = item.get(key)
    return [each for each in inner if isinstance(each, Mapping)] if isinstance(inner, list) else []
