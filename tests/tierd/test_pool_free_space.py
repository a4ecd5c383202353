"""The allocator against a plain list of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute.tierd.pool import Extent, FreeSpace, joined

PAGE = 8
PAGES = 24


def test_the_smallest_gap_that_fits_is_taken() -> None:
    space = FreeSpace(10 * PAGE, page_bytes=PAGE)
    first, second, third, _ = (space.allocate(size * PAGE) for size in (3, 1, 2, 1))
    assert first is not None
    assert third is not None
    space.free(first)
    space.free(third)

    taken = space.allocate(2 * PAGE)

    assert second == (Extent(3 * PAGE, PAGE),)
    assert taken == third


def test_without_a_large_gap_an_object_is_as_few_pieces_as_possible() -> None:
    space = FreeSpace(8 * PAGE, page_bytes=PAGE)
    taken = [space.allocate(size * PAGE) for size in (1, 1, 3, 1, 2)]
    for number in (0, 2, 4):
        space.free(taken[number] or ())

    pieces = space.allocate(4 * PAGE + 3)

    assert pieces == (Extent(2 * PAGE, 3 * PAGE), Extent(6 * PAGE, PAGE + 3))
    assert space.free_bytes == PAGE


def test_released_extents_merge_with_their_neighbours() -> None:
    space = FreeSpace(4 * PAGE, page_bytes=PAGE)
    taken = [space.allocate(PAGE) for _ in range(4)]
    for number in (0, 2, 1, 3):
        space.free(taken[number] or ())

    assert space.allocate(4 * PAGE) == (Extent(0, 4 * PAGE),)


def test_an_object_grows_in_place_if_there_is_room() -> None:
    space = FreeSpace(8 * PAGE, page_bytes=PAGE)
    first = space.allocate(2 * PAGE)
    assert first == (Extent(0, 2 * PAGE),)

    second = space.allocate(3 * PAGE, after=2 * PAGE)
    assert second == (Extent(2 * PAGE, 3 * PAGE),)
    assert joined(first, second) == (Extent(0, 5 * PAGE),)

    space.free(first)
    third = space.allocate(PAGE, after=3 * PAGE)
    assert third == (Extent(0, PAGE),)
    assert joined(second, third) == (*second, *third)


def test_too_much_and_nothing_are_refused() -> None:
    space = FreeSpace(4 * PAGE, page_bytes=PAGE)

    assert space.allocate(4 * PAGE + 1) is None
    assert space.allocate(0) is None
    assert space.free_bytes == 4 * PAGE


@given(st.lists(st.one_of(st.integers(1, 9 * PAGE), st.integers(-9, -1)), max_size=60))
def test_extents_never_overlap_and_all_free_bytes_can_be_used(steps: list[int]) -> None:
    """A positive step takes that many bytes, a negative one gives an object back."""
    space = FreeSpace(PAGES * PAGE, page_bytes=PAGE)
    owner: list[int | None] = [None] * PAGES
    held: dict[int, tuple[Extent, ...]] = {}
    for number, step in enumerate(steps):
        if step < 0:
            if held:
                key = sorted(held)[step % len(held)]
                space.free(held.pop(key))
                owner = [None if other == key else other for other in owner]
            continue
        free_pages = owner.count(None)
        taken = space.allocate(step)
        assert (taken is None) == (-(-step // PAGE) > free_pages)
        if taken is None:
            continue
        held[number] = taken
        assert sum(length for _, length in taken) == step
        for offset, length in taken:
            assert offset % PAGE == 0
            for page in range(offset // PAGE, -(-(offset + length) // PAGE)):
                assert owner[page] is None
                owner[page] = number
        assert space.free_bytes == owner.count(None) * PAGE
