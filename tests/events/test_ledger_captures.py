"""Recorded streams of real engines lead to what the engines themselves reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import Tier, adapter_space, prompt_keys, token_keys
from kvroute.events.ledger import Ledger
from kvroute.events.sequence import Sequence, SequenceVerdict
from kvroute.index.prefix_index import PrefixIndex, TierMatch
from kvroute.wire.vllm import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Medium,
    decode_batch,
    medium_of,
)
from kvroute.wire.zmq import EventMessage

Messages = Callable[[str], list[tuple[float, str, EventMessage]]]
Requests = Callable[[str], list[dict[str, Any]]]
Run = Callable[[Ledger, Iterable[EventBatch]], None]


class PlainTruth:
    """Held blocks as full token prefixes, one counter of copies each: no keys, no index."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[Medium, int | bytes]] = Counter()
        self.prefixes: dict[int | bytes, tuple[int, list[int]]] = {}

    def apply(self, batch: EventBatch, *, repeats: bool = False) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.copies = Counter({k: n for k, n in self.copies.items() if k[0] is not Medium.GPU})
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self.copies[medium_of(event.medium), name] -= 1
            else:
                self._stored(event, repeats)

    def _stored(self, event: BlockStored, repeats: bool) -> None:
        if event.parent_block_hash is None:
            entry = (event.extra_keys or [None])[0] or []
            salt = next((str(value) for value in entry if value != event.lora_name), "")
            seed, prefix = adapter_space(event.lora_name, salt).seed, []
        else:
            seed, prefix = self.prefixes[event.parent_block_hash]
        for place, name in enumerate(event.block_hashes):
            start = place * event.block_size
            prefix = [*prefix, *event.token_ids[start : start + event.block_size]]
            self.prefixes[name] = seed, prefix
            held = medium_of(event.medium), name
            self.copies[held] = max(1, self.copies[held] + (not repeats))

    def keys(self, medium: Medium) -> list[int]:
        return sorted(
            {
                token_keys(prefix, seed)[-1]
                for (where, name), copies in self.copies.items()
                if where is medium and copies > 0
                for seed, prefix in [self.prefixes[name]]
            }
        )


def prompts_of(request: dict[str, Any]) -> list[list[int]]:
    asked = request["body"].get("prompt")
    return asked if asked and isinstance(asked[0], list) else [request["prompt_token_ids"]]


def cached_of(request: dict[str, Any]) -> int | None:
    details = (request.get("usage") or {}).get("prompt_tokens_details")
    return None if details is None else details["cached_tokens"]


def adapter_of(request: dict[str, Any]) -> str | None:
    return "ada" if request["model"] == "ada" else None


@pytest.mark.parametrize("release", ["vllm-0.32", "synthetic-vllm-0.19.1", "synthetic-vllm-0.23.0"])
def test_predictions_equal_the_engines_cached_tokens_with_evictions_and_a_reset(
    release: str, messages_of: Messages, requests_of: Requests, run_ledger: Run
) -> None:
    index, truth = PrefixIndex(), PlainTruth()
    ledger = Ledger(index, 0)
    messages = [*messages_of(f"{release}-stores"), *messages_of(f"{release}-evict-clear")]
    requests = [*requests_of("vllm-0.32-stores"), *requests_of("vllm-0.32-evict-clear")]
    checked = 0
    for place, request in enumerate(requests):
        cached = cached_of(request)
        if cached is not None and "reset" not in request["step"]:
            salt = request["body"].get("cache_salt", "")
            matches = [
                index.match(prompt_keys(prompt, adapter_space(None, salt))).get(0, TierMatch())
                for prompt in prompts_of(request)
            ]
            assert sum(match.tokens for match in matches) == cached, request["step"]
            checked += 1
        until = requests[place + 1]["t"] if place + 1 < len(requests) else float("inf")
        repeats = "kv_cache_report_mode" in str(request["body"])
        while messages and messages[0][0] < until:
            batch = decode_batch(messages.pop(0)[2].payload)
            run_ledger(ledger, [batch])
            truth.apply(batch, repeats=repeats)
            if release != "synthetic-vllm-0.19.1" and release != "synthetic-vllm-0.23.0":
                assert sorted(ledger.held_keys(Tier.GPU)) == truth.keys(Medium.GPU)
            assert set(ledger.held_keys(Tier.GPU)) >= set(truth.keys(Medium.GPU))

    assert checked == 19
    assert sorted(ledger.held_keys(Tier.GPU)) == truth.keys(Medium.GPU)
    assert ledger.counts.unusable == ledger.counts.orphaned == 0


def test_before_0_19_only_salted_blocks_are_ambiguous(messages_of: Messages, run_ledger: Run) -> None:
    ledgers = []
    for release in ("synthetic-vllm-0.11.1", "vllm-0.32"):
        ledger = Ledger(PrefixIndex(), 0)
        for part in ("stores", "evict-clear"):
            run_ledger(ledger, [decode_batch(m.payload) for _, _, m in messages_of(f"{release}-{part}")])
        ledgers.append(ledger)

    old, new = ledgers
    assert sorted(old.held_keys(Tier.GPU)) == sorted(new.held_keys(Tier.GPU))


