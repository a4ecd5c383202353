"""Measure the cost of hostile and huge requests, against the bounds that the gateway promises.

    python bench/edge.py [--executable PATH] [--only bodies,heads,clients] [--case TEXT] [--output FILE]

Each case gets a new gateway (`PATH serve`; by default that of this Python) in front of a worker that does
almost no work. With `--executable` an older checkout can be compared. `bodies` are the bodies of
edge_bodies.py. `heads` are endless header lines and endless lines. `clients` are connections that send
nothing, half a head or half a body, together with a slow upload and a silent stream that must pass. `idle` is
the error of the measurement itself.

The time for which the loop is blocked (`held`): a second connection requests /health without pauses; the
figure is the most CPU time (user and system, all threads) that the gateway used between a request and its
answer. CPU time excludes other work on the machine, wall-clock time does not. Other work still makes caches
cold, so `--repeats` takes the least of several measurements. Memory is the peak of resident memory minus the
resident memory before the case.

The exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from edge_bodies import BODIES, Shot
from edge_watch import Watched, rss_mb, watching
from gateway_machine import describe
from gateway_requests import MODEL
from gateway_running import free_port, running, wait_ready

HERE = Path(__file__).parent
MB = 1_000_000
MIB = 1024 * 1024
SMALL_BODY = 16 * MIB
HELD_SMALL_MS, HELD_LARGE_MS = 50.0, 150.0
MEMORY_TIMES, MEMORY_REST_MB = 4, 8.0
ANSWER_S = 120.0
ENDLESS = 1000 * MB
REFUSED = "refused"
KINDS = ("bodies", "heads", "clients")


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and its upper bound."""

    name: str
    value: float
    bound: float
    unit: str

    @property
    def is_met(self) -> bool:
        return self.value <= self.bound


@dataclass(frozen=True, slots=True)
class Case:
    """The result of one case. `answer`: the status, or the event that replaced it. `wrong`: the reason if the
    answer is wrong."""

    kind: str
    name: str
    sent_bytes: int
    answer: str
    figures: tuple[Figure, ...]
    cpu_ms: float
    silent_ms: float
    wrong: str = ""

    @property
    def is_met(self) -> bool:
        return not self.wrong and all(figure.is_met for figure in self.figures)


def bounds(watched: Watched, body_bytes: int) -> tuple[Figure, ...]:
    """Time and memory of a request whose body has `body_bytes` bytes, with their bounds."""
    held = HELD_SMALL_MS if body_bytes <= SMALL_BODY else HELD_LARGE_MS
    memory = MEMORY_TIMES * body_bytes / MB + MEMORY_REST_MB
    return (
        Figure("held", watched.held_ms, held, "ms"),
        Figure("memory", watched.memory_mb, memory, "MB"),
    )


def least(cases: Sequence[Case]) -> Case:
    """The least of each figure; the answers of all cases have to be right."""
    figures = tuple(
        replace(first, value=min(case.figures[place].value for case in cases))
        for place, first in enumerate(cases[0].figures)
    )
    wrong = next((case for case in cases if case.wrong), cases[0])
    return replace(wrong, figures=figures, cpu_ms=min(case.cpu_ms for case in cases))


def lines(cases: Sequence[Case]) -> list[str]:
    width = 26
    found = []
    for case in cases:
        figures = "  ".join(
            f"{figure.name} {figure.value:9.1f} of {figure.bound:6.0f} {figure.unit}"
            for figure in case.figures
        )
        word = "met" if case.is_met else f"MISSED{': ' if case.wrong else ''}{case.wrong}"
        found.append(
            f"{case.name:{width}} {case.sent_bytes / MB:7.1f} MB {case.answer:>9}  {figures}  cpu "
            f"{case.cpu_ms:8.0f} ms  silent {case.silent_ms:7.0f} ms  {word}"
        )
    return found


