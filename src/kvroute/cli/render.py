"""`kvroute render`: an endpoint spec as what other tools read."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvroute.cli.specs import WrongSpec, count, read_text, reading_of, tell
from kvroute.deploy.model_shape import with_model_at_hand
from kvroute.deploy.render.kubernetes import SECRET_FILE, with_its_key
from kvroute.deploy.render.plan import plan_endpoint
from kvroute.deploy.render.reach import findings_for
from kvroute.deploy.render.registry import TARGETS
from kvroute.deploy.spec.fields import Verdict


@click.command()
@click.option(
    "-f",
    "--file",
    "file",
    metavar="SPEC",
    required=True,
    type=click.Path(path_type=Path),
    help="The endpoint spec: HyperPod's InferenceEndpointConfig, or kvroute's own Endpoint.",
)
@click.option("--to", "target", required=True, type=click.Choice(list(TARGETS)), help="What to make of it.")
@click.option(
    "-o",
    "--output",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write files there; it is created if missing and may hold others.",
)
def render(file: Path, target: str, folder: Path | None) -> None:
    """Make a compose file, Kubernetes manifests or settings from an endpoint spec.

    Without -o the result goes to standard output. What has no effect, in general or in this
    target, is told on standard error. Exit code 1: the spec is wrong, nothing is written.
    """
    reading = reading_of(read_text(file))
    findings = list(reading.findings)
    if reading.document is not None:
        findings = list(findings_for(target, reading.document, findings))
    tell(file, (each for each in findings if each.verdict is not Verdict.APPLIED), err=True)
    if reading.document is None:
        raise WrongSpec(f"{file} is wrong: {count(findings)}")
    files = TARGETS[target].render(with_model_at_hand(plan_endpoint(reading.document)))
    if folder is not None:
        write(folder, files)
        return
    first, *others = files
    if not TARGETS[target].first_only:
        click.echo("".join(files.values()), nl=False)
        return
    click.echo(files[first], nl=False)
    if others:
        click.echo(f"kvroute: with -o DIR there would also be {', '.join(others)}", err=True)


def write(folder: Path, files: dict[str, str]) -> None:
    """Write `files` into `folder`, and say so. Raises WrongSpec when that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            if name == SECRET_FILE:
                _write_secret(folder / name, text)
            else:
                (folder / name).write_text(text, encoding="utf-8")
            click.echo(folder / name)
    except OSError as exc:
        raise WrongSpec(f"cannot write to {folder}: {exc.strerror}") from None


def _write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner may read; a key that is there already stays. Raises OSError."""
    if path.exists():
        try:
            text = with_its_key(text, path.read_text(encoding="utf-8"))
        except ValueError as exc:
            raise WrongSpec(f"{path} is not what was rendered: {exc}; remove it to make a new key") from None
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)
