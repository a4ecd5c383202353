from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.admission.fair_queue import (
    AdmissionOptions,
    FairQueue,
    Outcome,
    QueueEntry,
    StartRate,
    Target,
    TokenAccounts,
)

M, N = Target("m"), Target("n")


def queue(*, ageing_s: float = 0.0, max_waiting: int = 1000, output_weight: float = 2.0) -> FairQueue:
    return FairQueue(TokenAccounts(output_weight), ageing_s=ageing_s, max_waiting=max_waiting)


def put(
    line: FairQueue,
    key: str = "",
    at: float = 0.0,
    priority: int = 0,
    *,
    weight: float = 1.0,
    session: str | None = None,
    target: Target = M,
    wait_s: float = 30.0,
) -> QueueEntry:
    entry = QueueEntry(target, key, weight, priority, at, at + wait_s, session)
    outcome, _ = line.offer(entry, nowhere)
    assert outcome is Outcome.WAIT
    line.push(entry)
    return entry


def anywhere(target: Target) -> bool:
    return True


def nowhere(target: Target) -> bool:
    return False


def taken(line: FairQueue, now: float = 0.0, tokens: int = 100) -> list[QueueEntry]:
    """Start all requests one after another; each costs `tokens`."""
    order = []
    while (entry := line.pop(anywhere, now)) is not None:
        line.accounts.started(entry.key, tokens)
        order.append(entry)
    return order


# --- classes and ageing -----------------------------------------------------------------------------------


def test_a_lower_value_is_served_first_and_equal_ones_in_order_of_arrival():
    line = queue()
    entries = [put(line, at=at, priority=priority) for at, priority in enumerate((5, 0, 5, -1, 0))]

    assert taken(line, now=5.0) == [entries[3], entries[1], entries[4], entries[0], entries[2]]


def test_a_waiting_request_moves_up_one_class_after_each_ageing_time():
    line = queue(ageing_s=10.0)
    low = put(line, at=0.0, priority=2)
    high = put(line, at=15.0, priority=0)

    assert line.pop(anywhere, 19.0) is high
    high = put(line, at=20.0, priority=0)

    assert line.pop(anywhere, 20.0) is low
    assert line.pop(anywhere, 20.0) is high


def test_without_ageing_a_low_class_waits_while_a_high_one_does():
    line = queue(ageing_s=0.0)
    put(line, at=0.0, priority=1)
    high = put(line, at=900.0, priority=0)

    assert line.pop(anywhere, 1000.0) is high


def test_ageing_does_not_lift_a_flooding_key_above_others_of_its_class():
    line = queue(ageing_s=1.0)
    for _ in range(20):
        put(line, "flood", at=0.0)
    first = line.pop(anywhere, 20.0)
    assert first is not None
    line.accounts.started("flood", 1000)
    late = put(line, "other", at=20.0)

    assert line.pop(anywhere, 20.0) is late


# --- fairness ---------------------------------------------------------------------------------------------


def served(line: FairQueue, starts: int, sizes: dict[str, tuple[int, int]]) -> Counter[str]:
    """Weighted tokens of each key after `starts` starts; each key always has another request waiting."""
    tokens: Counter[str] = Counter()
    for number in range(starts):
        entry = line.pop(anywhere, float(number))
        assert entry is not None
        prompt, output = sizes[entry.key]
        assumed = line.accounts.started(entry.key, prompt)
        line.accounts.finished(entry.key, assumed, output)
        tokens[entry.key] += prompt + 2 * output
        put(line, entry.key, float(number), weight=entry.weight)
    return tokens


@given(
    sizes=st.tuples(*[st.tuples(st.integers(1, 2000), st.integers(0, 500))] * 3),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3),
)
def test_keys_that_always_wait_get_tokens_in_proportion_to_their_weights(sizes, weights):
    """The bound of VTC: counters of waiting keys differ by at most the largest request."""
    line = queue()
    by_key = dict(zip("abc", sizes, strict=True))
    by_weight = dict(zip("abc", weights, strict=True))
    for key in [*by_key, *by_key]:  # two, so that no key stops waiting when one of them starts
        put(line, key, weight=by_weight[key])

    tokens = served(line, 300, by_key)

    counters = [tokens[key] / by_weight[key] for key in by_key]
    # Before a key's first answer its length is not known, so the first request may count twice.
    largest = max(2 * (prompt + 2 * output) / by_weight[key] for key, (prompt, output) in by_key.items())
    assert max(counters) - min(counters) <= 2 * largest


def test_an_idle_key_saves_up_no_service():
    line = queue()
    put(line, "busy")
    put(line, "busy")
    served(line, 100, {"busy": (100, 0)})
    for _ in range(10):
        put(line, "idle", at=100.0)
        put(line, "busy", at=100.0)

    order = "".join(entry.key[0] for entry in taken(line, 100.0)[:10])

    assert order.count("i") in (5, 6)


def test_a_new_key_is_first_among_equal_counters():
    line = queue()
    for _ in range(5):
        put(line, "flood")
    late = put(line, "other", at=1.0)

    assert line.pop(anywhere, 1.0) is late


def test_the_number_of_accounts_is_bounded():
    accounts = TokenAccounts(2.0)
    for number in range(20_000):
        accounts.lift(str(number), 1.0, ())
        accounts.finished(str(number), accounts.started(str(number), 10), 5)

    assert len(accounts._accounts) <= 4096


# --- order, targets and removal ---------------------------------------------------------------------------