# --- the gateway and its worker ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gateway:
    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings that all cases share. `settings` are `PATH=VALUE`."""

    executable: str
    settings: Sequence[str]
    folder: Path
    worker_port: int

    @contextlib.contextmanager
    def gateway(self) -> Iterator[Gateway]:
        port = free_port()
        command = [self.executable, "serve", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker", f"http://127.0.0.1:{self.worker_port}"]
        for setting in self.settings:
            command += ["--set", setting]
        log = self.folder / "gateway.log"
        with running(command, frozenset(os.sched_getaffinity(0)), log) as pid:
            wait_ready(port, "the gateway", log, until_exact=False)
            yield Gateway(port, pid)


# --- requests ---------------------------------------------------------------------------------------------


def send(port: int, pieces: Iterator[bytes], *, answer_s: float = ANSWER_S) -> tuple[str, int]:
    """Send until all pieces are sent or the gateway closes; returns the status and the number of accepted
    bytes."""
    sent = 0
    with socket.create_connection(("127.0.0.1", port), ANSWER_S) as connection:
        answered = select.poll()  # not `select`, which fails for file descriptors above 1023
        answered.register(connection, select.POLLIN)
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
                sent += len(piece)
                if answered.poll(0):
                    break  # answered before the end
        connection.settimeout(answer_s)
        return status(connection), sent


def status(connection: socket.socket) -> str:
    """The status of the next answer; "closed" or "reset" without an answer, "silent" after a timeout."""
    data = b""
    try:
        while b"\r\n" not in data:
            part = connection.recv(65536)
            if not part:
                return "closed"
            data += part
    except TimeoutError:
        return "silent"
    except OSError:
        return "reset"
    return data.split(b" ", 2)[1].decode("latin-1")


def sliced(data: bytes, size: int = MIB) -> Iterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(data), size):
        yield bytes(view[start : start + size])


def request_of(shot: Shot) -> bytes:
    head = f"POST {shot.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in shot.headers.items())
    return f"{head}content-length: {len(shot.body)}\r\n\r\n".encode() + shot.body


def measure_body(bench: Bench, name: str) -> Case:
    shot = BODIES[name](MODEL)
    data = request_of(shot)
    with bench.gateway() as gateway, watching(gateway.pid, gateway.port) as watched:
        answer, sent = send(gateway.port, sliced(data))
    wrong = watched.failure
    if shot.is_legitimate and answer != "200":
        wrong = wrong or "a legitimate request was not answered 200"
    elif not answer.isdigit() or answer >= "500":
        wrong = wrong or "the answer is no client error and no success"
    return Case(
        "bodies",
        name,
        sent,
        answer,
        bounds(watched, len(shot.body)),
        watched.cpu_ms,
        watched.silent_ms,
        wrong,
    )


def measure_idle(bench: Bench) -> Case:
    """Send no request for a second: the error of the probe itself on this machine now."""
    with bench.gateway() as gateway, watching(gateway.pid, gateway.port) as watched:
        time.sleep(1.0)
    figures = bounds(watched, 0)
    return Case("idle", "idle", 0, "", figures, watched.cpu_ms, watched.silent_ms, watched.failure)


def repeated(head: bytes, make: Callable[[int], bytes], total: int) -> Iterator[bytes]:
    """`head`, then pieces of about 64 KB from `make`, until `total` bytes."""
    yield head
    sent = number = 0
    while sent < total:
        piece = b"".join(make(number + place) for place in range(64))
        number += 64
        sent += len(piece)
        yield piece


GET = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
HEADS: dict[str, Callable[[], Iterator[bytes]]] = {
    "header_lines_1000mb": lambda: repeated(GET, lambda n: b"x-%d: %b\r\n" % (n, b"a" * 1000), ENDLESS),
    "tiny_header_lines_100mb": lambda: repeated(GET, lambda n: b"a:b\r\n" * 200, 100 * MB),
    "same_header_1000mb": lambda: repeated(GET, lambda n: b"x-a: %b\r\n" % (b"a" * 1000), ENDLESS),
    "header_value_64mb": lambda: repeated(GET + b"x-a: ", lambda n: b"a" * 1024, 64 * MB),
    "header_name_64mb": lambda: repeated(GET, lambda n: b"a" * 1024, 64 * MB),
    "request_line_64mb": lambda: repeated(b"GET /", lambda n: b"a" * 1024, 64 * MB),
    "method_64mb": lambda: repeated(b"", lambda n: b"A" * 1024, 64 * MB),
    "blank_lines_64mb": lambda: repeated(b"", lambda n: b"\r\n" * 512, 64 * MB),
    "cookies_64mb": lambda: repeated(POST + b"cookie: ", lambda n: b"a=b; " * 200, 64 * MB),
    "chunk_extension_64mb": lambda: repeated(
        POST + b"transfer-encoding: chunked\r\n\r\n1;", lambda n: b"a" * 1024, 64 * MB
    ),
    "trailers_64mb": lambda: repeated(
        POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
        lambda n: b"x-%d: %b\r\n" % (n, b"a" * 1000),
        64 * MB,
    ),
    "one_byte_chunks_12mb": lambda: repeated(
        POST + b"transfer-encoding: chunked\r\n\r\n", lambda n: b"1\r\n \r\n" * 170, 12 * MB
    ),
}
OPEN_ENDED = ("one_byte_chunks_12mb", "blank_lines_64mb")
"""Heads that the gateway may read to their end before it answers."""
BODY_BYTES = {"one_byte_chunks_12mb": 2 * MB}
"""Cases whose bytes arrive as a request's body."""


