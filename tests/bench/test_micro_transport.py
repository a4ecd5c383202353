"""The small server of the transport bench."""

from __future__ import annotations

import pytest

from micro_transport import BODY, PLAIN, Server

HEAD = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(BODY)


class Written:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize(
    "reads",
    [
        [HEAD + BODY, HEAD + BODY],
        [HEAD, BODY, HEAD, BODY],
        [HEAD, BODY + HEAD, BODY],
        [HEAD[:10], HEAD[10:] + BODY[:5], BODY[5:] + HEAD + BODY],
    ],
)
def test_it_answers_each_request_however_its_bytes_come(reads):
    server, written = Server(), Written()
    server.connection_made(written)

    for data in reads:
        server.data_received(data)

    assert written.data == PLAIN * 2
