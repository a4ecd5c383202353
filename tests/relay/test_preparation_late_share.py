from __future__ import annotations

from kvroute.relay.preparation import HIGH, LOW, WINDOW, LateShare


def windows(share: LateShare, model: str, *late: int) -> list[tuple[bool, int] | None]:
    """The reports at the ends of windows; `late` are the late prompts in each."""
    found = []
    for count in late:
        reports = [share.count(model, is_late=number < count) for number in range(WINDOW)]
        assert reports[:-1] == [None] * (WINDOW - 1)
        found.append(reports[-1])
    return found


def test_a_change_is_reported_once_and_a_share_in_between_changes_nothing():
    high, low = round(HIGH * WINDOW), round(LOW * WINDOW)

    assert windows(LateShare(), "m", 0, high - 1, high, high, low, low - 1, low, high) == [
        None,
        None,
        (True, high),
        None,
        None,
        (False, low - 1),
        None,
        (True, high),
    ]


def test_models_are_counted_apart():
    share = LateShare()

    assert windows(share, "a", WINDOW) == [(True, WINDOW)]
    assert windows(share, "b", 0) == [None]