def measure_head(bench: Bench, name: str) -> Case:
    with bench.gateway() as gateway, watching(gateway.pid, gateway.port) as watched:
        answer, sent = send(gateway.port, HEADS[name](), answer_s=5.0)
    wrong = watched.failure
    # After a reset there may be no answer to read.
    if name not in OPEN_ENDED and answer not in ("400", "413", "414", "431", "closed", "reset"):
        wrong = wrong or "not refused while it arrived"
    return Case(
        "heads",
        name,
        sent,
        answer,
        bounds(watched, BODY_BYTES.get(name, 0)),
        watched.cpu_ms,
        watched.silent_ms,
        wrong,
    )


# --- clients ----------------------------------------------------------------------------------------------

HALVES = {
    "silent": b"",
    "half_head": b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: ",
    "half_body": POST + b'content-length: 100000\r\n\r\n{"model":"',
}


def measure_clients(bench: Bench, options: argparse.Namespace) -> list[Case]:
    """All kinds of connections at the same time on one gateway, and the two that must pass."""
    outcomes: dict[str, str] = {}
    with bench.gateway() as gateway, ExitStack() as stack:
        rss_before = rss_mb(gateway.pid)
        passing = [
            threading.Thread(target=_slow_upload, args=(gateway.port, options, outcomes)),
            threading.Thread(target=_silent_stream, args=(gateway.port, options, outcomes)),
        ]
        with watching(gateway.pid, gateway.port) as watched:
            clients = {
                name: [
                    open_half(stack, gateway.port, half) for _ in range(options.connections // len(HALVES))
                ]
                for name, half in HALVES.items()
            }
            time.sleep(1.0)
            each_kb = (rss_mb(gateway.pid) - rss_before) * 1e3 / options.connections
        opened = time.monotonic()
        for thread in passing:
            thread.start()
        with watching(gateway.pid, gateway.port) as closing:
            left = wait_closed(clients, options.patience_s)
        took = time.monotonic() - opened
        for thread in passing:
            thread.join()
    found = []
    for name, open_now in left.items():
        figures = (Figure("still open", open_now, 0, f"of {len(clients[name])}"),)
        found.append(Case("clients", name, 0, f"{took:.0f} s", figures, closing.cpu_ms, closing.silent_ms))
    held = max(watched.held_ms, closing.held_ms)
    found.append(
        Case(
            "clients",
            "all of them",
            0,
            "",
            (Figure("held", held, HELD_SMALL_MS, "ms"), Figure("memory each", each_kb, 50, "KB")),
            watched.cpu_ms + closing.cpu_ms,
            max(watched.silent_ms, closing.silent_ms),
            watched.failure or closing.failure,
        )
    )
    for name, answer in sorted(outcomes.items()):
        wrong = "" if answer == "200" else "has to pass"
        found.append(Case("clients", name, 0, answer, (), 0, 0, wrong))
    return found


def open_half(stack: ExitStack, port: int, half: bytes) -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), ANSWER_S))
    connection.sendall(half)
    return connection


def wait_closed(clients: dict[str, list[socket.socket]], patience_s: float) -> dict[str, int]:
    """The number of connections of each kind that the gateway has not closed within `patience_s`."""
    give_up = time.monotonic() + patience_s
    left = {name: list(sockets) for name, sockets in clients.items()}
    while any(left.values()) and time.monotonic() < give_up:
        for name, sockets in left.items():
            left[name] = [connection for connection in sockets if not is_closed(connection)]
        time.sleep(0.5)
    return {name: len(sockets) for name, sockets in left.items()}


