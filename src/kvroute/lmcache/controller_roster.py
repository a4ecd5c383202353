"""The instances that report to the controller, and which slots read from which instance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvroute.blocks.chunks import ChunkSpace
from kvroute.clock import Clock
from kvroute.index.chunk_index import ChunkHolder, ChunkIndex
from kvroute.lmcache.controller_instance import HashAgreement, LMCacheInstance, Rank
from kvroute.wire.lmcache_controller import ChunkHash, Sender


class SlotIdentity(NamedTuple):
    """What a slot's instance is recognised by: worker name, data-parallel rank, addresses of the worker's
    host."""

    worker: str
    rank: int = 0
    addresses: frozenset[str] = frozenset()


class InstanceAddress(NamedTuple):
    """The address that an instance's first rank reported; "" and 0 if it reported none."""

    name: str
    ip: str = ""
    port: int = 0
    registered_at: float = 0.0


def match_instances(
    slots: Mapping[int, SlotIdentity], instances: Iterable[InstanceAddress]
) -> tuple[dict[int, set[str]], list[str]]:
    """Find the slots of each instance. Returns slot -> instance names, and the ambiguous instances.

    An instance belongs to the slot whose worker has its name (`NAME`, or `NAME-RANK` for one data-parallel
    rank). Otherwise it belongs to the only slot at its address that has no instance by name. Of several
    instances with the same address and port only the newest counts: the others have ended.
    """
    names_of: dict[int, set[str]] = defaultdict(set)
    unnamed: dict[tuple[str, int], InstanceAddress] = {}
    for instance in instances:
        named = _named_after(instance.name, slots)
        for slot in named:
            names_of[slot].add(instance.name)
        if not named and instance.ip:
            other = unnamed.get((instance.ip, instance.port))
            if other is None or other.registered_at <= instance.registered_at:
                unnamed[instance.ip, instance.port] = instance
    unclear = []
    at_ip: dict[str, list[InstanceAddress]] = defaultdict(list)
    for instance in unnamed.values():
        at_ip[instance.ip].append(instance)
    taken = set(names_of)
    for ip, instances_there in at_ip.items():
        candidates = [
            slot for slot, identity in slots.items() if slot not in taken and ip in identity.addresses
        ]
        if len(candidates) == 1 and len(instances_there) == 1:
            names_of[candidates[0]].add(instances_there[0].name)
        elif candidates:
            unclear += [instance.name for instance in instances_there]
    return dict(names_of), sorted(unclear)


def is_named(name: str, slots: Mapping[int, SlotIdentity]) -> bool:
    """Whether the instance has the name of one of the slots' workers."""
    return bool(_named_after(name, slots))


def _named_after(name: str, slots: Mapping[int, SlotIdentity]) -> Collection[int]:
    exact = [slot for slot, identity in slots.items() if f"{identity.worker}-{identity.rank}" == name]
    return exact or [slot for slot, identity in slots.items() if identity.worker == name]


@dataclass(frozen=True, slots=True, eq=False)
class TrackedInstance:
    """An instance, and whether its chunk hashes agree with ours."""

    instance: LMCacheInstance
    agreement: HashAgreement


