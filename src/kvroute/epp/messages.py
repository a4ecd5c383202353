"""Envoy's `ext_proc` messages: what the picker reads of them, and the answers that it writes. Pure.

The messages are those of `envoy.service.ext_proc.v3` (Envoy 1.40); names of headers and metadata come from
the endpoint picker protocol 1.0 of the Gateway API Inference Extension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2

from kvroute.openai.headers import HeaderList, header

DESTINATION = "x-gateway-destination-endpoint"
"""Request header and key of the metadata: the addresses that the request is for."""
PIECE_BYTES = 62_000
"""Some releases of Envoy accept at most 64 KB in one message."""
_FILTER = "envoy.filters.http.ext_proc"
_LB, _SERVED_KEY = "envoy.lb", "x-gateway-destination-endpoint-served"
_SUBSET, _SUBSET_KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_VIA_UPSTREAM = "via_upstream"
_RESET = "upstream_reset_before_response_started"
_RESETS_BY_WORKER = frozenset(
    {
        "connection_termination",
        "connection_timeout",
        "http/1_premature_upstream_half_close",
        "protocol_error",
        "remote_connection_failure",
        "remote_refused_stream_reset",
        "remote_reset",
    }
)
"""Reasons of a reset (Envoy 1.40, `resetReasonToString`). The others lie in Envoy, such as `overflow`."""
_LONGEST_DETAIL = 64


class Head(NamedTuple):
    """The head of a request or an answer, without pseudo-headers."""

    pseudo: Mapping[str, bytes]
    headers: HeaderList

    @property
    def status(self) -> int:
        value = self.pseudo.get(":status", b"")
        return int(value) if value.isdigit() else 0


def read_head(message: Any) -> Head:
    """Read `HttpHeaders`. Names are lower-case, as in HTTP/2."""
    pseudo, headers = dict[str, bytes](), HeaderList()
    for envoy_header in message.headers.headers:
        value = envoy_header.raw_value or envoy_header.value.encode()
        if envoy_header.key.startswith(":"):
            pseudo[envoy_header.key] = value
        else:
            headers.append((envoy_header.key.encode("latin-1"), value))
    if authority := pseudo.get(":authority"):
        headers.append((b"host", authority))
    return Head(pseudo, headers)


def picked(destination: str, headers: HeaderList, removed: Sequence[str], decision: Mapping[str, str]) -> Any:
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


def _header_mutation(headers: HeaderList) -> Any:
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


def refused(status: int, headers: HeaderList, body: bytes) -> Any:
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


def response_head(headers: HeaderList) -> Any:
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
    trouble: str = ""
    """Envoy's reason for an answer of its own; "" for an answer of a worker."""
    is_workers_fault: bool = False
    """Whether Envoy answers because the worker that it tried last cannot be reached or broke off."""
    attempts: int | None = None
    """Number of workers that Envoy has tried; None if Envoy does not say it."""


def read_answer(message: Any) -> AnswerHead:
    """Read `response_headers`.

    The attributes `upstream.address`, `upstream.request_attempt_count` and `response.code_details` are
    optional.
    """
    head = read_head(message.response_headers)
    attributes, metadata = _attributes_of(message), _metadata_of(message, _LB) or {}
    served = metadata.get(_SERVED_KEY) or attributes.get("upstream.address") or ""
    details = str(attributes.get("response.code_details") or _VIA_UPSTREAM)
    trouble, _, detail = ("" if details == _VIA_UPSTREAM else details).partition("{")
    attempts = str(attributes.get("upstream.request_attempt_count", "")).removesuffix(".0")
    return AnswerHead(
        head.status,
        str(served),
        header(head.headers, b"content-type").startswith(b"text/event-stream"),
        trouble[:_LONGEST_DETAIL],
        trouble == _RESET and detail.partition("}")[0].partition("|")[0].lower() in _RESETS_BY_WORKER,
        int(attempts) if attempts.isdigit() else None,
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
    by_namespace = message.metadata_context.filter_metadata
    if namespace not in by_namespace:
        return None
    return {
        key: list(value) if isinstance(value, struct_pb2.ListValue) else value
        for key, value in by_namespace[namespace].items()
    }


class EnvoyAttempts(NamedTuple):
    """What became of a request at the addresses that Envoy got."""

    tried: int
    """Number of workers that Envoy has tried."""
    failed: int
    """At this number of addresses, from the first one, the worker failed."""
    answered_index: int | None
    """Which address has answered; None if it was Envoy itself, or a worker that Envoy has chosen."""


def attempts_of(head: AnswerHead, addresses: Sequence[str]) -> EnvoyAttempts:
    """Read from the head of an answer which workers Envoy has tried, and which of them failed.

    Envoy tries the addresses in their order, then workers of its own choice. Each attempt but the last one
    failed, or there would be no next one. An answer of Envoy itself says something about the last worker only
    if it is the worker's fault: not if a route's timeout has passed or no worker is healthy for Envoy.
    """
    index = addresses.index(head.served) if head.served in addresses else None
    is_other = head.served != "" and index is None
    tried = head.attempts if head.attempts is not None else 1 if index is None else index + 1
    if index is not None and not head.trouble:
        # More attempts than addresses up to this one: Envoy has begun again at the first one.
        failed = index if tried <= index + 1 else min(tried - 1, len(addresses))
        return EnvoyAttempts(tried, failed, index)
    failed = max(0, tried if head.is_workers_fault and not is_other else tried - 1)
    is_listed = not head.trouble and not is_other and failed < len(addresses)
    return EnvoyAttempts(tried, min(failed, len(addresses)), failed if is_listed else None)
