"""What somebody without the fleet's key may write to its Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random

import msgspec
from redis.asyncio import Redis

from kvroute.errors import WireError
from kvroute.replicas.envelope import (
    ID_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_MESSAGES,
    TO_ALL,
    Envelope,
    Kind,
    pack,
    unpack,
)
from kvroute.replicas.messages import Leaving

LISTENS_S = 0.8
"""Each member writes twice a second."""
INVENTED = 300
"""Invented members each time."""


async def members(redis: Redis) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The fleet's channel, and (gateway, member) of each one that was heard on it."""
    heard, channel = dict[bytes, bytes](), b""
    async with redis.pubsub() as listening:
        await listening.psubscribe("kvroute:*:all")
        try:
            async with asyncio.timeout(LISTENS_S):
                async for message in listening.listen():
                    if message["type"] != "pmessage":
                        continue
                    channel = message["channel"]
                    try:
                        envelope = unpack(message["data"], None)
                    except WireError:
                        continue
                    heard[envelope.sender] = envelope.gateway
        except TimeoutError:
            pass
    return channel, [(gateway, sender) for sender, gateway in heard.items()]


def hostile_messages(heard: Sequence[tuple[bytes, bytes]], random: Random) -> Iterator[bytes]:
    """Unsigned envelopes in the names of these members, huge and invented ones, and other bytes."""
    leave = msgspec.msgpack.encode(Leaving())
    empty, goodbye = msgspec.msgpack.encode([]), b"\x91" + leave

    def envelope(payload: bytes, sender: bytes, seq: int = 1, kind: Kind = Kind.BATCH) -> bytes:
        # Messages of their own gateway do not count, so this is another one.
        return pack(Envelope(kind, random.randbytes(ID_BYTES), sender, TO_ALL, seq, 0.0, payload), None)

    for _, sender in heard:
        yield envelope(empty, sender, 2**62)
        yield envelope(goodbye, sender, 2**62 + 1)
        yield envelope(goodbye, sender, 2**63 - 1, Kind.PRIVATE)
    for count in (MAX_MESSAGES, 200_000):
        many = b"\xdd" + count.to_bytes(4, "big") + leave * count
        yield envelope(many, random.randbytes(ID_BYTES))
        yield envelope(many, heard[0][1] if heard else bytes(ID_BYTES), 2**62)
    yield envelope(b"\xdd\xff\xff\xff\xff" + b"\x91" * 100_000, random.randbytes(ID_BYTES))
    yield envelope(bytes(MAX_ENVELOPE_BYTES), random.randbytes(ID_BYTES))
    yield bytes(2 * MAX_ENVELOPE_BYTES)
    for size in (0, 1, 43, 200):
        yield random.randbytes(size)
    for _ in range(INVENTED):
        yield envelope(empty, random.randbytes(ID_BYTES), random.getrandbits(62))
