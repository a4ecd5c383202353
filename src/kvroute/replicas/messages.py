"""The messages between the processes of one gateway and between gateways, and their encoding. Pure.

Between the processes of one gateway a frame is a length and a MessagePack list of messages, in the order of
the events that they report; both ends run the same release. Between gateways only the messages of
`SharedMessage` are accepted, in envelopes that have a version (`envelope.py`). There, a later release may add
fields at the end of a message, with defaults, and message types; older releases skip unknown ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import msgspec

from kvroute.routing.learned_costs import PrefillSums
from kvroute.wire.lmcache_server import (
    CacheServerAlive,
    CacheServerEvents,
    CacheServerLeft,
    CacheServerState,
    CacheServerStateEnd,
    CacheServerStore,
    CacheServerWanted,
    ControllerReport,
    FullSyncWanted,
)

Figure: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
"""Other values are refused: a NaN or an absurd figure would stay in a worker's load or averages for good."""
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_MOST_ENDED: Final = 1e9
"""Largest figure of requests that have ended together."""


class PeerMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of every message between two processes."""


class MapReset(PeerMessage, frozen=True):
    """The receiver empties its mirror of the cache map; the sender's whole map follows."""


class Attached(PeerMessage, frozen=True):
    """A slot reads from a holder of vLLM blocks. `holder` is a number, unique among the block holders."""

    slot: int
    holder: int
    tier: int
    shared: bool


class Detached(PeerMessage, frozen=True):
    """A slot no longer reads from a holder."""

    slot: int
    holder: int


class Stored(PeerMessage, frozen=True):
    """A holder stored blocks after the block `parent` (None: at the beginning). `keys` are packed block
    keys."""

    holder: int
    block_tokens: int
    parent: int | None
    keys: bytes


class RunSnapshot(PeerMessage, frozen=True):
    """Part of a snapshot: consecutive blocks that all `holders` have. `keys` are packed block keys."""

    holders: list[int]
    block_tokens: int
    keys: bytes


class Removed(PeerMessage, frozen=True):
    """A holder no longer has these blocks. `keys` are packed block keys."""

    holder: int
    keys: bytes


class Cleared(PeerMessage, frozen=True):
    holder: int


class SlotForgotten(PeerMessage, frozen=True):
    """A slot of the cache map no longer exists; no blocks belong to it."""

    slot: int


class KvGroupDefined(PeerMessage, frozen=True):
    """A slot has a further KV cache group with this rule (`index.groups.GroupRule`)."""

    slot: int
    group: int
    kind: str
    block_tokens: int
    span: int


class KvGroupStored(PeerMessage, frozen=True):
    """A further KV cache group stored blocks. `keys` are packed block keys."""

    slot: int
    group: int
    keys: bytes


class KvGroupRemoved(PeerMessage, frozen=True):
    """A further KV cache group no longer has these blocks. `keys` are packed block keys."""

    slot: int
    group: int
    keys: bytes


class KvGroupsCleared(PeerMessage, frozen=True):
    """The further KV cache groups of a slot have no blocks any more; `are_known`: their rules stay."""

    slot: int
    are_known: bool


Domain: TypeAlias = tuple[tuple[str, int, int], str]
"""A `ChunkDomain`: scheme and model."""


class ChunksAttached(PeerMessage, frozen=True):
    """A slot reads from a holder of LMCache chunks; its prompts are looked up in each of `domains`."""

    slot: int
    holder: int
    tier: int
    shared: bool
    domains: list[Domain]


class ChunksDetached(PeerMessage, frozen=True):
    slot: int
    holder: int


Space: TypeAlias = tuple[tuple[str, int, int], str, str]
"""A `ChunkSpace`: scheme, model and salt."""


class ChunksStored(PeerMessage, frozen=True):
    holder: int
    tier: int
    shared: bool
    space: Space
    keys: list[int]


class ChunksRemoved(PeerMessage, frozen=True):
    holder: int
    space: Space
    keys: list[int]


class ChunksSnapshot(PeerMessage, frozen=True):
    """Part of a snapshot: chunks of any space that all `holders` have."""

    holders: list[tuple[int, int, bool]]
    """Number, tier, shared."""
    entries: bytes
    """The keys of `ChunkIndex`'s hash tables, 9 bytes each."""