def test_copies_of_concurrent_requests_are_removed_one_by_one(
    messages_of: Messages, requests_of: Requests, run_ledger: Run
) -> None:
    index, truth = PrefixIndex(), PlainTruth()
    ledger = Ledger(index, 0)
    for _, _, message in messages_of("vllm-0.32-duplicates"):
        batch = decode_batch(message.payload)
        run_ledger(ledger, [batch])
        truth.apply(batch)

        assert sorted(ledger.held_keys(Tier.GPU)) == truth.keys(Medium.GPU)
        assert sorted(ledger.indexed(Tier.GPU)) == truth.keys(Medium.GPU)

    asked = [request for request in requests_of("vllm-0.32-duplicates") if request.get("output_token_ids")]
    last = asked[-1]
    assert ledger.counts.copies == 6
    assert ledger.counts.unknown_removed == 0
    assert index.match(prompt_keys(last["prompt_token_ids"], adapter_space(None))) == {0: TierMatch(192)}


def test_a_restart_shows_in_the_sequence_and_only_the_new_process_counts(
    messages_of: Messages, requests_of: Requests, run_ledger: Run
) -> None:
    index, sequence = PrefixIndex(), Sequence()
    ledger = Ledger(index, 0)
    messages = messages_of("vllm-0.32-restart")
    sequence.lost(messages[0][2].seq)
    verdicts = []
    for _, _, message in messages:
        digest = xxh3_64_intdigest(message.payload)
        verdict = sequence.on_live(message.seq, digest)
        if (
            verdict is SequenceVerdict.REPLAY
        ):  # the new engine's replay does not know the batch that we took in last
            sequence.start_replay()
            assert sequence.on_replayed(message.seq, digest) is SequenceVerdict.RESTART
            ledger.drop()
            sequence.reset()
            sequence.start_replay()
            verdict = sequence.on_replayed(message.seq, digest)
        verdicts.append(verdict)
        run_ledger(ledger, [decode_batch(message.payload)])
        sequence.applied(message.seq, digest)
        sequence.end_replay()

    after = requests_of("vllm-0.32-restart")[-2:]
    expected = [
        key for r in after for key in token_keys(r["prompt_token_ids"][:96], adapter_space(None).seed)
    ]
    assert verdicts == [
        SequenceVerdict.APPLY,
        SequenceVerdict.APPLY,
        SequenceVerdict.BEGIN,
        SequenceVerdict.APPLY,
    ]
    assert sorted(ledger.held_keys(Tier.GPU)) == sorted(expected[1::2])


def test_ranks_are_slots_of_their_own(messages_of: Messages, requests_of: Requests, run_ledger: Run) -> None:
    index = PrefixIndex()
    ledgers = {"rank0": Ledger(index, 0), "rank1": Ledger(index, 1)}
    messages = messages_of("vllm-0.32-dp2")
    requests = requests_of("vllm-0.32-dp2")
    for place, request in enumerate(requests):
        rank = request["headers"].get("X-data-parallel-rank")
        if rank is not None:
            found = index.match(prompt_keys(request["prompt_token_ids"], adapter_space(None)))
            predicted = found.get(int(rank), TierMatch()).tokens
            # After a reset the engine publishes the clearing with the rank's next step.
            assert predicted == (64 if "after reset" in request["step"] else cached_of(request))
        until = requests[place + 1]["t"] if place + 1 < len(requests) else float("inf")
        while messages and messages[0][0] < until:
            _, source, message = messages.pop(0)
            run_ledger(ledgers[source], [decode_batch(message.payload)])

    assert ledgers["rank0"].counts.cleared == 1
    assert ledgers["rank1"].counts.cleared == 0


def test_adapters_and_salts_have_blocks_of_their_own(
    messages_of: Messages, requests_of: Requests, run_ledger: Run
) -> None:
    index = PrefixIndex()
    run_ledger(Ledger(index, 0), [decode_batch(m.payload) for _, _, m in messages_of("vllm-0.32-lora")])

    for request in requests_of("vllm-0.32-lora"):
        ids, salt = request["prompt_token_ids"], request["body"].get("cache_salt", "")
        adapter = adapter_of(request)
        assert index.match(prompt_keys(ids, adapter_space(adapter, salt))) == {0: TierMatch(64)}
        assert index.match(prompt_keys(ids, adapter_space(adapter, salt + "x"))) == {}


def test_blocks_in_lmcaches_memory_outlive_a_reset_of_the_gpu(
    messages_of: Messages, requests_of: Requests, run_ledger: Run
) -> None:
    index = PrefixIndex()
    slots = {"va": 0, "vb": 1}
    ledgers = {name: Ledger(index, slot) for name, slot in slots.items()}
    truths = {name: PlainTruth() for name in slots}
    messages = messages_of("lmcache-mp-lmcache-driven")
    requests = requests_of("lmcache-mp-lmcache-driven")
    predicted: dict[str, TierMatch] = {}
    for place, request in enumerate(requests):
        step, cached = request["step"], cached_of(request)
        if cached is not None:
            keys = prompt_keys(
                request["prompt_token_ids"], adapter_space(None, request["body"].get("cache_salt", ""))
            )
            predicted[step] = index.match(keys).get(0 if step.startswith("A") else 1, TierMatch())
            assert predicted[step].tokens <= cached, step
        until = requests[place + 1]["t"] if place + 1 < len(requests) else float("inf")
        while messages and messages[0][0] < until:
            _, source, message = messages.pop(0)
            batch = decode_batch(message.payload)
            run_ledger(ledgers[source], [batch])
            truths[source].apply(batch)
            for tier, medium in ((Tier.GPU, Medium.GPU), (Tier.L1, Medium.CPU)):
                assert sorted(ledgers[source].held_keys(tier)) == truths[source].keys(medium)

    assert predicted["A: P again (local GPU-tier prefix hit)"] == TierMatch(gpu=576)
    assert predicted["B: P again"] == TierMatch(gpu=576)
