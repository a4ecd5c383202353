"""Which slots read from which LMCache instance, as far as names and addresses tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple


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