class ChunksCleared(PeerMessage, frozen=True):
    holder: int


class ChunkSlotForgotten(PeerMessage, frozen=True):
    slot: int


class CachePlaceMessage(msgspec.Struct, frozen=True, array_like=True):
    """A `CachePlace`. `by_lmcache` is True where LMCache itself reports the content of its L1."""

    slot: int
    rank: int
    trust: str
    reason: str
    by_lmcache: bool
    ahead: int = 0
    note: str = ""


class WorkerPlaces(PeerMessage, frozen=True):
    """The slots that a worker's requests can go to now. Empty when the worker's cache is unknown."""

    worker: str
    places: list[CachePlaceMessage]


class TierBandwidth(PeerMessage, frozen=True):
    """The measured bandwidth in GB/s from a slower tier (`blocks.keys.Tier`) to a slot's GPU memory."""

    slot: int
    tier: int
    gb_s: float


class L2TargetMessage(msgspec.Struct, frozen=True, array_like=True):
    """An `L2Target`."""

    holder: int
    scheme: tuple[str, int, int]
    model: str
    parts: list[tuple[int, int]]


class L2Targets(PeerMessage, frozen=True):
    """All places in the shared L2 store where chunks are looked up now."""

    targets: list[L2TargetMessage]


class PromptAnswered(PeerMessage, frozen=True):
    """A worker computed a prompt; only the process that follows the caches receives this.

    `ids` are packed 32-bit token ids, `keys` packed block keys; `sent_at` is the time of the dispatch in
    seconds.
    """

    worker: str
    rank: int
    model: str
    tokens: int
    ids: bytes
    keys: bytes
    salt: str
    adapter: str | None
    sent_at: float
    cached_tokens: int | None


class Distrusted(PeerMessage, frozen=True):
    """The predictions from one place's map are wrong too often."""

    worker: str
    rank: int
    reason: str


class Hello(PeerMessage, frozen=True):
    """The first message in each direction of a link. `is_synced`: the sender can answer `SnapshotRequest`."""

    number: int
    is_synced: bool


class Leaving(PeerMessage, frozen=True):
    """The sender shuts down as planned; the closed link is not a failure."""


class PromptSent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `PromptKeys` whose keys were encoded by `KeyGroups`.

    `base_key`: the keys up to this one were sent before; None: there are none. `fresh` are the packed keys
    after it.
    """

    base_key: int | None
    fresh: bytes
    tokens: Tokens
    block_tokens: Figure


class ExactSent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of an `ExactPrompt` that a dispatch needs; keys as in `PromptSent`."""

    base_key: int | None
    fresh: bytes
    key_tokens: Tokens


class Dispatched(PeerMessage, frozen=True):
    """The sender dispatched a request to a worker.

    `id` is the sender's own number for the request; `is_first` is True where the worker is the first of the
    ranking; `tiers` are the tokens that the map places in GPU memory, L1 and L2. Slots of the cache map have
    other numbers in another gateway, so the receiver finds its own by worker and rank.
    """

    id: int
    model: str
    worker: str
    strategy: str
    reason: str
    is_first: bool
    prefill_s: Figure
    tokens: Tokens
    matched_tokens: Tokens
    streamed: bool
    prompts: list[PromptSent]
    exact: list[ExactSent]
    session_key: str | None
    rank: int | None
    tiers: tuple[int, int, int] | None


class EndedRequests(PeerMessage, frozen=True, tag="Passed"):  # as members of the first version name it
    """Requests of one model that the sender dispatched to a worker, or to one data-parallel rank of it, and
    that ended before that was published.

    Of those that were answered: their number, and the sums of their estimated prefill and of their times from
    dispatch to end. Of the prompts of all: the mean tokens in a block, and the keys as in `PromptSent`:
    `base_keys`, the number of keys after it for each prompt, and all these keys in one. Prompts that were
    sent before as a whole are in `repeated` instead: their last keys, packed. `sessions` are the hashes of
    the requests' sessions, packed.
    """

    model: str
    worker: str
    answered: int
    prefill_s: float
    stay_s: float
    block_tokens: float
    base_keys: list[int | None]
    sizes: list[int]
    fresh: bytes
    repeated: bytes = b""
    sessions: bytes = b""
    rank: int | None = None

    def __post_init__(self) -> None:
        figures = self.answered, self.prefill_s, self.stay_s, self.block_tokens, min(self.sizes, default=0)
        has_keys = len(self.base_keys) == len(self.sizes) and 8 * sum(self.sizes) == len(self.fresh)
        is_packed = not len(self.repeated) % 8 and not len(self.sessions) % 8
        is_sized = self.block_tokens > 0 or not self.fresh
        are_bounded = all(0 <= figure <= _MOST_ENDED for figure in figures)
        if not has_keys or not is_packed or not is_sized or not are_bounded:
            raise ValueError("the figures of requests that have ended do not fit")


