from __future__ import annotations

import logging

import pytest

from kvroute.index.trust import Reason, Silence, Standing, Trust, trust_for


def standing() -> Standing:
    return Standing("w rank 0", Silence(2, 5.0, 100.0))


def reason(of: Standing, *, is_sure: bool = True, is_whole: bool = True, aside: int = 0) -> Reason | None:
    return of.reason(is_sure=is_sure, is_whole=is_whole, aside_blocks=aside)


def test_the_gravest_reason_comes_first() -> None:
    stream = standing()
    assert reason(stream) is None
    assert reason(stream, aside=1) is Reason.UNKNOWN_PARENT
    assert reason(stream, is_whole=False, aside=1) is Reason.GAP
    assert stream.reason(is_sure=True, is_whole=True, aside_blocks=1, is_full=True) is Reason.FULL
    assert stream.reason(is_sure=True, is_whole=False, aside_blocks=1, is_full=True) is Reason.GAP

    stream.distrust(Reason.AUDIT)

    assert reason(stream, is_whole=False) is Reason.AUDIT
    assert reason(stream, is_sure=False) is Reason.REPLAYING
    stream.fresh()
    assert reason(stream) is None


def test_some_reasons_leave_a_part_of_the_trust() -> None:
    assert trust_for(None) is Trust.WHOLE
    assert {reason for reason in Reason if trust_for(reason) is Trust.PARTIAL} == {
        Reason.GAP,
        Reason.UNKNOWN_PARENT,
        Reason.FULL,
    }


def test_answers_without_events_are_silence_and_a_batch_ends_it() -> None:
    silence = Silence(2, 5.0, 100.0)
    silence.served(104.0, 101.0)
    silence.served(104.9, 102.0)
    assert not silence.is_silent  # not for long enough
    silence.served(105.0, 103.0)
    assert silence.is_silent

    silence.heard(106.0)

    assert not silence.is_silent
    for _ in range(5):
        silence.served(120.0, 105.9)  # begun before the last batch, which may have been theirs
    assert not silence.is_silent
    silence.served(120.0)
    silence.served(120.0)
    assert silence.is_silent


def test_each_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = standing()
    for told in (Reason.REPLAYING, None, None, Reason.GAP, Reason.GAP, Reason.AUDIT, None):
        stream.report(told)

    assert [(record.levelname, record.getMessage().rpartition(": ")[2]) for record in caplog.records] == [
        ("INFO", "replaying)"),
        ("WARNING", "gap"),
        ("WARNING", "audit"),
        ("INFO", "audit)"),
    ]
