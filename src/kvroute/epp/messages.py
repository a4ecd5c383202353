"""Envoy's `ext_proc` messages: what the picker reads of them, and the answers that it writes. Pure.

The messages are those of `envoy.service.ext_proc.v3` (Envoy 1.40); names of headers and metadata come from
the endpoint picker protocol 1.0 of the Gateway API Inference Extension.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2

from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.worker import Worker
from kvroute.gateway.downstream import Headers, header
from kvroute.options import Options, option

DESTINATION = "x-gateway-destination-endpoint"
"""Request header and key of the metadata: the addresses that the request is for."""
PIECE_BYTES = 62_000
"""Some releases of Envoy accept at most 64 KB in one message."""
_FILTER = "envoy.filters.http.ext_proc"
_LB, _SERVED_KEY = "envoy.lb", "x-gateway-destination-endpoint-served"
_SUBSET, _SUBSET_KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_VIA_UPSTREAM = "via_upstream"
_LONGEST_DETAIL = 64


class Head(NamedTuple):
    """The head of a request or an answer, without pseudo-headers."""

    pseudo: Mapping[str, bytes]
    headers: Headers

    @property
    def status(self) -> int:
        value = self.pseudo.get(":status", b"")
        return int(value) if value.isdigit() else 0


def read_head(message: Any) -> Head:
    """Read `HttpHeaders`. Names are lower-case, as in HTTP/2."""
    pseudo, headers = dict[str, bytes](), Headers()
    for each in message.headers.headers:
        value = each.raw_value or each.value.encode()
        if each.key.startswith(":"):
            pseudo[each.key] = value
        else:
            headers.append((each.key.encode("latin-1"), value))
    if authority := pseudo.get(":authority"):
        headers.append((b"host", authority))
    return Head(pseudo, headers)


def picked(destination: str, headers: Headers, removed: Sequence[str], decision: Mapping[str, str]) -> Any:
    """The deferred answer to the request's head: where it goes, with these headers for the worker.

    `decision` becomes metadata, from which Envoy can make headers of the answer.
    """
    metadata = struct_pb2.Struct()
    metadata.update({_LB: {DESTINATION: destination}, "kvroute": dict(decision)})
    mutation = _header_mutation([(DESTINATION.encode(), destination.encode()), *headers])
    mutation.remove_headers.extend(removed)
    return pb.ProcessingResponse(
        dynamic_metadata=metadata,
        request_headers=pb.HeadersResponse(
            response=pb.CommonResponse(clear_route_cache=True, header_mutation=mutation)
        ),
    )


def _header_mutation(headers: Headers) -> Any:
    """Set these headers, and replace earlier values."""
    return pb.HeaderMutation(
        set_headers=[
            base_pb2.HeaderValueOption(
                header=base_pb2.HeaderValue(key=name.decode("latin-1"), raw_value=value),
                append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in headers
        ]
    )


def _pieces(body: bytes, *, is_last: bool) -> Iterator[Any]:
    """`body` as streamed mutations of at most `PIECE_BYTES`; `is_last`: not even trailers follow."""
    for start in range(0, len(body) or 1, PIECE_BYTES):
        end = start + PIECE_BYTES
        yield pb.CommonResponse(
            body_mutation=pb.BodyMutation(
                streamed_response=pb.StreamedBodyResponse(
                    body=body[start:end], end_of_stream=is_last and end >= len(body)
                )
            )
        )


def refused(status: int, headers: Headers, body: bytes) -> Any:
    """The picker's own answer. Envoy writes Content-Length itself."""
    headers = [pair for pair in headers if pair[0] != b"content-length"]
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status={"code": status}, headers=_header_mutation(headers), body=body
        )
    )


def request_pieces(body: bytes, *, has_trailers: bool) -> Iterator[Any]:
    """The body of a request that has one, and an answer to its trailers."""
    for piece in _pieces(body, is_last=not has_trailers):
        yield pb.ProcessingResponse(request_body=pb.BodyResponse(response=piece))
    if has_trailers:
        yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())


def response_pieces(message: Any) -> Iterator[Any]:
    """A piece of the worker's answer, unchanged."""
    body = message.response_body
    for piece in _pieces(body.body, is_last=body.end_of_stream):
        yield pb.ProcessingResponse(response_body=pb.BodyResponse(response=piece))


def request_head() -> Any:
    """Let the request's head pass."""
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse())


def response_head(headers: Headers) -> Any:
    """Let the answer's head pass, with these headers."""
    response = pb.CommonResponse(header_mutation=_header_mutation(headers))
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=response))


def response_trailers() -> Any:
    """Let the answer's trailers pass."""
    return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


class AnswerHead(NamedTuple):
    """What Envoy knows when the head of an answer arrives."""

    status: int
    served: str
    """The address that has served the request; "" if Envoy does not say it."""
    is_event_stream: bool
    trouble: str
    """Envoy's reason for an answer of its own; "" for an answer of a worker."""


def read_answer(message: Any) -> AnswerHead:
    """Read `response_headers`. The attributes `upstream.address` and `response.code_details` are optional."""
    head = read_head(message.response_headers)
    attributes, metadata = _attributes_of(message), _metadata_of(message, _LB) or {}
    served = metadata.get(_SERVED_KEY) or attributes.get("upstream.address") or ""
    details = str(attributes.get("response.code_details") or _VIA_UPSTREAM)
    return AnswerHead(
        head.status,
        str(served),
        header(head.headers, b"content-type").startswith(b"text/event-stream"),
        "" if details == _VIA_UPSTREAM else details.partition("{")[0][:_LONGEST_DETAIL],
    )