class Roster:
    """All instances and slots, and the attachments between them in `index`.

    Mutable throughout; owned by the controller. An instance's chunks leave the index together with the
    instance.
    """

    def __init__(self, index: ChunkIndex, space: ChunkSpace, clock: Clock, needed_prompts: int) -> None:
        self.by_name: dict[str, TrackedInstance] = {}
        self.unclear: list[str] = []
        """Names of instances that may belong to several workers."""
        self._index = index
        self._space = space
        self._clock = clock
        self._needed_prompts = needed_prompts
        self._slots: dict[int, SlotIdentity] = {}
        self._names_of: dict[int, set[str]] = {}
        self._attached: set[tuple[int, ChunkHolder]] = set()
        self._keys_to_free: list[set[ChunkHash]] = []
        """Chunks of removed or reset locations. To free a large set takes long, so `sweep` does it in
        steps."""

    # Instances and ranks

    def get(self, sender: Sender) -> tuple[TrackedInstance, Rank] | None:
        """The sender's instance and rank, if known."""
        tracked = self.by_name.get(sender.instance_id)
        rank = tracked.instance.ranks.get(sender.worker_id) if tracked else None
        return (tracked, rank) if tracked and rank else None

    def get_or_add(self, sender: Sender) -> tuple[TrackedInstance, Rank]:
        """The sender's instance and rank. A sender that has not registered is added: it may hold chunks."""
        origin = self.get(sender)
        return origin if origin else self.add(sender, predates_controller=True)

    def add(self, sender: Sender, *, predates_controller: bool) -> tuple[TrackedInstance, Rank]:
        """Add a new process; it replaces an earlier one of the same instance and rank.

        `predates_controller`: the process may already hold chunks.
        """
        tracked = self.by_name.get(sender.instance_id)
        rank = Rank(sender.worker_id, self._clock.now(), predates_controller=predates_controller)
        replaced_rank = tracked.instance.ranks.get(sender.worker_id) if tracked else None
        if replaced_rank:
            for name, location in replaced_rank.locations.items():
                rank.previous[name] = location.sequence.expected
                self._keys_to_free.append(location.keys)
        if tracked is None or not predates_controller:
            # Another process may compute other hashes.
            instance = (
                tracked.instance if tracked else LMCacheInstance(sender.instance_id, self._index, self._space)
            )
            tracked = TrackedInstance(instance, HashAgreement(self._needed_prompts))
            self.by_name[sender.instance_id] = tracked
        tracked.instance.add(rank)
        self.update_attachments()
        return tracked, rank

    def remove(self, tracked: TrackedInstance, rank: Rank) -> None:
        instance = tracked.instance
        self._keys_to_free += [location.keys for location in rank.locations.values()]
        instance.remove(rank)
        if not instance.ranks:
            del self.by_name[instance.name]
        self.update_attachments()

    def remove_replaced(self, name: str, by: Rank) -> None:
        """Remove instances that ended without deregistering, when `by` registers at their address.

        This concerns instances without a worker's name and without heartbeats. A restart gives such an
        instance a new random name, so otherwise their number would grow without limit.
        """
        for tracked, rank in self.ranks():
            if (
                by.port
                and (rank.ip, rank.port) == (by.ip, by.port)
                and tracked.instance.name != name
                and rank.last_heartbeat is None
                and not is_named(tracked.instance.name, self._slots)
            ):
                self.remove(tracked, rank)

    def ranks(self) -> Iterator[tuple[TrackedInstance, Rank]]:
        for tracked in list(self.by_name.values()):
            for rank in list(tracked.instance.ranks.values()):
                yield tracked, rank

    def free_later(self, keys: set[ChunkHash]) -> None:
        """Let `sweep` free these keys in steps."""
        if keys:
            self._keys_to_free.append(keys)

    def sweep(self, steps: int) -> bool:
        """Process up to `steps` chunks of deferred work; True while there is more."""
        more = self._index.sweep(steps)
        for tracked in self.by_name.values():
            more |= tracked.instance.sweep(steps)
        while self._keys_to_free and steps > 0:
            keys = self._keys_to_free[-1]
            for _ in range(min(steps, len(keys))):
                keys.pop()
                steps -= 1
            if not keys:
                self._keys_to_free.pop()
        return more or bool(self._keys_to_free)

    # Slots

    def add_slot(self, slot: int, identity: SlotIdentity) -> None:
        self._slots[slot] = identity
        self.update_attachments()

    def remove_slot(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self.update_attachments()

    def instances_of(self, slot: int) -> list[TrackedInstance]:
        """The instances that a slot reads from."""
        return [self.by_name[name] for name in self._names_of.get(slot, ()) if name in self.by_name]

    def update_attachments(self) -> None:
        """Find each slot's instances again. Call it after a change of an instance, its address or a slot."""
        self._names_of, self.unclear = match_instances(self._slots, self._instance_addresses())
        domain = (self._space.scheme, self._space.model)
        required = {
            (slot, tracked.instance.holder)
            for slot in self._names_of
            for tracked in self.instances_of(slot)
            if all(rank.is_reporting for rank in tracked.instance.ranks.values())
        }
        for slot, holder in self._attached - required:
            self._index.detach(slot, holder)
        for slot, holder in required - self._attached:
            self._index.attach(slot, holder, [domain])
        self._attached = required

    def _instance_addresses(self) -> Iterator[InstanceAddress]:
        for tracked in self.by_name.values():
            rank = min(tracked.instance.ranks.values(), key=lambda rank: rank.number)
            yield InstanceAddress(tracked.instance.name, rank.ip, rank.port, rank.registered_at)


def find_peer(
    instances: Iterable[LMCacheInstance], asker: str, rank_number: int, hashes: Sequence[ChunkHash]
) -> tuple[str, str, int, str] | None:
    """Find the peer location that holds most of the chunks `hashes`, counted from the first one on.

    Returns (instance name, location name, number of chunks, peer URL). None if no other instance with a peer
    URL has the first chunk. Only the same rank of other instances counts, because each rank has its own part
    of a chunk. Costs at most one set lookup per hash and location.
    """
    best: tuple[str, str, int, str] | None = None
    if not hashes:
        return None
    first_hash, most = hashes[0], 0
    for instance in instances:
        if instance.name == asker:
            continue
        rank = instance.ranks.get(rank_number)
        if rank is None or not rank.peer_url:
            continue
        for location in rank.locations.values():
            keys = location.keys
            if first_hash not in keys:
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
