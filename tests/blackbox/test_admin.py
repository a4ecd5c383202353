"""The admin API needs its key from every client: on loopback, behind a proxy on the same host, in a web
page."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.support.sockets import free_port

WORKER = "http://127.0.0.1:9"
SECRET = "s3cret-0123456789"
NEW, OLD = "new-0123456789abc", "old-0123456789abc"
WITH_KEY = {"authorization": f"Bearer {SECRET}"}
"""No worker listens there; the gateway starts all the same."""

ADDED = {"url": "http://127.0.0.1:10", "id": "added"}
KEYLESS = ["/health", "/ping", "/ready", "/version", "/metrics"]


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        yield client


def key_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def authorization(folder: Path) -> dict[str, str]:
    """The header with the key that the only gateway with its state in `folder` has made, if it has."""
    files = key_files(folder)
    return {"authorization": f"Bearer {files[0].read_text().strip()}"} if len(files) == 1 else {}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Where `serve` keeps what it writes for its user."""
    return tmp_path / "state"


# --- who is let in ----------------------------------------------------------------------------------------


async def test_loopback_without_the_key_reads_nothing(serve, http):
    gateway = await serve("--worker", WORKER, workers=0)

    for path in ("/admin/config", "/admin/workers", "/admin/decisions", "/admin/nothing", "/admin"):
        answer = await http.get(f"{gateway.url}{path}")

        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_admin_key"


async def test_loopback_without_the_key_changes_nothing(serve, http, state):
    gateway = await serve("--worker", f"w={WORKER}", workers=0)

    added = await http.post(f"{gateway.url}/admin/workers", json=ADDED)
    removed = await http.delete(f"{gateway.url}/admin/workers/w")
    drained = await http.post(f"{gateway.url}/admin/workers/w/drain")

    assert [added.status_code, removed.status_code, drained.status_code] == [401, 401, 401]
    workers = await http.get(f"{gateway.url}/admin/workers", headers=authorization(state))
    assert [worker["id"] for worker in workers.json()["workers"]] == ["w"]


async def test_probes_and_scrapes_need_no_key_under_any_host(serve, http, state):
    gateway = await serve("--worker", WORKER, workers=0)

    for path in KEYLESS:
        answer = await http.get(f"{gateway.url}{path}", headers={"host": "gateway.example"})

        assert answer.status_code in (200, 503), path
    assert key_files(state), "the admin API has no key of its own"


async def test_a_clients_key_is_not_the_admin_key(serve, http):
    gateway = await serve("--worker", WORKER, "--set", "server.api_keys=client", workers=0)
    client = {"authorization": "Bearer client"}

    admin = await http.get(f"{gateway.url}/admin/config", headers=client)
    models = await http.get(f"{gateway.url}/v1/models", headers=client)

    assert (admin.status_code, models.status_code) == (401, 200)


async def test_the_admin_key_comes_as_bearer_only(serve, http, state):
    gateway = await serve("--worker", WORKER, workers=0)
    key = authorization(state).get("authorization", "Bearer none").removeprefix("Bearer ")

    given = [
        {"authorization": f"Bearer {key}"},
        {"authorization": f"bearer {key}"},
        {"x-api-key": key},
        {"authorization": f"Basic {key}"},
        {"authorization": f"Bearer {key[:-1]}"},
        {"authorization": "Bearer"},
    ]
    statuses = [
        (await http.get(f"{gateway.url}/admin/config", headers=headers)).status_code for headers in given
    ]

    assert statuses == [200, 200, 401, 401, 401, 401]


async def test_x_forwarded_for_gives_no_access(serve, http):
    gateway = await serve("--worker", WORKER, "--set", "server.trusted_proxies=*", workers=0)

    answer = await http.get(f"{gateway.url}/admin/config", headers={"x-forwarded-for": "127.0.0.1"})

    assert answer.status_code == 401


# --- web pages --------------------------------------------------------------------------------------------


