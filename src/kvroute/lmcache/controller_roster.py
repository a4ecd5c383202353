"""Who reports to the controller, and which slots read from whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvroute.blocks.chunks import ChunkSpace
from kvroute.clock import Clock
from kvroute.index.chunk_index import ChunkHolder, ChunkIndex
from kvroute.lmcache.controller_instance import ControlledInstance, HashAgreement, Rank
from kvroute.wire.lmcache_controller import ChunkHash, Sender


class SlotPlace(NamedTuple):
    """What an instance may be recognised by: the worker's name, its data-parallel rank, the addresses of its
    host."""

    worker: str
    rank: int = 0
    addresses: frozenset[str] = frozenset()


class InstancePlace(NamedTuple):
    """Where an instance's first rank said to be; "" and 0 if it did not."""

    name: str
    ip: str = ""
    port: int = 0
    registered_at: float = 0.0


def join(
    slots: Mapping[int, SlotPlace], instances: Iterable[InstancePlace]
) -> tuple[dict[int, set[str]], list[str]]:
    """Slot -> names of its instances, and instances that could belong to several slots.

    An instance is the slot's whose worker it is named after (`NAME`, or `NAME-RANK` for one data-parallel
    rank), else the only slot's at its address that has none by name. Of several instances that give the
    same address and port, the latest is alive.
    """
    joined: dict[int, set[str]] = defaultdict(set)
    nameless: dict[tuple[str, int], InstancePlace] = {}
    for instance in instances:
        named = _named_after(instance.name, slots)
        for slot in named:
            joined[slot].add(instance.name)
        if not named and instance.ip:
            rival = nameless.get((instance.ip, instance.port))
            if rival is None or rival.registered_at <= instance.registered_at:
                nameless[instance.ip, instance.port] = instance
    unclear = []
    at_ip: dict[str, list[InstancePlace]] = defaultdict(list)
    for instance in nameless.values():
        at_ip[instance.ip].append(instance)
    taken = set(joined)
    for ip, found in at_ip.items():
        there = [slot for slot, place in slots.items() if slot not in taken and ip in place.addresses]
        if len(there) == 1 and len(found) == 1:
            joined[there[0]].add(found[0].name)
        elif there:
            unclear += [instance.name for instance in found]
    return dict(joined), sorted(unclear)


def is_named(name: str, slots: Mapping[int, SlotPlace]) -> bool:
    """Whether the instance is named after one of the slots' workers."""
    return bool(_named_after(name, slots))


def _named_after(name: str, slots: Mapping[int, SlotPlace]) -> Collection[int]:
    exact = [slot for slot, place in slots.items() if f"{place.worker}-{place.rank}" == name]
    return exact or [slot for slot, place in slots.items() if place.worker == name]


@dataclass(frozen=True, slots=True, eq=False)
class KnownInstance:
    """An instance, and whether its chunk hashes mean what ours mean."""

    instance: ControlledInstance
    agreement: HashAgreement


