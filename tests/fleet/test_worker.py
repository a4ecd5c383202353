from __future__ import annotations

import pytest

from kvroute.fleet.worker import (
    ASSUMED_BLOCK_TOKENS,
    ASSUMED_CAPACITY_TOKENS,
    Worker,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
    release_of,
)


def worker(**spec: object) -> Worker:
    return Worker(WorkerSpec(WorkerId("a"), "http://a:1", **spec))  # type: ignore[arg-type]


def test_measured_capacity_beats_configured_beats_assumed() -> None:
    known = worker(capacity_tokens=700)

    assert worker().capacity_tokens == ASSUMED_CAPACITY_TOKENS
    assert worker().block_size == ASSUMED_BLOCK_TOKENS
    assert known.capacity_tokens == 700
    known.facts = WorkerFacts(capacity_tokens=800, block_size=128)
    assert (known.capacity_tokens, known.block_size) == (800, 128)


def test_listed_models_override_configured_ones() -> None:
    known = worker(models=("configured",))

    assert known.serves("configured")
    known.facts = WorkerFacts(models=frozenset({"told"}))
    assert known.serves("told")
    assert not known.serves("configured")


def test_ramp_rises_linearly_from_its_start_to_one() -> None:
    back = worker()
    back.share, back.ramp_since, back.ramp_until = 0.1, 50.0, 60.0

    assert back.share_at(50.0) == 0.1
    assert back.share_at(55.0) == 0.55
    assert back.share_at(60.0) == 1.0
    assert back.share_at(1e9) == 1.0
    assert back.share_at(40.0) == 0.1


def test_without_a_ramp_the_share_is_full() -> None:
    assert worker().share_at(1.0) == 1.0


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.32.0", (0, 32, 0)), ("v0.11.1rc1+cpu", (0, 11, 1)), ("dev", None), ("0.9", (0, 9, 0))],
)
def test_releases(text: str, release: tuple[int, ...] | None) -> None:
    assert release_of(text) == release