def is_closed(connection: socket.socket) -> bool:
    """Whether the gateway has closed the connection; an answer before that is read and dropped."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _slow_upload(port: int, options: argparse.Namespace, outcomes: dict[str, str]) -> None:
    """Send a chat whose body arrives at 50 KB/s."""
    text = b"a" * int(options.upload_mb * MB)
    body = b'{"model":"%b","messages":[{"role":"user","content":"%b"}]}' % (MODEL.encode(), text)

    def pieces() -> Iterator[bytes]:
        yield POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        began = time.monotonic()
        for number, piece in enumerate(sliced(body, 10_000)):
            yield piece
            time.sleep(max(0.0, began + (number + 1) / 5 - time.monotonic()))

    outcomes[f"upload of {options.upload_mb:g} MB at 50 KB/s"] = send(port, pieces())[0]


def _silent_stream(port: int, options: argparse.Namespace, outcomes: dict[str, str]) -> None:
    """Read an event stream that pauses. "cut" if it does not have the end that the worker sent."""
    silence = options.silence_s
    body = b'{"model":"%b","messages":[{"role":"user","content":"x"}],"stream":true}' % MODEL.encode()
    head = POST + b"x-silence-s: %d\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (silence, len(body))
    data = b""
    with socket.create_connection(("127.0.0.1", port), silence + ANSWER_S) as connection:
        connection.sendall(head + body)
        with contextlib.suppress(OSError):
            while part := connection.recv(65536):
                data += part
    is_whole = b" 200 " in data[:16] and b"[DONE]" in data
    outcomes[f"stream silent for {silence:g} s"] = "200" if is_whole else "cut"


# --- the command ------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executable", default=str(Path(sys.prefix) / "bin" / "kvroute"))
    parser.add_argument("--only", default=",".join(KINDS), help="some of %(default)s")
    parser.add_argument("--case", action="append", default=[], help="only cases with TEXT in their names")
    parser.add_argument(
        "--repeats", type=int, default=1, help="repeats of bodies and heads; the least counts"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="an option for the gateway"
    )
    parser.add_argument(
        "--connections", type=int, default=9_999, help="number of connections, a third of each kind"
    )
    parser.add_argument(
        "--patience-s", type=float, default=95, help="time until all connections must be closed"
    )
    parser.add_argument("--upload-mb", type=float, default=3, help="size of the slow upload; 20 takes 400 s")
    parser.add_argument("--silence-s", type=float, default=60, help="pause of the silent stream")
    parser.add_argument("--output", type=Path, help="write the report to this JSON file")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(KINDS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    options.executable = str(Path(options.executable).absolute())
    if not os.access(options.executable, os.X_OK):
        parser.error(f"--executable: {options.executable} cannot be run")
    return options


def version(executable: str) -> str:
    result = subprocess.run([executable, "--version"], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def run(bench: Bench, options: argparse.Namespace) -> Iterator[Case]:
    yield measure_idle(bench)
    for kind, names, measure in (
        ("bodies", list(BODIES), measure_body),
        ("heads", list(HEADS), measure_head),
    ):
        if kind in options.only:
            for name in names:
                if not options.case or any(text in name for text in options.case):
                    yield least([measure(bench, name) for _ in range(options.repeats)])
    if "clients" in options.only and (not options.case or "clients" in options.case):
        yield from measure_clients(bench, options)


def main() -> None:
    options = arguments()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # the exception ends the children
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="kvroute-edge-") as scratch, ExitStack() as stack:
        folder, worker_port = Path(scratch), free_port()
        os.environ["XDG_STATE_HOME"] = str(folder / "state")  # files that gateways keep for their user
        command = [sys.executable, str(HERE / "edge_worker.py"), str(worker_port)]
        stack.enter_context(running(command, frozenset(os.sched_getaffinity(0)), folder / "worker.log"))
        wait_ready(worker_port, "the worker", folder / "worker.log", until_exact=False)
        for case in run(Bench(options.executable, options.set, folder, worker_port), options):
            print(*lines([case]), flush=True)
            cases.append(case)
    missed = [case.name for case in cases if not case.is_met]
    print(f"verdict: {len(cases) - len(missed)} of {len(cases)} cases within their bounds")
    if options.output:
        document = {
            "began": began,
            "version": version(options.executable),
            "machine": describe(),
            "settings": {"set": options.set, "connections": options.connections, "repeats": options.repeats},
            "cases": [asdict(case) | {"is_met": case.is_met} for case in cases],
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(1 if missed or not cases else 0)


if __name__ == "__main__":
    main()
