"""Answers with very many small values, which would hold the event loop while they are decoded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvroute.errors import DiscoveryError, WireError
from kvroute.events.options import KvEventsOptions, parse_sources
from kvroute.fleet.discovery.kubernetes_api import _read_page
from kvroute.fleet.worker import WorkerId, WorkerSpec, parse_models
from kvroute.wire.lmcache_server import decode_status

MANY = b"[" + b"{}," * 200_000 + b"{}]"
WORKER = WorkerSpec(WorkerId("w"), "http://w:8000")


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda: parse_models(b'{"data":%b}' % MANY), ValueError),
        (lambda: parse_sources(b'{"0":%b}' % MANY, KvEventsOptions(), WORKER), ValueError),
        (lambda: decode_status(b'{"more":%b}' % MANY), WireError),
    ],
    ids=["models", "event sources", "status"],
)
def test_answers_of_workers_with_very_many_values_are_refused(
    read: Callable[[], object], error: type[Exception]
) -> None:
    with pytest.raises(error, match="more than 200000 values"):
        read()


@pytest.mark.parametrize(
    "page", [b'{"metadata":{"a":%b},"items":[]}', b'{"metadata":{},"items":[%b]}'], ids=["metadata", "object"]
)
async def test_an_object_of_kubernetes_with_very_many_values_is_refused(page: bytes) -> None:
    with pytest.raises(DiscoveryError):
        await _read_page(page % MANY, [])
