from __future__ import annotations

import pytest

from kvroute.fleet.sleep import PAUSED, SLEEPS, EngineState, SleepFacts, why_asleep

AWAKE, ASLEEP = SleepFacts(), SleepFacts(is_asleep=True)


@pytest.mark.parametrize(
    ("before", "state", "page", "why"),
    [
        ("", EngineState(), None, ""),
        ("", EngineState(), AWAKE, ""),
        ("", EngineState(), ASLEEP, SLEEPS),
        ("", EngineState(True, True), None, PAUSED),
        ("", EngineState(True, True), AWAKE, PAUSED),
        ("", EngineState(True, True), ASLEEP, SLEEPS),
        ("", EngineState(None, True), None, SLEEPS),
        (PAUSED, EngineState(True, True), ASLEEP, SLEEPS),
        (SLEEPS, EngineState(True, True), None, SLEEPS),
        (SLEEPS, EngineState(True, True), AWAKE, PAUSED),
        (SLEEPS, EngineState(False, False), None, ""),
        (PAUSED, EngineState(False, False), None, ""),
        # The questions are newer than a page that was rendered before.
        ("", EngineState(False, False), ASLEEP, ""),
        # An engine that is busy, or lacks a question, changes nothing; a page that was read does.
        (PAUSED, EngineState(), None, PAUSED),
        (SLEEPS, EngineState(), None, SLEEPS),
        (SLEEPS, EngineState(), AWAKE, ""),
        (PAUSED, EngineState(False, None), None, ""),
        (SLEEPS, EngineState(False, None), None, SLEEPS),
        (SLEEPS, EngineState(False, None), ASLEEP, SLEEPS),
        (SLEEPS, EngineState(None, False), None, ""),
    ],
)
def test_why_an_engine_computes_nothing(
    before: str, state: EngineState, page: SleepFacts | None, why: str
) -> None:
    assert why_asleep(before, state, page) == why
