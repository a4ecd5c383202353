from __future__ import annotations

import io
import itertools
import json
import random
import struct

import pytest

from gateway_requests import FILES, MODEL, encoded, text, write


def records(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at < len(data):
        number, size = struct.unpack_from("<II", data, at)
        found.append((number, data[at + 8 : at + 8 + size]))
        at += 8 + size
    return found


@pytest.mark.parametrize("size", [1, 200, 3_100])
def test_text_has_the_requested_size(size: int) -> None:
    assert len(text(random.Random(1), size)) == size


def test_a_record_is_a_whole_request() -> None:
    [(number, request)] = records(encoded(7, {"model": MODEL}))

    head, _, body = request.partition(b"\r\n\r\n")
    assert number == 7
    assert json.loads(body) == {"model": MODEL}
    assert f"content-length: {len(body)}".encode() in head
    assert b"x-session-id: s7" in head


def test_the_turns_of_a_conversation_are_in_order_and_grow() -> None:
    found = list(itertools.islice(FILES["c"](random.Random(7)), 10))

    assert [number for number, _ in found] == [0] * 8 + [1] * 2
    turns = [body["messages"] for _, body in found[:8]]
    for earlier, later in itertools.pairwise(turns):
        assert later[: len(earlier)] == earlier
    sizes = [len(json.dumps(messages)) for messages in turns]
    assert 220_000 < sizes[0] < sizes[7] < 262_144


@pytest.mark.parametrize("name", ["a", "d"])
def test_the_same_name_gives_the_same_file(name: str) -> None:
    def written() -> bytes:
        file = io.BytesIO()
        write(FILES[name](random.Random(7)), file)
        return file.getvalue()

    assert written() == written()
    assert len(records(written())) == 512