class Roster:
    """Mutable throughout; owned by the controller. `index` follows: what an instance has can be read by the
    slots that it is joined to, and is gone with it."""

    def __init__(self, index: ChunkIndex, space: ChunkSpace, clock: Clock, needed_prompts: int) -> None:
        self.known: dict[str, KnownInstance] = {}
        self.unclear: list[str] = []
        """Instances that could belong to several workers."""
        self._index = index
        self._space = space
        self._clock = clock
        self._needed_prompts = needed_prompts
        self._slots: dict[int, SlotPlace] = {}
        self._joined: dict[int, set[str]] = {}
        self._attached: set[tuple[int, ChunkHolder]] = set()
        self._garbage: list[set[ChunkHash]] = []
        """What was held by those that are gone or began anew: its memory is still to be returned."""

    # Workers

    def get(self, sender: Sender) -> tuple[KnownInstance, Rank] | None:
        known = self.known.get(sender.instance_id)
        rank = known.instance.ranks.get(sender.worker_id) if known else None
        return (known, rank) if known and rank else None

    def known_rank(self, sender: Sender) -> tuple[KnownInstance, Rank]:
        """The one who speaks; if it has not registered, it was there before us."""
        found = self.get(sender)
        return found if found else self.add(sender, unsynced=True)

    def add(self, sender: Sender, *, unsynced: bool) -> tuple[KnownInstance, Rank]:
        """A new process, in place of any before it. `unsynced`: it may hold chunks already."""
        known = self.known.get(sender.instance_id)
        rank = Rank(sender.worker_id, self._clock.now(), unsynced=unsynced)
        before = known.instance.ranks.get(sender.worker_id) if known else None
        if before:
            for name, location in before.locations.items():
                rank.previous[name] = location.sequence.expected
                self._garbage.append(location.keys)
        if known is None or not unsynced:
            # Another process may hash otherwise.
            instance = (
                known.instance if known else ControlledInstance(sender.instance_id, self._index, self._space)
            )
            known = KnownInstance(instance, HashAgreement(self._needed_prompts))
            self.known[sender.instance_id] = known
        known.instance.add(rank)
        self.join()
        return known, rank

    def remove(self, known: KnownInstance, rank: Rank) -> None:
        instance = known.instance
        self._garbage += [location.keys for location in rank.locations.values()]
        instance.remove(rank)
        if not instance.ranks:
            del self.known[instance.name]
        self.join()

    def remove_outlived(self, name: str, by: Rank) -> None:
        """A process took a place that others had said to be at: those that are known by their place alone and
        send no heartbeats are gone. Their names are new ones each time: they would pile up."""
        for known, rank in self.ranks():
            if (
                by.port
                and (rank.ip, rank.port) == (by.ip, by.port)
                and known.instance.name != name
                and rank.last_heartbeat is None
                and not is_named(known.instance.name, self._slots)
            ):
                self.remove(known, rank)

    def ranks(self) -> Iterator[tuple[KnownInstance, Rank]]:
        for known in list(self.known.values()):
            for rank in list(known.instance.ranks.values()):
                yield known, rank

    def discard(self, keys: set[ChunkHash]) -> None:
        """Give the memory back little by little."""
        if keys:
            self._garbage.append(keys)

    def sweep(self, steps: int) -> bool:
        """Work off up to `steps` chunks of what can wait; True while there is more."""
        more = self._index.sweep(steps)
        for known in self.known.values():
            more |= known.instance.sweep(steps)
        while self._garbage and steps > 0:
            keys = self._garbage[-1]
            for _ in range(min(steps, len(keys))):
                keys.pop()
                steps -= 1
            if not keys:
                self._garbage.pop()
        return more or bool(self._garbage)

    # Slots

    def follow(self, slot: int, place: SlotPlace) -> None:
        self._slots[slot] = place
        self.join()

    def leave(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self.join()

    def at(self, slot: int) -> list[KnownInstance]:
        """The instances that a slot reads from."""
        return [self.known[name] for name in self._joined.get(slot, ()) if name in self.known]

    def join(self) -> None:
        """To be called when an instance, its address or a slot has changed."""
        self._joined, self.unclear = join(self._slots, self._places())
        domain = (self._space.scheme, self._space.model)
        wanted = {(slot, known.instance.holder) for slot in self._joined for known in self.at(slot)}
        for slot, holder in self._attached - wanted:
            self._index.detach(slot, holder)
        for slot, holder in wanted - self._attached:
            self._index.attach(slot, holder, [domain])
        self._attached = wanted

    def _places(self) -> Iterator[InstancePlace]:
        for known in self.known.values():
            rank = min(known.instance.ranks.values(), key=lambda rank: rank.number)
            yield InstancePlace(known.instance.name, rank.ip, rank.port, rank.registered_at)


def find_peer(
    instances: Iterable[ControlledInstance], asker: str, rank_number: int, hashes: Sequence[ChunkHash]
) -> tuple[str, str, int, str] | None:
    """Instance, location, chunks from the first on, and peer URL of the location that has most of them.

    Only the same rank of other instances is of use: each has its own part of a chunk. None if nobody has
    the first chunk and says where to fetch it. Costs what is found, at most the number of hashes for each
    location that has the first.
    """
    best: tuple[str, str, int, str] | None = None
    if not hashes:
        return None
    first, most = hashes[0], 0
    for instance in instances:
        if instance.name == asker:
            continue
        rank = instance.ranks.get(rank_number)
        if rank is None or not rank.peer_url:
            continue
        for location in rank.locations.values():
            keys = location.keys
            if first not in keys:
                continue
            count = 1
            for key in hashes[1:]:
                if key not in keys:
                    break
                count += 1
            if count > most:
                best, most = (instance.name, location.name, count, rank.peer_url), count
                if most == len(hashes):
                    return best
    return best
