"""Lock, list and audit the packages of the image.

    python scripts/supply_chain.py lock [--upgrade]   # requirements.lock, requirements-build.lock
    python scripts/supply_chain.py sbom               # sbom.cdx.json, from requirements.lock
    python scripts/supply_chain.py audit              # known vulnerabilities of the locked packages

`lock` and `sbom` need a package index. `audit` sends names and versions to the OSV database (`--osv-url` for
another one). Its exit codes: 0 no known vulnerability, 1 at least one, 2 the audit could not run, so nothing
is known.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK, BUILD_LOCK, SBOM = "requirements.lock", "requirements-build.lock", "sbom.cdx.json"
EXTRA = "jwt"
"""The extra of pyproject.toml that the image has."""

PYTHON = "3.12"
"""The Python of the Dockerfile."""

PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
"""The image's platforms. One lock serves both: `lock` fails if they need different packages."""

OSV_URL = "https://api.osv.dev/v1/query"
CLEAN, VULNERABLE, NOT_AUDITED = 0, 1, 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lock").add_argument("--upgrade", action="store_true", help="take newer versions")
    commands.add_parser("sbom")
    commands.add_parser("audit").add_argument("--osv-url", default=OSV_URL)
    arguments = parser.parse_args()
    if arguments.command == "lock":
        lock(LOCK, ["--extra", EXTRA, "pyproject.toml"], upgrade=arguments.upgrade)
        lock(BUILD_LOCK, ["--group", "build"], upgrade=arguments.upgrade)
        return 0
    if arguments.command == "sbom":
        (ROOT / SBOM).write_text(json.dumps(sbom(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return 0
    return audit(ROOT / LOCK, arguments.osv_url)


def lock(name: str, packages: list[str], *, upgrade: bool) -> None:
    """Write a lock file with the hashes of all files of each version. Versions stay without `upgrade`."""
    texts = set()
    with tempfile.TemporaryDirectory() as folder:
        for platform in PLATFORMS:
            file = Path(folder) / platform
            if (ROOT / name).exists():
                file.write_text((ROOT / name).read_text())
            argv = [_tool("uv"), "pip", "compile", "--quiet", "--generate-hashes", *packages]
            argv += ["--python-platform", platform, "--python-version", PYTHON]
            # Without the index's name the file says nothing of the machine that made it.
            argv += ["--no-emit-index-url", "--no-emit-find-links", "--custom-compile-command", "make lock"]
            argv += ["--output-file", str(file), *(["--upgrade"] if upgrade else [])]
            subprocess.run(argv, check=True, cwd=ROOT)
            texts.add(file.read_text())
    if len(texts) > 1:
        sys.exit(f"{' and '.join(PLATFORMS)} need different packages: {name} needs one file for each")
    (ROOT / name).write_text(texts.pop())


def locked(file: Path) -> Iterator[tuple[str, str]]:
    """Normalised name and version of each package of a lock file."""
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE):
        yield normal(name), version


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sbom() -> dict[str, Any]:
    """The packages of the lock as CycloneDX, with licences and dependencies.

    They are read from an installation of the lock, because a lock file does not have them.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, symlinks=True)
        python = f"{folder}/bin/python"
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--require-hashes", "-r", ROOT / LOCK], check=True)
        argv = [_tool("cyclonedx-py"), "environment", "--pyproject", ROOT / "pyproject.toml"]
        argv += ["--output-reproducible", "--output-format", "JSON", python]
        made = subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout
    bom: dict[str, Any] = json.loads(made)
    version = re.search(
        r'^__version__ = "(.+)"', (ROOT / "src/kvroute/__init__.py").read_text(), re.MULTILINE
    )
    assert version is not None
    bom["metadata"]["component"]["version"] = version[1]
    for tool in bom["metadata"]["tools"]["components"]:
        tool.pop("externalReferences", None)
    return bom


def audit(file: Path, osv_url: str) -> int:
    """Print the known vulnerabilities of the locked packages; returns the exit code."""
    argv = [_tool("pip-audit"), "--requirement", str(file), "--require-hashes", "--disable-pip"]
    argv += ["--vulnerability-service", "osv", "--osv-url", osv_url]
    argv += ["--format", "json", "--desc", "off", "--progress-spinner", "off"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    packages = list(locked(file))
    try:
        results = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        # pip-audit also exits with 1 when it cannot reach the database.
        cause = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"The audit could not run, so nothing is known about {len(packages)} packages: {cause}")
        return NOT_AUDITED
    found = [each for each in results if each.get("vulns")]
    audited = {normal(each["name"]) for each in results if "vulns" in each}
    for each in found:
        for vulnerability in each["vulns"]:
            fixed = ", ".join(vulnerability["fix_versions"]) or "none"
            print(f"{each['name']} {each['version']}: {vulnerability['id']}, fixed in: {fixed}")
    # pip-audit exits with 0 although it has skipped packages.
    missed = sorted({name for name, _ in packages} - audited)
    if missed:
        print(f"not audited: {', '.join(missed)}")
    if found:
        return VULNERABLE
    if missed or not packages:
        print("The audit is not complete, so nothing is known about these packages.")
        return NOT_AUDITED
    print(f"No known vulnerability in {len(packages)} packages.")
    return CLEAN


def _tool(name: str) -> str:
    """The path of a tool beside this Python."""
    return os.path.join(os.path.dirname(sys.executable), name)


if __name__ == "__main__":
    sys.exit(main())
