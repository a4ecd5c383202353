"""`Lru` compared with the plainest model: a list of entries, the least recently used first."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvroute.lru import Lru

KEYS = st.integers(0, 6)


class LruAgainstList(RuleBasedStateMachine):
    """A value is its weight, so that both sides compute weights in the same way."""

    @initialize(max_weight=st.integers(0, 12), is_weighed=st.booleans())
    def make(self, max_weight: int, is_weighed: bool) -> None:
        self.is_weighed = is_weighed
        self.max_weight = max_weight
        self.lru: Lru[int, int] = Lru(max_weight, (lambda key, value: value) if is_weighed else None)
        self.model: list[tuple[int, int]] = []

    def weight(self, value: int) -> int:
        return value if self.is_weighed else 1

    def total(self) -> int:
        return sum(self.weight(value) for _, value in self.model)

    def remove(self, key: int) -> int | None:
        for place, (stored, value) in enumerate(self.model):
            if stored == key:
                del self.model[place]
                return value
        return None

    def evict_to(self, max_weight: int) -> list[tuple[int, int]]:
        evicted = []
        while self.model and self.total() > max_weight:
            evicted.append(self.model.pop(0))
        return evicted

    @rule(key=KEYS, value=st.integers(1, 8))
    def put(self, key: int, value: int) -> None:
        self.remove(key)
        if self.weight(value) > self.max_weight:
            expected = [(key, value)]
        else:
            self.model.append((key, value))
            expected = self.evict_to(self.max_weight)

        assert self.lru.put(key, value) == expected

    @rule(key=KEYS)
    def get(self, key: int) -> None:
        value = self.remove(key)
        if value is not None:
            self.model.append((key, value))

        assert self.lru.get(key) == value

    @rule(key=KEYS)
    def peek(self, key: int) -> None:
        assert self.lru.peek(key) == dict(self.model).get(key)
        assert (key in self.lru) == (key in dict(self.model))

    @rule(key=KEYS)
    def pop(self, key: int) -> None:
        assert self.lru.pop(key) == self.remove(key)

    @rule(max_weight=st.integers(0, 12))
    def evict(self, max_weight: int) -> None:
        assert self.lru.evict(max_weight) == self.evict_to(max_weight)

    @invariant()
    def has_the_same_entries_in_the_same_order(self) -> None:
        if hasattr(self, "model"):
            assert list(self.lru.items()) == self.model
            assert len(self.lru) == len(self.model)
            assert self.lru.weight == self.total() <= self.max_weight


TestLruAgainstList = LruAgainstList.TestCase


@pytest.mark.parametrize("used", [True, False])
def test_a_used_entry_stays_and_a_peeked_one_does_not(used: bool) -> None:
    lru = Lru[str, int](2)
    lru.put("a", 1)
    lru.put("b", 2)

    assert (lru.get if used else lru.peek)("a") == 1

    assert lru.put("c", 3) == ([("b", 2)] if used else [("a", 1)])


def test_an_entry_that_is_too_heavy_replaces_nothing_else() -> None:
    lru = Lru[str, str](4, lambda key, value: len(value))
    lru.put("a", "xx")
    lru.put("b", "yy")

    assert lru.put("b", "too long") == [("b", "too long")]

    assert list(lru.items()) == [("a", "xx")]
