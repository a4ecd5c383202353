"""The controller that LMCache's in-process connector reports to, without its sockets.

Workers register, say what they store and drop, and ask for peers that have a chunk. What cannot be known for
sure is not believed: after a gap, a message that cannot be read, or without a registration (the worker was
there before us), a location begins anew, and the next heartbeat is answered with the request to say all that
is held. Beside LMCache's own controller: bench/controller.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from kvroute.blocks.chunks import SHA256_CBOR, ChunkScheme, ChunkSpace, chunk_keys
from kvroute.clock import Clock
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.trust import MapTrust
from kvroute.lmcache.controller_instance import ControlledInstance, HashAgreementState, Location, Rank, Step
from kvroute.lmcache.controller_roster import KnownInstance, Roster, SlotPlace, find_peer
from kvroute.lmcache.controller_syncs import ControllerCounts, ControllerFigures, FullSyncs
from kvroute.lmcache.options import ControllerOptions
from kvroute.wire import lmcache_controller as wire
from kvroute.wire.lmcache_controller import none_hash

log = logging.getLogger(__name__)


class Controller:
    """Feeds `index`. Mutable throughout; touched from the event loop only. `handle` takes messages as they
    come; `tick` (about once a second) and `sweep` do what can wait.

    `registered` is called with the name of an instance whenever a worker of it registers.
    """

    def __init__(
        self,
        index: ChunkIndex,
        clock: Clock,
        options: ControllerOptions,
        *,
        registered: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.counts = ControllerCounts()
        algorithm = options.hash_algorithm
        start = none_hash(options.hash_seed, sha256_cbor=algorithm == SHA256_CBOR)
        self.scheme = ChunkScheme(algorithm, options.chunk_tokens, start)
        """How workers are taken to name their chunks."""
        self._clock = clock
        self._options = options
        self._registered = registered
        self._roster = Roster(index, ChunkSpace(self.scheme), clock, options.mismatch_prompts)
        self._syncs = FullSyncs(self._roster, clock, self.counts, self._admit)
        self._answers: dict[type, Callable[..., wire.Reply | None]] = {
            wire.Register: self._register,
            wire.Heartbeat: self._heartbeat,
            wire.DeRegister: self._deregister,
            wire.KvOperations: self._operations,
            wire.KvAdmit: self._single,
            wire.KvEvict: self._single,
            wire.FullSyncStart: self._syncs.start,
            wire.FullSyncBatch: self._syncs.part,
            wire.FullSyncEnd: self._syncs.part,
            wire.FullSyncStatus: self._syncs.status,
            wire.P2pLookup: self._lookup,
        }

    # What routing and its surroundings ask

    def follow(self, slot: int, worker: str, *, rank: int = 0, addresses: Collection[str] = ()) -> None:
        """`slot` is a worker of the fleet, or one data-parallel rank of it. It reads from the instance named
        like the worker (or `WORKER-RANK`), else from the only one at one of its host's `addresses`."""
        self._roster.follow(slot, SlotPlace(worker, rank, frozenset(addresses)))

    def leave(self, slot: int) -> None:
        """Undo `follow`."""
        self._roster.leave(slot)

    def trust(self, slot: int) -> MapTrust:
        """How far what the index says of the slot's L1 can be believed. NONE: nobody reports for it, or in
        hashes that are not ours."""
        instances = self._roster.at(slot)
        if not instances or any(known.agreement.state is HashAgreementState.DIFFERS for known in instances):
            return MapTrust.NONE
        return MapTrust.WHOLE if all(known.instance.whole for known in instances) else MapTrust.PARTIAL

    def saw_prompt(self, slot: int, token_ids: Sequence[int]) -> None:
        """The slot's worker has served this prompt: what it reports is compared with what it should have
        stored. Once its hashes are known to agree this costs nothing; before, 3 us, or where not all that it
        holds is known, the hashing of the whole prompt (5 us for 256 tokens)."""
        size = self.scheme.chunk_tokens
        for known in self._roster.at(slot):
            if known.agreement.state is HashAgreementState.AGREES or len(token_ids) < size:
                continue
            # The beginning may have been stored before we listened; the end is rather new.
            tokens = token_ids[:size] if known.instance.whole else token_ids
            mark = chunk_keys(tokens, self.scheme)[-1]
            held = any(rank.has(mark) for rank in known.instance.ranks.values())
            if known.agreement.sent(mark, held=held, now=self._clock.now()):
                self._agreement_changed(known)

    def figures(self) -> ControllerFigures:
        """For gauges."""
        known = list(self._roster.known.values())
        ranks = [rank for _, rank in self._roster.ranks()]
        return ControllerFigures(
            instances=len(known),
            workers=len(ranks),
            chunks=sum(each.instance.chunks for each in known),
            syncing=sum(rank.is_syncing for rank in ranks),
            untrusted=sum(not rank.whole for rank in ranks),
            mismatched=sum(each.agreement.state is HashAgreementState.DIFFERS for each in known),
        )

    def problems(self) -> list[str]:
        """What keeps the map from being what the workers hold, a sentence each."""
        found = [
            f"LMCache instance {name!r} could belong to several workers: set its lmcache_instance_id to the "
            "name of its worker"
            for name in self._roster.unclear
        ]
        for known in self._roster.known.values():
            if known.agreement.state is HashAgreementState.DIFFERS:
                found.append(self._mismatch(known.instance))
        for known, rank in self._roster.ranks():
            if rank.needs_sync and rank.last_heartbeat is None:
                found.append(
                    f"LMCache instance {known.instance.name!r}, worker {rank.number}: part of what it holds "
                    "is not known, and it cannot be asked (set its lmcache_worker_heartbeat_time)"
                )
        return found

    # What can wait

    def tick(self) -> None:
        """Give up workers and synchronisations that are silent."""
        now = self._clock.now()
        for known, rank in self._roster.ranks():
            if rank.last_heartbeat is not None and now - rank.last_heartbeat > self._options.worker_timeout_s:
                self.counts.timeouts += 1
                log.warning(
                    "LMCache instance %r, worker %d sends no heartbeats any more: it is forgotten",
                    known.instance.name,
                    rank.number,
                )
                self._roster.remove(known, rank)
                continue
            self._syncs.expire(rank, self._options.sync_timeout_s)

    def sweep(self, steps: int = 1000) -> bool:
        """Work off up to about `steps` chunks of what can wait; True while there is more."""
        return self._roster.sweep(steps)

    # Messages

    def handle(self, message: wire.Message, heartbeat_url: str = "") -> wire.Reply | None:
        """Take in one message; returns the answer to those that ask. `heartbeat_url` (host:port) is what a
        worker that registers is told."""
        self.counts.messages += 1
        reply = self._answers[type(message)](message)
        if heartbeat_url and isinstance(reply, wire.RegisterReply):
            return wire.RegisterReply(extra_config={"heartbeat_url": heartbeat_url})
        return reply

    def unreadable(self, payload: bytes) -> None:
        """A message that is none. If it names a location, that is not believed any more."""
        self.counts.unreadable += 1
        instance, number, name = wire.origin(payload) or ("", 0, "")
        found = self._roster.get(wire.Sender(instance_id=instance, worker_id=number))
        if found and name in found[1].locations:
            self._begin_anew(found[0].instance, found[1].locations[name])

    def _register(self, message: wire.Register) -> wire.RegisterReply:
        name, number = message.instance_id, message.worker_id
        found = self._roster.get(message)
        if found and found[1].ip and (found[1].ip, found[1].port) != (message.ip, message.port):
            log.warning(
                "LMCache instance %r, worker %d was at %s:%d and is now at %s:%d; if both live, they need "
                "different lmcache_instance_id",
                *(name, number, found[1].ip, found[1].port, message.ip, message.port),
            )
        _, rank = self._roster.add(message, unsynced=False)
        self._place(rank, message)
        self._roster.remove_outlived(name, rank)
        log.info("LMCache instance %r, worker %d has registered", name, number)
        self._registered(name)
        return wire.RegisterReply()

    def _place(self, rank: Rank, message: wire.Register | wire.Heartbeat) -> None:
        rank.ip, rank.port, rank.peer_url = message.ip, message.port, message.peer_url
        self._roster.join()

    def _heartbeat(self, message: wire.Heartbeat) -> wire.HeartbeatReply:
        self.counts.heartbeats += 1
        _, rank = self._roster.known_rank(message)
        if not rank.ip:
            self._place(rank, message)
        now = rank.last_heartbeat = self._clock.now()
        asked = rank.asked_at is not None and now - rank.asked_at < self._options.sync_timeout_s
        if asked or rank.is_syncing or not rank.needs_sync:
            return wire.HeartbeatReply()
        rank.asked_at = now
        self.counts.syncs_asked += 1
        reason = "controller_restart" if rank.unsynced else "operations_missing"
        return wire.HeartbeatReply(commands=[wire.FullSyncCommand(reason=reason)])

    def _deregister(self, message: wire.DeRegister) -> None:
        found = self._roster.get(message)
        if found:
            log.info("LMCache instance %r, worker %d has left", message.instance_id, message.worker_id)
            self._roster.remove(*found)

    def _lookup(self, message: wire.P2pLookup) -> wire.P2pLookupReply:
        self.counts.lookups += 1
        instances = (known.instance for known in self._roster.known.values())
        peer = find_peer(instances, message.instance_id, message.worker_id, message.hashes)
        return wire.P2pLookupReply(layout_info=[peer]) if peer else wire.P2pLookupReply()

    # Operations

    def _operations(self, message: wire.KvOperations) -> None:
        operations = message.operations
        count = len(operations)
        if not count:
            return
        self.counts.operations += count
        known, rank = self._roster.known_rank(message)
        location = known.instance.location(rank, message.location)
        first, last = operations[0], operations[-1]
        step = location.sequence.judge(first.seq_num, count, first.key, last.key)
        if last.seq_num - first.seq_num != count - 1 and step is Step.APPLY:
            step = Step.GAP
        if step is not Step.APPLY and not self._out_of_order(known.instance, location, step):
            return
        start = 0
        for stop in _turns(operations):
            keys = [operation.key for operation in operations[start:stop]]
            if operations[start].op_type == "admit":
                self._admit(known, location, keys)
            else:
                known.instance.evict(rank, location, keys)
            start = stop

    def _out_of_order(self, instance: ControlledInstance, location: Location, step: Step) -> bool:
        """Whether the operations are to be applied all the same."""
        if step is Step.SKIP:
            self.counts.duplicates += 1
            return False
        self._begin_anew(instance, location)
        if step is Step.RESTART:
            location.whole = True
            return True
        self.counts.gaps += step is Step.GAP
        self.counts.strays += step is Step.FOREIGN
        log.warning("LMCache instance %r: operations on %s are missing", instance.name, location.name)
        return step is Step.GAP

    def _single(self, message: wire.KvAdmit | wire.KvEvict) -> None:
        """These have no numbers: a loss would not be noticed."""
        self.counts.operations += 1
        known, rank = self._roster.known_rank(message)
        location = known.instance.location(rank, message.location)
        if isinstance(message, wire.KvAdmit):
            self._admit(known, location, [message.key])
        else:
            known.instance.evict(rank, location, [message.key])

    def _admit(self, known: KnownInstance, location: Location, keys: Sequence[wire.ChunkHash]) -> None:
        known.instance.admit(location, keys)
        if known.agreement.reported(keys):
            self._agreement_changed(known)

    def _begin_anew(self, instance: ControlledInstance, location: Location) -> None:
        """Nothing is believed of what was said so far. A synchronisation that was under way tells what was
        held before what is missing: it is given up."""
        self._roster.discard(instance.forget(location))
        location.whole = False
        if location.sync:
            self._syncs.fail(location)

    # Hashes

    def _agreement_changed(self, known: KnownInstance) -> None:
        if known.agreement.state is HashAgreementState.DIFFERS:
            self.counts.mismatches += 1
            log.error("%s", self._mismatch(known.instance))
        else:
            log.info("LMCache instance %r: its chunk hashes are ours", known.instance.name)

    def _mismatch(self, instance: ControlledInstance) -> str:
        scheme, seed = self.scheme, self._options.hash_seed or "unset"
        return (
            f"LMCache instance {instance.name!r} names its chunks otherwise than we do, so that none of them "
            f"is ever found: its PYTHONHASHSEED must be {seed}, its pre_caching_hash_algorithm "
            f"{scheme.algorithm}, its chunk_size {scheme.chunk_tokens}; or set lmcache.controller.hash_seed, "
            ".hash_algorithm and .chunk_tokens to what it has"
        )


def _turns(operations: Sequence[wire.Operation]) -> list[int]:
    """Where runs of operations of one kind end."""
    kinds = [operation.op_type for operation in operations]
    if len(set(kinds)) == 1:
        return [len(kinds)]
    return [place for place in range(1, len(kinds)) if kinds[place] != kinds[place - 1]] + [len(kinds)]
