"""Channels of one loop over a simulated Redis that loses, delays and refuses messages as the tests say."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import msgspec
import pytest
from pydantic import SecretStr
from tests.support.clocks import AdvancingClock

from kvroute.replicas.channel import BEAT_S, Channel
from kvroute.replicas.envelope import (
    TO_ALL,
    Envelope,
    Kind,
    Refusal,
    decode_payload,
    encode_payloads,
    pack,
    unpack,
)
from kvroute.replicas.messages import (
    Finished,
    FirstToken,
    Leaving,
    OverrideEntry,
    OverridesChanged,
    SessionForgotten,
)
from kvroute.replicas.options import SharingOptions

KEY = "a secret of all members"
DRAIN = OverridesChanged([OverrideEntry("w0", (1, "a"), None, False, True)])


class Bus:
    """A Redis: `pump` delivers everything that waits. While it `is_away` no link is open."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.sent: list[bytes] = []
        self.is_lost = lambda data, link: False

    def pump(self) -> None:
        is_busy = True
        while is_busy:
            is_busy = False
            for sender in self.links:
                while sender.is_open and (command := sender.owner.next_command()) is not None:
                    is_busy = True
                    channel, data = command
                    self.sent.append(data)
                    for link in self.links:
                        if link.is_open and channel in link.channels and not self.is_lost(data, link):
                            link.owner.on_data(data)


