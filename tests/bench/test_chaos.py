"""The chaos run in one minute: each kind of fault once; answers, bytes, gauges and map, but no times."""

from __future__ import annotations

import os
import shutil

import pytest

from chaos import FAULTS, PERIOD_S, arguments, measure
from chaos_traffic import End, Planned, Traffic, judge

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None and not os.environ.get("CI"), reason="needs redis-server"
)


def planned() -> Planned:
    return next(
        each
        for each in Traffic(1, ["k"]).plan(10, 100)
        if each.body["stream"] and each.path == "/v1/completions"
    )


def event(text: str) -> bytes:
    return b'data: {"choices":[{"text":"%b"}]}\n\n' % text.encode()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
STATED = b'\n\ndata: {"error":{"code":"worker_unreachable"}}\n\n'


@pytest.mark.parametrize(
    ("cut", "changed", "rest", "end"),
    [
        (None, False, b"data: [DONE]\n\n", End.COMPLETE),
        (9, False, STATED, End.BROKEN),
        (9, False, b"", End.UNSTATED),
        (9, False, b"data: [DONE]\n\n", End.WRONG),
        (9, True, STATED, End.WRONG),
        (None, True, b"data: [DONE]\n\n", End.WRONG),
    ],
)
def test_an_answer_is_complete_or_a_stated_part_of_the_expected_one(cut, changed, rest, end):
    request = planned()
    text = ("#" + request.text[1:] if changed else request.text)[:cut]

    assert judge(request, HEAD + event(text) + rest, "")[0] is end


@pytest.mark.parametrize(("status", "end"), [(503, End.REFUSED), (500, End.UNSTATED), (502, End.UNSTATED)])
def test_only_stated_statuses_refuse_a_request(status, end):
    answer = b'HTTP/1.1 %d X\r\ncontent-length: 26\r\n\r\n{"error":{"code":"reason"}}' % status

    assert judge(planned(), answer, "")[0] is end


def test_equal_seeds_make_equal_traffic():
    assert Traffic(3, ["k"]).plan(5, 20) == Traffic(3, ["k"]).plan(5, 20)


@needs_redis
@pytest.mark.load
@pytest.mark.timeout(1500)
async def test_every_fault_leaves_answers_gauges_and_map_right():
    seconds = len(FAULTS) * PERIOD_S
    options = arguments().parse_args(
        ["--seconds", str(seconds), "--sequences", "1", "--no-baseline", "--untimed"]
    )

    problems, found = await measure(options)

    assert problems == []
    assert set(found["faults"]["faults"]) == set(FAULTS)
    assert found["faults"]["ends"][End.COMPLETE.value]  # how many depends on the machine
