"""The commands themselves: exit codes, JSON, the support archive without secrets, and explain."""

from __future__ import annotations

import asyncio
import json
import socket
import tarfile
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result
from tests.integration.conftest import gateway
from tests.integration.test_doctor import configuration, sims

from kvroute.cli import main
from kvroute.cli.explain import sentence

SECRETS = {
    "admin": "secret-admin-key",
    "client": "secret-client-key",
    "worker": "secret-worker-key",
    "redis": "secret/redis?password",
}
PROMPT = "a very private prompt about a diagnosis"


async def run(*arguments: object, **environ: str) -> Result:
    """The command in a thread, so that the servers in this event loop can answer."""
    return await asyncio.to_thread(CliRunner().invoke, main, [str(each) for each in arguments], env=environ)


def files_of(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as opened:
        return {
            member.name: file.read()
            for member in opened.getmembers()
            if (file := opened.extractfile(member)) is not None
        }


async def test_healthy_workers_end_with_0_and_a_broken_one_with_1():
    async with sims({}, {"prefix_caching": False}) as [good, bad]:
        options = ["--strategy", "kvaware", "--port", "9", "--no-probe"]
        healthy = await run("doctor", "--worker", good.url, *options)
        broken = await run("doctor", "--worker", good.url, "--worker", f"b={bad.url}", *options)

    assert healthy.exit_code == 0, healthy.output
    assert "1 worker examined: 0 errors, 0 warnings" in healthy.stdout
    assert broken.exit_code == 1, broken.output
    assert f"error: worker b ({bad.url}): prefix caching is off" in broken.stdout
    assert "    fix: Start vLLM without `--no-enable-prefix-caching`." in broken.stdout


async def test_warnings_do_not_change_the_exit_code():
    async with sims({"replay_endpoint": ""}) as [worker]:
        result = await run(
            "doctor", "--worker", worker.url, "--strategy", "kvaware", "--port", "9", "--no-probe"
        )

    assert "warning: " in result.stdout
    assert result.exit_code == 0


async def test_without_anything_to_examine_the_exit_code_is_2(tmp_path):
    wrong = tmp_path / "c.yaml"
    wrong.write_text("server:\n  prot: 1\n")

    nothing = await run("doctor", "--port", "9")
    unreadable = await run("doctor", "-c", wrong)
    silent = await run("doctor", "--url", "http://127.0.0.1:9")

    assert [nothing.exit_code, unreadable.exit_code, silent.exit_code] == [2, 2, 2]
    assert "no workers to examine" in nothing.stderr
    assert f"error: {wrong}: server.prot: unknown option; did you mean server.port?" in unreadable.stdout
    assert f"fix: Correct this line; `kvroute check -c {wrong}` prints each value" in unreadable.stdout
    assert "does not show its configuration" in silent.stderr


async def test_two_workers_with_one_name_are_named_until_each_has_its_own(tmp_path):
    """The gateway does not start with such a file."""
    file = tmp_path / "c.yaml"
    async with sims({}, {}) as [one, other]:

        def write(second: str) -> None:
            workers = [{"id": "w0", "url": one.url}, {"id": second, "url": other.url}]
            file.write_text(yaml.safe_dump({"fleet": {"workers": workers}}))

        write("w0")
        broken = await run("doctor", "-c", file, "--port", "9", "--no-probe")
        as_json = await run("doctor", "-c", file, "--port", "9", "--no-probe", "--json")
        write("w1")
        fixed = await run("doctor", "-c", file, "--port", "9", "--no-probe")

    assert broken.exit_code == 2
    assert f"error: {file}: fleet.workers: two workers have the id 'w0' (c.yaml:2) [same-" in broken.stdout
    assert "    fix: Give each worker its own `id`" in broken.stdout
    assert json.loads(as_json.stdout)["findings"][0]["code"] == "same-name"
    assert fixed.exit_code == 0, fixed.output


async def test_a_worker_that_two_sources_name_is_named_until_its_id_differs(tmp_path):
    """The gateway starts, and ignores the second one."""
    listed = tmp_path / "workers.yaml"
    async with sims({}, {}) as [one, other]:
        arguments = [
            "--worker",
            f"w0={one.url}",
            "--set",
            f"fleet.file={listed}",
            "--port",
            "9",
            "--no-probe",
        ]
        listed.write_text(yaml.safe_dump({"workers": [{"id": "w0", "url": other.url}]}))
        broken = await run("doctor", *arguments)
        listed.write_text(yaml.safe_dump({"workers": [{"id": "w1", "url": other.url}]}))
        fixed = await run("doctor", *arguments)

    assert broken.exit_code == 1, broken.output
    assert f"error: worker w0 ({other.url}): has the same id as {one.url}" in broken.stdout
    assert fixed.exit_code == 0, fixed.output
    assert "2 workers examined: 0 errors" in fixed.stdout


async def test_without_a_configuration_the_gateway_of_this_machine_is_examined(monkeypatch):
    async with sims({}) as [worker], gateway(configuration([worker.url])) as running:
        await running.until_healthy(1)
        monkeypatch.setenv("KVROUTE__ADMIN__API_KEY", "admin-key-of-the-tests")
        result = await run("doctor", "--port", running.url.rpartition(":")[2], "--no-probe")

    assert result.exit_code == 0, result.output
    assert "1 worker examined: 0 errors" in result.stdout


async def test_the_findings_as_json():
    async with sims({"kv_events": False}) as [worker]:
        result = await run("doctor", "--worker", worker.url, "--strategy", "kvaware", "--port", "9", "--json")

    findings = {each["code"]: each for each in json.loads(result.stdout)["findings"]}
    assert findings["events-off"]["severity"] == "error"
    assert "--kv-events-config" in findings["events-off"]["fix"]
    assert findings["gateway"]["severity"] == "not checked"


async def test_the_archive_has_the_facts_but_no_secret_and_no_prompt(tmp_path):
    bundle = tmp_path / "support.tar.gz"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sections: dict[str, Any] = {
        "admin": {"api_key": SECRETS["admin"]},
        "server": {"port": 0, "api_keys": [SECRETS["client"]]},
        "lmcache": {"l2": {"redis_url": f"redis://:secret%2Fredis%3Fpassword@127.0.0.1:{port}/0"}},
        "fleet": {"worker_api_key": SECRETS["worker"]},
    }
    async with sims({"api_key": SECRETS["worker"]}) as [worker]:
        config = configuration([worker.url], **sections)
        file = tmp_path / "kvroute.yaml"
        file.write_text(
            yaml.safe_dump(
                {
                    **sections,
                    "routing": {"strategy": "kvaware"},
                    "fleet": {
                        "workers": [{"id": "w0", "url": worker.url}],
                        "worker_api_key": SECRETS["worker"],
                    },
                }
            )
        )
        async with gateway(config) as running:
            await running.until_healthy(1)
            body = {"model": "sim-model", "prompt": PROMPT, "max_tokens": 1}
            key = {"authorization": f"Bearer {SECRETS['client']}"}
            answer = await running.client.post("/v1/completions", json=body, headers=key)
            assert answer.status_code == 200
            result = await run("doctor", "-c", file, "--url", running.url, "--bundle", bundle)

    files = files_of(bundle)
    assert {
        f"kvroute-support/{name}"
        for name in (
            "findings.json",
            "config.json",
            "versions.json",
            "gateway/metrics.txt",
            "gateway/decisions.json",
            "workers/w0/metrics.txt",
        )
    } <= set(files)
    assert json.loads(files["kvroute-support/gateway/decisions.json"])["decisions"]
    assert json.loads(files["kvroute-support/versions.json"])["workers"] == {"w0": "0.32.0"}
    for text in [*files.values(), result.output.encode()]:
        for secret in [*SECRETS.values(), "secret%2Fredis%3Fpassword", PROMPT]:
            assert secret.encode() not in text


async def test_explain_says_where_a_prompt_goes_and_where_a_request_went():
    async with (
        sims({}, {}) as workers,
        gateway(configuration([each.url for each in workers], routing={})) as running,
    ):
        await running.until_healthy(2)
        prompt = "hello " * 300
        body = {"model": "sim-model", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
        answer = await running.client.post(
            "/v1/chat/completions", json=body, headers={"x-request-id": "req-17"}
        )
        worker = answer.headers["x-kvroute-worker"]
        before = await run("explain", prompt, "--url", running.url)
        after = await run(
            "explain",
            "--request-id",
            "req-17",
            "--url",
            running.url,
            KVROUTE__ADMIN__API_KEY="admin-key-of-the-tests",
        )
        unknown = await run(
            "explain",
            "--request-id",
            "x",
            "--url",
            running.url,
            KVROUTE__ADMIN__API_KEY="admin-key-of-the-tests",
        )

    assert before.stdout.startswith(f"The prompt goes to {worker} by prefixaware (reason: ")
    assert "it is expected to hold" in before.stdout
    assert after.stdout.startswith(f"Request req-17 went to {worker} by prefixaware")
    assert unknown.exit_code == 2
    assert "have no request 'x'" in unknown.stderr


def test_a_refused_request_is_explained():
    refused = {"request_id": "r", "error": "model_not_found", "status": 404, "worker": "-"}

    assert sentence(refused, "r") == "Request r went to no worker: model_not_found (status 404)."
