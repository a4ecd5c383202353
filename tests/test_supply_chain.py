"""scripts/supply_chain.py, and the files that it makes for the image."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.support.sockets import free_port, tcp_server

import kvroute

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "supply_chain.py"
spec = importlib.util.spec_from_file_location("supply_chain", SCRIPT)
assert spec is not None
assert spec.loader is not None
supply_chain = importlib.util.module_from_spec(spec)
spec.loader.exec_module(supply_chain)

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKED = dict(supply_chain.locked(ROOT / supply_chain.LOCK))
BUILD_LOCKED = dict(supply_chain.locked(ROOT / supply_chain.BUILD_LOCK))
BOM = json.loads((ROOT / supply_chain.SBOM).read_text())


def normal(name: str) -> str:
    return str(supply_chain.normal(name))


@pytest.mark.parametrize(
    ("requirements", "locked"),
    [
        (PYPROJECT["project"]["dependencies"], LOCKED),
        (PYPROJECT["project"]["optional-dependencies"][supply_chain.EXTRA], LOCKED),
        (PYPROJECT["build-system"]["requires"], BUILD_LOCKED),
        (PYPROJECT["dependency-groups"]["build"], BUILD_LOCKED),
    ],
    ids=["dependencies", "extra of the image", "build-system", "group of the lock"],
)
def test_each_requirement_of_the_image_is_locked_within_its_range(
    requirements: list[str], locked: dict[str, str]
) -> None:
    """After a change of pyproject.toml: `make lock sbom`."""
    for requirement in map(Requirement, requirements):
        assert locked[normal(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("name", [supply_chain.LOCK, supply_chain.BUILD_LOCK])
def test_each_locked_package_has_hashes_and_the_file_names_no_index(name: str) -> None:
    text = (ROOT / name).read_text()
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]

    assert len(entries) == len(dict(supply_chain.locked(ROOT / name)))
    assert all("--hash=sha256:" in entry for entry in entries)
    assert not re.search(r"://|--index|--find-links|\.\./|^/", text, re.MULTILINE)


def test_the_dockerfile_installs_the_python_and_the_locks_that_are_locked_for() -> None:
    text = (ROOT / "Dockerfile").read_text()
    installs = [line for line in re.split(r"&&|\n(?! )", text) if re.search(r"\bpip\b.* install ", line)]

    assert set(re.findall(r"^FROM python:(\d+\.\d+)", text, re.MULTILINE)) == {supply_chain.PYTHON}
    assert len(installs) == 3
    for line in installs:
        assert "--require-hashes" in line or "--no-deps --no-index" in line


def test_the_sbom_lists_the_locked_packages_and_this_version() -> None:
    listed = {normal(each["name"]): each["version"] for each in BOM["components"]}

    assert listed == LOCKED
    assert BOM["bomFormat"] == "CycloneDX"
    assert BOM["metadata"]["component"]["version"] == kvroute.__version__


def test_the_sbom_has_licences_and_dependencies_and_no_path() -> None:
    of_gateway = {each["ref"]: each.get("dependsOn", []) for each in BOM["dependencies"]}["root-component"]

    assert all(each.get("licenses") for each in BOM["components"])
    assert {normal(each.split("==")[0]) for each in of_gateway} >= {
        normal(Requirement(each).name) for each in PYPROJECT["project"]["dependencies"]
    }
    assert "file:" not in json.dumps(BOM)


@asynccontextmanager
async def database(answer: Callable[[str], object]) -> AsyncIterator[str]:
    """A database with OSV's interface; `answer` gets a package's name. Yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            length = re.search(rb"(?i)content-length: (\d+)", head)
            assert length is not None
            query = json.loads(await reader.readexactly(int(length[1])))
            body = json.dumps(answer(query["package"]["name"])).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()

    async with tcp_server(serve) as port:
        yield f"http://127.0.0.1:{port}/v1/query"


async def audit(url: str) -> tuple[int, str]:
    """Exit code and output of the script."""
    argv = [sys.executable, str(SCRIPT), "audit", "--osv-url", url]
    with tempfile.TemporaryDirectory() as home:
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=subprocess.PIPE, env={"NO_PROXY": "*", "HOME": home}
        )
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_an_audit_without_findings_says_how_many_packages_it_looked_up() -> None:
    asked = []

    def none(name: str) -> object:
        asked.append(name)
        return {}

    async with database(none) as url:
        code, output = await audit(url)

    assert code == 0
    assert output == f"No known vulnerability in {len(LOCKED)} packages.\n"
    assert sorted(map(normal, asked)) == sorted(LOCKED)


async def test_an_audit_names_each_vulnerability_and_the_version_without_it() -> None:
    def in_jinja(name: str) -> object:
        if name != "jinja2":
            return {}
        ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}]
        package = {"name": "jinja2", "ecosystem": "PyPI"}
        affected = [{"package": package, "ranges": ranges, "versions": [LOCKED["jinja2"]]}]
        return {"vulns": [{"id": "PYSEC-2026-1", "summary": "a", "affected": affected}]}

    async with database(in_jinja) as url:
        code, output = await audit(url)

    assert code == 1
    assert output == f"jinja2 {LOCKED['jinja2']}: PYSEC-2026-1, fixed in: 99.0\n"


async def test_an_audit_that_could_not_run_says_that_nothing_is_known() -> None:
    """Its exit code is neither that of a clean audit nor that of a vulnerability."""
    code, output = await audit(f"http://127.0.0.1:{free_port()}/v1/query")

    assert code == 2
    assert output.startswith(
        f"The audit could not run, so nothing is known about {len(LOCKED)} packages: requests."
    )


def test_packages_that_the_database_skipped_are_no_clean_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip-audit exits with 0 when it has skipped every package."""
    lock = tmp_path / "requirements.lock"
    lock.write_text("jinja2==3.1.6 --hash=sha256:00\n")
    tool = tmp_path / "pip-audit"
    tool.write_text(
        '#!/bin/sh\necho \'{"dependencies": [{"name": "jinja2", "skip_reason": "not found"}]}\'\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(supply_chain, "_tool", lambda name: str(tmp_path / name))

    assert supply_chain.audit(lock, "http://127.0.0.1:1/") == 2
    assert capsys.readouterr().out.startswith("not audited: jinja2\n")
