"""Guesses of the admin key: how many are compared, per client and in all, and who is not refused."""

from __future__ import annotations

import logging

import pytest
from tests.support.clocks import ManualClock

from kvroute.admin.key_guesses import IN_ALL, PER_PEER, KeyGuesses, peer_of
from kvroute.errors import TooManyGuesses


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0.0)


@pytest.fixture
def guesses(clock) -> KeyGuesses:
    return KeyGuesses(clock)


def guess(guesses: KeyGuesses, peer: str, number: int) -> None:
    key = b"guess-%d" % number
    guesses.check(peer, key)
    guesses.wrong(peer, key)


def test_a_client_may_send_some_wrong_keys_and_then_one_from_time_to_time(guesses, clock):
    for number in range(PER_PEER):
        guess(guesses, "10.0.0.1", number)

    with pytest.raises(TooManyGuesses) as caught:
        guesses.check("10.0.0.1", b"the right one")

    assert caught.value.retry_after_s == 60 // PER_PEER
    guess(guesses, "10.0.0.2", 0)
    clock.time += 60 / PER_PEER
    guess(guesses, "10.0.0.1", -1)
    with pytest.raises(TooManyGuesses):
        guess(guesses, "10.0.0.1", -2)


def test_an_old_key_that_is_repeated_is_one_guess(guesses):
    for _ in range(5 * PER_PEER):
        guess(guesses, "10.0.0.1", 0)

    guesses.check("10.0.0.1", b"the right one")


def test_all_strangers_together_have_a_bound_which_binds_nobody_who_has_had_the_key(guesses):
    guesses.check("10.1.1.1", b"right")
    guesses.right("10.1.1.1")
    for number in range(IN_ALL):
        guess(guesses, f"10.0.{number}.1", number)

    with pytest.raises(TooManyGuesses):
        guesses.check("10.2.2.2", b"right")
    guesses.check("10.1.1.1", b"right")
    guesses.check("127.0.0.1", b"right")


def test_the_memory_is_bounded(guesses, clock):
    for number in range(5000):
        guess(guesses, f"10.{number >> 8}.{number & 255}.1", number)
        guesses.right(f"11.{number >> 8}.{number & 255}.1")
        clock.time += 1.0

    assert len(guesses._peers) == 1024
    assert len(guesses._known) == 256


def test_the_log_names_the_client_not_more_than_every_ten_seconds(guesses, caplog):
    with caplog.at_level(logging.WARNING):
        for number in range(5 * PER_PEER):
            try:
                guess(guesses, "10.0.0.1", number)
            except TooManyGuesses:
                pass

    (line,) = caplog.messages
    assert (
        line == "too many wrong admin keys were sent, the last by 10.0.0.1; its next key is compared in 6 s"
    )


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("", ""),
        ("x" * 900, "x" * 64),
    ],
)
def test_what_counts_as_one_client(address, peer):
    assert peer_of(address) == peer
