"""The fleet's channel: how one gateway process exchanges messages with the processes of other gateways.

All members publish on one Redis channel and receive from it; each also has a channel of its own, for messages
to it alone. Every batch has the sender's epoch (a random number of its start) and a number in its sequence,
so a receiver notices by itself what did not arrive, also if Redis was restarted: it then asks the sender for
its state. A member that is silent for `_DEAD_S` is dead until the next message from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, Protocol

from kvroute import __version__
from kvroute.clock import Clock
from kvroute.replicas.envelope import (
    ID_BYTES,
    NEEDS_HMAC,
    TO_ALL,
    Envelope,
    Kind,
    Outgoing,
    Refusal,
    Refused,
    SendQueue,
    decode_payload,
    encode_payloads,
    pack,
    unpack,
)
from kvroute.replicas.inbox import Inbox
from kvroute.replicas.members import JOINS, ChannelCounts, Member, MessageLink, describe_process
from kvroute.replicas.mesh import GATHER_S, PeerListener
from kvroute.replicas.messages import (
    Leaving,
    MemberState,
    PeerId,
    SharedMessage,
    StateBegins,
    StateEnds,
    StateRequest,
)
from kvroute.replicas.options import SharingOptions

log = logging.getLogger(__name__)

BEAT_S: Final = 0.5
_DEAD_S: Final = 2.0
"""With `BEAT_S` the requests of a dead member are gone after 2.5 s at most."""
_STUCK_S: Final = 4.0
"""An open link that delivers nothing for this long is made again."""
_ASK_AGAIN_S: Final = 1.0
_FORGET_S: Final = 60.0
"""How long a member that has left or died stays in the list of members."""
_MAX_QUEUED: Final = 512
"""Messages; with more, the batch is sent before `GATHER_S` has passed."""
_MAX_MEMBERS: Final = 1024
_MAX_UNSIGNED: Final = 64
"""Members without any signed envelope, where this process has a key: anybody may have invented them."""
_MAX_NAMED: Final = 256
"""Senders whose refusals are logged."""
_MAX_LINES: Final = 8
"""Lines of the log about a member that has signed nothing, where this process has a key."""
_ROOM_BYTES: Final = 1024 * 1024


class ChannelListener(PeerListener, Protocol):
    """The receiver of the channel's messages."""

    @property
    def has_reports(self) -> bool:
        """Whether this process follows LMCache's reports. False where it mirrors another process's map."""
        ...

    def state(self) -> Sequence[SharedMessage]:
        """What another gateway must know now: the requests in flight, and the changes by hand."""
        ...

    def on_state(self, peer: PeerId) -> None:
        """The requests of a member that still run follow; those that were reported before no longer count."""
        ...

    def on_missed(self, peer: PeerId, message: SharedMessage) -> None:
        """A message of a batch that did not arrive in time; requests of it have ended or follow."""
        ...


