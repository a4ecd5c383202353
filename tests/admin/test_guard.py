from __future__ import annotations

from typing import Any

import pytest
from tests.support.clocks import ManualClock

from kvroute.access.keys import AdminKeys, fingerprint
from kvroute.admin.guard import KEY_FINGERPRINT, AdminGuard
from kvroute.admin.key_guesses import KeyGuesses
from kvroute.errors import Forbidden, GatewayError, MisdirectedRequest, Unauthorized, UnsupportedMediaType
from kvroute.metrics import Metrics

KEY = {"authorization": "Bearer key"}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def guard(metrics: Metrics) -> AdminGuard:
    return AdminGuard(
        AdminKeys(["key"]),
        "gateway.internal",
        ["gw.example", "2001:db8::1"],
        metrics,
        KeyGuesses(ManualClock(0.0)),
    )


def request(path: str = "/admin/workers", method: str = "GET", **headers: str) -> dict[str, Any]:
    named = {"host": "10.0.0.5:8080", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return {
        "path": path,
        "method": method,
        "server": ("10.0.0.5", 8080),
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
    }


def test_a_request_with_the_key_passes_and_is_attributed_to_it(guard):
    scope = request(**KEY)

    guard.check(scope)

    assert scope[KEY_FINGERPRINT] == fingerprint("key")


@pytest.mark.parametrize("path", ["/admin", "/admin/", "/admin/workers", "/admin/no/such/thing"])
def test_all_below_admin_needs_the_key(guard, path):
    with pytest.raises(Unauthorized):
        guard.check(request(path))


@pytest.mark.parametrize("path", ["/health", "/metrics", "/administrator", "/v1/models", "/", "/uid"])
def test_other_paths_are_not_checked(guard, path):
    guard.check(request(path, host="evil.example", origin="null"))


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.5",
        "10.0.0.5:1",
        "gateway.internal",
        "gw.example:443",
        "[2001:db8::1]:8080",
        "localhost",
        "[::1]",
    ],
)
def test_hosts_of_this_gateway(guard, host):
    guard.check(request(host=host, **KEY))


@pytest.mark.parametrize("host", ["10.0.0.6", "0.0.0.0", "example", "x.gw.example", "gw.example:x", ""])
@pytest.mark.parametrize("path", ["/admin/workers", "/ui", "/ui/app.js"])
def test_other_hosts_are_misdirected(guard, path, host):
    with pytest.raises(MisdirectedRequest):
        guard.check(request(path, host=host, **KEY))


def test_a_host_that_is_missing_or_comes_twice_is_misdirected(guard):
    none, two = request(**KEY), request(**KEY)
    none["headers"] = none["headers"][1:]
    two["headers"].append((b"host", b"localhost"))

    for scope in (none, two):
        with pytest.raises(MisdirectedRequest):
            guard.check(scope)


def test_listening_everywhere_makes_no_address_of_that_name(metrics):
    everywhere = AdminGuard(AdminKeys(["key"]), "0.0.0.0", [], metrics, KeyGuesses(ManualClock(0.0)))

    with pytest.raises(MisdirectedRequest):
        everywhere.check(request(host="0.0.0.0:8080", **KEY))


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("10.0.0.5:8080", "http://10.0.0.5:8080"),
        ("gw.example", "https://gw.example"),
        ("gw.example", "http://gw.example:80"),
        ("10.0.0.5:8080", "https://gw.example:8443"),
        ("localhost:8080", "http://localhost:8080"),
    ],
)
def test_origins_of_this_gateway(guard, host, origin):
    guard.check(request(host=host, origin=origin, **KEY))


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "https://evil.example",
        "http://10.0.0.5",
        "http://10.0.0.5:3000",
        "http://gateway.internal:3000",
        "http://localhost:8080",
        "file://",
        "file://10.0.0.5:8080",
        "10.0.0.5:8080",
    ],
)
@pytest.mark.parametrize("path", ["/admin/workers", "/ui"])
def test_other_origins_are_forbidden(guard, path, origin):
    with pytest.raises(Forbidden):
        guard.check(request(path, origin=origin, **KEY))


def test_other_sites_are_forbidden_but_may_link_to_the_page(guard):
    away = {"sec-fetch-site": "cross-site"}

    guard.check(request("/ui", **away, **{"sec-fetch-mode": "navigate"}))
    guard.check(request(**{"sec-fetch-site": "same-origin"}, **KEY))
    for scope in (
        request("/ui", **away),
        request("/ui", "POST", **away, **{"sec-fetch-mode": "navigate"}),
        request(**away, **{"sec-fetch-mode": "navigate"}, **KEY),
        request(**{"sec-fetch-site": "same-site"}, **KEY),
    ):
        with pytest.raises(Forbidden):
            guard.check(scope)


@pytest.mark.parametrize("length", [{"content-length": "10"}, {"transfer-encoding": "chunked"}])
def test_a_body_is_json(guard, length):
    guard.check(
        request(method="POST", **length, **{"content-type": "Application/JSON; charset=utf-8"}, **KEY)
    )
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/json-seq"}):
        with pytest.raises(UnsupportedMediaType):
            guard.check(request(method="POST", **length, **kind, **KEY))


def test_no_body_needs_no_type(guard):
    guard.check(request(method="POST", **{"content-length": "0"}, **KEY))


def test_each_refusal_is_counted(guard, metrics):
    for scope in (request(), request(host="evil"), request(origin="null")):
        with pytest.raises(GatewayError):
            guard.check(scope)

    counted = {
        code: metrics.registry.get_sample_value("kvroute_requests_rejected_total", {"code": code})
        for code in ("invalid_admin_key", "wrong_host", "wrong_origin")
    }
    assert set(counted.values()) == {1}