class KeyGroupsRequest(PeerMessage, frozen=True, tag="GroupsWanted"):
    """The sender does not know the keys up to `last_key`; answered by `KeyGroupsAnswer`."""

    id: int
    last_key: int


class KeyGroupsAnswer(PeerMessage, frozen=True, tag="Groups"):
    """The answer to the `KeyGroupsRequest` of this `id`: the packed keys up to its `last_key`, none if they
    are forgotten."""

    id: int
    keys: bytes


class FirstToken(PeerMessage, frozen=True):
    id: int


class Finished(PeerMessage, frozen=True):
    id: int


class ResponseOwner(PeerMessage, frozen=True, tag="Owner"):
    """This worker keeps a stored response."""

    response_id: str
    worker: str


class SessionForgotten(PeerMessage, frozen=True):
    session_key: str


class AdminWorkerSpec(msgspec.Struct, frozen=True, array_like=True):
    """The `WorkerSpec` of a worker that the admin API added."""

    id: str
    url: str
    models: tuple[str, ...]
    capacity_tokens: int | None
    role: str | None
    draining: bool
    node: str | None
    needs_health: bool = True


class OverrideEntry(msgspec.Struct, frozen=True, array_like=True):
    """The admin API's override for one worker: added, removed or drained.

    Of two entries the one with the later stamp is valid.
    """

    worker: str
    stamp: tuple[int, str]
    """Milliseconds since the Unix epoch, but above all stamps known before; and the process of the change."""
    added: AdminWorkerSpec | None
    removed: bool
    drained: bool


class OverridesChanged(PeerMessage, frozen=True):
    """Changes of the fleet through the admin API; workers that are not named have not changed."""

    entries: list[OverrideEntry]


class Ejected(PeerMessage, frozen=True):
    """The sender ejected a healthy worker from routing."""

    worker: str
    cause: str


class SnapshotRequest(PeerMessage, frozen=True):
    """The sender has just started and asks for `RecentPrompts`, then `InSync`.

    `only_reports`: it has the rest, and asks for LMCache's reports alone.
    """

    only_reports: bool = False


class CacheCleared(PeerMessage, frozen=True):
    """The prefix cache of a worker was emptied through the admin API, or that of one rank by its own
    event."""

    worker: str
    rank: int | None = None


class RecentPrompts(PeerMessage, frozen=True):
    """Prompts that were sent to a worker, or to one rank of it, the least recently used first, as packed
    keys."""

    worker: str
    prompts: list[bytes]
    rank: int | None = None


class LearnedCosts(PeerMessage, frozen=True):
    """A `PrefillSums` of a model, and by worker the `Speeds.sums`; for a process that joins."""

    model: str
    sums: PrefillSums
    speeds: dict[str, tuple[int, float, float]]


class PlacedSessions(PeerMessage, frozen=True):
    """`Session.placements` and `SessionWorkers.latest`, for a process that joins.

    `ranks` has the rank of each placement, if any has one.
    """

    placements: list[tuple[str, int, str, str]]
    models: list[str] = []
    latest: list[tuple[int, str]] = []
    ranks: list[int | None] = msgspec.field(default_factory=list)


class KeyUsed(PeerMessage, frozen=True):
    """What the sender's clients have used of a key's limits: since its last message of this key, and since
    its start. `in_flight`: now."""

    key: str
    requests: int
    tokens: int
    all_requests: int
    all_tokens: int
    in_flight: int


class RequestLost(PeerMessage, frozen=True):
    """A worker was lost while it had a request with this body (`gateway.poison.Loss`), `age_s` ago."""

    digest: bytes
    id: int
    key: str
    model: str
    body_bytes: int
    worker: str
    age_s: float


