"""A finding of the doctor, with its reason and its fix, and the exit code that follows from findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvroute.doctor.observations import Observations, WorkerSeen


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. `code` is stable and names the entry in docs/troubleshooting.md."""

    code: str
    severity: Severity
    subject: str
    """The part concerned, with id and URL."""
    what: str
    why: str = ""
    fix: str = ""


Found = Iterator[Finding]


def exit_code(found: Sequence[Finding]) -> int:
    """1 if there is an error, else 0: warnings do not count."""
    return int(any(each.severity is Severity.ERROR for each in found))


def error(code: str, subject: str, what: str, why: str, fix: str) -> Finding:
    return Finding(code, Severity.ERROR, subject, what, why, fix)


def warning(code: str, subject: str, what: str, why: str, fix: str) -> Finding:
    return Finding(code, Severity.WARNING, subject, what, why, fix)


def unchecked(code: str, subject: str, what: str) -> Finding:
    return Finding(code, Severity.NOT_CHECKED, subject, what)


def running(seen: Observations) -> list[WorkerSeen]:
    return [worker for worker in seen.workers if worker.answers]
