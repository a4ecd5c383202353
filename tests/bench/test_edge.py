from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edge import HEADS, MB, Case, Figure, bounds, is_closed, least, lines, repeated, send, status
from edge_watch import Watched, watching


def case(held: float, *, wrong: str = "", cpu_ms: float = 1.0) -> Case:
    return Case("bodies", "x", 20 * MB, "200", bounds(Watched(held_ms=held), 20 * MB), cpu_ms, 1.0, wrong)


def test_the_bounds_are_those_that_are_promised():
    small, large = bounds(Watched(), 16 * 1024 * 1024), bounds(Watched(), 64 * 1024 * 1024)

    assert [figure.bound for figure in small] == [50.0, pytest.approx(4 * 16.777216 + 8)]
    assert large[0].bound == 150.0
    assert bounds(Watched(), 0)[1].bound == 8.0


def test_a_case_misses_by_a_figure_or_by_its_answer():
    assert case(150.0).is_met
    assert not case(150.1).is_met
    assert not case(1.0, wrong="no answer").is_met


def test_of_repeats_the_least_figures_count_and_any_wrong_answer():
    found = least([case(200.0, cpu_ms=3.0), case(100.0, cpu_ms=5.0, wrong="reset")])

    assert (found.figures[0].value, found.cpu_ms, found.wrong) == (100.0, 3.0, "reset")


def test_a_line_names_figure_bound_and_verdict():
    (line,) = lines([Case("heads", "y", 0, "431", (Figure("held", 60.0, 50.0, "ms"),), 1, 1, "")])

    assert "held      60.0 of     50 ms" in line
    assert line.endswith("MISSED")


@pytest.mark.parametrize("name", HEADS)
def test_endless_heads_are_made_piece_by_piece(name):
    pieces = HEADS[name]()

    assert len(b"".join(next(pieces) for _ in range(3))) < 300_000


def test_repeated_pieces_end_at_the_total():
    assert 1000 <= sum(map(len, repeated(b"", lambda n: b"%4d" % n, 1000))) < 1300


@contextmanager
def answering(answer: bytes, *, after: int) -> Iterator[int]:
    """A server that reads `after` bytes of one connection, answers and closes."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            got = 0
            while got < after:
                got += len(connection.recv(65536))
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_sending_ends_when_the_gateway_has_answered():
    with answering(b"HTTP/1.1 431 Too Large\r\n\r\n", after=1) as port:
        answer, sent = send(port, (b"a" * 10_000 for _ in range(100_000)))

    assert answer in ("431", "reset")  # a reset may overtake the answer
    assert sent < 1000 * MB


def test_an_answer_behind_the_whole_request_is_read():
    with answering(b"HTTP/1.1 200 OK\r\n\r\n", after=5) as port:
        assert send(port, iter([b"hello"])) == ("200", 5)


def test_ends_without_an_answer_have_different_outcomes():
    left, right = socket.socketpair()
    with left:
        left.settimeout(0.01)
        assert status(left) == "silent"
        assert not is_closed(left)
        right.close()
        assert is_closed(left)
        left.setblocking(True)
        assert status(left) == "closed"


SERVER = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
asked = 0
while connection.recv(65536):
    asked += 1
    if asked == 3:
        kept = b"x" * 50_000_000
        del kept
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
    connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")
listener.accept()  # the figures are read after the connection is closed, from a process that still runs
"""


def test_the_probe_sees_a_blocked_loop_and_released_memory():
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server:
        port = int(server.stdout.readline())
        with watching(server.pid, port) as watched:
            while watched.held_ms < 199 and not watched.failure:
                pass
        server.kill()

    assert not watched.failure
    assert watched.held_ms >= 199
    assert watched.cpu_ms >= watched.held_ms
    assert 45 < watched.memory_mb < 60
    assert watched.probes >= 2


def test_a_server_that_ends_is_a_failure_and_no_figure():
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER.replace("asked == 3", "asked == 2 and exit()")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    with server:
        port = int(server.stdout.readline())
        with watching(server.pid, port) as watched:
            while not watched.failure:
                pass

    assert "/health was not answered" in watched.failure