class Link:
    def __init__(self, bus: Bus, owner: Channel, channels) -> None:
        self.owner, self.channels = owner, channels
        self.is_open = False
        self.reconnects = 0
        bus.links.append(self)

    def wake(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def reconnect(self) -> None:
        self.reconnects += 1

    def open(self) -> None:
        self.is_open = True
        self.owner.on_up()

    def close(self, why: str = "it cannot be reached") -> None:
        self.is_open = False
        self.owner.on_down(why)

    async def run(self) -> None:
        self.open()
        await asyncio.get_running_loop().create_future()


class Recorder:
    """A `ChannelListener` that records."""

    is_synced = True

    def __init__(self, has_reports: bool = True) -> None:
        self.has_reports = has_reports
        self.facts: list = []
        """What another member must know now."""
        self.received: list = []
        self.missed: list = []
        self.links: list = []

    def state(self):
        return self.facts

    def greeting(self, peer):
        raise AssertionError("a channel asks for `state`")

    def on_linked(self, peer, *, is_synced):
        self.links.append(("linked", peer, is_synced))

    def on_message(self, peer, message):
        self.received.append((peer, message))

    def on_missed(self, peer, message):
        self.missed.append((peer, message))

    def on_peer_gone(self, peer):
        self.links.append(("lost", peer))

    def on_state(self, peer):
        self.links.append(("state", peer))


class Member:
    def __init__(
        self, bus: Bus, clock: AdvancingClock, name: str, gateway: bytes | None = None, **options
    ) -> None:
        self.listener = Recorder()
        self.bus, self.clock = bus, clock
        self.link: Link
        fields = {"url": SecretStr("redis://x"), "member": name, "key": SecretStr(KEY), **options}

        def make_link(channel, channels):
            self.link = Link(bus, channel, channels)
            return self.link

        self.channel = Channel(
            SharingOptions(**fields), gateway or name.ljust(8).encode(), 0, clock, make_link
        )

    @property
    def id(self) -> str:
        return self.channel.id.hex()

    def say(self, *messages) -> None:
        for message in messages:
            self.channel.publish(message)
        self.channel.flush()

    def state_of(self, other: Member) -> str:
        (row,) = [row for row in self.channel.describe() if row["member"] == other.id]
        return row["state"]


@pytest.fixture
def clock() -> AdvancingClock:
    return AdvancingClock()


@pytest.fixture
def bus() -> Bus:
    return Bus()


async def enter(stack: AsyncExitStack, bus: Bus, *members: Member) -> None:
    for member in members:
        await member.channel.start(member.listener)

        async def leave(member: Member = member) -> None:
            member.channel._up_at = None
            member.channel.problem = "the test is over"
            await member.channel.aclose()

        stack.push_async_callback(leave)
    await members[0].clock.settle()
    for member in members:
        member.channel.flush()
    bus.pump()


async def seconds(clock: AdvancingClock, bus: Bus, number: float) -> None:
    for _ in range(round(number / BEAT_S)):
        await clock.advance(BEAT_S)
        bus.pump()


@pytest.fixture
async def two(bus, clock):
    async with AsyncExitStack() as stack:
        one, other = Member(bus, clock, "one"), Member(bus, clock, "other")
        await enter(stack, bus, one, other)
        yield one, other


async def test_members_link_at_once_and_hear_each_other(two, bus):
    one, other = two

    one.say(Finished(1), FirstToken(2))
    bus.pump()

    assert one.listener.links == [("state", other.id), ("linked", other.id, True)]
    assert other.listener.links == [("state", one.id), ("linked", one.id, True)]
    assert other.listener.received == [(one.id, Finished(1)), (one.id, FirstToken(2))]
    assert one.listener.received == [], "its own messages are no news"
    assert one.state_of(other) == "alive"


async def test_processes_of_one_gateway_ignore_each_other(bus, clock):
    async with AsyncExitStack() as stack:
        one, sibling = (Member(bus, clock, "one", b"gateway1") for _ in range(2))
        await enter(stack, bus, one, sibling)

        one.say(Finished(1))
        await seconds(clock, bus, 1)

        assert (sibling.listener.received, sibling.listener.links) == ([], [])


async def test_a_message_for_one_member_reaches_it_alone_and_after_what_was_published(bus, clock):
    async with AsyncExitStack() as stack:
        one, other, third = (Member(bus, clock, name) for name in ("one", "other", "third"))
        await enter(stack, bus, one, other, third)

        one.channel.publish(Finished(1))
        assert one.channel.send(other.id, Finished(2))
        bus.pump()

        assert other.listener.received == [(one.id, Finished(1)), (one.id, Finished(2))]
        assert third.listener.received == [(one.id, Finished(1))]
        assert not one.channel.send("00" * 8, Finished(3)), "there is no such member"


async def test_a_lost_batch_is_noticed_and_made_up_for(two, bus):
    one, other = two
    one.listener.facts = [FirstToken(9)]
    bus.is_lost = lambda data, link: link is other.link
    one.say(SessionForgotten("missed"))
    bus.pump()
    bus.is_lost = lambda data, link: False

    one.say(Finished(2))
    bus.pump()

    assert other.listener.missed == [(one.id, SessionForgotten("missed"))]
    assert [kind for kind, *_ in other.listener.links] == ["state", "linked", "state"]
    assert [message for _, message in other.listener.received] == [Finished(2), FirstToken(9)]
    (row,) = [row for row in other.channel.describe() if row["member"] == one.id]
    assert (row["gaps"], row["missed_batches"], row["state"]) == (1, 1, "alive")
    assert other.channel.counts.missed == 1


async def test_a_lost_last_batch_is_noticed_by_the_next_heartbeat(two, bus, clock):
    one, other = two
    bus.is_lost = lambda data, link: link is other.link
    one.say(SessionForgotten("missed"))
    bus.pump()
    bus.is_lost = lambda data, link: False

    await seconds(clock, bus, BEAT_S)

    assert other.listener.missed == [(one.id, SessionForgotten("missed"))]


async def test_a_state_that_is_lost_is_asked_for_again(two, bus, clock):
    one, other = two
    bus.is_lost = lambda data, link: unpack(data, None).kind is not Kind.BATCH or link is other.link
    one.say(Finished(1))
    bus.pump()
    bus.is_lost = lambda data, link: unpack(data, None).kind is not Kind.BATCH
    await seconds(clock, bus, 1)
    assert other.state_of(one) == "joining"

    bus.is_lost = lambda data, link: False
    await seconds(clock, bus, 2)

    assert other.state_of(one) == "alive"
    assert other.listener.missed == [(one.id, Finished(1))]


async def test_a_member_that_falls_silent_is_lost_within_three_seconds(two, bus, clock):
    one, other = two

    one.link.is_open = False  # as after kill -9
    await seconds(clock, bus, 2.5)

    assert other.listener.links[-1] == ("lost", one.id)
    assert other.state_of(one) == "silent"
    assert other.channel.counts.deaths == 1
    await seconds(clock, bus, 61)
    assert [row["name"] for row in other.channel.describe()] == ["other"], "forgotten"


async def test_a_member_that_is_heard_again_is_asked_for_what_was_missed(two, bus, clock):
    one, other = two
    one.link.close()
    await seconds(clock, bus, 3)
    one.say(SessionForgotten("said alone"))
    one.listener.facts = [FirstToken(4)]

    one.link.open()
    one.channel.flush()
    bus.pump()

    assert [kind for kind, *_ in other.listener.links] == ["state", "linked", "lost", "state", "linked"]
    assert [message for _, message in other.listener.received] == [
        SessionForgotten("said alone"),
        FirstToken(4),
    ]
    assert one.channel.counts.outages == 1


async def test_a_process_that_did_not_run_for_a_while_loses_nobody(two, bus, clock):
    one, other = two

    clock.time += 30  # what the others have sent is still unread
    await clock.advance(0)
    bus.pump()
    await seconds(clock, bus, 1)

    assert other.state_of(one) == "alive"


async def test_a_member_that_leaves_is_gone_at_once(two, bus):
    one, other = two

    closing = asyncio.create_task(one.channel.aclose())
    await one.clock.settle()
    bus.pump()
    await closing

    assert other.listener.links[-1] == ("lost", one.id)
    assert other.state_of(one) == "left"
    assert other.channel.counts.deaths == 0


def batch_of(member: Member, *messages) -> bytes:
    payload = msgspec.msgpack.encode(messages)
    channel = member.channel
    channel._seq += 1
    envelope = Envelope(Kind.BATCH, channel._gateway, channel.id, TO_ALL, channel._seq, 0.0, payload, True)
    return pack(envelope, KEY.encode())


async def test_very_many_messages_at_once_are_handled_in_slices_and_in_order(two):
    one, other = two
    before = len(other.listener.received)
    other.channel.on_data(batch_of(one, *[Finished(number) for number in range(8192)]))
    other.channel.on_data(batch_of(one, FirstToken(1)))
    counts = []
    while len(other.listener.received) < before + 8193:
        counts.append(len(other.listener.received))
        await asyncio.sleep(0)
        assert len(counts) < 1000

    assert max(later - earlier for earlier, later in pairwise([before, *counts])) <= 1024
    received = [message for _, message in other.listener.received[before:]]
    assert received == [*[Finished(number) for number in range(8192)], FirstToken(1)]


async def test_what_a_member_said_before_it_was_found_dead_does_not_count_afterwards(two, bus, clock):
    one, other = two
    other.channel.on_data(batch_of(one, *[Finished(number) for number in range(8192)]))
    member = other.channel._members[one.channel.id]
    other.channel._gone(member)
    handled = len(other.listener.received)
    await clock.settle()

    assert len(other.listener.received) == handled
    assert other.listener.links[-1] == ("lost", one.id)


async def test_redis_that_is_away_is_noted_and_nothing_grows_without_bound(bus, clock):
    async with AsyncExitStack() as stack:
        one, other = Member(bus, clock, "one", max_queued_bytes=64 * 1024), Member(bus, clock, "other")
        await enter(stack, bus, one, other)
        one.link.close("it does not answer in time")
        for number in range(2000):
            one.say(SessionForgotten(f"{number} {'x' * 100}"))

        assert "does not answer in time" in one.channel.notes()[0]
        assert one.channel.counts.dropped > 1000
        assert not one.channel.is_up

        one.link.open()
        one.channel.flush()
        bus.pump()
        await clock.settle()  # the rest is received in slices
        bus.pump()
        await clock.settle()
        assert one.channel.notes() == []
        assert other.channel.counts.missed == one.channel.counts.dropped
        assert other.state_of(one) == "alive"


async def test_an_open_link_that_delivers_nothing_is_noted_and_made_again(two, bus, clock):
    one, other = two
    bus.is_lost = lambda data, link: True

    await seconds(clock, bus, 3)
    assert "does not deliver" in one.channel.notes()[0]
    await seconds(clock, bus, 2)
    assert one.link.reconnects >= 1

    bus.is_lost = lambda data, link: False
    await seconds(clock, bus, 2)
    assert one.channel.notes() == []
    assert one.state_of(other) == "alive"


async def test_a_refusal_of_redis_is_noted_until_a_message_passes(two, bus, clock):
    one, _ = two

    one.channel.on_refused("it does not permit that")
    assert "does not permit" in one.channel.notes()[0]

    await seconds(clock, bus, 2 * BEAT_S)
    assert one.channel.notes() == []


async def test_changes_of_the_fleet_need_the_key_on_both_sides(bus, clock):
    async with AsyncExitStack() as stack:
        with_key, other = Member(bus, clock, "with"), Member(bus, clock, "other")
        without, wrong = Member(bus, clock, "without", key=None), Member(bus, clock, "wrong", key="x" * 20)
        await enter(stack, bus, with_key, other, without, wrong)

        with_key.say(DRAIN)
        without.say(DRAIN, Finished(1))
        wrong.say(DRAIN)
        bus.pump()

        assert (with_key.id, DRAIN) in other.listener.received
        assert [m for _, m in without.listener.received if isinstance(m, OverridesChanged)] == []
        assert [m for _, m in with_key.listener.received] == [Finished(1)]
        assert with_key.channel.counts.refused[Refusal.SIGNATURE] >= 1
        assert without.channel.counts.refused[Refusal.UNSIGNED] >= 1
        assert b"OverridesChanged" not in b"".join(
            data for data in bus.sent if unpack(data, None).sender == without.channel.id
        )


async def test_recorded_changes_are_not_believed(bus, clock):
    async with AsyncExitStack() as stack:
        one, other = Member(bus, clock, "one"), Member(bus, clock, "other")
        await enter(stack, bus, one, other)
        one.say(DRAIN)
        bus.pump()
        recorded = list(bus.sent)
        other.listener.received.clear()

        for data in recorded:  # again in the same life of the receiver
            other.channel.on_data(data)
        assert not any(isinstance(m, OverridesChanged) for _, m in other.listener.received)
        assert other.channel.counts.refused[Refusal.STALE] > 0

        late = Member(bus, clock, "late")
        await enter(stack, bus, late)
        one.link.is_open = False
        late.channel._members.clear()
        for data in recorded:  # and to one that never heard the sender
            late.channel.on_data(data)
        assert not any(isinstance(m, OverridesChanged) for _, m in late.listener.received)
        await seconds(clock, bus, 3)
        assert late.channel.counts.refused[Refusal.UNSIGNED] == 1


def forged(member: Member, *messages, seq: int, key: bytes | None = None) -> bytes:
    """An envelope in the name of `member` by somebody who can write to the Redis."""
    return invented(member.channel.id, *messages, seq=seq, key=key)


def invented(sender: bytes, *messages, seq: int, key: bytes | None = None) -> bytes:
    (payload,) = encode_payloads(messages)
    envelope = Envelope(Kind.BATCH, b"attacker", sender, TO_ALL, seq, 0.0, payload, key is not None)
    return pack(envelope, key)


async def test_an_unsigned_envelope_cannot_silence_a_member_that_has_the_key(two, bus, clock):
    one, other = two

    other.channel.on_data(forged(one, Finished(9), seq=2**62))
    other.channel.on_data(forged(one, Leaving(), seq=2**62 + 1))
    one.say(DRAIN)
    bus.pump()
    await seconds(clock, bus, 3)

    assert (one.id, DRAIN) in other.listener.received
    assert (one.id, Finished(9)) not in other.listener.received
    assert other.state_of(one) == "alive"
    assert other.channel.counts.refused[Refusal.UNSIGNED] == 2


async def test_a_member_whose_id_was_used_before_it_came_is_heard_all_the_same(bus, clock):
    async with AsyncExitStack() as stack:
        one, other = Member(bus, clock, "one"), Member(bus, clock, "other")
        await enter(stack, bus, other)
        other.channel.on_data(forged(one, Finished(9), seq=2**62))

        await enter(stack, bus, one)
        await seconds(clock, bus, 3)
        one.say(DRAIN)
        bus.pump()

        assert (one.id, DRAIN) in other.listener.received
        assert other.state_of(one) == "alive"


async def test_without_a_key_a_member_with_a_forged_number_is_heard_again_after_its_silence(bus, clock):
    async with AsyncExitStack() as stack:
        one, other = Member(bus, clock, "one", key=None), Member(bus, clock, "other", key=None)
        await enter(stack, bus, one, other)

        other.channel.on_data(forged(one, Finished(9), seq=2**62))
        await seconds(clock, bus, 4)
        one.say(Finished(1))
        bus.pump()

        assert (one.id, Finished(1)) in other.listener.received
        assert other.state_of(one) == "alive"


async def test_invented_members_leave_room_for_those_that_have_the_key(bus, clock):
    async with AsyncExitStack() as stack:
        other = Member(bus, clock, "other")
        await enter(stack, bus, other)
        for number in range(2000):
            other.channel.on_data(invented(number.to_bytes(8, "big"), Finished(1), seq=1))
        assert len(other.channel.describe()) < 100

        one = Member(bus, clock, "one")
        await enter(stack, bus, one)

        assert other.state_of(one) == "alive"
        assert other.channel.counts.refused[Refusal.TOO_LARGE] > 1900


async def test_one_who_has_no_key_cannot_fill_the_log(two, caplog):
    """Neither with many goodbyes in one envelope nor by going and coming back."""
    _, other = two
    before, said = len(other.listener.links), len(caplog.records)
    with caplog.at_level("INFO"):
        for seq in range(1, 200):
            other.channel.on_data(invented(bytes(8), Leaving(), Leaving(), seq=seq))

    assert other.listener.links[before:].count(("lost", bytes(8).hex())) == 199
    assert len(caplog.records) - said < 10


async def test_an_envelope_of_very_many_messages_is_refused_undecoded(two):
    _, other = two
    payload = msgspec.msgpack.encode([Finished(1)] * 200_000)
    envelope = Envelope(Kind.BATCH, b"attacker", bytes(8), TO_ALL, 1, 0.0, payload)

    other.channel.on_data(pack(envelope, None))

    assert other.listener.received == []
    assert other.channel.counts.refused[Refusal.TOO_LARGE] == 1


def test_many_messages_are_divided_into_envelopes_that_are_accepted() -> None:
    messages = [Finished(number) for number in range(20_000)]

    payloads = list(encode_payloads(messages))

    assert [message for payload in payloads for message in decode_payload(payload)[0]] == messages


async def test_messages_before_the_answer_of_a_new_member_are_no_alarm(bus, clock, caplog):
    async with AsyncExitStack() as stack:
        one, late = Member(bus, clock, "one"), Member(bus, clock, "late")
        await enter(stack, bus, one)
        one.listener.facts = [DRAIN]
        await late.channel.start(late.listener)
        stack.push_async_callback(late.channel.aclose)
        await clock.settle()

        one.say(Finished(1), DRAIN)  # written before the question of the other one is read
        bus.pump()
        await seconds(clock, bus, 3)

        assert late.channel.counts.refused[Refusal.UNSIGNED] == 0
        assert "is refused" not in caplog.text
        assert [m for _, m in late.listener.received] == [Finished(1), DRAIN]


async def test_a_member_that_mirrors_the_map_of_another_process_is_not_asked_for_reports(bus, clock):
    async with AsyncExitStack() as stack:
        one, mirror, other = (Member(bus, clock, name) for name in ("one", "mirror", "other"))
        mirror.listener.has_reports = False
        await enter(stack, bus, one, mirror, other)

        assert one.channel.reporting_peers == [other.id]
        await seconds(clock, bus, 1)
        other.link.is_open = False
        await seconds(clock, bus, 3)
        assert one.channel.reporting_peers == []


async def test_messages_that_cannot_be_handled_do_not_end_the_sharing(two, bus, caplog):
    one, other = two

    def fail(peer, message):
        raise KeyError("a defect")

    other.listener.on_message = fail
    other.channel.on_data(b"nonsense")
    one.say(Finished(1))
    bus.pump()
    del other.listener.on_message
    one.say(Finished(2))
    bus.pump()

    assert (one.id, Finished(2)) in other.listener.received
    assert other.channel.counts.refused[Refusal.MALFORMED] == 1
    assert f"handling a message of {one.channel.name} failed" in caplog.text


async def test_the_messages_after_one_that_cannot_be_handled_are_applied(two, bus):
    one, other = two
    apply = other.listener.on_message

    def fail_first(peer, message):
        if message == Finished(1):
            raise KeyError("a defect")
        apply(peer, message)

    other.listener.on_message = fail_first
    one.channel.publish(Finished(1), Finished(2))
    one.channel.flush()
    bus.pump()

    assert [message for _, message in other.listener.received if isinstance(message, Finished)] == [
        Finished(2)
    ]


async def test_a_member_of_another_format_is_refused_in_words(two, bus, caplog):
    _, other = two
    stranger = Envelope(Kind.BATCH, b"gateway9", b"stranger", bytes(8), 1, 0.0, b"\x90")
    data = pack(stranger, None)

    for _ in range(3):
        other.channel.on_data(data[:4] + b"\x01" + data[5:])

    assert other.channel.counts.refused[Refusal.FORMAT] == 3
    assert caplog.text.count("has format 1, and this release of kvroute reads format 2") == 1


async def test_joining_ends_when_all_members_are_linked(bus, clock):
    async with AsyncExitStack() as stack:
        one, late = Member(bus, clock, "one"), Member(bus, clock, "late")
        await enter(stack, bus, one)
        one.listener.facts = [FirstToken(1)]
        joining = asyncio.create_task(late.channel.joined(60))
        await enter(stack, bus, late)
        assert not joining.done()

        await seconds(clock, bus, 2)

        assert await joining
        assert late.listener.received == [(one.id, FirstToken(1))]


async def test_joining_ends_at_once_when_redis_is_away(bus, clock):
    async with AsyncExitStack() as stack:
        one = Member(bus, clock, "one")
        one.link.run = asyncio.get_running_loop().create_future  # type: ignore[method-assign]
        joining = asyncio.create_task(one.channel.joined(60))
        await asyncio.sleep(0)

        one.channel.on_down("it cannot be reached")

        assert not await joining
        assert "cannot be reached" in one.channel.notes()[0]
        await stack.aclose()


async def test_dispatches_of_a_member_that_dies_before_it_is_linked_are_released(bus, clock):
    async with AsyncExitStack() as stack:
        one, other = Member(bus, clock, "one"), Member(bus, clock, "other")
        # Its state never arrives, only what it publishes.
        bus.is_lost = lambda data, link: link is one.link and link.owner.id in data[:64]
        await enter(stack, bus, one, other)
        other.say(SessionForgotten("s"))
        bus.pump()
        if not one.listener.received:
            pytest.fail("the message did not arrive")
        assert one.listener.links == []

        other.link.is_open = False
        await seconds(clock, bus, 3)

        assert ("lost", other.id) in one.listener.links


async def test_a_heartbeat_that_fails_is_logged_and_continues(two, bus, clock, monkeypatch, caplog):
    one, other = two
    with monkeypatch.context() as patch:
        patch.setattr(other.channel, "_check", lambda now: 1 / 0)
        await seconds(clock, bus, 1)
    await seconds(clock, bus, 5)

    assert "the heartbeat failed; it is restarted" in caplog.text
    assert one.state_of(other) == "alive"
