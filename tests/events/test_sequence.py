from __future__ import annotations

from kvroute.events.sequence import Sequence, SequenceVerdict


def following(*seqs: int) -> Sequence:
    """A sequence that has replayed `seqs` from the start; the digest of a batch is its number."""
    sequence = Sequence()
    sequence.begin()
    for seq in seqs:
        sequence.replayed(seq, seq)
        sequence.applied(seq, seq)
    sequence.ended()
    return sequence


def test_nothing_is_believed_before_the_first_replay() -> None:
    sequence = Sequence()

    assert sequence.live(0, 0) is SequenceVerdict.REPLAY
    assert (sequence.begin(), sequence.ended(), sequence.whole) == (0, SequenceVerdict.APPLY, True)
    assert sequence.live(0, 0) is SequenceVerdict.APPLY


def test_next_is_applied_known_is_skipped_all_else_is_checked() -> None:
    sequence = following(0, 1, 2)

    assert sequence.live(3, 3) is SequenceVerdict.APPLY
    assert sequence.live(1, 1) is SequenceVerdict.SKIP
    assert sequence.live(1, 99) is SequenceVerdict.REPLAY
    assert sequence.live(5, 5) is SequenceVerdict.REPLAY
    sequence.doubt()
    assert sequence.live(3, 3) is SequenceVerdict.REPLAY


def test_a_replay_begins_with_a_batch_that_is_known() -> None:
    sequence = following(0, 1, 2)

    assert sequence.begin() == 2
    assert sequence.replayed(2, 2) is SequenceVerdict.SKIP
    assert sequence.replayed(3, 3) is SequenceVerdict.APPLY


def test_another_batch_under_a_known_number_is_another_stream() -> None:
    sequence = following(0, 1, 2)
    sequence.begin()

    assert sequence.replayed(2, 77) is SequenceVerdict.RESTART


def test_a_replay_that_lacks_the_known_batch_is_a_restart_or_an_overrun() -> None:
    sequence = following(0, 1, 2)
    sequence.begin()
    assert sequence.ended() is SequenceVerdict.RESTART
    sequence.begin()
    assert sequence.replayed(4, 4) is SequenceVerdict.RESTART


def test_history_without_its_beginning_is_not_whole_until_a_clear() -> None:
    sequence = Sequence()
    sequence.begin()

    assert sequence.replayed(7, 7) is SequenceVerdict.BEGIN
    sequence.applied(7, 7)
    assert not sequence.whole
    assert sequence.replayed(8, 8) is SequenceVerdict.APPLY
    sequence.applied(8, 8, cleared=True)
    assert sequence.whole


def test_a_gap_inside_a_replay_restarts_the_sequence() -> None:
    sequence = following(0)
    sequence.begin()
    sequence.replayed(0, 0)

    assert sequence.replayed(2, 2) is SequenceVerdict.RESTART


def test_after_a_loss_history_starts_with_the_next_batch() -> None:
    sequence = following(0, 1)
    sequence.lost(9)

    assert sequence.live(9, 9) is SequenceVerdict.APPLY
    assert not sequence.whole
