"""Certificates are loaded again while connections are open, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from tests.support.certificates import Authority
from tests.support.clocks import AdvancingClock
from tests.support.waiting import until

from kvroute.app.listening import Backlog, TlsListener
from kvroute.metrics import Metrics
from kvroute.tls import ServerTlsOptions

INTERVAL_S = 5.0


class Echo(asyncio.Protocol):
    def __init__(self, accepted: set) -> None:
        self.accepted = accepted

    def connection_made(self, transport):
        self.transport = transport
        self.accepted.add(transport)

    def connection_lost(self, exc):
        self.accepted.discard(self.transport)

    def data_received(self, data):
        self.transport.write(data)


class Scene:
    """A TLS listener with files that the test changes, and clients of it. `names` is read from the
    certificate that a client sees."""

    def __init__(self, authority: Authority, address: tuple[str, int]) -> None:
        self.authority = authority
        self.address = address
        self.clock = AdvancingClock()
        self.metrics = Metrics()
        self.files = authority.issue("current")
        self.accepted: set[asyncio.Transport] = set()

    def count(self, name: str, outcome: str) -> float:
        family = self.metrics.tls_handshakes if name == "handshakes" else self.metrics.tls_reloads
        return family.labels(outcome).value

    async def dial(self, context: ssl.SSLContext | None = None):
        return await asyncio.open_connection(*self.address, ssl=context or self.authority.client())

    async def name_seen(self, context: ssl.SSLContext | None = None) -> str:
        """The name in the certificate that a new connection gets."""
        reader, writer = await self.dial(context)
        try:
            writer.write(b"x")
            await reader.readexactly(1)
            ((_, name),) = writer.get_extra_info("peercert")["subject"][0]
        finally:
            writer.transport.abort()
        return name

    async def intervals_pass(self, done: Callable[[], bool]) -> None:
        """Let intervals pass until `done`. The files are read in a thread, so one may not be enough."""

        async def is_done() -> bool:
            await self.clock.advance(INTERVAL_S)
            return done()

        await until(is_done)


@pytest.fixture
async def scene(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        scene = Scene(Authority(tmp_path), listening.getsockname())
        options = ServerTlsOptions(
            cert_file=scene.files.cert,
            key_file=scene.files.key,
            client_ca_file=None,
            reload_interval_s=INTERVAL_S,
        )
        backlog = Backlog(lambda: Echo(scene.accepted), 16)
        listener = TlsListener(backlog, options, scene.metrics, scene.clock)
        await listener.start([listening])
        try:
            yield scene
        finally:
            await listener.aclose()
            backlog.close()
            for transport in list(scene.accepted):
                transport.abort()
            await until(lambda: not scene.accepted)


async def test_new_connections_get_a_changed_certificate_and_open_ones_continue(scene):
    reader, writer = await scene.dial()
    scene.authority.issue("renewed").copy_to(scene.files)

    await scene.intervals_pass(lambda: scene.count("reloads", "loaded") >= 1)

    assert await scene.name_seen() == "renewed"
    writer.write(b"still here")
    assert await reader.readexactly(10) == b"still here"
    writer.transport.abort()


async def test_the_expiry_of_the_certificate_in_use_is_a_metric_and_an_expired_one_is_logged(scene, caplog):
    def expiry() -> datetime:
        family = scene.metrics.certificate_expiry
        return datetime.fromtimestamp(family.labels("server.tls.cert_file").value, UTC)

    assert expiry() > datetime.now(UTC)
    renewed, past = datetime(2040, 1, 1, tzinfo=UTC), datetime(2001, 1, 1, tzinfo=UTC)
    scene.authority.issue("renewed", until=renewed).copy_to(scene.files)
    await scene.intervals_pass(lambda: expiry() == renewed)
    assert "has expired" not in caplog.text

    scene.authority.issue("past", until=past).copy_to(scene.files)
    await scene.intervals_pass(lambda: expiry() == past)

    assert f"server.tls.cert_file: a certificate in {scene.files.cert} has expired" in caplog.text


@pytest.mark.parametrize("fault", ["another key", "missing", "no PEM"])
async def test_files_that_cannot_be_used_are_refused_once_and_the_old_ones_stay(scene, caplog, fault):
    good = scene.authority.issue("renewed")
    if fault == "another key":
        scene.files.key.write_bytes(good.key.read_bytes())
    elif fault == "missing":
        scene.files.cert.unlink()
    else:
        scene.files.cert.write_text("nothing")

    await scene.intervals_pass(lambda: scene.count("reloads", "refused") >= 1)
    await scene.clock.advance(3 * INTERVAL_S)

    assert await scene.name_seen() == "current"
    refusals = [record for record in caplog.records if "are refused" in record.message]
    assert len(refusals) == 1
    assert str(scene.files.key if fault == "another key" else scene.files.cert) in refusals[0].message
    good.copy_to(scene.files)
    await scene.intervals_pass(lambda: scene.count("reloads", "loaded") >= 1)
    assert await scene.name_seen() == "renewed"


def dial_blocking(address: tuple[str, int], context: ssl.SSLContext) -> None:
    """A handshake that sends OpenSSL's alerts; asyncio's client only closes the connection."""
    with (
        socket.create_connection(address, timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost"),
    ):
        pass


async def test_each_failed_handshake_is_counted_by_its_cause(scene):
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.to_thread(dial_blocking, scene.address, ssl.create_default_context())
    old = scene.authority.client()
    old.set_ciphers("DEFAULT@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await scene.dial(old)
    reader, writer = await asyncio.open_connection(*scene.address)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await reader.read()
    writer.close()
    await scene.name_seen()

    await until(lambda: scene.count("handshakes", "refused_by_client") == 1)
    assert [scene.count("handshakes", each) for each in ("started", "finished", "version", "plain_http")] == [
        4, 1, 1, 1,
    ]  # fmt: skip
