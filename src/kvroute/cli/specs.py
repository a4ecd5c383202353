"""How commands read an endpoint spec and say what is in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from kvroute.cli.gateway_settings import problems_of
from kvroute.deploy.spec.fields import Verdict, dotted
from kvroute.deploy.spec.loading import Finding, Reading, read_spec
from kvroute.routing.registry import STRATEGIES


class WrongSpec(click.ClickException):
    """What is wrong with a spec has been printed already."""

    exit_code = 1

    def show(self, file: object = None) -> None:
        click.echo(f"kvroute: {self.message}", err=True)


def read_text(file: Path) -> str:
    """The file's text. Raises WrongSpec."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise WrongSpec(f"cannot read {file}: {reason}") from None


def reading_of(text: str) -> Reading:
    """The spec, with what the gateway says about the options that the spec passes on to it."""
    reading = read_spec(text, strategies=frozenset(STRATEGIES))
    if reading.document is None:
        return reading
    problems = list(problems_of(reading.document))
    if not problems:
        return reading
    lines = {finding.path: finding.line for finding in reading.findings}
    wrong = [Finding(path, lines.get(path), Verdict.WRONG, text) for path, text in problems]
    fields = {finding.path for finding in wrong}
    kept = [finding for finding in reading.findings if finding.path not in fields]
    return Reading(None, tuple(sorted([*kept, *wrong], key=lambda each: each.line or 0)))


def line_about(file: Path, finding: Finding) -> str:
    """One finding as one line: where, what becomes of it, why."""
    place = f"{file}:{finding.line}" if finding.line is not None else str(file)
    name = f"{dotted(finding.path)}: " if finding.path else ""
    return f"{place}: {finding.verdict.value}: {name}{finding.text}"


def tell(file: Path, findings: Iterable[Finding], *, err: bool) -> None:
    for finding in findings:
        click.echo(line_about(file, finding), err=err)


def count(findings: Iterable[Finding]) -> str:
    """How many fields are applied, noted and wrong."""
    verdicts = [finding.verdict for finding in findings]
    return ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict)
