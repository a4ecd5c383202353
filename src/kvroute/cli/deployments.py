"""How commands read an endpoint spec and say what is in it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import select
import signal
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from kvroute.app.config import load
from kvroute.clock import SystemClock
from kvroute.deploy.endpoint import simulated
from kvroute.deploy.plan import AdminKeyLocation, Engine, UpSpec, local_findings
from kvroute.deploy.prepare import EndpointRequest, prepare, prepare_endpoint
from kvroute.deploy.render.config import config_text, gateway_config
from kvroute.deploy.render.kubernetes import SECRET_FILE, with_earlier_key
from kvroute.deploy.render.plan import EndpointPlan, plan_endpoint, with_local_token_bytes
from kvroute.deploy.render.reach import findings_for
from kvroute.deploy.render.registry import TARGETS
from kvroute.deploy.render.site import local_site
from kvroute.deploy.spec.endpoint import Document
from kvroute.deploy.spec.loading import Finding, SpecReading, read_spec
from kvroute.deploy.spec.source import FieldVerdict, dotted
from kvroute.deploy.spec.source import Path as Field
from kvroute.deploy.state import StateFolder, UpState
from kvroute.deploy.up import LogTail, Prepare, Screen, follow, last_lines, run_up
from kvroute.errors import ConfigError, InvalidConfig, KvrouteError
from kvroute.routing.registry import STRATEGIES

SETTINGS: Field = ("x-kvroute", "gateway", "settings")
OPTIONS: Field = ("x-kvroute", "routing", "options")


def problems_of(document: Document) -> Iterator[tuple[Field, str]]:
    """What is wrong with `x-kvroute.gateway.settings` and `x-kvroute.routing.options`, by field.

    Files that secrets are in are not looked for: they are where the gateway will run.
    """
    plan = plan_endpoint(document)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kvroute.yaml"
        file.touch(mode=0o600)
        file.write_text(config_text(gateway_config(plan, local_site(plan))), encoding="utf-8")
        try:
            load(file=file)
        except InvalidConfig as exc:
            found = exc.problems
        else:
            found = ()
    for problem in found:
        if not problem.path.endswith("_file"):
            yield _field(document, problem), _text(problem, file)


def _field(document: Document, problem: ConfigError) -> Field:
    """Where the spec says it."""
    section = problem.path.partition(".")[0]
    settings = document.x_kvroute.gateway.settings or {}
    if section == "routing" and section not in settings:
        return OPTIONS
    return SETTINGS


def _text(problem: ConfigError, file: Path) -> str:
    """With the option's own name, and without the place in a file that nobody has."""
    text = str(problem)
    return text.rpartition(f" ({file.name}")[0] or text


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


def reading_of(text: str) -> SpecReading:
    """The spec, with what the gateway says about the options that the spec passes on to it."""
    reading = read_spec(text, strategies=frozenset(STRATEGIES))
    if reading.document is None:
        return reading
    problems = list(problems_of(reading.document))
    if not problems:
        return reading
    lines = {finding.path: finding.line for finding in reading.findings}
    wrong = [Finding(path, lines.get(path), FieldVerdict.WRONG, text) for path, text in problems]
    fields = {finding.path for finding in wrong}
    kept = [finding for finding in reading.findings if finding.path not in fields]
    return SpecReading(None, tuple(sorted([*kept, *wrong], key=lambda each: each.line or 0)))


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
    return ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in FieldVerdict)


state_dir_option = click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".kvroute"),
    show_default=True,
    help="The folder of that `kvroute up`.",
)


STATE_DIR = Path(".kvroute")
IN_THE_SPEC = {
    "model": "spec.model",
    "workers": "spec.replicas",
    "tensor_parallel_size": "x-kvroute.gpusPerWorker",
    "engine_args": "spec.worker.args",
}
"""Parameters that a spec has fields for."""


