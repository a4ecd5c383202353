from __future__ import annotations

import json

import pytest

from kvroute.tierd.http import Acquire, BadRequest, Get, Put, Release, StatusPage, error_body, parse_call
from kvroute.tierd.pool import ObjectName


def test_names_are_compared_without_their_quoting() -> None:
    plain = parse_call(b"PUT", b"/v1/kv/lm%20cache/org%2Fmodel@00000001@0@ab%40", 60)

    assert plain == Put(ObjectName(b"lm cache", b"org/model@00000001@0@ab@"))


def test_a_lease_has_the_times_of_its_query() -> None:
    name = ObjectName(b"b", b"k")

    call = parse_call(b"POST", b"/v1/kv/b/k/leases?timeout_ms=1500&ttl_s=30.5", 60)

    assert call == Acquire(name, 30.5, 1.5)
    assert parse_call(b"POST", b"/v1/kv/b/k/leases", 60) == Acquire(name, 30.0, 0.0)
    assert parse_call(b"POST", b"/v1/kv/b/k/leases?timeout_ms=9e9&ttl_s=1", 60) == Acquire(name, 1.0, 60.0)


def test_the_other_calls() -> None:
    assert parse_call(b"GET", b"/v1/kv/b/k", 60) == Get(ObjectName(b"b", b"k"))
    assert parse_call(b"HEAD", b"/v1/kv/b/k", 60) == Get(ObjectName(b"b", b"k"))
    assert parse_call(b"POST", b"/v1/leases/0af-12/release", 60) == Release("0af-12")
    assert parse_call(b"DELETE", b"/v1/kv/b/k/leases/0af-12", 60) == Release("0af-12")
    assert parse_call(b"GET", b"/metrics?x=1", 60) == StatusPage("metrics")


@pytest.mark.parametrize(
    ("method", "target", "status", "param"),
    [
        (b"POST", b"/v1/kv/b/k/leases?ttl_s=soon", 400, "ttl_s"),
        (b"POST", b"/v1/kv/b/k/leases?ttl_s=nan", 400, "ttl_s"),
        (b"POST", b"/v1/kv/b/k/leases?ttl_s=0", 400, "ttl_s"),
        (b"POST", b"/v1/kv/b/k/leases?ttl_s=60.1", 400, "ttl_s"),
        (b"POST", b"/v1/kv/b/k/leases?timeout_ms=-1", 400, "timeout_ms"),
        (b"POST", b"/v1/kv/b/k/leases?timeout_ms=", 400, "timeout_ms"),
        (b"POST", b"/v1/kv/b/k/leases?" + b"a=1&" * 40, 400, "query"),
        (b"POST", b"/v1/kv/b/k/leases?\xff=1", 400, "query"),
        (b"PUT", b"/v1/kv//k", 400, "bucket"),
        (b"PUT", b"/v1/kv/b/", 400, "key"),
        (b"PUT", b"/v1/kv/b/a%00b", 400, "key"),
        (b"PUT", b"/v1/kv/b/" + b"k" * 4097, 400, "key"),
        (b"DELETE", b"/v1/kv/b/k", 405, "method"),
        (b"GET", b"/v1/kv/b/k/leases", 405, "method"),
        (b"GET", b"/v1/leases/0af-12/release", 405, "method"),
        (b"POST", b"/v1/kv/b/k/leases/0af-12", 405, "method"),
        (b"DELETE", b"/v1/kv/b/k/leases/nonsense", 404, "id"),
        (b"POST", b"/health", 405, "method"),
        (b"POST", b"/v1/leases/nonsense/release", 404, "id"),
        (b"POST", b"/v1/leases/-1/release", 404, "id"),
        (b"GET", b"/v2", 404, "path"),
        (b"GET", b"*", 404, "path"),
    ],
)
def test_the_error_for_a_wrong_request_gives_the_reason(
    method: bytes, target: bytes, status: int, param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_call(method, target, 60)

    assert (caught.value.status, caught.value.param) == (status, param)
    assert json.loads(error_body(param, str(caught.value)))["error"]["param"] == param
