"""The trace as requests of the real-time comparison (bench/realtime.py)."""

from __future__ import annotations

import json

from kvroute.sim.prompts import encode
from realtime import BLOCK, plan, prompt_text, trace_rows


def test_prompts_have_the_traces_lengths_and_share_exactly_the_shared_blocks() -> None:
    one, other = prompt_text([0, 7, 9], 2 * BLOCK + 100), prompt_text([0, 7, 8, 9], 4 * BLOCK)

    assert len(encode(one)) == 2 * BLOCK + 100
    assert len(encode(other)) == 4 * BLOCK
    pairs = enumerate(zip(encode(one), encode(other), strict=False))
    shared = next(place for place, (a, b) in pairs if a != b)
    assert 2 * BLOCK <= shared < 2 * BLOCK + 8  # a few words may be the same by chance


def test_requests_come_in_order_at_the_requested_rate() -> None:
    rows = list(trace_rows(60))

    planned = plan(rows, 10.5, 1, "completions")

    assert [one.at_s for one in planned] == sorted(one.at_s for one in planned)
    assert 0.8 * 60 / 10.5 < planned[-1].at_s <= 60 / 10.5
    bodies = [json.loads(one.body) for one in planned]
    lengths = sorted(len(encode(body["prompt"])) for body in bodies)
    assert lengths == sorted(row["input_length"] for row in rows)
    assert {body["max_tokens"] for body in bodies} == {16}


def test_another_seed_moves_arrivals_and_nothing_else() -> None:
    rows = list(trace_rows(20))

    one, other = plan(rows, 10.5, 1, "chat"), plan(rows, 10.5, 2, "chat")

    assert {planned.body for planned in one} == {planned.body for planned in other}
    assert [planned.at_s for planned in one] != [planned.at_s for planned in other]
