"""What can be known of the image without building it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvroute.cli import COMMANDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = [
    line.strip()
    for line in re.sub(r"\\\n", " ", TEXT).splitlines()
    if line.strip() and not line.startswith("#")
]


def last(keyword: str) -> str:
    """The argument of the last `keyword` instruction."""
    return [line for line in INSTRUCTIONS if line.startswith(f"{keyword} ")][-1].removeprefix(keyword).strip()


def test_it_starts_kvroute_itself_so_that_sigterm_reaches_it():
    assert json.loads(last("ENTRYPOINT")) == ["kvroute"]
    assert json.loads(last("CMD"))[0] in COMMANDS


def test_it_does_not_run_as_root():
    assert last("USER") == "kvroute"
    assert INSTRUCTIONS.index("USER kvroute") > max(
        number for number, line in enumerate(INSTRUCTIONS) if line.startswith(("FROM ", "COPY ", "RUN "))
    )


def test_every_copied_file_exists_and_is_in_the_build_context():
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        source
        for line in INSTRUCTIONS
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }

    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" and self.server.is_healthy else 500)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def checked(tmp_path: Path, *line: str, **environ: str) -> int:
    """The exit code of the health check in a container that runs the command `line`."""
    cmdline = tmp_path / "cmdline"
    cmdline.write_text("".join(f"{word}\0" for word in line))
    command = json.loads(last("HEALTHCHECK").partition("CMD")[2])
    command = [word.replace("/proc/1/cmdline", str(cmdline)) for word in command]
    done = subprocess.run(
        [sys.executable, *command[1:]],
        env={"http_proxy": "http://127.0.0.1:9", **environ},
        timeout=60,
        check=False,
        capture_output=True,
    )
    return done.returncode


@pytest.mark.parametrize(("is_healthy", "code"), [(True, 0), (False, 1)])
def test_the_health_check_fails_only_for_an_unhealthy_gateway(server, is_healthy, code, tmp_path):
    server.is_healthy = is_healthy
    port = str(server.server_port)

    assert checked(tmp_path, "kvroute", "serve", KVROUTE__SERVER__PORT=port) == code
    assert checked(tmp_path, "kvroute", "--port", port, KVROUTE__SERVER__PORT="9") == code
    assert checked(tmp_path, "kvroute", "serve", "--port=9", f"--port={port}") == code


def test_the_health_check_knows_the_default_ports():
    command = last("HEALTHCHECK")

    found = re.search(r"8001 if re\.search\(r'(.*?)', line\) else 8080", command)
    assert found is not None
    option = re.compile(found[1].replace("\\\\", "\\"))
    for line in ("kvroute\0--service-discovery\0static", "kvroute\0--dynamic-config-yaml=/f\0"):
        assert option.search(line)
    assert not option.search("kvroute\0serve\0")


def test_vllm_router_is_a_command_of_the_image_only(tmp_path):
    (script,) = [line for line in INSTRUCTIONS if line.endswith("/opt/kvroute/bin/vllm-router")]
    text = re.findall(r"printf '(.*?)'", script)[0].encode().decode("unicode_escape")
    router, kvroute = tmp_path / "vllm-router", tmp_path / "kvroute"
    router.write_text(text)
    kvroute.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    router.chmod(0o755)
    kvroute.chmod(0o755)

    done = subprocess.run(
        [router, "--session-key", "a b"],
        env={"PATH": f"{tmp_path}:/bin:/usr/bin"},
        capture_output=True,
        text=True,
    )

    assert done.stdout.splitlines() == ["vllm-router", "--session-key", "a b"]
    assert "vllm-router" not in (ROOT / "pyproject.toml").read_text()


def installed_bytes() -> int:
    """The files that kvroute and all it requires install, bytecode included."""
    waiting, seen, size = ["kvroute"], {"kvroute"}, 0
    while waiting:
        distribution = importlib.metadata.distribution(waiting.pop())
        files = [Path(str(file.locate())) for file in distribution.files or []]
        size += sum(file.stat().st_size for file in files if file.is_file())
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if requirement.name.lower() not in seen:
                seen.add(requirement.name.lower())
                waiting.append(requirement.name)
    package = ROOT / "src" / "kvroute"
    return size + sum(file.stat().st_size for file in package.rglob("*.py"))


def test_the_estimated_image_size_is_below_300_mb():
    base, claimed = map(int, re.findall(r"(?:base image|bytecode) (\d+) MB", TEXT))

    measured = installed_bytes() / 1e6

    assert measured < claimed * 1.25, "measure again: see the comment at the top of the Dockerfile"
    assert base + measured < 300