class Channel:
    """This process's place in the fleet. Mutable; belongs to one event loop.

    `start` connects; `aclose` says goodbye and ends every task. `publish` and `send` never wait: what Redis
    does not take is queued, within `sharing.max_queued_bytes`.
    """

    def __init__(
        self,
        options: SharingOptions,
        gateway: bytes,
        process: int,
        clock: Clock,
        make_link: Callable[[Channel, tuple[bytes, ...]], MessageLink],
    ) -> None:
        """`gateway`: `ID_BYTES` that all processes of this gateway have; `process`: the number of this one.

        `make_link` gets the channels to subscribe to.
        """
        self.counts = ChannelCounts()
        self.id = os.urandom(ID_BYTES)
        self.lag_s: float | None = None
        """How long this process's last own message took through Redis; None while none comes back."""
        self.problem: str | None = "it was not reached yet"
        """Why Redis cannot be used now; None if it can."""
        self._options = options
        self._key = options.mac_key
        self._gateway = gateway
        self.process = process
        self.name = f"{options.name}/{process}"
        self._clock = clock
        self._to_all = f"kvroute:{options.fleet}:all".encode()
        self._link = make_link(self, (self._to_all, self._own_channel(self.id)))
        self._inbox = Inbox(self._read, self._link.pause, self._link.resume)
        self._listener: ChannelListener | None = None
        self._members: dict[bytes, Member] = {}
        self._queue = SendQueue(options.max_queued_bytes)
        self._seq = 0
        self._queued: list[SharedMessage] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._named: set[tuple[bytes, Refusal]] = set()
        """Refusals that the log has."""
        self._echo_at = -math.inf
        """When an own message came back."""
        self._up_at: float | None = None
        """Since when the link is open."""
        self._refusal: str | None = None
        self._down_at = clock.now()
        self._has_failed = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._has_warned_of_key = False

    # For the owner

    @property
    def is_up(self) -> bool:
        return self.problem is None

    @property
    def reporting_peers(self) -> Sequence[PeerId]:
        """The members that are linked and follow LMCache's reports."""
        return [member.id for member in self._members.values() if member.is_reporting]

    async def start(self, listener: ChannelListener) -> None:
        """Begin to connect; returns at once."""
        self._listener = listener
        self._spawn(self._link.run, "sharing: the link to Redis")
        self._beating = self._spawn(self._beat, "sharing: the heartbeat")

    async def joined(self, timeout_s: float) -> bool:
        """Wait until every member that lives is linked. False if Redis cannot be reached, or after
        `timeout_s`.

        Members answer at once, and those that do not know of this one yet send a heartbeat.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_up and not self._has_failed:
                    await self._wait_for_change()
                if not self.is_up:
                    return False
                await self._clock.sleep(BEAT_S + 4 * GATHER_S)
                while any(
                    member.gone_at is None and not member.is_linked for member in self._members.values()
                ):
                    await self._wait_for_change()
        except TimeoutError:
            return False
        return True

    def publish(self, *messages: SharedMessage) -> None:
        """Send to all members, within `GATHER_S`; they are encoded then."""
        self._queued += messages
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.flush)
        elif len(self._queued) >= _MAX_QUEUED:
            self.flush()

    def send(self, peer: PeerId, *messages: SharedMessage) -> bool:
        """Send to one member, after everything that was published. False if it is not alive."""
        member = self._members.get(bytes.fromhex(peer)) if isinstance(peer, str) else None
        if member is None or member.gone_at is not None:
            return False
        self.flush()
        self._emit(Kind.PRIVATE, member.sender, messages)
        return True

    def flush(self) -> None:
        """Send the queued messages now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        messages, self._queued = self._queued, []
        if messages:
            self._emit(Kind.BATCH, TO_ALL, messages)

    async def has_room(self) -> None:
        """Wait until little waits to be sent, for a sender of much; at most a second."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while self._queue.waiting_bytes > _ROOM_BYTES:
                    self._room.clear()
                    await self._room.wait()

    async def aclose(self) -> None:
        """Say goodbye, then end every task."""
        if self._beating is not None:
            self._beating.cancel()  # a beat after the goodbye would be a return
        if self.is_up:
            self.publish(Leaving())
            self.flush()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    while self._queue.waiting_bytes:
                        self._room.clear()
                        await self._room.wait()
        if self._timer is not None:
            self._timer.cancel()
        self._inbox.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def notes(self) -> list[str]:
        """Notes for `/ready`."""
        if self.problem is None:
            return []
        return [
            f"sharing: Redis is not used because {self.problem}; process {self.process} decides alone for "
            f"{self._clock.now() - self._down_at:.0f} s"
        ]

    def describe(self) -> list[dict[str, Any]]:
        """This process and all other members, as JSON values."""
        standing, now = "alive" if self.is_up else "alone", self._clock.now()
        own_row = describe_process(
            self.id, self._gateway, self._own_state(), standing, self.lag_s, self.problem
        )
        return [own_row, *(member.describe(now) for member in self._members.values())]

    def states(self) -> dict[str, int]:
        """Number of other members by state."""
        numbers = dict.fromkeys(("alive", "joining", "silent", "left"), 0)
        for member in self._members.values():
            numbers[member.standing] += 1
        return numbers

    # `LinkOwner`

    def next_command(self) -> tuple[bytes, bytes] | None:
        outgoing = self._queue.take()
        if self._queue.waiting_bytes <= _ROOM_BYTES:
            self._room.set()
        if outgoing is None:
            return None
        data = pack(
            Envelope(
                outgoing.kind,
                self._gateway,
                self.id,
                outgoing.to,
                outgoing.seq,
                self._clock.now(),
                outgoing.payload,
                outgoing.is_signed,
            ),
            self._key,
        )
        self.counts.envelopes_sent += 1
        self.counts.sent_bytes += len(data)
        return self._to_all if outgoing.to == TO_ALL else self._own_channel(outgoing.to), data

    def on_data(self, data: bytes) -> None:
        self._inbox.add(data)

    def _read(self, data: bytes) -> Iterator[None]:
        """Handle one envelope; pauses after each message. Raises nothing."""
        try:
            envelope = unpack(data, self._key)
            if envelope.gateway == self._gateway:
                if envelope.sender == self.id:
                    self._echo_at, self._refusal = self._clock.now(), None
                    self.lag_s = self._echo_at - envelope.sent_s
                return  # another process of this gateway: its messages come over the Unix socket
            self.counts.envelopes_received += 1
            self.counts.received_bytes += len(data)
            yield from self._receive(envelope)
        except Refused as refused:
            self._refuse(refused)
        except Exception:  # one bad envelope must not end the sharing
            log.exception("handling an envelope of the fleet failed")

    def on_too_large(self, size: int) -> None:
        self._refuse(Refused(Refusal.TOO_LARGE, f"it has {size} bytes"))

    def on_up(self) -> None:
        self._up_at = self._clock.now()
        if self._refusal is None:
            self._set_problem(None)
        self.publish(self._own_state())  # members that do not know this process ask for its state
        self._link.wake()

    def on_down(self, reason: str) -> None:
        self._up_at = None
        self._set_problem(reason)

    def on_refused(self, reason: str) -> None:
        self._refusal = reason
        self._set_problem(reason)

    def _set_problem(self, reason: str | None) -> None:
        if reason is not None:
            if self.problem is None or not self._has_failed:
                log.warning("sharing: Redis is not used because %s; this process decides alone", reason)
                self.counts.outages += 1
            if self.problem is None:
                self._down_at = self._clock.now()
            self._has_failed, self.lag_s = True, None
        elif self.problem is not None:
            alone_s = self._clock.now() - self._down_at
            log.info("sharing: in the fleet %r as %s, after %.1f s", self._options.fleet, self.name, alone_s)
        self.problem = reason
        self._changed.set()

    # Receiving

    def _receive(self, envelope: Envelope) -> Iterator[None]:
        if envelope.to not in (TO_ALL, self.id):
            return
        member = self._members.get(envelope.sender)
        if member is not None and member.signs_all and not envelope.is_signed:
            raise Refused(Refusal.UNSIGNED, "this member signs all that it sends", envelope.sender)
        if member is not None and self._has_wrong_number(member, envelope):
            if member.gone_at is None:
                self._gone(member)
            del self._members[envelope.sender]
            member = None
        if member is None:
            member = self._meet(envelope)
        self._check_number(member, envelope)
        messages, unknown = decode_payload(envelope.payload)
        self.counts.refused[Refusal.UNKNOWN] += unknown
        self.counts.messages_received += len(messages)
        member.has_signed = member.has_signed or envelope.is_signed
        if envelope.is_signed and envelope.to == self.id:
            member.is_authenticated, member.skipped_unauthenticated = True, 0
        gone_at = member.gone_at
        for message in messages:
            if member.gone_at != gone_at or self._members.get(member.sender) is not member:
                return  # it has left or died meanwhile: what follows would count for ever
            # The messages after one that fails are not sent again.
            try:
                self._apply(member, envelope, message)
            except ValueError as error:
                text = f"{type(message).__name__}: {error}"
                self._refuse(Refused(Refusal.MALFORMED, text, member.sender))
            except Exception:
                log.exception("handling a message of %s failed", member.name)
            yield

    def _has_wrong_number(self, member: Member, envelope: Envelope) -> bool:
        """Whether the number that is stored for the member is not its own: somebody else has used its id.

        A signed envelope of a member that signs all proves it, if all earlier ones were unsigned. Without a
        key nothing can be proved: a member that was silent begins again with the number that it sends now.
        """
        if envelope.kind is Kind.MISSED or envelope.seq >= member.seq + (envelope.kind is Kind.BATCH):
            return False
        if self._key is None:
            return member.gone_at is not None
        return envelope.is_signed and not member.has_signed and _signs_all(envelope)

    def _check_number(self, member: Member, envelope: Envelope) -> None:
        """Compare the envelope's number with the member's sequence. Raises Refused if it has arrived before.

        Only an envelope that is believed shows that the member is alive.
        """
        if envelope.kind is Kind.MISSED:
            return  # an answer to this process's question, outside the sequence
        missed = envelope.seq - member.seq - (envelope.kind is Kind.BATCH)
        if missed < 0:
            raise Refused(Refusal.STALE, "it has arrived already, or is a recording", envelope.sender)
        member.heard_at = self._clock.now()
        needs_state = member.gone_at is not None
        if needs_state:
            self._log(member, logging.INFO, "sharing: %s is heard again", member.name)
            member.gone_at, member.has_left = None, False
        if missed:
            needs_state = needs_state or member.is_complete
            self._gap(member, missed, envelope.seq - (envelope.kind is Kind.BATCH))
        member.seq = envelope.seq
        if needs_state:
            self._ask(member)

    def _apply(self, member: Member, envelope: Envelope, message: SharedMessage) -> None:
        assert self._listener is not None
        if envelope.kind is Kind.MISSED:
            if not isinstance(message, NEEDS_HMAC):
                self._listener.on_missed(member.id, message)
        elif isinstance(message, MemberState):
            member.state = message
            member.signs_all = member.signs_all or (envelope.is_signed and message.signs_all)
        elif isinstance(message, StateRequest):
            self._send_state(member, message)
        elif isinstance(message, StateBegins):
            self._listener.on_state(member.id)
        elif isinstance(message, StateEnds):
            member.is_complete = True
            if member.gap_end_seq > member.asked_until:  # a gap after the question
                self._ask(member)
            if not member.is_linked:
                member.is_linked = True
                text = "sharing: linked to %s (kvroute %s)"
                self._log(member, logging.INFO, text, member.name, member.release)
                is_synced = member.state is not None and member.state.is_synced
                self._listener.on_linked(member.id, is_synced=is_synced)
            self._changed.set()
        elif isinstance(message, Leaving):
            if member.gone_at is None:
                member.has_left = True
                self._gone(member)
        elif isinstance(message, NEEDS_HMAC) and not (envelope.is_signed and member.is_authenticated):
            if envelope.is_signed:  # its answer is on the way, with all that is true now
                member.skipped_unauthenticated += 1
                self._check_proof(member)
            else:
                self._refuse(Refused(Refusal.UNSIGNED, "it needs an HMAC", member.sender))
        else:
            self._listener.on_message(member.id, message)

    def _meet(self, envelope: Envelope) -> Member:
        """A new member, from its first envelope. Raises Refused if there is no room for it.

        Anybody who can write to the Redis can invent members, so those who have proved nothing make room.
        """
        unsigned = [member for member in self._members.values() if not member.has_signed]
        if self._key is not None and not envelope.is_signed and len(unsigned) >= _MAX_UNSIGNED:
            text = f"{_MAX_UNSIGNED} members have signed nothing yet"
            raise Refused(Refusal.TOO_LARGE, text, envelope.sender)
        if len(self._members) >= _MAX_MEMBERS:
            gone = [member for member in self._members.values() if member.gone_at is not None]
            replaceable = gone or (unsigned if envelope.is_signed else [])
            if not replaceable:
                text = f"the fleet has {_MAX_MEMBERS} members already"
                raise Refused(Refusal.TOO_LARGE, text, envelope.sender)
            oldest = min(replaceable, key=lambda member: member.heard_at)
            if oldest.gone_at is None:
                self._gone(oldest)
            del self._members[oldest.sender]
        previous_seq = envelope.seq - (envelope.kind is Kind.BATCH)
        now = self._clock.now()
        member = Member(envelope.sender, envelope.gateway, previous_seq, now, now)
        self._members[envelope.sender] = member
        self._ask(member)
        return member

    def _gap(self, member: Member, missed: int, gap_end_seq: int) -> None:
        """Batches up to number `gap_end_seq` did not arrive."""
        member.gaps += 1
        member.missed += missed
        self.counts.missed += missed
        if member.is_complete:
            log.warning(
                "sharing: %d batches of %s did not arrive; its state is asked for", missed, member.name
            )
            member.is_complete, member.contiguous_seq = False, member.seq
        member.gap_end_seq = gap_end_seq

    def _ask(self, member: Member) -> None:
        """Ask a member for its state, and for what was missed."""
        member.is_complete, member.asked_at = False, self._clock.now()
        member.asked_until = member.gap_end_seq
        self._emit(Kind.PRIVATE, member.sender, (StateRequest(member.contiguous_seq, member.gap_end_seq),))

    def _send_state(self, member: Member, wanted: StateRequest) -> None:
        """Answer: what the member has missed, then what is true now."""
        assert self._listener is not None
        self.flush()
        if wanted.contiguous_seq != JOINS:
            for batch in self._queue.written_between(wanted.contiguous_seq, wanted.gap_end_seq):
                self._queue_envelope(
                    Outgoing(Kind.MISSED, member.sender, batch.seq, batch.payload, batch.is_signed)
                )
        state = (self._own_state(), StateBegins(), *self._listener.state(), StateEnds())
        self._emit(Kind.PRIVATE, member.sender, state)

    def _gone(self, member: Member) -> None:
        assert self._listener is not None
        if member.is_complete:
            member.contiguous_seq = member.gap_end_seq = member.seq
        member.gone_at, member.is_complete = self._clock.now(), False
        if member.has_left:
            self._log(member, logging.INFO, "sharing: %s has left", member.name)
        elif self.is_up:  # else the cause is this process's own link
            self.counts.deaths += 1
            text = "sharing: %s is silent for %.1f s; its requests no longer count"
            self._log(member, logging.WARNING, text, member.name, _DEAD_S)
        member.is_linked = False
        # Also before it was linked: its dispatches count from the first.
        self._listener.on_peer_gone(member.id)
        self._changed.set()

    def _check_proof(self, member: Member) -> None:
        """Refuse the messages of a member that has not answered in time: they may be recordings."""
        for _ in range(member.refused(self._clock.now(), _DEAD_S)):
            self._refuse(Refused(Refusal.UNSIGNED, "it needs an HMAC that is no recording", member.sender))

    def _refuse(self, refused: Refused) -> None:
        self.counts.refused[refused.reason] += 1
        occurrence = refused.sender, refused.reason
        if occurrence not in self._named and len(self._named) < _MAX_NAMED:
            self._named.add(occurrence)
            member = self._members.get(refused.sender)
            name = member.name if member is not None else refused.sender.hex() or "an unknown sender"
            log.warning("sharing: a message of %s is refused: %s", name, refused)

    def _log(self, member: Member, level: int, text: str, *values: object) -> None:
        """Log a change of a member; at most `_MAX_LINES` lines while it has signed nothing.

        Anybody may have invented such a member.
        """
        if self._key is not None and not member.has_signed:
            if member.lines >= _MAX_LINES:
                return
            member.lines += 1
        log.log(level, text, *values)

    # Sending

    def _emit(self, kind: Kind, to: bytes, messages: Sequence[SharedMessage]) -> None:
        """Queue messages as envelopes. Without a key those that need an HMAC are not sent."""
        is_signed = self._key is not None
        if not is_signed and any(isinstance(message, NEEDS_HMAC) for message in messages):
            messages = [message for message in messages if not isinstance(message, NEEDS_HMAC)]
            if not self._has_warned_of_key and kind is Kind.BATCH:
                self._has_warned_of_key = True
                log.warning("sharing: drains, limits of keys, LMCache's reports: not without sharing.key")
        if not messages:
            return
        self.counts.messages_sent += len(messages)
        for payload in encode_payloads(messages):
            if kind is Kind.BATCH:
                self._seq += 1
            self._queue_envelope(Outgoing(kind, to, self._seq, payload, is_signed))

    def _queue_envelope(self, outgoing: Outgoing) -> None:
        self.counts.dropped += self._queue.add(outgoing)
        self._link.wake()

    def _own_state(self) -> MemberState:
        listener = self._listener
        is_synced = listener is not None and listener.is_synced
        has_reports = listener is not None and listener.has_reports
        lag_s = -1.0 if self.lag_s is None else self.lag_s
        has_key = self._key is not None
        return MemberState(
            self._options.name,
            self.process,
            __version__,
            is_synced,
            has_key,
            lag_s,
            has_reports,
            signs_all=has_key,
        )

    def _own_channel(self, member: bytes) -> bytes:
        return f"kvroute:{self._options.fleet}:{member.hex()}".encode()

    # Time

    async def _beat(self) -> None:
        """Say that this process is alive, and find out which members are not."""
        at = self._clock.now()
        while True:
            await self._clock.sleep(BEAT_S)
            previous, at = at, self._clock.now()
            if self._up_at is not None:
                self.publish(self._own_state())
                self.flush()
            if at - previous < 2 * BEAT_S:
                # Otherwise this process was not running: what the others have sent is still unread.
                self._check(at)

    def _check(self, now: float) -> None:
        if self._up_at is not None:
            silent_s = now - max(self._echo_at, self._up_at)
            if silent_s > _DEAD_S:
                self._set_problem(self._refusal or "it does not deliver messages")
                if silent_s > _STUCK_S:
                    self._link.reconnect()
            elif self._echo_at > self._up_at and self._refusal is None:
                self._set_problem(None)
        for member in list(self._members.values()):
            self._check_proof(member)
            if member.gone_at is None:
                if now - member.heard_at > _DEAD_S:
                    self._gone(member)
                elif not member.is_complete and now - member.asked_at > _ASK_AGAIN_S:
                    self._ask(member)
            elif now - member.gone_at > _FORGET_S:
                del self._members[member.sender]

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(self._run_forever(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_forever(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("%s failed; it is restarted", name)
            await self._clock.sleep(BEAT_S)


def _signs_all(envelope: Envelope) -> bool:
    """Whether the envelope says that its sender signs all of them."""
    messages, _ = decode_payload(envelope.payload)
    return any(isinstance(message, MemberState) and message.signs_all for message in messages)