@click.command()
@click.option(
    "-f",
    "--file",
    "file",
    metavar="SPEC",
    type=click.Path(path_type=Path),
    help="An endpoint spec: run all of it, caches included. --host, --port and --strategy win over it.",
)
@click.option(
    "--engine",
    type=click.Choice([engine.value for engine in Engine]),
    help="sim: simulated workers; vllm: real ones, on GPUs if there are any, else on the CPU. "
    "Default: sim; with -f what the spec says (sim: its workers simulated, without caches).",
)
@click.option(
    "--model",
    metavar="NAME",
    help="What the workers serve: a model name or folder; vllm without it: a small random-weight model.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="How many. Default: 2; one per GPU share on GPUs."
)
@click.option("--tensor-parallel-size", type=click.IntRange(min=1), help="GPUs per worker. Default: 1.")
@click.option("--host", help="Where the gateway listens. Default: 127.0.0.1.")
@click.option("--port", type=click.IntRange(1, 65535), help="Default: 8080.")
@click.option("--strategy", type=click.Choice(list(STRATEGIES)), help="Routing strategy of the gateway.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=STATE_DIR,
    show_default=True,
    help="Logs, made-up models, and what `kvroute ps` reads; the gateway's admin key too, if given.",
)
@click.option(
    "--admin-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file with the gateway's admin key; without one, it is made.",
)
@click.option(
    "--engine-venv",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".venv-engine"),
    show_default=True,
    help="Where vLLM for CPUs is, or will be installed (2 GB).",
)
@click.option("--logs/--no-logs", default=True, help="Show what the processes write. Default: --logs.")
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def up(
    context: click.Context,
    /,
    file: Path | None,
    state_dir: Path,
    admin_key_file: Path | None,
    engine_venv: Path,
    logs: bool,
    **wanted: Any,
) -> None:
    """Run workers and the gateway, or the endpoint of a spec, on this machine until Ctrl-C.

    ENGINE_ARGS, after a `--`, are appended to every worker's command line.
    """
    console, clock = Console(), SystemClock()
    making: Prepare
    is_given = context.get_parameter_source("state_dir") is not ParameterSource.DEFAULT
    admin_key = AdminKeyLocation(admin_key_file, state_dir if is_given else None)
    if file is not None:
        endpoint = _endpoint(file, wanted)
        wish = EndpointRequest(endpoint, wanted["host"], wanted["port"], state_dir, engine_venv, admin_key)
        making = partial(prepare_endpoint, wish, console=console, clock=clock)
    else:
        given = {name: value for name, value in wanted.items() if value is not None}
        engine = Engine(given.pop("engine", Engine.SIM.value))
        spec = UpSpec(
            engine=engine, state_dir=state_dir, engine_venv=engine_venv, admin_key=admin_key, **given
        )
        making = partial(prepare, spec, console=console, clock=clock)
    try:
        asyncio.run(run_up(making, StateFolder(state_dir), console=console, clock=clock, show_logs=logs))
    except KvrouteError as exc:
        raise click.ClickException(str(exc)) from exc


def _endpoint(file: Path, wanted: dict[str, Any]) -> EndpointPlan:
    """What the spec in `file` says, which is told as far as it has no effect here."""
    for name, field in IN_THE_SPEC.items():
        if wanted[name] not in (None, ()):
            option = f"--{name.replace('_', '-')}" if name != "engine_args" else "ENGINE_ARGS"
            raise click.UsageError(f"{option} does not go with -f: the spec has {field}")
    reading = reading_of(read_text(file))
    findings = list(reading.findings)
    if reading.document is not None:
        findings = list(local_findings(reading.document, findings))
    tell(file, (each for each in findings if each.verdict is not FieldVerdict.APPLIED), err=True)
    if reading.document is None:
        raise WrongSpec(f"{file} is wrong: {count(findings)}")
    endpoint = with_local_token_bytes(plan_endpoint(reading.document))
    if wanted["strategy"] is not None:
        endpoint = dataclasses.replace(endpoint, strategy=wanted["strategy"])
    if wanted["engine"] == Engine.SIM.value and not endpoint.is_simulated:
        return simulated(endpoint)
    if wanted["engine"] == Engine.VLLM.value and endpoint.is_simulated:
        raise click.UsageError("--engine vllm does not go with a spec that says x-kvroute.engine: sim")
    return endpoint


KILLED_S = 15.0


