"""The chunk index answers as plain sets of chunks per holder would."""

from __future__ import annotations

import weakref

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvroute.blocks.chunks import BUILTIN, ChunkKey, ChunkScheme, ChunkSpace, PromptChunks, chunk_keys
from kvroute.blocks.keys import Tier
from kvroute.index.chunk_index import ChunkDomain, ChunkHolder, ChunkIndex

TWO = ChunkScheme(BUILTIN, 2)
THREE = ChunkScheme(BUILTIN, 3)
A, B = (TWO, "a"), (THREE, "b")
SALTS = st.sampled_from(["", "salt"])
PROMPTS = st.lists(st.integers(0, 1), max_size=14)
SLOTS = (0, 1, 2)
STARTS = st.dictionaries(st.sampled_from(SLOTS), st.integers(0, 16))

Held = set[tuple[ChunkSpace, ChunkKey]]


def space(domain: ChunkDomain, salt: str = "") -> ChunkSpace:
    return ChunkSpace(*domain, salt)


def plain_match(
    tokens: list[int], salt: str, start: int, tiers: list[list[tuple[ChunkDomain, Held]]]
) -> tuple[int, int]:
    """The rule itself, chunk by chunk."""
    place, found = start, [0, 0]
    while True:
        for tier, sources in enumerate(tiers):
            stops = [
                stop
                for domain, held in sources
                if (stop := (place // domain[0].chunk_tokens + 1) * domain[0].chunk_tokens) <= len(tokens)
                and (space(domain, salt), chunk_keys(tokens[:stop], domain[0])[-1]) in held
            ]
            if stops:
                found[tier] += stops[0] - place
                place = stops[0]
                break
        else:
            return found[0], found[1]


class ChunksAgainstSets(RuleBasedStateMachine):
    """Three slots with L1 holders, where the last two share one holder; two pools."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex()
        own, node = ChunkHolder(Tier.L1), ChunkHolder(Tier.L1, shared=True)
        pool, other = ChunkHolder(Tier.L2, shared=True), ChunkHolder(Tier.L2, shared=True)
        self.holders = [own, node, pool, other]
        self.held: list[Held] = [set() for _ in self.holders]
        self.reads: dict[int, dict[int, tuple[ChunkDomain, ...]]] = {
            0: {0: (A,), 2: (A,)},
            1: {1: (A, B), 2: (A,), 3: (B,)},
            2: {1: (B,), 3: (B,)},
        }
        for slot, reads in self.reads.items():
            for place, domains in reads.items():
                self.index.attach(slot, self.holders[place], domains)

    @rule(place=st.integers(0, 3), domain=st.sampled_from([A, B]), salt=SALTS, tokens=PROMPTS)
    def store(self, place: int, domain: ChunkDomain, salt: str, tokens: list[int]) -> None:
        held, where = self.held[place], space(domain, salt)
        keys = chunk_keys(tokens, domain[0])
        new = {(where, key) for key in keys} - held

        assert self.index.store(self.holders[place], where, keys) == len(new)
        held |= new

    @rule(place=st.integers(0, 3), which=st.integers(0, 30))
    def remove(self, place: int, which: int) -> None:
        held = sorted(self.held[place], key=repr)
        if held:
            where, key = held[which % len(held)]
            assert self.index.remove(self.holders[place], where, key)
            self.held[place].discard((where, key))
            assert not self.index.remove(self.holders[place], where, key)

    @rule(place=st.integers(0, 3))
    def clear(self, place: int) -> None:
        self.index.clear(self.holders[place])
        self.held[place].clear()

    @rule(steps=st.integers(1, 400))
    def sweep(self, steps: int) -> None:
        self.index.sweep(steps)

    @rule(slot=st.sampled_from(SLOTS))
    def leave_and_return(self, slot: int) -> None:
        self.index.forget(slot)
        if slot == 0 and 0 in self.reads[0]:
            self.held[0].clear()
        for place, domains in self.reads[slot].items():
            self.index.attach(slot, self.holders[place], domains)

    @rule(slot=st.sampled_from(SLOTS), place=st.integers(0, 3), domains=st.sets(st.sampled_from([A, B])))
    def attach(self, slot: int, place: int, domains: set[ChunkDomain]) -> None:
        if place == 0 and slot != 0:
            return
        chosen = tuple(sorted(domains))
        self.reads[slot].pop(place, None)
        self.index.detach(slot, self.holders[place])
        if chosen:
            self.reads[slot][place] = chosen
            self.index.attach(slot, self.holders[place], chosen)

    @rule(tokens=PROMPTS, salt=SALTS, starts=STARTS)
    def match(self, tokens: list[int], salt: str, starts: dict[int, int]) -> None:
        self.check(tokens, salt, starts, self.held, self.index.match(PromptChunks(tokens), salt, starts))

    @rule(tokens=PROMPTS, salt=SALTS, starts=STARTS, there=PROMPTS)
    def match_with_a_probe(
        self, tokens: list[int], salt: str, starts: dict[int, int], there: list[int]
    ) -> None:
        keys = set(chunk_keys(there, THREE))
        held = [*self.held[:3], {(space(domain, salt), key) for key in keys for domain in (A, B)}]

        found = self.index.match(PromptChunks(tokens), salt, starts, {self.holders[3]: keys})

        self.check(tokens, salt, starts, held, found)

    def check(
        self,
        tokens: list[int],
        salt: str,
        starts: dict[int, int],
        held: list[Held],
        found: dict[int, tuple[int, int]],
    ) -> None:
        """A slot that reads from L1 and L2 may count a chunk in either, so only the sum is compared."""
        expected = {}
        for slot, reads in self.reads.items():
            tiers: list[list[tuple[ChunkDomain, Held]]] = [[], []]
            for place, domains in sorted(reads.items()):
                tiers[place > 1] += [(domain, held[place]) for domain in domains]
            if any(len({domain for domain, _ in tier}) > 1 for tier in tiers):
                found.pop(slot, None)
                continue
            reached = plain_match(tokens, salt, starts.get(slot, 0), tiers)
            if reached != (0, 0):
                expected[slot] = reached
        assert found == expected

    @invariant()
    def holds_exactly_the_sets(self) -> None:
        for holder, held in zip(self.holders, self.held, strict=True):
            assert holder.chunks == len(held)
            assert all(self.index.holds(holder, where, key) for where, key in held)
        assert self.index.size().held_chunks == sum(map(len, self.held))

    def teardown(self) -> None:
        while self.index.sweep(1000):
            pass
        assert self.index.size().chunks == len(set().union(*self.held))


TestChunksAgainstSets = ChunksAgainstSets.TestCase
TestChunksAgainstSets.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)

PROMPT = list(range(100, 120))


def attached(tier: Tier, *slots: int) -> tuple[ChunkIndex, ChunkHolder]:
    index, holder = ChunkIndex(), ChunkHolder(tier, shared=True)
    for slot in slots:
        index.attach(slot, holder, [A])
    return index, holder


def test_a_slot_with_two_sources_matches_at_least_as_much_as_with_either() -> None:
    index, pool = attached(Tier.L2, 0)
    memory = ChunkHolder(Tier.L1)
    index.attach(0, memory, [A, B])
    index.store(memory, space(A), chunk_keys(PROMPT[:4], TWO))
    index.store(memory, space(B), chunk_keys(PROMPT[:9], THREE))
    index.store(pool, space(A), chunk_keys(PROMPT, TWO))

    assert index.match(PromptChunks(PROMPT), "", {}) == {0: (9, 11)}


def test_a_chunk_that_is_partly_on_the_gpu_counts_with_its_rest() -> None:
    index, memory = attached(Tier.L1, 0, 1)
    index.store(memory, space(A), chunk_keys(PROMPT, TWO)[2:5])

    found = index.match(PromptChunks(PROMPT), "", {0: 5, 1: 3})

    assert found == {0: (5, 0)}


def test_chunk_names_are_computed_only_up_to_the_first_miss() -> None:
    index, memory = attached(Tier.L1, 0)
    index.store(memory, space(A), chunk_keys(PROMPT, TWO)[:3])
    chunks = PromptChunks(PROMPT)

    index.match(chunks, "", {})

    assert len(chunks.keys(TWO).computed) == 4


def tail_of(tokens: list[int], scheme: ChunkScheme) -> ChunkKey:
    found = PromptChunks(tokens[:-1], tokens[-1]).tail(scheme)
    assert found is not None
    return found[1]


def test_the_last_chunk_counts_for_an_equal_prompt_although_it_is_not_full() -> None:
    prompt = PROMPT[:11]  # three chunks of three tokens, and two more
    index, memory, pool = ChunkIndex(), ChunkHolder(Tier.L1), ChunkHolder(Tier.L2, shared=True)
    for slot, holders in {0: [memory], 1: [pool], 2: [memory, pool]}.items():
        for holder in holders:
            index.attach(slot, holder, [B])
    index.store(memory, space(B), chunk_keys(prompt, THREE))
    index.store(pool, space(B), [*chunk_keys(prompt, THREE), tail_of(prompt, THREE)])

    def found(tokens: list[int], starts: dict[int, int] | None = None) -> dict[int, tuple[int, int]]:
        return index.match(PromptChunks(tokens[:-1], tokens[-1]), "", starts or {})

    assert found(prompt) == {0: (9, 0), 1: (0, 10), 2: (9, 1)}
    assert found(prompt, {0: 10, 1: 10, 2: 4}) == {2: (5, 1)}
    assert found([*prompt, 7]) == {0: (9, 0), 1: (0, 9), 2: (9, 0)}
    assert found([7, *prompt[1:]]) == {}
    assert index.match(PromptChunks(prompt[:-1]), "", {}) == {0: (9, 0), 1: (0, 9), 2: (9, 0)}
    index.remove(pool, space(B), chunk_keys(prompt, THREE)[1])
    assert found(prompt) == {0: (9, 0), 1: (0, 3), 2: (9, 1)}


def test_a_full_last_chunk_counts_without_the_prompts_last_token() -> None:
    index, memory = attached(Tier.L1, 0)
    index.store(memory, space(A), chunk_keys(PROMPT, TWO))

    assert index.match(PromptChunks(PROMPT[:-1], PROMPT[-1]), "", {}) == {0: (19, 0)}
    assert index.match(PromptChunks(PROMPT[:-1]), "", {}) == {0: (18, 0)}


def test_a_slot_with_several_domains_finds_the_last_chunk_too() -> None:
    index, memory, pool = ChunkIndex(), ChunkHolder(Tier.L1), ChunkHolder(Tier.L2, shared=True)
    prompt = PROMPT[:11]
    index.attach(0, memory, [A])
    index.attach(0, pool, [B])
    index.store(memory, space(A), chunk_keys(prompt[:6], TWO))
    index.store(pool, space(B), [*chunk_keys(prompt, THREE), tail_of(prompt, THREE)])

    assert index.match(PromptChunks(prompt[:-1], prompt[-1]), "", {}) == {0: (6, 4)}


def test_a_full_index_counts_refused_chunks() -> None:
    index, memory = ChunkIndex(max_chunks=3), ChunkHolder(Tier.L1)
    index.attach(0, memory, [A])

    assert index.store(memory, space(A), chunk_keys(PROMPT, TWO)) == 3
    assert index.size()[:3] == (3, 3, 7)
    assert index.match(PromptChunks(PROMPT), "", {}) == {0: (6, 0)}
    index.clear(memory)
    while index.sweep():
        pass
    assert index.store(memory, space(A), chunk_keys(PROMPT, TWO)[:2]) == 2


def test_tables_of_an_owner_are_freed_one_by_one() -> None:
    class Entry:
        pass

    entries = [Entry() for _ in range(4)]
    alive = [weakref.ref(entry) for entry in entries]
    index = ChunkIndex()
    index.free_later([{0: entries[0]}, {1: entries[1], 2: entries[2]}, {3: entries[3]}])
    entries.clear()
    assert all(entry() for entry in alive)

    left = []
    while index.sweep(1):
        left.append(sum(entry() is not None for entry in alive))
    assert left == [3, 1]
    assert not any(entry() for entry in alive)


def test_a_query_overrides_the_events() -> None:
    index, pool = attached(Tier.L2, 0)
    keys = chunk_keys(PROMPT, TWO)
    index.store(pool, space(A), keys)

    assert index.match(PromptChunks(PROMPT), "", {}, {pool: set(keys[:4])}) == {0: (0, 8)}
    assert index.match(PromptChunks(PROMPT), "", {}, {pool: set()}) == {}
    assert index.match(PromptChunks(PROMPT), "", {}) == {0: (0, 20)}


def test_models_salts_and_seeds_are_kept_apart() -> None:
    index, memory = attached(Tier.L1, 0)
    keys = chunk_keys(PROMPT, TWO)
    index.store(memory, space((TWO, "another")), keys)
    index.store(memory, space((ChunkScheme(BUILTIN, 2, 7), "a")), keys)
    index.store(memory, space(A, "salt"), keys[:2])

    assert index.match(PromptChunks(PROMPT), "", {}) == {}
    assert index.match(PromptChunks(PROMPT), "salt", {}) == {0: (4, 0)}
