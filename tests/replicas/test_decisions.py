"""Two routers that receive each other's messages have the same loads and route history."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf, nan

import msgspec
import pytest
from tests.support.clocks import ManualClock

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.key_groups import KeyGroups
from kvroute.blocks.keys import PromptKeys, block_keys
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerFacts, WorkerId, WorkerRole, WorkerSpec
from kvroute.index.map_trust import MapTrust
from kvroute.replicas.decisions import PAUSE_S, REPEAT_S, SHORT_S, DispatchPublisher, PeerDispatches
from kvroute.replicas.envelope import SPLIT_BYTES, decode_payload, encode_payloads
from kvroute.replicas.members import apply_recent_prompts, recent_prompts
from kvroute.replicas.mesh import GATHER_S, FrameReader, encode_frame
from kvroute.replicas.messages import (
    Dispatched,
    EndedRequests,
    Finished,
    FirstToken,
    KeyGroupsAnswer,
    KeyGroupsRequest,
    RecentPrompts,
    SessionForgotten,
    pack_keys,
    unpack_keys,
)
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Router
from kvroute.routing.sessions import hash_of_session
from kvroute.routing.strategy import CachePlace, ExactPrompt, NoMap, RouteQuery, Tokens

MODEL = "m"


class Gateway:
    """A router with its fleet; its messages are encoded and decoded as between processes."""

    def __init__(self, strategy: str, clock: ManualClock, caches=None, roles=("both",) * 3) -> None:
        self.groups = KeyGroups()
        self.own = DispatchPublisher(lambda: None, self.groups)
        self.router = Router(RoutingOptions(strategy=strategy), caches=caches, observer=self.own)
        self.fleet = Fleet()
        self.specs = [
            WorkerSpec(WorkerId(f"w{n}"), f"http://w{n}", role=WorkerRole(role))
            for n, role in enumerate(roles)
        ]
        self.clock = clock
        self.serve(self.specs)
        self.answers: list = []
        self.peers = PeerDispatches(
            self.router, self.fleet, clock, self.groups, lambda _, *messages: self.sent(messages)
        )
        self.envelopes = 0

    def serve(self, specs) -> None:
        """Let the fleet have these workers, all of them routable."""
        known = self.fleet.workers()
        self.fleet.apply("test", specs)
        for worker in self.fleet.workers():
            if worker not in known:
                facts = WorkerFacts(frozenset([MODEL]), capacity_tokens=20_000, block_size=16)
                self.fleet.update_facts(worker, facts)
                self.fleet.mark_healthy(worker, self.clock.now())
                self.router.worker_joined(worker)

    def sent(self, messages) -> None:
        self.answers += messages
        self.envelopes += 1

    def query(self, text: str, **fields) -> RouteQuery:
        keys = block_keys(text.encode())
        prompts = (PromptKeys(keys, len(text) // 4, 16.0),)
        return RouteQuery(MODEL, self.clock.now(), prompts, len(text) // 4, **fields)

    def send(self, text: str, **fields):
        query = self.query(text, **fields)
        decision = self.router.decide(query, self.fleet.view(MODEL))
        chosen = decision.ranking[0]
        return self.router.dispatch(query, decision, chosen, self.clock.now()), chosen

    def receive(self, other: Gateway, *more) -> list:
        """Apply the messages of the other one, and `more` of its messages."""
        due = other.own.take(self.clock.now(), everything=True)
        messages = FrameReader().feed(encode_frame([*due, *more]))
        for message in messages:
            if isinstance(message, Dispatched):
                self.peers.dispatched(1, message)
            elif isinstance(message, FirstToken):
                self.peers.first_token(1, message.id)
            elif isinstance(message, Finished):
                self.peers.finished(1, message.id)
            elif isinstance(message, EndedRequests):
                self.peers.ended(1, message)
            elif isinstance(message, SessionForgotten):
                self.router.session_forgotten_by_peer(message.session_key)
        return messages

    def loads(self) -> list[tuple[float, int, int, int]]:
        now = self.clock.now()
        return [
            (round(w.load.wait(now), 6), w.load.in_flight, w.load.active_tokens, w.load.queued)
            for w in self.fleet.workers()
        ]

    def explained(self, text: str) -> list[tuple[str, int]]:
        decision = self.router.decide(self.query(text), self.fleet.view(MODEL))
        return [(c.worker.id, c.matched_tokens) for c in decision.ranking]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_the_session_of_a_request_that_has_ended_is_known_to_the_others(clock):
    sender, receiver = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    dispatch, chosen = sender.send("a short request", session_key="s", streamed=False)
    dispatch.finish(clock.now())

    messages = receiver.receive(sender)

    assert [type(message) for message in messages] == [EndedRequests]
    assert messages[0].sessions != b"s"
    assert receiver.router.sessions.worker(hash_of_session(MODEL, "s")) == chosen.worker.id


@pytest.mark.parametrize("strategy", ["prefixaware", "roundrobin", "session", "kvaware"])
def test_loads_and_prefix_trees_of_two_processes_agree(strategy, clock):
    both = [Gateway(strategy, clock), Gateway(strategy, clock)]
    rng, open_, texts = random.Random(5), [], [f"conversation {n} " for n in range(6)]

    for step in range(300):
        clock.time += 0.01
        sender = both[step % 2]
        if open_ and rng.random() < 0.5:
            place = rng.randrange(len(open_))
            dispatch, is_streamed = open_[place]
            if not is_streamed:
                dispatch.finish(clock.now())
                open_.pop(place)
            else:
                dispatch.first_token(clock.now())
                open_[place] = dispatch, False
        else:
            place = rng.randrange(len(texts))
            texts[place] += f"and turn {step} says {rng.getrandbits(200):x} "
            streamed = rng.random() < 0.8
            dispatch, _ = sender.send(texts[place], session_key=str(place), streamed=streamed)
            open_.append((dispatch, streamed))
        both[0].receive(both[1])
        both[1].receive(both[0])

        assert both[0].loads() == both[1].loads()

    for text in texts:
        assert both[0].explained(text) == both[1].explained(text)
    workers = [
        [each.router.sessions.worker(hash_of_session(MODEL, str(place))) for place in range(len(texts))]
        for each in both
    ]
    assert workers[0] == workers[1]
    assert (None in workers[0]) is (strategy in ("roundrobin", "session"))
    for dispatch, _ in open_:
        dispatch.finish(clock.now())
    both[0].receive(both[1])
    both[1].receive(both[0])
    assert both[0].loads() == both[1].loads() == [(0.0, 0, 0, 0)] * 3
    assert both[0].peers.unfinished == both[1].peers.unfinished == 0


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_requests_that_end_before_they_are_published_count_as_others(batch, clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    rng, texts = random.Random(batch), [f"conversation {n} " for n in range(6)]

    for step in range(120):
        clock.time += 0.01
        place = rng.randrange(len(texts))
        texts[place] += f"and turn {step} says {rng.getrandbits(800):x} "
        dispatch, _ = one.send(texts[place], streamed=step % 2 == 0)
        clock.time += 0.002
        if step % 3:
            dispatch.first_token(clock.now())
        dispatch.finish(clock.now())
        if step % batch == 0:
            assert {type(message) for message in other.receive(one)} == {EndedRequests}
    other.receive(one)

    assert other.loads() == one.loads() == [(0.0, 0, 0, 0)] * 3
    assert other.peers.unfinished == 0
    for text in texts:
        assert other.explained(text) == one.explained(text)
    clock.time += 5  # the averages divide by a second at least, so the first one begins with a batch
    for mine, theirs in zip(one.fleet.workers(), other.fleet.workers(), strict=True):
        assert theirs.load.recent(clock.now()) == pytest.approx(mine.load.recent(clock.now()), rel=0.1)
        assert theirs.load.residence_s == pytest.approx(mine.load.residence_s, rel=0.01)


def test_what_has_ended_waits_for_other_messages(clock):
    one = Gateway("prefixaware", clock)
    one.send("ended " * 20)[0].finish(clock.now())

    assert one.own.take(clock.now()) == []
    assert one.own.due_at == clock.now() + PAUSE_S
    running, _ = one.send("running " * 20)
    clock.time += PAUSE_S
    sent, ended = one.own.take(clock.now())

    assert isinstance(sent, Dispatched)
    assert isinstance(ended, EndedRequests)
    assert one.own.due_at is None
    running.finish(clock.now())
    assert one.own.take(clock.now()) == [Finished(sent.id)]


def test_what_has_ended_is_sent_in_the_end_with_nothing_else_to_send(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    one.send("ended " * 20)[0].finish(clock.now())

    takes = [one.own.take(clock.now())]
    while one.own.due_at is not None:
        clock.time = one.own.due_at
        takes.append(one.own.take(clock.now()))

    assert [len(messages) for messages in takes] == [0, 0, 0, 0, 1]
    other.receive(one, *takes[-1])
    assert other.explained("ended " * 20) == one.explained("ended " * 20)


def test_a_request_that_has_just_begun_waits_while_most_are_short(clock):
    one = Gateway("prefixaware", clock)
    one.send("ended " * 20)[0].finish(clock.now())
    one.own.take(clock.now())

    soon, _ = one.send("ends soon " * 20)
    clock.time += 0.001
    late, _ = one.send("runs on " * 20)
    clock.time += 0.004
    soon.finish(clock.now())
    clock.time += PAUSE_S - 0.005
    assert one.own.take(clock.now()) == []
    assert one.own.due_at == clock.now() + PAUSE_S
    clock.time = one.own.due_at
    sent, ended = one.own.take(clock.now())

    assert isinstance(sent, Dispatched)
    assert isinstance(ended, EndedRequests)
    late.finish(clock.now())
    assert one.own.take(clock.now()) == [Finished(sent.id)]


def test_only_requests_that_end_at_once_make_others_wait(clock):
    one = Gateway("prefixaware", clock)
    dispatches = [one.send(f"request {number} " * 20)[0] for number in range(3)]
    dispatches[0].finish(clock.now())
    clock.time += SHORT_S + 0.001
    for dispatch in dispatches[1:]:
        dispatch.finish(clock.now())

    assert one.own.take(clock.now()) == []
    assert one.own.due_at == clock.now() + GATHER_S


def test_requests_are_published_soon_again_once_most_of_them_last(clock):
    one = Gateway("prefixaware", clock)
    one.send("ended " * 20)[0].finish(clock.now())
    one.own.take(clock.now())
    for number in range(3):
        one.send(f"runs on {number} " * 20)
    clock.time += PAUSE_S
    assert len(one.own.take(clock.now())) == 4

    one.send("begun " * 20)
    (sent,) = one.own.take(clock.now())

    assert isinstance(sent, Dispatched)


def test_no_request_waits_where_requests_last(clock):
    one = Gateway("prefixaware", clock)
    for number in range(8):
        one.send(f"request {number} " * 20)
        clock.time += 0.001
        (sent,) = one.own.take(clock.now())
        assert isinstance(sent, Dispatched)
        assert one.own.due_at is None


@pytest.mark.parametrize("strategy", ["roundrobin", "session"])
def test_a_strategy_that_follows_dispatches_has_them_in_order(strategy, clock):
    """A session that is forgotten after a dispatch must not be placed by it again."""
    one = Gateway(strategy, clock)
    one.send("ended " * 20, session_key="s")[0].finish(clock.now())
    one.own.take(clock.now())
    one.send("runs on " * 20, session_key="s")
    one.router.forget_session("s")

    assert [type(message) for message in one.own.take(clock.now())] == [Dispatched, SessionForgotten]


def test_all_is_published_for_a_process_that_links(clock):
    one = Gateway("prefixaware", clock)
    one.send("ended " * 20)[0].finish(clock.now())
    one.own.take(clock.now())
    one.send("runs on " * 20)

    messages = one.own.take(clock.now(), everything=True)

    assert [type(message) for message in messages] == [Dispatched, EndedRequests]
    assert one.own.due_at is None


def test_a_prompt_that_is_sent_again_costs_one_key(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    texts = [f"{number} {random.Random(number).getrandbits(40_000):x}" for number in range(3)]
    for text in texts:
        one.send(text)[0].finish(clock.now())
    other.receive(one)
    clock.time += REPEAT_S
    for text in texts:
        one.send(text)[0].finish(clock.now())

    sent = other.receive(one)

    keys = [key for message in sent for key in unpack_keys(message.repeated)]
    assert sorted(keys) == sorted(block_keys(text.encode())[-1] for text in texts)
    assert all(message.base_keys == [] and message.fresh == b"" for message in sent)
    for text in texts:
        assert other.explained(text) == one.explained(text)


def repeated(messages) -> int:
    """Prompts that were sent before, in messages about ended requests."""
    return sum(len(message.repeated) // 8 for message in messages)


@pytest.mark.parametrize("counts_repeats", [False, True])
def test_a_prompt_that_the_others_got_lately_is_sent_again_only_where_each_use_counts(clock, counts_repeats):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    one.own.counts_repeats = counts_repeats
    text, sent = f"{random.Random(3).getrandbits(40_000):x}", []
    for _ in range(4):
        dispatch, chosen = one.send(text, streamed=False)
        clock.time += 0.002
        dispatch.finish(clock.now())
        sent += other.receive(one)

    assert repeated(sent) == (3 if counts_repeats else 0)
    assert [message.answered for message in sent] == [1] * 4
    assert other.fleet.get(chosen.worker.id).load.residence_s == pytest.approx(0.002)
    clock.time += REPEAT_S
    one.send(text)[0].finish(clock.now())
    assert repeated(other.receive(one)) == 1


def test_a_repeated_prompt_of_an_unanswered_request_is_no_message(clock):
    one, text = Gateway("prefixaware", clock), f"{random.Random(3).getrandbits(40_000):x}"
    for _ in range(2):
        one.send(text)[0].finish(clock.now())

    (message,) = one.own.take(clock.now(), everything=True)
    one.send(text)[0].finish(clock.now())

    assert (message.answered, len(message.sizes)) == (0, 1)
    assert one.own.take(clock.now(), everything=True) == []


def test_a_prompt_that_went_to_another_worker_is_sent_again(clock):
    one, text = Gateway("prefixaware", clock), f"{random.Random(3).getrandbits(40_000):x}"
    query = one.query(text)
    for worker in one.router.decide(query, one.fleet.view(MODEL)).ranking:
        decision = one.router.decide(query, one.fleet.view(MODEL))
        candidate = next(each for each in decision.ranking if each.worker is worker.worker)
        one.router.dispatch(query, decision, candidate, clock.now()).finish(clock.now())

    messages = one.own.take(clock.now(), everything=True)

    assert {message.worker for message in messages} == {"w0", "w1", "w2"}
    assert repeated(messages) == 2


def test_a_prompt_that_is_sent_again_comes_to_the_history_of_another_worker(clock):
    """Its keys are known, but not to have been sent to this worker."""
    other, text = Gateway("prefixaware", clock), f"{random.Random(3).getrandbits(40_000):x}"
    keys = pack_keys(block_keys(text.encode()))
    last = keys[-8:]
    other.peers.ended(1, EndedRequests("m", "w0", 1, 0.1, 0.1, 16.0, [None], [len(keys) // 8], keys))
    for worker in ("w1", "w2"):
        other.peers.ended(1, EndedRequests("m", worker, 1, 0.1, 0.1, 16.0, [], [], b"", last))

    assert {matched for _, matched in other.explained(text)} == {2 * len(keys)}


def test_a_request_is_released_although_it_began_before_its_link_and_ended_after(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    running, _ = one.send("begun " * 100)
    # Before the state is sent, what was gathered is published to the others.
    one.own.take(clock.now(), everything=True)
    other.receive(one, *one.own.unfinished())
    assert other.peers.unfinished == 1

    running.finish(clock.now())
    other.receive(one)

    assert other.loads() == [(0.0, 0, 0, 0)] * 3


def test_requests_that_ended_at_an_unknown_worker_are_skipped(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    other.fleet.apply("test", [])
    one.send("hello " * 50)[0].finish(clock.now())

    other.receive(one)

    assert other.router.index_size().blocks == 0


def test_prompts_of_ended_requests_with_unknown_keys_arrive_later(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    text = f"{random.Random(3).getrandbits(40_000):x}"
    one.send(text)[0].finish(clock.now())
    one.own.take(clock.now(), everything=True)  # lost
    one.send(text + "and more " * 20)[0].finish(clock.now())
    one.send("another " * 40)[0].finish(clock.now())

    other.receive(one)
    assert other.explained("another " * 40) == one.explained("another " * 40)
    (wanted,) = other.answers
    one.peers.send_key_groups("other", wanted)
    (answer,) = one.answers
    other.peers.learn_key_groups(1, answer)

    assert other.explained(text) == one.explained(text)


def test_round_robin_continues_across_processes(clock):
    one, other = Gateway("roundrobin", clock), Gateway("roundrobin", clock)

    taken = []
    for step in range(6):
        sender, receiver = (one, other) if step % 2 else (other, one)
        taken.append(sender.send("x" * 200)[1].worker.id)
        receiver.receive(sender)

    assert taken[:3] == taken[3:]
    assert len(set(taken)) == 3


@pytest.mark.parametrize(
    ("roles", "ranked_with"),
    [(("both",) * 3, 0), (("both",) * 6, 2), (("decode", "decode", "decode", "prefill", "prefill"), 0)],
    ids=["without a request of its own", "with one before workers joined", "with roles"],
)
def test_a_standby_keeps_sessions_where_load_has_moved_them(roles, ranked_with, clock):
    one, standby = Gateway("session", clock, roles=roles), Gateway("session", clock, roles=roles)
    if ranked_with:
        standby.serve(standby.specs[:ranked_with])
        before, _ = standby.send("before " * 20, session_key="before")
        standby.serve(standby.specs)
        before.finish(clock.now())  # a busy home would not get the first request of a session
    places, running = {}, []
    for session in map(str, range(60)):
        for _ in range(2):
            dispatch, chosen = one.send("hello " * 50, session_key=session)
            running.append(dispatch)
        places[session] = chosen.worker.id
        standby.receive(one)
    for dispatch in running:
        dispatch.finish(clock.now())
    standby.receive(one)

    def first(gateway: Gateway, session: str) -> str:
        decision = gateway.router.decide(
            gateway.query("hello " * 51, session_key=session), gateway.fleet.view(MODEL)
        )
        return decision.ranking[0].worker.id

    assert {session: first(one, session) for session in places} == places
    assert {session: first(standby, session) for session in places} == places
    homes = Gateway("session", clock, roles=roles)
    assert {session: first(homes, session) for session in places} != places, "load has moved some"
    for session in places:
        assert standby.router.session_forgotten_by_peer(session)
        assert first(standby, session) == first(homes, session)


def test_a_lost_process_releases_its_load_and_restores_it_when_it_returns(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    running, _ = one.send("begun " * 100)
    running.first_token(clock.now())
    one.send("waits " * 100)
    ended, _ = one.send("ended " * 100)
    ended.finish(clock.now())
    other.receive(one)
    loads = other.loads()

    other.peers.peer_gone(1)
    assert other.loads() == [(0.0, 0, 0, 0)] * 3

    other.receive(one, *one.own.unfinished())
    assert other.loads() == loads == one.loads()


def test_a_dispatch_that_is_sent_twice_is_released_once_it_ends(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    one.send("twice " * 100)
    (sent,) = one.own.take(clock.now(), everything=True)

    other.peers.dispatched(1, sent)
    other.peers.dispatched(1, sent)
    assert sum(worker.load.in_flight for worker in other.fleet.workers()) == 1

    other.peers.finished(1, sent.id)
    assert sum(worker.load.in_flight for worker in other.fleet.workers()) == 0


def test_the_end_of_an_unknown_request_changes_nothing(clock):
    other = Gateway("prefixaware", clock)

    other.peers.first_token(1, 7)
    other.peers.finished(1, 7)
    other.peers.peer_gone(3)

    assert other.loads() == [(0.0, 0, 0, 0)] * 3


def test_a_request_to_an_unknown_worker_is_skipped(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    other.fleet.apply("test", [])
    _, chosen = one.send("hello " * 50)

    other.receive(one)

    assert chosen.worker.load.in_flight == 1
    assert other.peers.unfinished == 0


def test_a_process_that_joins_receives_the_route_history(clock):
    one, late = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    rng = random.Random(2)
    texts = [("shared " * 40) + f"{rng.getrandbits(4000):x}" for _ in range(30)]
    for text in texts:
        one.send(text)[0].finish(clock.now())

    messages = FrameReader().feed(encode_frame(list(recent_prompts(one.router, one.fleet.workers()))))
    for message in messages:
        assert isinstance(message, RecentPrompts)
        apply_recent_prompts(late.router, late.fleet, late.groups, message)

    for text in texts:
        assert late.explained(text) == one.explained(text)


def test_a_long_route_history_is_sent_in_messages_that_fit_into_envelopes(clock):
    one, late = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    rng = random.Random(5)
    shared = f"{rng.getrandbits(160_000):x}"
    texts = [f"{shared}{rng.getrandbits(600):x}" for _ in range(150)]
    for text in texts:
        one.send(text)[0].finish(clock.now())

    messages = list(recent_prompts(one.router, one.fleet.workers()))
    assert sum(len(keys) for each in messages for keys in each.prompts) > 2 * SPLIT_BYTES
    longest = max(len(keys) for each in messages for keys in each.prompts)
    for message in messages:
        (payload,) = encode_payloads([message])
        assert len(payload) < SPLIT_BYTES + 2 * longest
        apply_recent_prompts(late.router, late.fleet, late.groups, message)

    assert [late.explained(text) for text in texts] == [one.explained(text) for text in texts]


def test_a_dispatch_with_unknown_groups_is_load_until_they_arrive(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    text = f"{random.Random(3).getrandbits(40_000):x}"
    one.send(text)[0].finish(clock.now())
    one.own.take(clock.now(), everything=True)  # lost
    running, _ = one.send(text + "and more")

    other.receive(one)

    assert other.loads() == one.loads()
    assert other.explained(text) != one.explained(text)
    (wanted,) = other.answers
    assert isinstance(wanted, KeyGroupsRequest)
    one.peers.send_key_groups("other", wanted)
    (answer,) = one.answers
    assert isinstance(answer, KeyGroupsAnswer)
    other.peers.learn_key_groups(1, answer)
    assert other.explained(text) == one.explained(text)
    running.finish(clock.now())
    other.receive(one)
    assert other.loads() == [(0.0, 0, 0, 0)] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_s": float("nan")},
        {"stay_s": float("inf")},
        {"answered": -1},
        {"sizes": [1, 1]},
        {"fresh": b"x"},
        {"repeated": b"x"},
        {"base_keys": [None, None], "sizes": [-1, 2]},
    ],
)
def test_figures_that_do_not_fit_are_no_message(change):
    whole = {
        "model": "m",
        "worker": "w",
        "answered": 1,
        "prefill_s": 0.1,
        "stay_s": 0.2,
        "block_tokens": 16.0,
    }
    keys = {"base_keys": [None], "sizes": [1], "fresh": bytes(8)}
    EndedRequests(**whole | keys)

    with pytest.raises(ValueError, match="do not fit"):
        EndedRequests(**whole | keys | change)


def test_a_reason_of_a_later_release_is_load_like_any_other(clock):
    one, other = Gateway("session", clock), Gateway("session", clock)
    dispatch, _ = one.send("Hi.", session_key="s")
    (sent,) = one.own.take(clock.now(), everything=True)

    other.peers.dispatched("peer", msgspec.structs.replace(sent, reason="of a later release"))
    assert sum(worker.load.in_flight for worker in other.fleet.workers()) == 1
    other.peers.finished("peer", sent.id)
    assert sum(worker.load.in_flight for worker in other.fleet.workers()) == 0
    dispatch.finish(clock.now())


@pytest.mark.parametrize("figure", [nan, inf, -inf, 1e300])
def test_absurd_figures_of_a_dispatch_are_refused(clock, figure):
    one = Gateway("prefixaware", clock)
    dispatch, _ = one.send("hello " * 100)
    (sent,) = one.own.take(clock.now(), everything=True)
    dispatch.finish(clock.now())
    prompts = [msgspec.structs.replace(each, block_tokens=figure) for each in sent.prompts]
    assert prompts

    for change in ({"prefill_s": figure}, {"prompts": prompts}):
        wrong, right = msgspec.structs.replace(sent, **change), FirstToken(sent.id)
        (payload,) = encode_payloads([wrong, right])
        assert decode_payload(payload) == ([right], 1)


def test_unknown_groups_are_asked_for_once_for_all_prompts_that_begin_with_them(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    text = f"{random.Random(3).getrandbits(40_000):x}"
    one.send(text)[0].finish(clock.now())
    one.own.take(clock.now(), everything=True)  # lost
    for number in range(20):
        one.send(f"{text}{number}" + "x" * 1000 * (number + 1))[0].finish(clock.now())

    other.receive(one)
    (wanted,) = other.answers
    one.peers.send_key_groups("other", wanted)
    other.peers.learn_key_groups(1, one.answers[0])

    assert other.peers.incomplete == 20
    for number in range(20):
        follow_up = f"{text}{number}" + "x" * 1000 * (number + 1) + "y"
        assert other.explained(follow_up) == one.explained(follow_up)


def test_all_unknown_groups_of_a_message_are_asked_for_together(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    texts = [f"{random.Random(seed).getrandbits(40_000):x}" for seed in range(3)]
    for text in texts:
        one.send(text)[0].finish(clock.now())
    one.own.take(clock.now(), everything=True)  # lost
    prompts = tuple(one.query(text + "more").prompts[0] for text in texts)
    query = RouteQuery(MODEL, clock.now(), prompts, 1000)
    decision = one.router.decide(query, one.fleet.view(MODEL))
    one.router.dispatch(query, decision, decision.ranking[0], clock.now())

    other.receive(one)

    assert len({wanted.last_key for wanted in other.answers}) == 3
    assert other.envelopes == 1


def test_a_question_without_an_answer_is_repeated(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    one.own.counts_repeats = True  # so that each prompt is sent
    text = f"{random.Random(3).getrandbits(40_000):x}"
    one.send(text)[0].finish(clock.now())
    one.own.take(clock.now(), everything=True)  # lost

    for number in range(3):
        one.send(f"{text}{number}")[0].finish(clock.now())
        other.receive(one)
        clock.time += 1.5
    assert len(other.answers) == 2, "the first one, and the third one after 3 s"

    other.peers.peer_gone(1)
    one.send(f"{text}{4}")[0].finish(clock.now())
    other.receive(one)
    assert len(other.answers) == 3, "a process that returns is asked again"


def test_groups_that_never_arrive_do_not_fill_the_memory(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    one.own.counts_repeats = True  # so that each prompt is sent
    texts = [f"{random.Random(seed).getrandbits(12_000):x}" for seed in range(300)]
    for text in texts:
        one.send(text)[0].finish(clock.now())
    one.own.take(clock.now(), everything=True)  # lost
    for text in [*texts, *(300 * [texts[-1]])]:
        one.send(f"{text}more")[0].finish(clock.now())

    other.receive(one)
    assert len(other.peers._questions) == 256
    assert max(len(each.prompts) for each in other.peers._questions.values()) == 256
    for wanted in other.answers:
        other.peers.learn_key_groups(1, KeyGroupsAnswer(wanted.id, b""))
    other.peers.learn_key_groups(1, KeyGroupsAnswer(12345, b""))

    assert (other.peers.incomplete, len(other.answers)) == (600, 300)
    assert other.peers.unfinished == 0


def test_a_missed_dispatch_counts_for_the_history_alone(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    running, _ = one.send("missed " * 100)
    (message,) = FrameReader().feed(encode_frame(one.own.take(clock.now(), everything=True)))

    other.peers.missed(1, message)

    assert other.loads() == [(0.0, 0, 0, 0)] * 3
    running.finish(clock.now())
    assert other.explained("missed " * 100) == one.explained("missed " * 100)


def test_a_forgotten_session_is_forgotten_in_all_processes(clock):
    one, other = Gateway("session", clock), Gateway("session", clock)
    other.send("y", session_key="s")
    one.receive(other)
    other.router.forget_session("s")

    one.receive(other)

    assert not one.router.forget_session("s")


class OnePlaceEach(NoMap):
    """A map that is complete and empty: only requests in flight count."""

    def places(self, worker):
        return (CachePlace(worker.index, 0, MapTrust.WHOLE),)

    def match(self, prompt):
        return dict[int, Tokens]()


def test_exact_prompts_in_flight_in_another_process_count_as_held(clock):
    one, other = (Gateway("kvaware", clock, OnePlaceEach()) for _ in range(2))
    exact = ExactPrompt(800, list(block_keys(b"k" * 3200)), PromptChunks(()))

    _, chosen = one.send("k" * 3200, exact=(exact,))
    other.receive(one)
    query = other.query("k" * 3200, exact=(exact,))
    decision = other.router.decide(query, other.fleet.view(MODEL))

    held = {c.worker.id: c.matched_tokens for c in decision.ranking}
    assert held == {w.id: 800 if w.id == chosen.worker.id else 0 for w in other.fleet.workers()}


def with_ranks(gateway: Gateway, count: int = 2) -> None:
    for worker in gateway.fleet.workers():
        gateway.fleet.update_facts(worker, replace(worker.facts, ranks=tuple(range(count))))
        gateway.router.capacity_changed(worker)


@pytest.mark.parametrize("ends", [True, False], ids=["ended before it was published", "in flight"])
def test_another_process_knows_what_was_sent_to_which_rank(ends, clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    with_ranks(one)
    with_ranks(other)
    text = "one conversation on one rank " * 40

    dispatch, chosen = one.send(text)
    if ends:
        dispatch.finish(clock.now())
    other.receive(one)

    assert chosen.rank is not None
    view, found = other.fleet.view(MODEL), dict[int, dict[str, int]]()
    for rank in (0, 1):
        ranking = other.router.decide(other.query(text, rank=rank), view).ranking
        found[rank] = {each.worker.id: each.matched_tokens for each in ranking if each.matched_tokens}
    assert list(found[chosen.rank]) == [chosen.worker.id]
    assert found[1 - chosen.rank] == {}
    load = other.fleet.get(chosen.worker.id).load_of(chosen.rank)
    assert load.in_flight == (0 if ends else 1)


def test_what_ended_before_a_cache_was_emptied_is_not_sent_as_cached(clock):
    one, other = Gateway("prefixaware", clock), Gateway("prefixaware", clock)
    text = "a prompt whose blocks are gone " * 40
    dispatch, chosen = one.send(text)
    dispatch.finish(clock.now())

    one.own.cache_cleared(chosen.worker.id)
    other.receive(one)

    assert other.send(text)[1].matched_tokens == 0
