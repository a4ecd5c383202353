"""Chunk hashes that differ from ours, by seed, size or algorithm, so that no prompt ever matches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvroute.index.map_trust import MapTrust

CHUNK = 64
CPU = "LocalCPUBackend"


def serve(rig: Any, worker: Any, theirs: Callable[[Sequence[int]], list[int]], count: int = 10) -> None:
    """Let the worker serve prompts and store their chunks under its own hashes."""
    for number in range(count):
        prompt = [number * 1000 + place for place in range(2 * CHUNK)]
        worker.admit(*theirs(prompt))
        rig.controller.on_prompt_served(1, prompt)
        rig.clock.time += 1


@pytest.mark.parametrize(
    "theirs",
    [
        {"hash_seed": "1"},
        {"hash_seed": "00"},
        {"hash_algorithm": "sha256_cbor"},
        {"chunk_tokens": CHUNK // 2},
        {"hash_algorithm": "builtin_none"},
    ],
)
def test_different_hashes_are_logged_as_an_error(
    theirs: dict[str, Any], caplog: pytest.LogCaptureFixture, rig_of: Any, worker_of: Any
) -> None:
    rig = rig_of()
    worker = worker_of(rig)
    worker.register()
    serve(rig, worker, rig_of(**theirs).keys)

    assert rig.counts.mismatches == 1
    assert rig.controller.gauges().mismatched == 1
    assert rig.controller.trust(1) is MapTrust.NONE
    (problem,) = rig.controller.problems()
    assert "PYTHONHASHSEED must be 0" in problem
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.getMessage() == problem

    # The worker is started again with the right seed.
    right = worker_of(rig)
    right.register()
    serve(rig, right, rig.keys, 1)
    assert rig.controller.problems() == []
    assert rig.controller.trust(1) is MapTrust.WHOLE


def test_hashes_of_a_worker_that_started_before_the_controller_are_compared_too(
    rig_of: Any, worker_of: Any
) -> None:
    for seed, mismatches in (("0", 0), ("1", 1)):
        rig = rig_of()
        worker = worker_of(rig)
        worker.batch("admit", range(1, 10))
        serve(rig, worker, rig_of(hash_seed=seed).keys)

        assert rig.counts.mismatches == mismatches


def test_chats_that_continue_after_the_controllers_start_are_no_mismatch(rig: Any, worker_of: Any) -> None:
    worker = worker_of(rig)
    chats = [[chat * 1000 + place for place in range(8 * CHUNK)] for chat in range(20)]
    worker.batch("admit", [key for chat in chats for key in rig.keys(chat[: 4 * CHUNK])])
    for length in range(4 * CHUNK, 8 * CHUNK, CHUNK // 2):
        for chat in chats:
            fresh = [key for key in rig.keys(chat[:length]) if key not in worker.held[CPU]]
            if fresh:
                worker.admit(*fresh)
            rig.controller.on_prompt_served(1, chat[:length])
            rig.clock.time += 1

    assert rig.counts.mismatches == 0


def test_prompts_that_are_not_stored_are_no_mismatch(rig: Any, worker: Any) -> None:
    serve(rig, worker, lambda _: [])
    assert rig.controller.problems() == []

    worker.admit(*range(500, 600))
    serve(rig, worker, rig.keys, 1)
    assert rig.controller.problems() == []


def test_an_agreement_is_detected_although_the_chunk_was_evicted(rig: Any, worker: Any, rig_of: Any) -> None:
    prompt = list(range(CHUNK))
    rig.controller.on_prompt_served(1, prompt)
    worker.admit(*rig.keys(prompt))
    worker.evict(*rig.keys(prompt))
    serve(rig, worker, rig_of(hash_seed="1").keys)

    assert rig.counts.mismatches == 0


def test_a_prompt_shorter_than_a_chunk_is_ignored(rig: Any, worker: Any) -> None:
    for number in range(20):
        rig.controller.on_prompt_served(1, [number] * (CHUNK - 1))
        worker.admit(100 + number)
        rig.clock.time += 1

    assert rig.counts.mismatches == 0
