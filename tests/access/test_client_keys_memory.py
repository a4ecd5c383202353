"""What docs/operations.md says about the memory of named keys."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tests.support.memory import growth_bytes

from kvroute.access.client_keys import KeyRing
from kvroute.access.key_file import read_keys
from kvroute.clock import SystemClock
from kvroute.metrics import Metrics

LIMITS = {"requests_per_minute": 600, "tokens_per_minute": 200_000, "concurrent_requests": 32}


def entry(number: int) -> dict[str, Any]:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return {"name": f"team-{number}", "hash": f"sha256:{digest}", "limits": LIMITS}


def test_a_named_key_with_limits_takes_about_two_kilobytes() -> None:
    rings: list[KeyRing] = []

    def add(start: int) -> None:
        text = json.dumps({"keys": [entry(start * 100 + place) for place in range(100)]})
        rings.append(KeyRing(read_keys(text, "keys.json"), Metrics(), SystemClock()))

    empty = growth_bytes(lambda _: rings.append(KeyRing((), Metrics(), SystemClock())), 5)
    each = (growth_bytes(add, 5) - empty) / (5 * 100)

    assert 500 < each < 3000
