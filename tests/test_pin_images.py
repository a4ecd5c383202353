"""Digests come from a registry: a small one on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from tests.support.sockets import free_port, tcp_server

SCRIPT = Path(__file__).parent.parent / "scripts" / "pin_images.py"
MANIFEST = b'{"schemaVersion": 2, "manifests": []}'
DIGEST = "sha256:" + hashlib.sha256(MANIFEST).hexdigest()


@asynccontextmanager
async def registry(announces: str = DIGEST):
    """Has the image team/redis:7.4.6 for those with a token. Yields host and port, and what was asked."""
    asked: list[bytes] = []
    host = ""

    async def serve(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            asked.append(head.split(b"\r\n")[0])
            status, more, body = "404 Not Found", "", b""
            if b"GET /token?" in head:
                status, body = "200 OK", b'{"token": "t0ken"}'
            elif b"Bearer t0ken" not in head:
                status = "401 Unauthorized"
                more = f'www-authenticate: Bearer realm="http://{host}/token",service="s",scope="pull"\r\n'
            elif b"/v2/team/redis/manifests/7.4.6 " in head:
                status, more, body = "200 OK", f"docker-content-digest: {announces}\r\n", MANIFEST
            writer.write(f"HTTP/1.1 {status}\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body)

    async with tcp_server(serve) as port:
        host = f"127.0.0.1:{port}"
        yield host, asked


async def pin(file: Path) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run, [sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True, timeout=60
    )


def values(folder: Path, host: str, tag: str = "7.4.6") -> Path:
    file = folder / "values.yaml"
    file.write_text(
        f'image:\n  repository: own   # local\n  tag: ""\n  digest: ""   # none\n'
        f'redis:\n  image: {host}/team/redis:{tag}\n  resources: {{}}\n  digest: ""  # of redis\n'
    )
    return file


async def test_a_digest_is_that_of_the_manifest_and_all_else_stays(tmp_path):
    async with registry() as (host, _):
        file = values(tmp_path, host)
        before = file.read_text()
        done = await pin(file)

    assert (done.returncode, done.stderr) == (0, "")
    assert file.read_text() == before.replace('""  # of redis', f'"{DIGEST}"  # of redis')
    assert yaml.safe_load(file.read_text())["image"]["digest"] == ""


@pytest.mark.parametrize("change", ["another digest", "no such tag", "nobody listens"])
async def test_no_digest_is_made_up(tmp_path, change):
    async with registry("sha256:" + "0" * 64 if change == "another digest" else DIGEST) as (host, _):
        host = f"127.0.0.1:{free_port()}" if change == "nobody listens" else host
        file = values(tmp_path, host, "8" if change == "no such tag" else "7.4.6")
        before = file.read_text()
        done = await pin(file)

    assert done.returncode == (2 if change == "nobody listens" else 1)
    assert "Traceback" not in done.stderr
    assert file.read_text() == before


def test_the_charts_own_digests_are_empty():
    chart = yaml.safe_load((SCRIPT.parent.parent / "charts/kvroute/values.yaml").read_text())

    assert chart["image"]["digest"] == chart["sharing"]["redis"]["digest"] == ""