@click.command()
@state_dir_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=90.0,
    show_default=True,
    help="Seconds that the processes have to end by themselves; then they are killed.",
)
def down(state_dir: Path, timeout_s: float) -> None:
    """End every process of `kvroute up`, as Ctrl-C there would."""
    state = StateFolder(state_dir).read()
    if state is None:
        click.echo(f"nothing runs in {state_dir}")
        return
    try:
        watch = os.pidfd_open(state.pid)
    except ProcessLookupError:
        raise click.ClickException(
            f"process {state.pid}, which supervises {state_dir}, is not on this machine (in a container?)"
        ) from None
    try:
        # A second signal kills what has not ended after the first; the last resort is for the supervisor.
        for number, wait_s in (
            (signal.SIGTERM, timeout_s),
            (signal.SIGTERM, KILLED_S),
            (signal.SIGKILL, KILLED_S),
        ):
            _send(watch, number)
            if select.select([watch], [], [], wait_s)[0]:
                click.echo(f"{state.name or 'it'} has ended")
                return
    finally:
        os.close(watch)
    raise click.ClickException(f"process {state.pid} did not end")


def _send(watch: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(watch, number)
    except ProcessLookupError:
        pass  # it has just ended


@click.command()
@state_dir_option
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object; its `processes` are empty when nothing runs."
)
def ps(state_dir: Path, as_json: bool) -> None:
    """List the processes of `kvroute up`: how each is, for how long, restarts and addresses."""
    state = StateFolder(state_dir).read()
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(state) if state is not None else {"processes": []}))
    elif state is None:
        click.echo(f"nothing runs in {state_dir}")
    else:
        click.echo(f"{state.name or 'starting'}, supervised by process {state.pid}")
        Console().print(_table(state, SystemClock().wall()))
        if state.admin_key_file:
            click.echo(f"the gateway's admin key: {state.admin_key_file}")


def _table(state: UpState, now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("NAME", "STATE", "FOR", "RESTARTS", "PID", "URL"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("RESTARTS", "PID") else "left")
    for process in state.processes:
        pid = str(process.pid) if process.pid is not None else "-"
        row = (
            process.name,
            process.phase,
            _for(now - process.since),
            str(process.restarts),
            pid,
            process.url,
        )
        table.add_row(*row)
    return table


def _for(seconds: float) -> str:
    """A duration in its two largest units."""
    left = max(0, round(seconds))
    for name, length, smaller in (("d", 86_400, ("h", 3600)), ("h", 3600, ("m", 60)), ("m", 60, ("s", 1))):
        if left >= length:
            return f"{left // length} {name} {left % length // smaller[1]} {smaller[0]}"
    return f"{left} s"


@click.command()
@state_dir_option
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=100, show_default=True, help="How many of the last."
)
@click.option("-f", "--follow", "keep_on", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
def logs(state_dir: Path, lines: int, keep_on: bool, names: tuple[str, ...]) -> None:
    """Show the logs of these processes, or of all; also after they have ended."""
    files = StateFolder(state_dir).log_files()
    unknown = [name for name in names if name not in files]
    if unknown:
        known = ", ".join(files) or f"none in {state_dir}"
        raise click.ClickException(f"there is no log of {', '.join(unknown)}; logs: {known}")
    chosen = {name: files[name] for name in names or files}
    screen, growing = Screen(Console(), chosen), {}
    for name, path in chosen.items():
        last, end = last_lines(path, lines)
        if len(chosen) == 1 and not keep_on:
            click.echo("".join(f"{line}\n" for line in last), nl=False)
        else:
            screen.show(name, last)
        growing[name] = LogTail(path, offset=end)
    if keep_on:
        asyncio.run(_follow_until_told(growing, screen))


async def _follow_until_told(files: dict[str, LogTail], screen: Screen) -> None:
    """Until SIGINT or SIGTERM, also where the shell has started this with SIGINT ignored (`&`)."""
    following = asyncio.create_task(follow(files, screen, SystemClock()))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, following.cancel)
    await asyncio.wait({following})
    if not following.cancelled():
        following.result()


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
    tell(file, (each for each in findings if each.verdict is not FieldVerdict.APPLIED), err=True)
    if reading.document is None:
        raise WrongSpec(f"{file} is wrong: {count(findings)}")
    files = TARGETS[target].render(with_local_token_bytes(plan_endpoint(reading.document)))
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
            text = with_earlier_key(text, path.read_text(encoding="utf-8"))
        except ValueError as exc:
            raise WrongSpec(f"{path} is not what was rendered: {exc}; remove it to make a new key") from None
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)
