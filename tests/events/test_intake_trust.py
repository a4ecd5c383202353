from __future__ import annotations

import logging

import pytest

from kvroute.events.intake import SilenceDetector, TrustState
from kvroute.index.map_trust import MapTrust, TrustReason, trust_for


def trust_state() -> TrustState:
    return TrustState("w rank 0", SilenceDetector(2, 5.0, 100.0))


def reason(
    of: TrustState, *, is_sure: bool = True, is_whole: bool = True, orphans: int = 0
) -> TrustReason | None:
    return of.reason(is_sure=is_sure, is_whole=is_whole, orphan_blocks=orphans)


def test_the_gravest_reason_comes_first() -> None:
    stream = trust_state()
    assert reason(stream) is None
    assert reason(stream, orphans=1) is TrustReason.UNKNOWN_PARENT
    assert reason(stream, is_whole=False, orphans=1) is TrustReason.GAP
    assert stream.reason(is_sure=True, is_whole=True, orphan_blocks=1, is_full=True) is TrustReason.FULL
    assert stream.reason(is_sure=True, is_whole=False, orphan_blocks=1, is_full=True) is TrustReason.GAP

    stream.distrust(TrustReason.AUDIT)

    assert reason(stream, is_whole=False) is TrustReason.AUDIT
    assert reason(stream, is_sure=False) is TrustReason.REPLAYING
    stream.clear_doubt()
    assert reason(stream) is None


def test_some_reasons_leave_a_part_of_the_trust() -> None:
    assert trust_for(None) is MapTrust.WHOLE
    assert {reason for reason in TrustReason if trust_for(reason) is MapTrust.PARTIAL} == {
        TrustReason.GAP,
        TrustReason.UNKNOWN_PARENT,
        TrustReason.FULL,
    }


def test_answers_without_events_are_silence_and_a_batch_ends_it() -> None:
    silence = SilenceDetector(2, 5.0, 100.0)
    silence.on_answer(104.0, 101.0)
    silence.on_answer(104.9, 102.0)
    assert not silence.is_silent  # not for long enough
    silence.on_answer(105.0, 103.0)
    assert silence.is_silent

    silence.on_event(106.0)

    assert not silence.is_silent
    for _ in range(5):
        silence.on_answer(120.0, 105.9)  # sent before the last batch, which may belong to these requests
    assert not silence.is_silent
    silence.on_answer(120.0)
    silence.on_answer(120.0)
    assert silence.is_silent


def test_each_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = trust_state()
    for change in (
        TrustReason.REPLAYING,
        None,
        None,
        TrustReason.GAP,
        TrustReason.GAP,
        TrustReason.AUDIT,
        None,
    ):
        stream.report(change)

    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [(level, text.split(" (")[0].rpartition(": ")[2]) for level, text in lines[1:3]] == [
        ("WARNING", "gap"),
        ("WARNING", "audit"),
    ]
    assert [(level, text.rpartition(": ")[2]) for level, text in (lines[0], lines[3])] == [
        ("INFO", "replaying)"),
        ("INFO", "audit)"),
    ]
    assert len(lines) == 4
    assert "set replay_endpoint in its --kv-events-config" in lines[1][1]
    assert "GET /admin/audit" in lines[2][1]
