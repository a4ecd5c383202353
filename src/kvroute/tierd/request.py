"""What a request asks for: method and target to one of the daemon's calls, or what is wrong with them."""

from __future__ import annotations

import json
import math
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

from kvroute.tierd.pool import ObjectName

MAX_NAME_BYTES = 4096
DEFAULT_TTL_S = 30.0


class BadRequest(Exception):
    """Answered with `status`; `param` names the part of the request that is wrong."""

    def __init__(self, status: int, param: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Put(NamedTuple):
    """Store an object; its bytes are the body."""

    name: ObjectName


class Get(NamedTuple):
    """An object's bytes, for a peer."""

    name: ObjectName


class Take(NamedTuple):
    """Lease an object for `ttl_s`, waiting up to `wait_s` for it."""

    name: ObjectName
    ttl_s: float
    wait_s: float


class Release(NamedTuple):
    """End a lease."""

    lease_id: str


class Page(NamedTuple):
    """`health` or `metrics`."""

    name: str


Call = Put | Get | Take | Release | Page


def parse_call(method: bytes, target: bytes, longest_lease_s: float) -> Call:
    """Raises BadRequest. Microseconds: this is on every request's way."""
    path, _, query = target.partition(b"?")
    parts = path.split(b"/")
    match parts:
        case [b"", b"v1", b"kv", bucket, key]:
            name = _object_name(bucket, key)
            if method == b"PUT":
                return Put(name)
            _require(method, b"GET", b"HEAD", b"PUT")
            return Get(name)
        case [b"", b"v1", b"kv", bucket, key, b"leases"]:
            _require(method, b"POST")
            name = _object_name(bucket, key)
            values = _query(query)
            ttl_s = _number(values, "ttl_s", DEFAULT_TTL_S)
            if not 0 < ttl_s <= longest_lease_s:
                text = f"ttl_s must be above 0 and at most {longest_lease_s:g} seconds"
                raise BadRequest(400, "ttl_s", text)
            wait_ms = _number(values, "timeout_ms", 0.0)
            if wait_ms < 0:
                raise BadRequest(400, "timeout_ms", "timeout_ms must not be negative")
            return Take(name, ttl_s, min(wait_ms / 1000, longest_lease_s))
        case [b"", b"v1", b"leases", lease_id, b"release"]:
            _require(method, b"POST")
            return Release(_lease_id(lease_id))
        case [b"", (b"health" | b"metrics") as page]:
            _require(method, b"GET", b"HEAD")
            return Page(page.decode())
    shown = path[:200].decode("ascii", "replace")
    raise BadRequest(404, "path", f"there is no {shown} here")


def error_body(param: str, message: str) -> bytes:
    """The JSON of every error."""
    return json.dumps({"error": {"message": message, "param": param}}).encode()


def _require(method: bytes, *allowed: bytes) -> None:
    if method not in allowed:
        names = ", ".join(each.decode() for each in allowed)
        raise BadRequest(405, "method", f"this path takes {names}")


def _object_name(bucket: bytes, key: bytes) -> ObjectName:
    return ObjectName(_name(bucket, "bucket"), _name(key, "key"))


def _name(quoted: bytes, what: str) -> bytes:
    name = unquote_to_bytes(quoted) if b"%" in quoted else quoted
    if not name:
        raise BadRequest(400, what, f"the {what} is empty")
    if len(name) > MAX_NAME_BYTES or b"\0" in name:
        raise BadRequest(400, what, f"the {what} must have at most {MAX_NAME_BYTES} bytes, none of them zero")
    return name


def _query(query: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=16))
    except ValueError:
        raise BadRequest(400, "query", "the query cannot be read") from None


def _number(values: dict[str, str], name: str, default: float) -> float:
    text = values.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadRequest(400, name, f"{name} must be a number, not {text[:40]!r}")
    return number


def _lease_id(quoted: bytes) -> str:
    incarnation, _, number = quoted.partition(b"-")
    if not (incarnation.isalnum() and number.isdigit() and len(quoted) <= 64):
        raise BadRequest(404, "id", "this is not the id of a lease")
    return quoted.decode("ascii")