def test_requests_of_a_session_keep_their_order_although_their_classes_differ():
    line = queue()
    first = put(line, at=0.0, priority=5, session="s")
    second = put(line, at=1.0, priority=-5, session="s")
    put(line, at=2.0, priority=0)

    order = taken(line, 3.0)

    assert order.index(first) < order.index(second)


def test_a_request_whose_target_is_full_does_not_block_others():
    line = queue()
    put(line, at=0.0, target=M)
    other = put(line, at=1.0, target=N)

    assert line.pop(lambda target: target == N, 1.0) is other
    assert line.pop(lambda target: target == N, 1.0) is None


def test_expired_requests_leave_in_order_of_their_deadlines():
    line = queue()
    entries = [put(line, at=float(at), priority=-at) for at in range(3)]

    assert line.next_deadline == 30.0
    assert line.expired(31.0) == entries[:2]
    assert not line.remove(entries[0])
    assert len(line) == 1


# --- a full queue -----------------------------------------------------------------------------------------


def entry_of(key: str, priority: int = 0, weight: float = 1.0) -> QueueEntry:
    return QueueEntry(M, key, weight, priority, 10.0, 40.0)


def test_a_full_queue_refuses_the_key_that_fills_it_and_drops_its_newest_request_for_another():
    line = queue(max_waiting=3)
    flood = [put(line, "flood", at=float(at)) for at in range(3)]
    newcomer = entry_of("flood")

    assert line.victim(newcomer) is newcomer
    assert line.victim(entry_of("other")) is flood[-1]


def test_a_full_queue_drops_the_lowest_class_first():
    line = queue(max_waiting=3)
    put(line, "a", priority=0)
    put(line, "a", priority=0)
    low = put(line, "b", priority=7)
    newcomer = entry_of("a", priority=9)

    assert line.victim(entry_of("a", priority=0)) is low
    assert line.victim(newcomer) is newcomer


def test_a_queue_with_room_drops_nothing():
    line = queue(max_waiting=1)

    assert line.victim(entry_of("a")) is None


def test_the_expected_wait_counts_higher_classes_and_the_fair_share_of_the_own_one():
    line = queue()
    for at in range(10):  # one start per second
        put(line, "x", at=float(at))
        put(line, "x", at=float(at))
        line.pop(anywhere, float(at))
    for entry in list(line._order):
        line.remove(entry)
    for _ in range(10):
        put(line, "flood", at=10.0)
    put(line, "high", at=10.0, priority=-1)

    assert line.expected_wait_s(entry_of("flood")) == pytest.approx(12.0)
    assert line.expected_wait_s(entry_of("new")) == pytest.approx(2.0)
    assert line.expected_wait_s(entry_of("high", priority=-1)) == pytest.approx(2.0)


def test_the_rate_of_starts_is_unknown_at_first_and_ignores_time_without_waiting_requests():
    rate = StartRate()
    for at in range(5):
        rate.started(float(at))
    rate.queue_is_empty()
    assert rate.interval_s == 0.0
    for at in range(100, 106):
        rate.started(float(at))

    assert rate.interval_s == pytest.approx(1.0)


# --- a model of the whole queue ---------------------------------------------------------------------------


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(0, 2), st.sampled_from("ST ")),
        st.tuples(st.just("pop")),
        st.tuples(st.just("leave"), st.integers(0, 50)),
        st.tuples(st.just("expire")),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_every_request_leaves_the_queue_exactly_once_and_sessions_stay_in_order(operations):
    line, now = queue(ageing_s=2.0), 0.0
    present: list[QueueEntry] = []
    for operation, *arguments in operations:
        now += 1.0
        if operation == "push":
            key, priority, session = arguments
            present.append(put(line, key, now, priority, session=session.strip() or None, wait_s=15.0))
        elif operation == "pop":
            entry = line.pop(anywhere, now)
            assert (entry is None) == (not present)
            if entry is not None:
                earlier = present[: present.index(entry)]
                assert not entry.session or all(
                    (other.key, other.session) != (entry.key, entry.session) for other in earlier
                )
                line.accounts.started(entry.key, 10)
                present.remove(entry)
        elif operation == "leave" and present:
            entry = present.pop(arguments[0] % len(present))
            assert line.remove(entry)
            assert not line.remove(entry)
        elif operation == "expire":
            expired = line.expired(now)
            assert expired == [entry for entry in present if entry.deadline <= now]
            present = [entry for entry in present if entry not in expired]
        assert len(line) == len(present)
        assert sum(line.waiting(key) for key in "abc") == len(present)
    while present:
        entry = line.pop(anywhere, now)
        assert entry is not None
        present.remove(entry)
    assert not line._lanes
    assert not line._sessions
    assert not line._of_key


# --- changed options --------------------------------------------------------------------------------------


def test_changed_options_count_for_requests_that_wait():
    line = queue(max_waiting=1)
    first = put(line, priority=1)
    line.configure(AdmissionOptions(max_waiting=2, max_wait_s=5.0))
    second = put(line, at=2.0, wait_s=5.0)

    assert line.expired(4.0) == []
    assert line.expired(5.0) == [first]
    assert line.next_deadline == second.deadline == 7.0


def test_a_changed_time_of_ageing_counts_for_requests_that_wait():
    line = queue()
    first, second = put(line, priority=1), put(line, at=2.0)
    line.configure(AdmissionOptions(ageing_s=1.0))

    assert taken(line, now=2.0) == [first, second]