def read_subset(message: Any) -> frozenset[str] | None:
    """The addresses that the proxy permits for a request; None if it permits all.

    The value is a list of `ip:port`, or one text with commas.
    """
    value = (_metadata_of(message, _SUBSET) or {}).get(_SUBSET_KEY)
    if value is None:
        return None
    texts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return frozenset(text.strip() for text in texts if isinstance(text, str) and text.strip())


def _attributes_of(message: Any) -> Mapping[str, Any]:
    """The attributes that the filter's `response_attributes` ask for, as Python values."""
    return dict(message.attributes[_FILTER]) if _FILTER in message.attributes else {}


def _metadata_of(message: Any, namespace: str) -> Mapping[str, object] | None:
    """The request's metadata of one namespace, as Python values; None without any."""
    found = message.metadata_context.filter_metadata
    if namespace not in found:
        return None
    return {
        key: list(value) if isinstance(value, struct_pb2.ListValue) else value
        for key, value in found[namespace].items()
    }


log = logging.getLogger(__name__)

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host name, the preferred one first. Raises OSError."""


class EppOptions(Options):
    """`kvroute epp`: the picker's own options. Its gRPC listener has `server.host` and `server.port`."""

    http_port: int = option(
        9090,
        "TCP port of `/metrics`, `/ready`, the admin API and the live page, on `server.host`; 0 lets the "
        "system choose. The port also relays requests, like `kvroute serve`.",
        ge=0,
        le=65535,
    )
    fallbacks: int = option(
        2,
        "Addresses after the first one in `x-gateway-destination-endpoint`, in the order of the ranking. "
        "Envoy's policy `override_host` tries them when a retry is due. 0: one address, as clusters of the "
        "type `ORIGINAL_DST` need it.",
        unit="addresses",
        higher="more dead workers in a row are survived",
        lower="shorter headers",
        ge=0,
        le=16,
    )
    resolve_interval_s: float = option(
        10.0,
        "Time between resolutions of workers' host names. Envoy gets IP addresses only.",
        unit="s",
        higher="fewer queries",
        lower="a changed address is used sooner",
        gt=0,
    )
    attach_timeout_s: float = option(
        5.0,
        "With two filters: how long a picked request waits for the stream of the second filter, which shows "
        "its end. After that its load is returned.",
        unit="s",
        higher="a slow Envoy keeps its requests accounted",
        lower="the load of requests whose second stream went to another picker is returned sooner",
        gt=0,
    )


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of `host` by the system's resolver, IPv4 first."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(sockaddr[0]) for _, _, _, _, sockaddr in found]
    return sorted(dict.fromkeys(addresses), key=lambda address: ":" in address)


class Endpoints:
    """Maps the fleet's workers to `ip:port`.

    A worker whose URL has a path or whose name cannot be resolved has no address: Envoy could not send a
    request there. Mutable: changes of the fleet and `run` change it.
    """

    def __init__(self, fleet: Fleet, clock: Clock, interval_s: float, resolve: Resolve = resolve) -> None:
        self._fleet = fleet
        self._clock = clock
        self._interval_s = interval_s
        self._resolve = resolve
        self._addresses: dict[str, str] = {}
        """The worker's URL -> `ip:port`."""
        self._named: dict[str, tuple[str, int]] = {}
        """The worker's URL -> its host name and port, if the host is no IP address."""
        self._refused: set[str] = set()
        """URLs for which a warning was logged."""
        self._joined = asyncio.Event()
        for worker in fleet.workers():
            self._add(worker)
        fleet.subscribe(self._fleet_changed)

    def of(self, worker: Worker) -> str | None:
        """The worker's address; None while it has none."""
        return self._addresses.get(worker.spec.url)

    async def run(self) -> None:
        """Resolve host names until cancelled: at once for a worker that joins, then every interval."""
        while True:
            self._joined.clear()
            await asyncio.gather(*(self._look_up(url) for url in list(self._named)))
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._joined.wait()
            except TimeoutError:
                pass

    async def _look_up(self, url: str) -> None:
        host, port = self._named[url]
        try:
            async with asyncio.timeout(self._interval_s):
                found = await self._resolve(host, port)
        except (OSError, TimeoutError) as error:
            # The last known address stays: a name server that fails must not empty the fleet.
            self._warn(url, f"its host name cannot be resolved ({error or 'no answer in time'})")
            return
        if url in self._named and found:
            self._refused.discard(url)
            self._addresses[url] = joined(found[0], port)

    def _fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.JOINED:
            self._add(worker)
        elif change is FleetChange.LEFT and all(
            other.spec.url != worker.spec.url for other in self._fleet.workers()
        ):
            for known in (self._addresses, self._named):
                known.pop(worker.spec.url, None)
            self._refused.discard(worker.spec.url)

    def _add(self, worker: Worker) -> None:
        url = worker.spec.url
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if parts.path not in ("", "/"):
            self._warn(url, "its URL has a path, which Envoy does not get")
            return
        try:
            self._addresses[url] = joined(str(ip_address(host)), port)
        except ValueError:
            self._named[url] = (host, port)
            self._joined.set()

    def _warn(self, url: str, why: str) -> None:
        if url not in self._refused:
            self._refused.add(url)
            log.warning("the worker at %s cannot be picked: %s", urlsplit(url).netloc.rpartition("@")[2], why)


def joined(address: str, port: int) -> str:
    """`ip:port`, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