class LostRequestsCleared(PeerMessage, frozen=True):
    """An operator has cleared the losses of the body with this digest, or of all (b"")."""

    digest: bytes


class LimitsInUse(PeerMessage, frozen=True, tag="KeysRefilling"):
    """Key, requests and tokens that have not refilled yet, for a process that joins."""

    uses: list[tuple[str, int, int]]


class InSync(PeerMessage, frozen=True):
    """The sender has sent its whole answer to a `SnapshotRequest`; `only_reports` is that of the request."""

    only_reports: bool = False


class MemberState(PeerMessage, frozen=True):
    """A member of the fleet is alive. `lag_s`: its own messages take this long through Redis.

    `has_reports`: it has LMCache's reports, so it can send the state of LMCache's servers. `signs_all`: each
    of its envelopes has an HMAC; earlier releases sign only those that need one.
    """

    name: str
    process: int
    release: str
    is_synced: bool
    has_key: bool
    lag_s: float
    has_reports: bool = True
    signs_all: bool = False


class StateRequest(PeerMessage, frozen=True, tag="StateWanted"):
    """The sender asks for the receiver's state, and for the batches that it has missed.

    They have the numbers after `contiguous_seq` up to `gap_end_seq`; `contiguous_seq` is -1 if it joins.
    """

    contiguous_seq: int
    gap_end_seq: int


class StateBegins(PeerMessage, frozen=True):
    """The receiver drops the sender's requests; those that still run follow, then `StateEnds`."""


class StateEnds(PeerMessage, frozen=True):
    """The state that `StateRequest` asked for is complete."""


class PeerRequest(PeerMessage, frozen=True):
    """A request that the receiver answers with `PeerAnswer`; `topic` selects the handler."""

    id: int
    topic: str
    argument: bytes


class PeerAnswer(PeerMessage, frozen=True):
    id: int
    payload: bytes


SharedMessage: TypeAlias = (
    Dispatched
    | FirstToken
    | Finished
    | EndedRequests
    | KeyGroupsRequest
    | KeyGroupsAnswer
    | ResponseOwner
    | SessionForgotten
    | OverridesChanged
    | Ejected
    | CacheCleared
    | SnapshotRequest
    | RecentPrompts
    | LearnedCosts
    | PlacedSessions
    | KeyUsed
    | LimitsInUse
    | RequestLost
    | LostRequestsCleared
    | InSync
    | Leaving
    | MemberState
    | StateRequest
    | StateBegins
    | StateEnds
    | CacheServerEvents
    | CacheServerAlive
    | CacheServerLeft
    | CacheServerWanted
    | CacheServerState
    | CacheServerStore
    | CacheServerStateEnd
    | ControllerReport
    | FullSyncWanted
)
"""What gateways exchange: every message that a process accepts from outside its machine."""

Message: TypeAlias = (
    SharedMessage
    | Hello
    | PeerRequest
    | PeerAnswer
    | MapReset
    | Attached
    | Detached
    | Stored
    | RunSnapshot
    | Removed
    | Cleared
    | SlotForgotten
    | KvGroupDefined
    | KvGroupStored
    | KvGroupRemoved
    | KvGroupsCleared
    | ChunksAttached
    | ChunksDetached
    | ChunksStored
    | ChunksRemoved
    | ChunksSnapshot
    | ChunksCleared
    | ChunkSlotForgotten
    | WorkerPlaces
    | TierBandwidth
    | L2Targets
    | PromptAnswered
    | Distrusted
)

PeerId: TypeAlias = int | str
"""Another process: its number within this gateway, or the id of a member of another gateway."""


def pack_keys(keys: Sequence[int]) -> bytes:
    """Keys as unsigned 64-bit numbers, in the machine's byte order."""
    if not keys:
        return b""
    return (keys if isinstance(keys, array) and keys.typecode == "Q" else array("Q", keys)).tobytes()


def unpack_keys(keys: bytes) -> array[int]:
    """The keys that `pack_keys` packed."""
    return array("Q", keys)


def unpack_ids(ids: bytes) -> array[int]:
    """Token ids that were packed as 32-bit numbers."""
    return array("I", ids)