async def test_pages_of_other_origins_are_refused_with_and_without_the_key(serve, http, state):
    gateway = await serve("--worker", f"w={WORKER}", workers=0)
    text = json.dumps(ADDED).encode()

    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        simple = {**headers, "content-type": "text/plain"}
        drain = await http.post(f"{gateway.url}/admin/workers/w/drain", headers=headers)
        added = await http.post(f"{gateway.url}/admin/workers", content=text, headers=simple)

        assert (drain.status_code, added.status_code) == (403, 403), headers
        answer = await http.get(f"{gateway.url}/admin/config", headers=headers | authorization(state))
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "wrong_origin"


async def test_a_page_of_the_gateway_itself_is_served(serve, http, state):
    gateway = await serve("--worker", WORKER, workers=0)
    own = {"origin": gateway.url, "sec-fetch-site": "same-origin"}

    answer = await http.get(f"{gateway.url}/admin/config", headers=own | authorization(state))

    assert answer.status_code == 200


async def test_foreign_host_names_are_refused(serve, http, state):
    gateway = await serve("--worker", WORKER, workers=0)
    url = f"{gateway.url}/admin/config"

    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "0.0.0.0", "127.0.0.1@evil"):
        refused = await http.get(url, headers={"host": host})
        with_key = await http.get(url, headers={"host": host} | authorization(state))

        status = 400 if "@" in host else 421  # not a name at all: refused before anything else
        assert (refused.status_code, with_key.status_code) == (status, status), host


async def test_names_of_loopback_and_allowed_ones_are_served(serve, http, state):
    gateway = await serve("--worker", WORKER, "--set", "admin.allowed_hosts=kv.example,10.1.2.3", workers=0)
    port = gateway.address[1]

    for host in (
        "localhost", f"localhost:{port}", "LOCALHOST.", f"127.0.0.1:{port}", "[::1]:1234", "kv.example",
        "kv.example:8443", "10.1.2.3",
    ):  # fmt: skip
        answer = await http.get(f"{gateway.url}/admin/config", headers={"host": host} | authorization(state))

        assert answer.status_code == 200, host


async def test_inference_takes_any_host_and_origin(serve, sim, http, state):
    gateway = await serve("--worker", await sim("--time-scale", "0"))
    message = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}]}
    headers = {"host": "kv.example", "origin": "https://evil.example", "sec-fetch-site": "cross-site"}

    answer = await http.post(f"{gateway.url}/v1/chat/completions", json=message, headers=headers)
    explained = await http.post(f"{gateway.url}/v1/route/explain", json=message, headers=headers)

    assert (answer.status_code, explained.status_code) == (200, 200)
    assert key_files(state), "the admin API has no key of its own"


async def test_a_body_that_a_form_could_send_is_refused(serve, http, state):
    gateway = await serve("--worker", WORKER, workers=0)
    text = json.dumps(ADDED).encode()

    statuses = []
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=utf-8"):
        headers = {"content-type": kind} | authorization(state)
        answer = await http.post(f"{gateway.url}/admin/workers", content=text, headers=headers)
        statuses.append(answer.status_code)

    assert statuses == [415, 415, 415, 201]


# --- behind a proxy ---------------------------------------------------------------------------------------

NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen {port}; location / {{ proxy_pass {gateway}; }} }}
}}
"""


@pytest.fixture
async def nginx(processes, tmp_path):
    """`await nginx(URL)` is the URL of an nginx in front, as its documentation begins; needs Debian's."""
    executable = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if executable is None:
        if os.environ.get("CI"):
            pytest.fail("nginx is not installed")
        pytest.skip("nginx is not installed (Debian: apt install nginx)")

    async def start(gateway: str) -> str:
        port = free_port()
        file = tmp_path / "nginx.conf"
        file.write_text(NGINX.format(folder=tmp_path, port=port, gateway=gateway))
        process = await asyncio.create_subprocess_exec(executable, "-p", str(tmp_path), "-c", str(file))

        async def end() -> None:
            process.kill()
            await process.wait()

        processes.push_async_callback(end)
        async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    await client.get(f"http://127.0.0.1:{port}/health")
                except httpx.TransportError:
                    assert process.returncode is None
                    await asyncio.sleep(0.02)
                else:
                    return f"http://127.0.0.1:{port}"

    return start


