from __future__ import annotations

from kvroute.events.sequence import Sequence, SequenceVerdict


def following(*seqs: int) -> Sequence:
    """A sequence that has replayed `seqs` from the start; the digest of a batch is its number."""
    sequence = Sequence()
    sequence.start_replay()
    for seq in seqs:
        sequence.on_replayed(seq, seq)
        sequence.applied(seq, seq)
    sequence.end_replay()
    return sequence


def test_nothing_is_believed_before_the_first_replay() -> None:
    sequence = Sequence()

    assert sequence.on_live(0, 0) is SequenceVerdict.REPLAY
    assert (sequence.start_replay(), sequence.end_replay(), sequence.whole) == (
        0,
        SequenceVerdict.APPLY,
        True,
    )
    assert sequence.on_live(0, 0) is SequenceVerdict.APPLY


def test_next_is_applied_known_is_skipped_all_else_is_checked() -> None:
    sequence = following(0, 1, 2)

    assert sequence.on_live(3, 3) is SequenceVerdict.APPLY
    assert sequence.on_live(1, 1) is SequenceVerdict.SKIP
    assert sequence.on_live(1, 99) is SequenceVerdict.REPLAY
    assert sequence.on_live(5, 5) is SequenceVerdict.REPLAY
    sequence.mark_unsure()
    assert sequence.on_live(3, 3) is SequenceVerdict.REPLAY


def test_a_replay_begins_with_a_batch_that_is_known() -> None:
    sequence = following(0, 1, 2)

    assert sequence.start_replay() == 2
    assert sequence.on_replayed(2, 2) is SequenceVerdict.SKIP
    assert sequence.on_replayed(3, 3) is SequenceVerdict.APPLY


def test_another_batch_under_a_known_number_is_another_stream() -> None:
    sequence = following(0, 1, 2)
    sequence.start_replay()

    assert sequence.on_replayed(2, 77) is SequenceVerdict.RESTART


def test_a_replay_that_lacks_the_known_batch_is_a_restart_or_an_overrun() -> None:
    sequence = following(0, 1, 2)
    sequence.start_replay()
    assert sequence.end_replay() is SequenceVerdict.RESTART
    sequence.start_replay()
    assert sequence.on_replayed(4, 4) is SequenceVerdict.RESTART


def test_history_without_its_beginning_is_not_whole_until_a_clear() -> None:
    sequence = Sequence()
    sequence.start_replay()

    assert sequence.on_replayed(7, 7) is SequenceVerdict.BEGIN
    sequence.applied(7, 7)
    assert not sequence.whole
    assert sequence.on_replayed(8, 8) is SequenceVerdict.APPLY
    sequence.applied(8, 8, cleared=True)
    assert sequence.whole


def test_a_gap_inside_a_replay_restarts_the_sequence() -> None:
    sequence = following(0)
    sequence.start_replay()
    sequence.on_replayed(0, 0)

    assert sequence.on_replayed(2, 2) is SequenceVerdict.RESTART


def test_an_engines_first_batch_begins_a_whole_history() -> None:
    sequence = following(4, 5)
    sequence.begin()

    assert sequence.on_live(0, 0) is SequenceVerdict.APPLY
    assert sequence.whole


def test_after_a_loss_history_starts_with_the_next_batch() -> None:
    sequence = following(0, 1)
    sequence.lost(9)

    assert sequence.on_live(9, 9) is SequenceVerdict.APPLY
    assert not sequence.whole
