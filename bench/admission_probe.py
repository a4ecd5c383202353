"""Measure the time to a refusal as a client that does nothing else.

    python bench/admission_probe.py PORT KEY SECONDS

`admission.py` starts this script beside its load. The load is one busy process, whose own delays would
count as those of the gateway. Here each of eight threads sends a request every 0.2 s with a blocking socket,
in turns on a new and on an open connection; a request that may wait occupies its thread. Prints, by kind of
connection, the seconds from the connect or the first byte to the whole head of each answer `queue_full`; and
how late the process itself woke up from short pauses.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from realtime import MODEL, WORDS

THREADS = 8
EVERY_S = 0.2
TIMEOUT_S = 60.0


def connect(port: int) -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def request(key: str, *, is_last: bool) -> bytes:
    body = json.dumps(
        {"model": MODEL, "prompt": "".join(WORDS[:256]), "max_tokens": 1, "stream": False}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n"
    )
    return head.encode() + (b"connection: close\r\n" if is_last else b"") + b"\r\n" + body


def answered(opened: socket.socket, data: bytes) -> tuple[bool, float]:
    """Send a request and read its answer: whether the queue was full, and when the head was complete."""
    opened.sendall(data)
    received = b""
    while b"\r\n\r\n" not in received:
        part = opened.recv(65_536)
        if not part:
            raise RuntimeError("the connection ended")
        received += part
    at = time.perf_counter()
    head, _, body = received.partition(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length:")[2].split(None, 1)[0])
    while len(body) < size:
        part = opened.recv(65_536)
        if not part:
            raise RuntimeError("the connection ended")
        body += part
    return b"queue_full" in body, at


def measure(port: int, key: str, seconds: float, found: dict[str, list[float]]) -> None:
    first, later = request(key, is_last=True), request(key, is_last=False)
    kept = connect(port)
    end = time.perf_counter() + seconds
    while (sent := time.perf_counter()) < end:
        opened = connect(port)
        is_full, at = answered(opened, first)
        opened.close()
        if is_full:
            found["new"].append(at - sent)
        time.sleep(EVERY_S)
        sent = time.perf_counter()
        is_full, at = answered(kept, later)
        if is_full:
            found["open"].append(at - sent)
        time.sleep(EVERY_S)


def watch(seconds: float, found: list[float]) -> None:
    """How much later than asked this process wakes up: what the machine adds to every time here."""
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        time.sleep(0.002)
        found.append(time.perf_counter() - began - 0.002)


def main() -> None:
    port, key, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    found: dict[str, list[float]] = {"new": [], "open": [], "none, late wake-ups": []}
    with ThreadPoolExecutor(THREADS + 1) as pool:
        running = [pool.submit(measure, port, key, seconds, found) for _ in range(THREADS)]
        running.append(pool.submit(watch, seconds, found["none, late wake-ups"]))
        for each in running:
            each.result()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