async def test_a_proxy_on_the_same_host_gets_no_access_without_a_key(serve, http, state, nginx):
    gateway = await serve("--worker", WORKER, workers=0)
    proxy = await nginx(gateway.url)

    read = await http.get(f"{proxy}/admin/config")
    added = await http.post(f"{proxy}/admin/workers", json=ADDED)
    evil = await http.post(f"{proxy}/admin/workers", json=ADDED, headers={"origin": "https://evil.example"})

    assert (read.status_code, added.status_code, evil.status_code) == (401, 401, 403)
    with_key = await http.get(f"{proxy}/admin/config", headers=authorization(state))
    health = await http.get(f"{proxy}/health")
    assert (with_key.status_code, health.status_code) == (200, 200)


# --- the key file -----------------------------------------------------------------------------------------


async def test_the_start_logs_the_key_files_path_and_only_its_owner_can_read_it(serve, http, state):
    gateway = await serve("--worker", WORKER, workers=0)

    file = state / "kvroute" / f"admin-key-{gateway.address[1]}"
    line = await gateway.logged("admin key")
    key = file.read_text().strip()
    answer = await http.get(f"{gateway.url}/admin/config", headers={"authorization": f"Bearer {key}"})

    assert str(file) in line
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert len(key) >= 32
    assert answer.status_code == 200
    assert key not in gateway.log
    assert key not in answer.text
    assert await gateway.stop() == 0
    assert not file.exists()  # the kernel chose the port, so the next gateway has another one


async def test_a_state_dir_holds_the_key_instead(serve, http, state, tmp_path):
    folder = tmp_path / "own"
    gateway = await serve("--worker", WORKER, "--state-dir", str(folder), workers=0)

    answer = await http.get(f"{gateway.url}/admin/config", headers=authorization(folder))

    assert answer.status_code == 200
    assert not state.exists()


async def test_several_processes_share_one_key(serve, http, state):
    gateway = await serve("--worker", WORKER, "--processes", "2", workers=0)
    header = authorization(state)

    refused, let_in = set(), set()
    for _ in range(20):  # each connection may reach either process
        async with httpx.AsyncClient(trust_env=False) as client:
            refused.add((await client.get(f"{gateway.url}/admin/config")).status_code)
            let_in.add((await client.get(f"{gateway.url}/admin/config", headers=header)).status_code)

    assert (refused, let_in) == ({401}, {200})
    assert sum("admin key" in line for line in gateway.lines) == 1


async def test_the_key_outlives_a_restart(run, state):
    port, keys = str(free_port()), set[str]()
    for _ in range(2):
        gateway = await run("serve", "--worker", WORKER, "--port", port, env={"XDG_STATE_HOME": str(state)})
        await gateway.logged("listens on")
        keys.add(authorization(state).get("authorization", ""))
        assert await gateway.stop() == 0

    assert len(keys) == 1
    assert "" not in keys


async def refusal(run, state: Path, port: int) -> str:
    """Why `serve` does not start."""
    gateway = await run("serve", "--worker", WORKER, "--port", str(port), env={"XDG_STATE_HOME": str(state)})
    try:
        code = await gateway.ended(within_s=30)
    except TimeoutError:
        pytest.fail("it serves")
    assert code == 2
    assert "Traceback" not in gateway.log
    return gateway.log


async def test_where_no_key_can_be_kept_the_error_names_the_option(run, state):
    # Not a folder without permissions: root may write there.
    state.write_text("a file")

    assert "admin.api_key_file" in await refusal(run, state, free_port())
    assert "admin.api_key_file" in await refusal(run, state, 0)


async def test_where_no_key_can_be_kept_a_configured_one_is_enough(serve, http, state):
    state.write_text("a file")

    gateway = await serve("--worker", WORKER, "--set", f"admin.api_key={SECRET}", workers=0)

    answer = await http.get(f"{gateway.url}/admin/config", headers=WITH_KEY)
    assert answer.status_code == 200
    assert (await http.get(f"{gateway.url}/admin/config")).status_code == 401
    assert SECRET not in gateway.log + answer.text
    assert "admin.api_key" in await gateway.logged("admin key")


