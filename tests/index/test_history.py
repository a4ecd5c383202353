"""The contract of a route history, over every registered one."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.blocks.keys import BlockKeys, block_keys

A, B = 0, 5


def test_matches_the_leading_blocks_that_each_worker_was_sent(history, sent, chain) -> None:
    sent(A, chain("abcdef"))
    sent(B, chain("abx"))

    assert history.match(chain("abcdef")) == {A: 6, B: 2}
    assert history.match(chain("abcz")) == {A: 3, B: 2}
    assert history.match(chain("abxyz")) == {A: 2, B: 3}
    assert history.match(chain("a")) == {A: 1, B: 1}


def test_a_prompt_that_was_never_sent_matches_no_worker(history, sent, chain) -> None:
    sent(A, chain("abc"))

    assert history.match(chain("bc")) == {}
    assert history.match([]) == {}


def test_an_empty_prompt_can_be_leased(history) -> None:
    lease = history.acquire(A, [])

    assert lease.new_blocks == 0
    lease.release()
    assert history.share(A).blocks == 0


def test_matching_changes_nothing(history, sent, chain) -> None:
    history.set_capacity(A, 6)
    sent(A, chain("old"))
    sent(A, chain("new"))
    history.match(chain("old"))

    sent(A, chain("xyz"))

    assert history.match(chain("old")) == {}
    assert history.match(chain("new")) == {A: 3}


def test_a_match_result_does_not_change_later(history, sent, chain) -> None:
    sent(A, chain("abcdef"))
    sent(B, chain("abcx"))
    prompts = [chain(name) for name in ("abcdef", "abcx", "abc", "abcde", "abz")]
    given = [history.match(prompt) for prompt in prompts]
    copies = [dict(held) for held in given]

    sent(A, chain("abcdefgh"))
    sent(B, chain("abcdex"))
    history.set_capacity(A, 2)
    history.forget(B)

    assert given == copies
    assert [history.match(prompt) for prompt in prompts] == [{A: 2}] * 5


def test_keys_may_be_any_sequence(history, sent, chain) -> None:
    sent(A, tuple(chain("abc")))
    sent(A, chain("abcd"))

    assert history.match(tuple(chain("abcd"))) == {A: 4}


def test_the_least_recently_finished_sequence_loses_its_tail_first(history, sent, chain) -> None:
    history.set_capacity(A, 10)
    sent(A, chain("aaaaa"))
    sent(A, chain("bbbbb"))

    sent(A, chain("cc"))

    assert history.match(chain("aaaaa")) == {A: 3}
    assert history.match(chain("bbbbb")) == {A: 5}
    assert history.share(A).blocks == 10


def test_using_a_sequence_again_protects_it(history, sent, chain) -> None:
    history.set_capacity(A, 10)
    sent(A, chain("aaaaa"))
    sent(A, chain("bbbbb"))
    sent(A, chain("aaaaa"))

    sent(A, chain("ccccc"))

    assert history.match(chain("aaaaa")) == {A: 5}
    assert history.match(chain("bbbbb")) == {}


def test_a_shared_prefix_outlives_the_branches_that_were_not_used_again(history, sent, chain) -> None:
    history.set_capacity(A, 8)
    sent(A, chain("sys" + "aa"))
    sent(A, chain("sys" + "bbb"))

    sent(A, chain("sys" + "ccccc"))

    assert history.match(chain("sysaa")) == {A: 3}
    assert history.match(chain("sysbbb")) == {A: 3}
    assert history.match(chain("sysccccc")) == {A: 8}


def test_eviction_on_one_worker_does_not_affect_the_others(history, sent, chain) -> None:
    history.set_capacity(A, 4)
    for worker in (A, B):
        sent(worker, chain("abcd"))

    sent(A, chain("wxyz"))

    assert history.match(chain("abcd")) == {B: 4}


def test_blocks_of_unfinished_requests_are_never_evicted(history, sent, chain) -> None:
    history.set_capacity(A, 6)
    lease = history.acquire(A, chain("held"))
    sent(A, chain("xy"))

    sent(A, chain("qrst"))

    assert history.match(chain("held")) == {A: 4}
    assert history.match(chain("qrst")) == {A: 2}
    lease.release()
    sent(A, chain("qrstuv"))
    assert history.match(chain("held")) == {}


def test_a_part_exceeds_its_capacity_only_while_pinned_blocks_need_it(history, chain) -> None:
    history.set_capacity(A, 4)

    lease = history.acquire(A, chain("abcdefgh"))
    assert (history.share(A).blocks, history.share(A).active_blocks) == (8, 8)

    lease.release()
    assert (history.share(A).blocks, history.share(A).active_blocks) == (4, 0)
    assert history.match(chain("abcdefgh")) == {A: 4}


def test_active_blocks_count_shared_blocks_once(history, chain) -> None:
    leases = [history.acquire(A, chain(["s1", "s2", i])) for i in range(3)]

    assert history.share(A).active_blocks == 5
    leases[0].release()
    assert history.share(A).active_blocks == 4
    leases[1].release()
    leases[2].release()
    assert history.share(A).active_blocks == 0


def test_releasing_twice_is_releasing_once(history, chain) -> None:
    first, second = history.acquire(A, chain("ab")), history.acquire(A, chain("ab"))

    first.release()
    first.release()

    assert history.share(A).active_blocks == 2
    second.release()
    assert history.share(A).active_blocks == 0


def test_a_lease_counts_its_new_blocks(history, sent, chain) -> None:
    assert sent(A, chain("abc")).new_blocks == 3
    assert sent(A, chain("abcde")).new_blocks == 2
    assert sent(A, chain("abx")).new_blocks == 1
    assert sent(B, chain("abc")).new_blocks == 3


def test_a_lease_grows_with_its_sequence(history, chain) -> None:
    lease = history.acquire(A, chain("prompt"))

    lease.extend(chain("prompt+answer"))

    assert lease.new_blocks == 13
    assert history.match(chain("prompt+answer")) == {A: 13}
    assert history.share(A).active_blocks == 13
    lease.release()
    assert history.share(A).active_blocks == 0


def test_two_leases_on_the_same_blocks_pin_each_block_once_per_lease(history, chain) -> None:
    first, second = history.acquire(A, chain("ab")), history.acquire(A, chain("ab"))

    first.extend(chain("abcd"))
    assert history.share(A).active_blocks == 4

    first.release()
    assert history.share(A).active_blocks == 2
    second.release()
    assert history.share(A).active_blocks == 0


def test_a_run_with_branches_does_not_grow_in_place(history, chain) -> None:
    """The second branch must not be appended to the run that the first one hangs on."""
    trunk = history.acquire(A, chain("ab"))
    history.acquire(A, chain("abc")).release()
    trunk.release()

    history.acquire(A, chain("abd")).release()

    assert history.match(chain("abc")) == {A: 3}
    assert history.match(chain("abd")) == {A: 3}


def test_extending_a_released_or_void_lease_does_nothing(history, chain) -> None:
    released, void = history.acquire(A, chain("ab")), history.acquire(B, chain("ab"))
    released.release()
    history.forget(B)

    released.extend(chain("abc"))
    void.extend(chain("abc"))

    assert history.match(chain("abc")) == {A: 2}


def test_a_forgotten_worker_holds_nothing_and_its_leases_are_void(history, sent, chain) -> None:
    history.set_capacity(A, 50)
    sent(A, chain("abc"))
    sent(B, chain("ab"))
    lease = history.acquire(A, chain("abd"))

    history.forget(A)
    assert history.match(chain("abc")) == {B: 2}
    assert (history.share(A).blocks, history.share(A).active_blocks) == (0, 0)

    again = history.acquire(A, chain("abd"))
    lease.release()
    assert history.share(A).active_blocks == 3, "the void lease unpinned blocks of the new share"
    assert history.share(A).capacity_blocks == 50
    again.release()


def test_forgetting_an_unknown_worker_is_nothing(history) -> None:
    history.forget(9)

    assert history.size().tracked == 0


def test_lowering_the_capacity_evicts_immediately(history, sent, chain) -> None:
    sent(A, chain("abcdef"))

    history.set_capacity(A, 2)

    assert history.share(A).blocks == 2
    assert history.match(chain("abcdef")) == {A: 2}


def test_the_history_counts_the_blocks_that_a_request_would_evict(history, chain) -> None:
    history.set_capacity(A, 10)
    share = history.share(A)
    history.acquire(A, chain("abcdef")).release()
    lease = history.acquire(A, chain("xy"))

    assert share.room_blocks == 2
    assert share.evicted_by(2) == 0
    assert share.evicted_by(5) == 3
    assert share.evicted_by(50) == 6, "pinned blocks do not go"
    lease.release()
    history.set_capacity(A, 4)
    assert share.room_blocks == 0


def test_a_new_worker_starts_empty_at_the_default_capacity(make_history) -> None:
    share = make_history(77).share(B)

    assert (share.blocks, share.active_blocks, share.capacity_blocks, share.room_blocks) == (0, 0, 77, 77)


def test_sizes_go_up_and_back_to_zero(history, sent, chain) -> None:
    assert history.size() == (0, 0, 0)
    sent(A, chain("abcd"))
    sent(B, chain("abx"))

    size = history.size()
    assert (size.blocks, size.tracked) == (5, 7)
    assert size.bytes > 0

    history.forget(A)
    history.forget(B)
    assert history.size() == (0, 0, 0)


def test_nothing_is_kept_that_no_worker_holds(history, sent, chain) -> None:
    """Evicted ends are dropped even where a longer holder of the same run has gone."""
    sent(A, chain("abcdefgh"))
    sent(B, chain("abcdefgh"))
    history.set_capacity(B, 3)

    history.forget(A)

    assert history.size().blocks == 3
    assert history.match(chain("abcdefgh")) == {B: 3}
    sent(B, chain("abcz"))
    assert history.match(chain("abcdefgh")) == {B: 3}


def test_a_run_that_one_worker_lost_the_end_of_can_still_be_branched_off(history, sent, chain) -> None:
    sent(A, chain("abcdefgh"))
    sent(B, chain("abcdefgh"))
    history.set_capacity(B, 3)

    sent(A, chain("abcde+"))

    assert history.match(chain("abcdefgh")) == {A: 8, B: 3}
    assert history.match(chain("abcde+")) == {A: 6, B: 3}
    sent(B, chain("xy"))
    assert history.match(chain("abcdefgh")) == {A: 8, B: 1}


WORKERS = (0, 1, 6)
prompts = st.one_of(
    st.lists(st.integers(0, 2), max_size=9),
    # Long common prefixes, cut anywhere: runs that several workers hold in part.
    st.builds(
        lambda length, end: [0] * length + end, st.integers(0, 12), st.lists(st.integers(0, 1), max_size=2)
    ),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from(WORKERS), prompts),
        st.tuples(st.just("release"), st.integers(0, 9), st.none()),
        st.tuples(st.just("touch"), st.sampled_from(WORKERS), prompts),
        st.tuples(st.just("extend"), st.integers(0, 9), prompts),
        st.tuples(st.just("forget"), st.sampled_from(WORKERS), st.none()),
        st.tuples(st.just("capacity"), st.sampled_from(WORKERS), st.integers(1, 14)),
    ),
    max_size=40,
)


class Pair:
    """A history and its model, which get the same calls and must return the same results."""

    def __init__(self, history, model, chain) -> None:
        self.history, self.model, self.chain = history, model, chain
        self.leases: list[tuple[int, list[int], object]] = []
        self.probes = [chain([0] * 9), chain([1, 0, 2, 1]), chain([2])]

    def apply(self, step) -> None:
        action, which, argument = step
        if action == "send":
            keys = self.chain(argument)
            lease = self.history.acquire(which, keys)
            assert lease.new_blocks == self.model.acquire(which, keys)
            self.leases.append((which, argument, lease))
            self.probes.append(self.chain([*argument, 1]))
        elif action == "touch" and argument:
            keys = self.chain(argument)
            if not [*self.history.touch(which, [keys[-1]])]:
                assert not self.model.acquire(which, keys)
                self.model.release(which, keys)
        elif action == "release" and self.leases:
            worker, content, lease = self.leases.pop(which % len(self.leases))
            lease.release()
            lease.release()
            self.model.release(worker, self.chain(content))
        elif action == "extend" and self.leases:
            place = which % len(self.leases)
            worker, content, lease = self.leases[place]
            longer = [*content, *argument]
            lease.extend(self.chain(longer))
            self.model.acquire(worker, self.chain(longer))
            self.model.release(worker, self.chain(content))
            self.leases[place] = (worker, longer, lease)
        elif action == "forget":
            self.history.forget(which)
            self.model.forget(which)
            self.leases = [entry for entry in self.leases if entry[0] != which]
        elif action == "capacity":
            self.history.set_capacity(which, argument)
            self.model.set_capacity(which, argument)

    def compare(self) -> None:
        for worker in WORKERS:
            share = self.history.share(worker)
            assert share.blocks == self.model.blocks(worker)
            assert share.active_blocks == self.model.active(worker)
        for keys in self.probes[-6:] + self.probes[:: 1 + len(self.probes) // 20]:
            assert self.history.match(keys) == self.model.match(keys)
        size = self.history.size()
        assert size.tracked == sum(self.model.blocks(worker) for worker in WORKERS)
        assert size.blocks == len(set().union(*(self.model.pins[worker] for worker in WORKERS)))


@given(steps=steps, capacity=st.integers(1, 14))
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_agrees_with_sets_and_a_list(steps, capacity, make_history, plain_history, chain) -> None:
    pair = Pair(make_history(capacity), plain_history(capacity, WORKERS), chain)

    for step in steps:
        pair.apply(step)
        pair.compare()


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_sets_and_a_list_over_a_long_life(seed, make_history, plain_history, chain) -> None:
    """Conversations that grow, share a prefix and come back, under constant eviction."""
    rng = random.Random(seed)
    pair = Pair(make_history(40), plain_history(40, WORKERS), chain)
    chats = [[[9, 9, 9]], [[9, 9, 8]], [[7]]]
    """Each as its turns: a new branch starts where an earlier turn ended, or anywhere."""
    for _ in range(500):
        turns = rng.choice(chats)
        turns.append([*turns[-1], *(rng.randrange(3) for _ in range(rng.randrange(4)))])
        if len(turns[-1]) > 20 or rng.random() < 0.3:
            del turns[rng.randrange(1, len(turns)) :]
        if rng.random() < 0.1:
            turns.append(turns[-1][: rng.randrange(len(turns[-1]) + 1)])
        pair.apply(("send", rng.choice(WORKERS), list(turns[-1])))
        pair.apply(("touch", rng.choice(WORKERS), list(rng.choice(chats)[-1])))
        while len(pair.leases) > 4 or (pair.leases and rng.random() < 0.4):
            pair.apply(("release", rng.randrange(99), None))
        if rng.random() < 0.01:
            pair.apply(("forget", rng.choice(WORKERS), None))
        pair.compare()


@pytest.mark.parametrize("seed", range(3))
def test_a_match_may_be_used_only_until_the_next_change(seed, make_history, plain_history) -> None:
    """A request is matched and then sent with the same keys. What the match came by may be used again, but
    not after other requests were sent, ended or evicted in between."""
    rng = random.Random(seed)
    made: dict[tuple[int, ...], BlockKeys] = {}

    def chain(content) -> BlockKeys:
        """The same object for the same content."""
        return made.setdefault(tuple(content), block_keys(b"".join(b"%064d" % block for block in content)))

    pair = Pair(make_history(20), plain_history(20, WORKERS), chain)
    for _ in range(700):
        content = [0] * rng.randrange(9) + [rng.randrange(2) for _ in range(rng.randrange(4))]
        other = [0] * rng.randrange(9) + [rng.randrange(2) for _ in range(rng.randrange(4))]
        assert pair.history.match(chain(content)) == pair.model.match(chain(content))
        between = [
            ("send", rng.choice(WORKERS), other),
            ("release", rng.randrange(99), None),
            ("extend", rng.randrange(99), other),
            ("forget", rng.choice(WORKERS), None),
            ("capacity", rng.choice(WORKERS), rng.randrange(1, 25)),
        ]
        for step in rng.choices(between, weights=(6, 6, 3, 1, 2), k=rng.randrange(3)):
            pair.apply(step)
        pair.apply(("send", rng.choice(WORKERS), content))
        while len(pair.leases) > 4 or (pair.leases and rng.random() < 0.4):
            pair.apply(("release", rng.randrange(99), None))
        pair.compare()


def test_recent_prompts_fill_another_history(history, make_history, sent, chain) -> None:
    history.set_capacity(A, 14)
    for name in ("gone", "aaab", "aaacd", "aaae", "zz"):
        sent(A, chain(name * 1))
    sent(A, chain("aaab"))

    other = make_history(14)
    for keys in history.recent(A, 1000):
        other.acquire(A, keys).release()

    for name in ("gone", "aaab", "aaacd", "aaae", "zz"):
        assert other.match(chain(name)) == history.match(chain(name))
    for name in ("new", "newer", "newest"):
        for each in (history, other):
            each.acquire(A, chain(name)).release()
        for old in ("aaab", "aaacd", "aaae", "zz"):
            assert other.match(chain(old)) == history.match(chain(old)), (name, old)


def test_recent_prompts_are_bounded_and_the_newest_are_included(history, sent, chain) -> None:
    sent(A, chain("older"))
    sent(A, chain("newer"))

    assert [list(keys) for keys in history.recent(A, 9)] == [chain("newer")]
    assert history.recent(B, 9) == []
