"""Names with several addresses, and listening on every address of both families."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from tests.blackbox.conftest import command, spawn

NAME = "two-addresses.test"
CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}

HOSTS = f"127.0.0.1 localhost\n::1 {NAME}\n127.0.0.1 {NAME}\n"
WITH_HOSTS = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')


def _can_replace_hosts(file: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    look = [*WITH_HOSTS, str(file), "getent", "ahosts", NAME]
    return "::1" in subprocess.run(look, capture_output=True, text=True).stdout


@contextmanager
def black_hole(port: int) -> Iterator[None]:
    """A port of ::1 at which the kernel drops SYNs, because its queue is full."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_INET6))
        listening.bind(("::1", port))
        listening.listen(0)
        for _ in range(64):
            client = stack.enter_context(socket.socket(socket.AF_INET6))
            client.settimeout(0.5)
            try:
                client.connect(("::1", port))
            except TimeoutError:
                yield
                return
        pytest.skip("this kernel accepts connections beyond the queue")


@pytest.mark.parametrize("lane", ["on", "off"])
async def test_a_name_is_reached_whose_first_address_drops_everything(processes, sim, tmp_path, lane):
    """Probes and requests, with a timeout that only a race of the addresses keeps."""
    file = tmp_path / "hosts"
    file.write_text(HOSTS)
    if not _can_replace_hosts(file):
        pytest.skip("needs IPv6 and a mount namespace of its own, to give a name two addresses")
    port = int((await sim("--time-scale", "0")).rpartition(":")[2])
    with black_hole(port):
        gateway = await spawn(
            processes, str(file), *command(), "serve", "--port", "0",
            "--worker", f"http://{NAME}:{port}", "--set", f"server.fast_lane={lane}",
            "--set", "upstream.connect_timeout_s=2", "--set", "fleet.health.timeout_s=2",
            "--set", "fleet.health.interval_s=0.2",
            env={"XDG_STATE_HOME": str(tmp_path / "state")}, program=WITH_HOSTS,
        )  # fmt: skip
        url = (await gateway.logged("listens on")).rsplit(" ", 1)[1].strip()
        await gateway.logged("is healthy")
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            answers = [await client.post("/v1/chat/completions", json=CHAT) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200] * 3


@pytest.mark.parametrize("processes_", ["1", "2"])
async def test_every_address_of_both_families_is_listened_on(serve, sim, processes_):
    gateway = await serve(
        "--worker", await sim("--time-scale", "0"), "--host", "::", "--processes", processes_,
        "--set", "admin.api_key=admin-key-of-the-tests",
    )  # fmt: skip
    port = json.loads(await gateway.logged("listens on"))["message"].rpartition(":")[2]
    key = {"authorization": "Bearer admin-key-of-the-tests"}

    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        for host in ("127.0.0.1", "[::1]"):
            answer = await client.post(f"http://{host}:{port}/v1/chat/completions", json=CHAT)
            workers = await client.get(f"http://{host}:{port}/admin/workers", headers=key)
            assert (answer.status_code, workers.status_code) == (200, 200), host
        (worker,) = workers.json()["workers"]
        drained = await client.post(
            f"http://127.0.0.1:{port}/admin/workers/{worker['id']}/drain", headers=key
        )
    assert drained.status_code < 300
    line = await gateway.logged('"kvroute.admin"')
    assert "::ffff:" not in line
    assert "127.0.0.1" in line
