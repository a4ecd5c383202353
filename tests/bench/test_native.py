"""The C programs, one against the other."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway_requests import encoded
from gateway_running import build, free_port

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler on this machine"
)

CHUNKS = 5
STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
ENDS = {"/tokenize": b'_strs":null}', "/v1/chat/completions/render": b'"priority":0}'}
PLAIN = {"messages": [{"role": "user", "content": "hi " * 40_000}]}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(tmp_path_factory.mktemp("native"))


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def worker(tools: dict[str, Path]) -> Iterator[int]:
    """The port of a worker that streams events of 400 bytes a millisecond apart."""
    port = free_port()
    command = [tools["worker"], "-t", "-c", str(CHUNKS), "-g", "1000", "-e", "400", "-m", "m", str(port)]
    process = subprocess.Popen(command)
    try:
        give_up = time.monotonic() + 30
        while not is_listening(port):
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.01)  # another process is starting
        yield port
    finally:
        process.kill()
        process.wait()


def talk(port: int, data: bytes, enough: bytes) -> bytes:
    """What comes back until `enough` has, or the connection ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        got = b""
        while enough not in got and (more := connection.recv(65536)):
            got += more
        return got


def test_load_counts_each_event_and_each_answer(tools: dict[str, Path], worker: int, tmp_path: Path) -> None:
    file = tmp_path / "mixed.requests"
    bodies = [(0, STREAM), (0, PLAIN), (1, STREAM), (1, STREAM)]
    file.write_bytes(b"".join(encoded(number, body) for number, body in bodies))

    completed = subprocess.run(
        [tools["load"], str(worker), str(file), "2", "8"], capture_output=True, check=True, timeout=60
    )

    result = json.loads(completed.stdout)
    assert (result["requests"], result["errors"], result["last_error"]) == (8, 0, "")
    assert result["events"] == result["transit"]["count"] == 6 * CHUNKS
    assert result["latency"]["count"] == result["first_byte"]["count"] == 8
    assert result["workers"] == {str(worker): 8}
    assert result["sticky"] == 1.0
    assert result["transit"]["max"] < 5e6, "a stamp that was not read whole would be far off"


def test_load_counts_failures(tools: dict[str, Path], worker: int, tmp_path: Path) -> None:
    """A worker that is not asked by GET or POST closes the connection."""
    file = tmp_path / "bad.requests"
    file.write_bytes(encoded(0, PLAIN).replace(b"POST", b"PUT "))

    completed = subprocess.run(
        [tools["load"], str(worker), str(file), "1", "3"], capture_output=True, check=True, timeout=60
    )

    result = json.loads(completed.stdout)
    assert (result["requests"], result["errors"], result["latency"]["count"]) == (3, 3, 0)


def test_a_stream_has_whole_events_of_the_requested_size_and_usage_at_its_end(worker: int) -> None:
    got = talk(worker, encoded(0, STREAM)[8:], b"0\r\n\r\n")

    _, _, body = got.partition(b"\r\n\r\n")
    sizes = []
    while body:
        size, _, body = body.partition(b"\r\n")
        chunk, body = body[: int(size, 16)], body[int(size, 16) + 2 :]
        sizes.append(len(chunk))
        if chunk.startswith(b"data: {"):
            event = json.loads(chunk.removeprefix(b"data: ").split(b"\n")[0])
    assert sizes[:CHUNKS] == [400] * CHUNKS
    assert sizes[-1] == 0
    assert event["usage"]["completion_tokens"] == CHUNKS


@pytest.mark.parametrize("path", ENDS)
def test_equal_beginnings_have_equal_tokens(worker: int, path: str) -> None:
    def ids(text: str) -> list[int]:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
        head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n\r\n"
        answer = json.loads(talk(worker, (head + body).encode(), ENDS[path]).partition(b"\r\n\r\n")[2])
        found: list[int] = answer.get("tokens") or answer["token_ids"]
        return found

    long, longer = ids("x" * 400), ids("x" * 800)

    assert len(longer) - len(long) == 100
    assert long[:100] == longer[:100]


def test_a_chunked_body_is_read_to_its_end(worker: int) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    request = head + b'8\r\n{"a": 1,\r\n8\r\n "b": 2}\r\n0\r\n\r\n'

    got = talk(worker, request + b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n", b"0.32.0")

    assert got.count(b"HTTP/1.1 200 OK") == 2
