"""Which smaller sets are believed, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.fleet.discovery.base import GuardedSet, ShrinkGuard
from kvroute.fleet.worker import WorkerId, WorkerSpec

CONFIRM_S = 30.0


def specs(names: str, draining: str = "") -> list[WorkerSpec]:
    """One worker for each letter."""
    return [WorkerSpec(WorkerId(name), f"http://{name}", draining=name in draining) for name in names]


def ids(names: str) -> frozenset[WorkerId]:
    return frozenset(WorkerId(name) for name in names)


def applied(judged: GuardedSet) -> str:
    return "".join(sorted(spec.id for spec in judged.specs))


def guard(known: str = "", *, share: float = 0.5, confirm_s: float = CONFIRM_S) -> ShrinkGuard:
    made = ShrinkGuard(share=share, confirm_s=confirm_s)
    made.check(specs(known), ids(""), 0.0)
    return made


@pytest.mark.parametrize(
    ("known", "read", "is_kept"),
    [
        ("abcd", "", True),
        ("a", "", True),
        ("abcd", "a", True),
        ("abcd", "ab", False),  # half: not more than the share
        ("abcd", "abc", False),
        ("ab", "a", False),
        ("abcd", "wxyz", False),  # as many as before: others
        ("abcd", "z", True),
    ],
)
def test_an_empty_or_far_smaller_set_is_held_back(known: str, read: str, is_kept: bool) -> None:
    judged = guard(known).check(specs(read), ids(known), 1.0)

    assert bool(judged.kept) == is_kept
    assert applied(judged) == ("".join(sorted(set(known) | set(read))) if is_kept else read)


def test_a_smaller_set_is_accepted_after_it_has_been_repeated_for_long_enough() -> None:
    under_test = guard("abcd")

    assert applied(under_test.check(specs("a"), ids("abcd"), 100.0)) == "abcd"
    assert applied(under_test.check(specs("a"), ids("abcd"), 100.0 + CONFIRM_S - 0.1)) == "abcd"
    judged = under_test.check(specs("a"), ids("abcd"), 100.0 + CONFIRM_S)
    assert (applied(judged), judged.kept, judged.confirmed) == ("a", frozenset(), ids("bcd"))


def test_time_alone_confirms_nothing() -> None:
    """Only a reading does: one that is the first of its kind begins its own wait."""
    under_test = guard("abcd")
    under_test.check(specs("abcd"), ids("abcd"), 10 * CONFIRM_S)

    assert under_test.check(specs(""), ids("abcd"), 11 * CONFIRM_S).kept == ids("abcd")


def test_a_full_set_in_between_ends_the_wait() -> None:
    under_test = guard("abcd")
    under_test.check(specs(""), ids("abcd"), 0.0)
    under_test.check(specs("abcd"), ids("abcd"), 20.0)

    assert under_test.check(specs(""), ids("abcd"), 40.0).kept == ids("abcd")


def test_each_worker_has_its_own_wait() -> None:
    """A name server that returns another part of the addresses each time loses no worker."""
    under_test = guard("abcdef")
    for second in range(0, 600, 5):
        read = "ab" if second % 10 else "cd" if second % 20 else "ef"
        assert applied(under_test.check(specs(read), ids("abcdef"), float(second))) == "abcdef"


def test_workers_that_stop_answering_leave_with_the_smaller_set() -> None:
    under_test = guard("abcd")

    assert applied(under_test.check(specs(""), ids("ab"), 0.0)) == "ab"
    assert applied(under_test.check(specs(""), ids("b"), 1.0)) == "b"
    assert applied(under_test.check(specs(""), ids(""), 2.0)) == ""


def test_terminating_workers_leave_with_the_smaller_set() -> None:
    under_test = guard("abcd")
    under_test.check(specs("abcd", draining="bcd"), ids("a"), 0.0)

    assert applied(under_test.check(specs("a"), ids("abcd"), 1.0)) == "a"


def test_a_terminating_worker_is_accepted_immediately() -> None:
    judged = guard("abcd").check(specs("abcd", draining="abcd"), ids("abcd"), 1.0)

    assert not judged.kept
    assert all(spec.draining for spec in judged.specs)


def test_new_and_changed_workers_apply_while_missing_ones_are_kept() -> None:
    judged = guard("abcdef").check(specs("ax", draining="a"), ids("abcdef"), 1.0)

    assert judged.kept == ids("bcdef")
    assert {spec.id: spec.draining for spec in judged.specs} == dict.fromkeys("bcdefx", False) | {"a": True}


def test_confirmation_can_be_switched_off() -> None:
    assert applied(guard("abcd", confirm_s=0).check(specs(""), ids("abcd"), 1.0)) == ""


@given(
    st.lists(st.tuples(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef"))), max_size=30)
)
def test_whatever_comes(readings: list[tuple[set[str], set[str]]]) -> None:
    """What is named is always applied; what is kept answers and was known; a lasting reading wins."""
    under_test = ShrinkGuard(share=0.5, confirm_s=CONFIRM_S)
    before: set[str] = set()
    now = 0.0
    for read, answering in readings:
        now += 7.0
        judged = under_test.check(specs("".join(read)), ids("".join(answering)), now)
        after = {str(spec.id) for spec in judged.specs}
        assert read <= after <= read | (before & answering)
        assert after - read == {str(worker) for worker in judged.kept}
        before = after
    last = readings[-1][0] if readings else set()
    for _ in range(2):
        now += CONFIRM_S
        judged = under_test.check(specs("".join(last)), ids("abcdef"), now)
    assert {str(spec.id) for spec in judged.specs} == last
