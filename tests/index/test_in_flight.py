"""What is in flight answers as a plain list of prompts per slot would."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, token_keys
from kvroute.index.in_flight import ANNOUNCED_S, MOST_ENDED, Flight, InFlight

PATHS = st.lists(st.integers(0, 1), max_size=12)
SLOTS = st.integers(0, 2)


def chain(path: list[int]) -> list[BlockKey]:
    return token_keys([number for number in path for _ in range(KEY_TOKENS)], 0)


class Ends:
    """A map by the ends of the prompts that it has, or of all prompts of a slot. Mutable."""

    def __init__(self) -> None:
        self.ends: set[tuple[int, BlockKey]] = set()
        self.slots: set[int] = set()

    def __call__(self, slot: int, keys: Sequence[BlockKey]) -> bool:
        return slot in self.slots or (slot, keys[-1]) in self.ends


def common(one: list[BlockKey], other: list[BlockKey]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


class InFlightAgainstLists(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.map = Ends()
        self.in_flight = InFlight(self.map)
        self.flights: list[tuple[Flight, int, list[BlockKey]]] = []
        self.of_forgotten: list[Flight] = []
        self.ended: list[tuple[int, list[BlockKey]]] = []

    @rule(slot=SLOTS, path=PATHS, streamed=st.booleans())
    def acquire(self, slot: int, path: list[int], streamed: bool) -> None:
        keys = chain(path)
        self.flights.append((self.in_flight.acquire(slot, keys, streamed=streamed), slot, keys))

    @rule(number=st.integers(0, 100), twice=st.booleans())
    def release(self, number: int, twice: bool) -> None:
        if self.flights:
            flight, slot, keys = self.flights.pop(number % len(self.flights))
            flight.first_token(0.0, True)
            flight.finish(0.0)
            self.ended.append((slot, keys))
            if twice:
                flight.finish(0.0)

    @rule(slot=SLOTS)
    def apply_events(self, slot: int) -> None:
        self.map.slots = {slot}
        self.in_flight.compact(0.0)
        self.map.slots = set()
        self.ended = [each for each in self.ended if each[0] != slot and each[1]]

    @rule()
    def wait(self) -> None:
        self.in_flight.compact(ANNOUNCED_S)
        self.ended.clear()

    @rule(slot=SLOTS)
    def forget(self, slot: int) -> None:
        self.in_flight.forget(slot)
        self.of_forgotten += [flight for flight, of, _ in self.flights if of == slot]
        self.flights = [each for each in self.flights if each[1] != slot]
        self.ended = [each for each in self.ended if each[0] != slot]

    @rule()
    def release_what_was_forgotten(self) -> None:
        """The number may be another's by then."""
        for flight in self.of_forgotten:
            flight.finish(0.0)
        self.of_forgotten.clear()

    @rule(path=PATHS)
    def match(self, path: list[int]) -> None:
        keys, expected = chain(path), dict[int, int]()
        for slot, others in [*self.ended, *((slot, others) for _, slot, others in self.flights)]:
            if shared := common(keys, others):
                expected[slot] = max(shared, expected.get(slot, 0))

        found, continues = self.in_flight.match(keys)

        assert found == expected
        assert continues or not any(
            others and len(keys) > len(others) == common(keys, others) for _, others in self.ended
        )
        if not self.in_flight.ended:
            assert not continues

    @invariant()
    def keeps_only_what_is_in_flight(self) -> None:
        blocks = {key for _, keys in self.ended for key in keys}
        blocks |= {key for _, _, keys in self.flights for key in keys}
        assert len(self.in_flight) <= len(blocks)


TestInFlightAgainstLists = InFlightAgainstLists.TestCase
TestInFlightAgainstLists.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_finished_prompt_stays_until_the_map_has_its_end() -> None:
    ends, keys = Ends(), chain([1, 2, 3])
    in_flight = InFlight(ends)
    flight = in_flight.acquire(7, keys)

    flight.first_token(1.0, True)
    assert in_flight.match(chain([1, 2, 3, 4])) == ({7: 3}, False)

    flight.finish(2.0)
    assert in_flight.match(chain([1, 2, 3, 4])) == ({7: 3}, True)
    assert in_flight.match(keys) == ({7: 3}, False)  # no more keys are in flight
    assert in_flight.match(chain([1, 2, 4])) == ({7: 2}, False)

    in_flight.compact(2.0 + 0.9 * ANNOUNCED_S)  # other events have come, not those of the prompt
    assert in_flight.match(keys) == ({7: 3}, False)

    ends.ends.add((7, keys[-1]))
    in_flight.compact(2.0)
    assert in_flight.match(keys) == ({}, False)
    assert len(in_flight) == 0


def test_a_prompt_whose_events_do_not_come_leaves_in_time() -> None:
    in_flight, keys = InFlight(), chain([1])
    in_flight.acquire(0, keys, streamed=False).finish(2.0)

    in_flight.compact(2.0 + ANNOUNCED_S)

    assert in_flight.match(keys) == ({}, False)


def test_a_prompt_that_was_not_computed_leaves_at_once() -> None:
    """Its client has left, or its worker has failed, before the first token."""
    in_flight, keys = InFlight(), chain([1])
    in_flight.acquire(0, keys).finish(2.0)

    in_flight.compact(2.0)

    assert in_flight.match(keys) == ({}, False)


def test_a_prompt_that_the_map_had_at_the_end_leaves_though_it_was_evicted_since() -> None:
    ends, keys = Ends(), chain([1])
    in_flight = InFlight(ends)
    flight = in_flight.acquire(0, keys, streamed=False)
    ends.ends.add((0, keys[-1]))
    flight.finish(2.0)

    ends.ends.clear()
    in_flight.compact(2.0)

    assert in_flight.match(keys) == ({}, False)


def test_the_map_is_asked_by_the_keys_that_the_worker_announces() -> None:
    ends, keys, ahead = Ends(), chain([1, 2]), chain([2, 1])
    in_flight = InFlight(ends)
    in_flight.acquire(0, keys, ahead, streamed=False).finish(2.0)

    ends.ends.add((0, ahead[-1]))
    in_flight.compact(2.0)

    assert in_flight.match(keys) == ({}, False)


def test_the_number_of_finished_prompts_is_bounded_without_events() -> None:
    in_flight, keys = InFlight(), chain([1])
    for _ in range(3 * MOST_ENDED):
        in_flight.acquire(0, keys, streamed=False).finish(0.0)

    assert len(in_flight.ended) <= MOST_ENDED + 1


def test_of_a_slot_with_states_only_whole_prompts_count() -> None:
    in_flight, keys = InFlight(), chain([1, 2, 3, 4])
    assert in_flight.count_whole_prompts(7)
    assert not in_flight.count_whole_prompts(7)
    short, long = in_flight.acquire(7, keys[:2]), in_flight.acquire(7, keys)
    in_flight.acquire(8, keys)
    assert in_flight.match(keys[:3])[0] == {7: 2, 8: 3}
    assert in_flight.match(chain([1, 2, 3, 4, 5]))[0] == {7: 4, 8: 4}
    short.finish(0.0)
    in_flight.compact(ANNOUNCED_S)
    assert in_flight.match(keys[:3])[0] == {8: 3}
    long.finish(0.0)
    in_flight.compact(ANNOUNCED_S)
    assert in_flight.match(keys)[0] == {8: 4}
    in_flight.forget(7)
    assert in_flight.count_whole_prompts(7)
