"""schemathesis over the control plane, by the OpenAPI description that the gateway gives of itself."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path

from tests.fuzz.cases import ADMIN_KEY
from tests.fuzz.lanes import Finding, Report
from tests.fuzz.served import served

_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "ignored_auth",
)


async def fuzz_control(examples: int, seed: int, phases: str = "examples,coverage,fuzzing") -> Report:
    """Run `examples` examples for each operation; `phases` are schemathesis's."""
    report = Report()
    key = ADMIN_KEY.decode()
    async with served("open") as gateway:  # one header for all operations: clients need no key here
        with tempfile.TemporaryDirectory() as folder:
            process = await asyncio.create_subprocess_exec(
                str(Path(sys.executable).parent / "schemathesis"),
                *("run", f"{gateway.url}/openapi.json", "--checks", ",".join(_CHECKS)),
                *("--max-examples", str(examples), "--seed", str(seed), "--mode", "all"),
                *("--phases", phases, "--continue-on-failure", "--workers", "1"),
                *("--header", f"Authorization: Bearer {key}", "--request-timeout", "20"),
                *("--generation-database", "none", "--output-sanitize", "false"),
                *(each for tag in ("gateway", "admin") for each in ("--include-tag", tag)),
                # Workers that are paused or asleep get nothing, so other operations would answer 503 rightly.
                *("--exclude-path-regex", "/(pause|sleep)$"),
                *("--suppress-health-check", "all", "--warnings", "off", "--no-color"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "COLUMNS": "160"},
            )
            output, _ = await process.communicate()
        text = output.decode("utf-8", "replace")
        if process.returncode:
            report.findings["schemathesis"] = 1
            print(text)
        report.outcomes["schemathesis, its exit code"] = process.returncode or 0
        generated = re.search(r"(\d+) generated", text)
        report.inputs = int(generated[1]) if generated else 0
        for finding in gateway.findings():
            _note(report, finding)
    return report


def _note(report: Report, finding: Finding) -> None:
    report.findings[finding.kind] += 1
    print(f"! {finding.kind}\n{finding.text}")
