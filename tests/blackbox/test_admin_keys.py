"""The admin key cannot be guessed, and no file of keys is used that every user may write."""

from __future__ import annotations

import hashlib
import os

import httpx
import pytest
import yaml
from tests.support.sockets import free_port

KEY = "admin-key-of-the-tests"
WORKER = "http://127.0.0.1:9"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_guesses_are_slowed_down_counted_and_logged(serve):
    gateway = await serve("--worker", WORKER, "--set", f"admin.api_key={KEY}", workers=0)

    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        assert (await http.get("/admin/workers", headers=bearer(KEY))).status_code == 200
        answers = [await http.get("/admin/workers", headers=bearer(f"guess-{n}")) for n in range(40)]
        right = await http.get("/admin/workers", headers=bearer(KEY))
        none = await http.get("/admin/workers")
        metrics = (await http.get("/metrics")).text

    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {401, 429}
    assert len(refused) >= 20
    assert refused[0].json()["error"]["code"] == "too_many_key_guesses"
    assert 1 <= int(refused[0].headers["retry-after"]) <= 6
    assert right.status_code == 429  # otherwise the answer would tell that the guess is right
    assert none.status_code == 401  # nothing was guessed
    assert 'kvroute_requests_rejected_total{code="too_many_key_guesses"}' in metrics
    assert "too many wrong admin keys were sent, the last by 127.0.0.1" in gateway.log
    assert "guess-" not in gateway.log


async def test_a_page_that_repeats_an_old_key_keeps_nobody_out(serve):
    gateway = await serve("--worker", WORKER, "--set", f"admin.api_key={KEY}", workers=0)

    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        old = {
            (await http.get("/admin/workers", headers=bearer("an-old-key"))).status_code for _ in range(40)
        }

        assert old == {401}
        assert (await http.get("/admin/workers", headers=bearer(KEY))).status_code == 200


async def test_a_short_admin_key_ends_the_start(run):
    gateway = await run("serve", "--port", str(free_port()), "--worker", WORKER, "--set", "admin.api_key=x")

    assert await gateway.ended() == 2
    assert "admin.api_key: the key has 1 characters; an admin key needs 16 or more" in gateway.log
    assert "Traceback" not in gateway.log


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("admin.api_key_file", KEY),
        ("server.api_keys_file", "a-key-of-clients"),
        ("server.client_keys.file", yaml.safe_dump({"keys": []})),
        ("fleet.worker_api_key_file", "a-key"),
        ("sharing.key_file", "0123456789abcdef0123456789abcdef"),
        ("sharing.password_file", "a-password"),
        ("lmcache.l2.redis_password_file", "a-password"),
    ],
)
async def test_a_file_of_keys_that_every_user_may_write_ends_the_start(run, tmp_path, option, text):
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(0o666)

    gateway = await run(
        "serve", "--port", str(free_port()), "--worker", WORKER, "--set", f"{option}={file}",
        env={"XDG_STATE_HOME": str(tmp_path / "state")},
    )  # fmt: skip

    assert await gateway.ended() != 0
    assert f"{option}: {file} has mode 0666: every user may have written it" in gateway.log
    assert "Traceback" not in gateway.log
    assert text.strip() not in gateway.log


async def test_a_changed_file_of_keys_that_every_user_may_write_is_refused(serve, sim, tmp_path):
    file = tmp_path / "keys.yaml"

    def write(*names: str, mode: int) -> None:
        new = file.with_suffix(".new")
        entries = [{"name": n, "hash": "sha256:" + hashlib.sha256(n.encode()).hexdigest()} for n in names]
        new.write_text(yaml.safe_dump({"keys": entries}))
        new.chmod(mode)
        os.replace(new, file)

    write("first", mode=0o600)
    gateway = await serve(
        "--worker", await sim("--time-scale", "0"), "--set", f"server.client_keys.file={file}",
        "--set", "server.client_keys.reload_interval_s=0.05",
    )  # fmt: skip
    write("first", "intruder", mode=0o666)
    line = await gateway.logged("the changed file of keys is refused")

    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        first, intruder = [
            await http.get("/v1/models", headers=bearer(name)) for name in ("first", "intruder")
        ]
    assert "has mode 0666: every user may have written it" in line
    assert (first.status_code, intruder.status_code) == (200, 401)