async def test_a_key_file_that_others_may_read_is_refused(run, state):
    port = free_port()
    file = state / "kvroute" / f"admin-key-{port}"
    file.parent.mkdir(parents=True)
    file.write_text("somebody-knows-this-key\n")
    file.chmod(0o644)

    assert str(file) in await refusal(run, state, port)


async def test_a_key_file_that_is_a_link_is_refused(run, state, tmp_path):
    port = free_port()
    file = state / "kvroute" / f"admin-key-{port}"
    file.parent.mkdir(parents=True)
    target = tmp_path / "target"
    target.touch(mode=0o600)
    target.write_text("a-key\n")
    file.symlink_to(target)

    assert "symbolic link" in await refusal(run, state, port)


async def test_up_prints_the_key_files_path_and_ps_finds_the_key(run, http, tmp_path):
    folder, port = tmp_path / "up", free_port()
    up = await run("up", "--workers", "1", "--port", str(port), "--state-dir", str(folder))
    url = f"http://127.0.0.1:{port}/admin/workers"
    async with asyncio.timeout(60):
        while up.process.returncode is None:
            try:
                answer = await http.get(url)
                break
            except httpx.TransportError:
                await asyncio.sleep(0.1)

    assert answer.status_code == 401
    file = folder / f"admin-key-{port}"
    key = {"authorization": f"Bearer {file.read_text().strip()}"}
    assert (await http.get(url, headers=key)).status_code == 200
    assert str(file) in json.loads((folder / "up.json").read_text())["admin_key_file"]
    assert await up.stop() == 0


# --- configured keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["variable", "variable of a file", "flag"])
async def test_a_configured_key_counts_and_none_is_made(serve, http, state, tmp_path, how):
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    arguments, env = [], {}
    if how == "variable":
        env = {"KVROUTE__ADMIN__API_KEY": SECRET}
    elif how == "variable of a file":
        env = {"KVROUTE__ADMIN__API_KEY_FILE": str(file)}
    else:
        arguments = ["--admin-key-file", str(file)]
    gateway = await serve("--worker", WORKER, *arguments, workers=0, env=env | {"XDG_STATE_HOME": str(state)})

    answer = await http.get(f"{gateway.url}/admin/config", headers=WITH_KEY)

    assert answer.status_code == 200
    assert "admin key" in await gateway.logged("admin key")
    assert not state.exists()


async def test_while_one_key_replaces_another_both_are_valid(serve, http, tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# the new one\n{NEW}\n\n{OLD}\n")
    gateway = await serve("--worker", WORKER, "--set", f"admin.api_key_file={file}", workers=0)

    url = f"{gateway.url}/admin/config"
    statuses = [
        (await http.get(url, headers={"authorization": f"Bearer {key}"})).status_code
        for key in (NEW, OLD, f"{OLD}er", "# the new one", f"{NEW} {OLD}")
    ]

    assert statuses == [200, 200, 401, 401, 401]


async def test_changes_leave_an_audit_line_without_the_key(serve, http, tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{NEW}\n{OLD}\n")
    gateway = await serve("--worker", WORKER, "--set", f"admin.api_key_file={file}", workers=0)
    workers = f"{gateway.url}/admin/workers"

    def header(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    await http.post(workers, json=ADDED, headers=header(NEW))
    await http.post(f"{workers}/added/drain", headers=header(OLD))
    await http.delete(f"{workers}/added/drain", headers=header(OLD))
    await http.delete(f"{workers}/added", headers=header(NEW) | {"x-forwarded-for": "203.0.113.9"})
    await gateway.logged("removed")
    lines = [json.loads(line) for line in gateway.lines if '"kvroute.admin"' in line]

    assert [line["message"].split()[2] for line in lines] == [
        "added", "drained", "undrained", "removed",
    ]  # fmt: skip
    fingerprints = [line["key_fingerprint"] for line in lines]
    assert fingerprints[0] == fingerprints[3] != fingerprints[1] == fingerprints[2]
    assert not {NEW, OLD} & set(fingerprints)
    assert [line["client"] for line in lines] == ["127.0.0.1"] * 3 + ["203.0.113.9"]
