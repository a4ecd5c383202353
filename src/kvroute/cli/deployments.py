"""The commands that read endpoint specs or manage local processes: `up`, `ps`, `logs`, `down`, `render`."""

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
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from kvroute.clock import SystemClock
from kvroute.config.loading import load
from kvroute.deploy.endpoint import with_simulated_workers
from kvroute.deploy.engine_install import Recipe
from kvroute.deploy.plan import AdminKeyLocation, Engine, UpSpec, local_findings
from kvroute.deploy.prepare import EndpointRequest, prepare, prepare_endpoint
from kvroute.deploy.render.config import config_text, gateway_config
from kvroute.deploy.render.envoy import GatewayRef, gateway_ref
from kvroute.deploy.render.kubernetes import SECRET_FILE
from kvroute.deploy.render.manifest import with_earlier_keys
from kvroute.deploy.render.plan import EndpointPlan, plan_endpoint, with_local_token_bytes
from kvroute.deploy.render.reach import KUBERNETES
from kvroute.deploy.render.registry import TARGETS, render_target, rendered, target_findings
from kvroute.deploy.render.site import local_site
from kvroute.deploy.spec.endpoint import Document
from kvroute.deploy.spec.loading import Finding, SpecReading, read_spec
from kvroute.deploy.spec.source import FieldVerdict, dotted
from kvroute.deploy.spec.source import Path as Field
from kvroute.deploy.spec.versions import stated_versions, with_versions
from kvroute.deploy.tiny_engines import TINY_WORKERS, with_tiny_engines
from kvroute.deploy.up import LogTail, Prepare, Screen, follow, last_lines, run_up
from kvroute.deploy.up_state import StateFolder, UpState
from kvroute.errors import ConfigError, InvalidConfig, KvrouteError
from kvroute.routing.registry import STRATEGIES

SETTINGS: Field = ("x-kvroute", "gateway", "settings")
OPTIONS: Field = ("x-kvroute", "routing", "options")


def problems_of(document: Document) -> Iterator[tuple[Field, str]]:
    """The errors in `x-kvroute.gateway.settings` and `x-kvroute.routing.options`, by field.

    Files with secrets are not checked: they are on the machine where the gateway will run.
    """
    plan = plan_endpoint(document)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kvroute.yaml"
        file.touch(mode=0o600)
        file.write_text(config_text(gateway_config(plan, local_site(plan))), encoding="utf-8")
        try:
            load(file=file)
        except InvalidConfig as exc:
            config_problems = exc.problems
        else:
            config_problems = ()
    for problem in config_problems:
        if not problem.path.endswith("_file"):
            yield _field(document, problem), _text(problem, file)


def _field(document: Document, problem: ConfigError) -> Field:
    """The field of the spec that causes the problem."""
    section = problem.path.partition(".")[0]
    settings = document.x_kvroute.gateway.settings or {}
    if section == "routing" and section not in settings:
        return OPTIONS
    return SETTINGS


def _text(problem: ConfigError, file: Path) -> str:
    """The problem's text without its place in the temporary file."""
    text = str(problem)
    return text.rpartition(f" ({file.name}")[0] or text


class WrongSpec(click.ClickException):
    """A spec is wrong; its errors have been printed already."""

    exit_code = 1

    def show(self, file: object = None) -> None:
        click.echo(f"kvroute: {self.message}", err=True)


def read_text(file: Path) -> str:
    """The text of a file. Raises WrongSpec."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise WrongSpec(f"cannot read {file}: {reason}") from None


def reading_of(text: str, versions: str | None = None) -> SpecReading:
    """The parsed spec, with the errors that the gateway finds in its own options in the spec.

    `versions` is the value of the option `--versions`. Raises click.BadParameter if it is none.
    """
    try:
        stated = stated_versions(versions) if versions is not None else None
    except ValueError as exc:
        raise click.BadParameter(str(exc), param_hint="'--versions'") from None
    reading = read_spec(text, strategies=frozenset(STRATEGIES), versions=stated)
    if reading.document is None:
        return reading
    problems = list(problems_of(reading.document))
    if not problems:
        return reading
    lines = {finding.path: finding.line for finding in reading.findings}
    wrong = [Finding(path, lines.get(path), FieldVerdict.WRONG, text) for path, text in problems]
    fields = {finding.path for finding in wrong}
    kept = [finding for finding in reading.findings if finding.path not in fields]
    return SpecReading(None, tuple(sorted([*kept, *wrong], key=lambda finding: finding.line or 0)))


def line_about(file: Path, finding: Finding) -> str:
    """One finding as one line: place, verdict, field and reason."""
    location = f"{file}:{finding.line}" if finding.line is not None else str(file)
    name = f"{dotted(finding.path)}: " if finding.path else ""
    return f"{location}: {finding.verdict.value}: {name}{finding.text}"


def print_findings(file: Path, findings: Iterable[Finding], *, err: bool) -> None:
    """Print a line for each finding: first what is wrong, then what is noted, last what is applied."""
    order = [FieldVerdict.WRONG, FieldVerdict.NOTED, FieldVerdict.APPLIED]
    for finding in sorted(findings, key=lambda finding: order.index(finding.verdict)):
        click.echo(line_about(file, finding), err=err)


def count(findings: Iterable[Finding]) -> str:
    """The number of applied, noted and wrong fields."""
    verdicts = [finding.verdict for finding in findings]
    return ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in FieldVerdict)


state_dir_option = click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".kvroute"),
    show_default=True,
    help="State folder of the `kvroute up` to use.",
)


STATE_DIR = Path(".kvroute")
SPEC_FIELDS = {
    "model": "spec.model",
    "workers": "spec.replicas",
    "prefill_workers": "spec.pdSpec.prefillSpec.replicas",
    "decode_workers": "spec.pdSpec.decodingSpec.replicas",
    "tensor_parallel_size": "x-kvroute.gpusPerWorker",
    "engine_args": "spec.worker.args",
}
"""Parameters that a spec sets with its own fields."""


@click.command()
@click.option(
    "-f",
    "--file",
    "file",
    metavar="SPEC",
    type=click.Path(path_type=Path),
    help="Run the endpoint of this spec, with its caches. --host, --port and --strategy win over the spec.",
)
@click.option(
    "--engine",
    type=click.Choice([engine.value for engine in Engine]),
    help="sim: simulated workers; vllm: real workers, on GPUs if there are any, else on the CPU. "
    "Default: sim; with -f the spec's engine (sim: simulate its workers, without caches).",
)
@click.option(
    "--tiny",
    is_flag=True,
    help="With -f: run real CPU engines with a tiny model, and real caches, in place of the spec's model and "
    f"GPUs. One worker for each replica, at most {TINY_WORKERS} or --workers.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="Model name or folder for the workers. Default with vllm: a small model with random weights.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Number of workers. Default: 2; on GPUs as many as fit."
)
@click.option(
    "--prefill-workers",
    type=click.IntRange(min=1),
    help="Number of workers that compute long prompts, whose KV decode workers take over.",
)
@click.option("--decode-workers", type=click.IntRange(min=1), help="Number of workers that answer.")
@click.option("--tensor-parallel-size", type=click.IntRange(min=1), help="GPUs per worker. Default: 1.")
@click.option("--host", help="Address of the gateway. Default: 127.0.0.1.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the gateway. Default: 8080.")
@click.option("--strategy", type=click.Choice(list(STRATEGIES)), help="Routing strategy of the gateway.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=STATE_DIR,
    show_default=True,
    help="Folder for logs, generated models and process states; if given, also for the admin key.",
)
@click.option(
    "--admin-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the gateway's admin key. Default: a key is generated.",
)
@click.option(
    "--engine-venv",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".venv-engine"),
    show_default=True,
    help="Virtual environment of vLLM for CPUs; created if missing (2 GB).",
)
@click.option("--tls", is_flag=True, help="Make a self-signed certificate, and serve https with it.")
@click.option("--logs/--no-logs", default=True, help="Show the output of the processes. Default: --logs.")
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def up(
    context: click.Context,
    /,
    file: Path | None,
    state_dir: Path,
    admin_key_file: Path | None,
    engine_venv: Path,
    tls: bool,
    logs: bool,
    tiny: bool,
    **flags: Any,
) -> None:
    """Run workers and the gateway, or the endpoint of a spec, on this machine until Ctrl-C.

    ENGINE_ARGS, after a `--`, are appended to every worker's command line.
    """
    console, clock = Console(), SystemClock()
    make: Prepare
    is_given = context.get_parameter_source("state_dir") is not ParameterSource.DEFAULT
    admin_key = AdminKeyLocation(admin_key_file, state_dir if is_given else None)
    if file is not None:
        if tls:
            raise click.UsageError(f"--tls cannot be used with -f: set server.tls in {dotted(SETTINGS)}")
        endpoint = _read_endpoint(file, flags, state_dir if tiny else None)
        wish = EndpointRequest(endpoint, flags["host"], flags["port"], state_dir, engine_venv, admin_key)
        make = partial(prepare_endpoint, wish, console=console, clock=clock)
    elif tiny:
        raise click.UsageError("--tiny needs -f SPEC; without a spec, --engine vllm runs a small model")
    else:
        given = {name: value for name, value in flags.items() if value is not None}
        engine = Engine(given.pop("engine", Engine.SIM.value))
        spec = UpSpec(
            engine=engine,
            state_dir=state_dir,
            engine_venv=engine_venv,
            admin_key=admin_key,
            tls=tls,
            **given,
        )
        make = partial(prepare, spec, console=console, clock=clock)
    try:
        asyncio.run(run_up(make, StateFolder(state_dir), console=console, clock=clock, show_logs=logs))
    except KvrouteError as exc:
        raise click.ClickException(str(exc)) from exc


def _read_endpoint(file: Path, flags: dict[str, Any], tiny_in: Path | None) -> EndpointPlan:
    """Read the spec in `file`, and print the fields that have no effect here. Raises WrongSpec.

    `tiny_in` is the state folder of engines with a tiny model (`--tiny`); None without it.
    """
    for name, field in SPEC_FIELDS.items():
        if flags[name] not in (None, ()) and not (name == "workers" and tiny_in is not None):
            option = f"--{name.replace('_', '-')}" if name != "engine_args" else "ENGINE_ARGS"
            raise click.UsageError(f"{option} cannot be used with -f: set {field} in the spec")
    if tiny_in is not None and flags["engine"] is not None:
        raise click.UsageError("--engine cannot be used with --tiny, which runs vLLM engines")
    reading = reading_of(read_text(file))
    document, findings = reading.document, list(reading.findings)
    if document is not None:
        findings = list(local_findings(document, findings))
    print_findings(
        file, (finding for finding in findings if finding.verdict is not FieldVerdict.APPLIED), err=True
    )
    if document is None:
        raise WrongSpec(f"{file} is wrong: {count(findings)}")
    if tiny_in is not None:
        most = flags["workers"] or TINY_WORKERS
        document, notes = with_tiny_engines(document, most_workers=most, folder=tiny_in.absolute())
        for note in notes:
            click.echo(f"{file}: --tiny: {note}", err=True)
    endpoint = with_local_token_bytes(plan_endpoint(_on_local_engine(document)))
    if flags["strategy"] is not None:
        endpoint = dataclasses.replace(endpoint, strategy=flags["strategy"])
    if flags["engine"] == Engine.SIM.value and not endpoint.is_simulated:
        return with_simulated_workers(endpoint)
    if flags["engine"] == Engine.VLLM.value and endpoint.is_simulated:
        raise click.UsageError("--engine vllm cannot be used with a spec that has x-kvroute.engine: sim")
    return endpoint


def _on_local_engine(document: Document) -> Document:
    """The document with the versions of this host's engine, which runs instead of the spec's image."""
    if document.x_kvroute.engine == "sim":
        return document
    if document.x_kvroute.device == "cpu":
        return with_versions(document, *Recipe.bundled().versions)
    try:
        return with_versions(document, metadata.version("vllm"), metadata.version("lmcache"))
    except metadata.PackageNotFoundError:
        return document  # the engine is in another environment: its versions are not known


KILL_TIMEOUT_S = 15.0


@click.command()
@state_dir_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=90.0,
    show_default=True,
    help="Seconds that the processes have to stop; then they are killed.",
)
def down(state_dir: Path, timeout_s: float) -> None:
    """Stop every process of `kvroute up`, as Ctrl-C there does."""
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
        # The second SIGTERM makes the supervisor kill the remaining processes. SIGKILL kills the supervisor
        # itself.
        for number, wait_s in (
            (signal.SIGTERM, timeout_s),
            (signal.SIGTERM, KILL_TIMEOUT_S),
            (signal.SIGKILL, KILL_TIMEOUT_S),
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
        pass  # the process has just ended


@click.command()
@state_dir_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object; `processes` is empty if nothing runs."
)
def ps(state_dir: Path, as_json: bool) -> None:
    """List the processes of `kvroute up` with state, duration, restarts and address."""
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
            _duration(now - process.since),
            str(process.restarts),
            pid,
            process.url,
        )
        table.add_row(*row)
    return table


def _duration(seconds: float) -> str:
    """A duration in two units, such as `2 h 5 m`."""
    remaining = max(0, round(seconds))
    for name, length, smaller in (("d", 86_400, ("h", 3600)), ("h", 3600, ("m", 60)), ("m", 60, ("s", 1))):
        if remaining >= length:
            return f"{remaining // length} {name} {remaining % length // smaller[1]} {smaller[0]}"
    return f"{remaining} s"


@click.command()
@state_dir_option
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Number of last lines to show.",
)
@click.option("-f", "--follow", "follow_logs", is_flag=True, help="Follow the logs until Ctrl-C.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
def logs(state_dir: Path, lines: int, follow_logs: bool, names: tuple[str, ...]) -> None:
    """Show the logs of the named processes, or of all, also after they have ended."""
    files = StateFolder(state_dir).log_files()
    unknown = [name for name in names if name not in files]
    if unknown:
        available = ", ".join(files) or f"none in {state_dir}"
        raise click.ClickException(f"there is no log of {', '.join(unknown)}; logs: {available}")
    chosen = {name: files[name] for name in names or files}
    screen, growing = Screen(Console(), chosen), {}
    for name, path in chosen.items():
        last, end = last_lines(path, lines)
        if len(chosen) == 1 and not follow_logs:
            click.echo("".join(f"{line}\n" for line in last), nl=False)
        else:
            screen.show(name, last)
        growing[name] = LogTail(path, offset=end)
    if follow_logs:
        asyncio.run(_follow_until_signal(growing, screen))


async def _follow_until_signal(files: dict[str, LogTail], screen: Screen) -> None:
    """Show new lines until SIGINT or SIGTERM."""
    # Own handlers, because a shell starts a background command (`&`) with SIGINT ignored.
    following = asyncio.create_task(follow(files, screen, SystemClock()))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, following.cancel)
    await asyncio.wait({following})
    if not following.cancelled():
        following.result()


class TargetName(click.ParamType):  # type: ignore[type-arg]
    """A render target: a built-in one, or one of an installed distribution."""

    name = "target"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(TARGETS)}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            is_known = render_target(value) is not None
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        if not is_known:
            names = ", ".join(map(repr, TARGETS))
            self.fail(f"{value!r} is not one of {names}, nor of an installed distribution.", param, ctx)
        return value


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
@click.option("--to", "target", required=True, type=TargetName(), help="Kind of files.")
@click.option(
    "--gateway",
    "door",
    metavar="[NAMESPACE/]NAME",
    type=gateway_ref,
    help="With --to kubernetes: endpoint pickers, and a route of this Gateway (Gateway API) to the workers.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the files to this folder; it is created if missing and may contain other files.",
)
@click.option(
    "--versions",
    metavar="VLLM+LMCACHE",
    help="The versions in the workers' image, such as 0.19.1+0.4.3. Default: what the spec or the image's "
    "name says.",
)
def render(
    file: Path, target: str, door: GatewayRef | None, folder: Path | None, versions: str | None
) -> None:
    """Generate a compose file, Kubernetes manifests or settings from an endpoint spec.

    Without -o the result goes to standard output. Fields without an effect, in general or for this target,
    are listed on standard error. Exit code 1: the spec is wrong, and nothing is written.
    """
    if door is not None and target != KUBERNETES:
        raise click.UsageError("--gateway needs --to kubernetes")
    reading = reading_of(read_text(file), versions)
    findings = list(reading.findings)
    if reading.document is not None:
        findings = target_findings(target, reading.document, findings, door)
    print_findings(
        file, (finding for finding in findings if finding.verdict is not FieldVerdict.APPLIED), err=True
    )
    if reading.document is None or any(finding.verdict is FieldVerdict.WRONG for finding in findings):
        raise WrongSpec(f"{file} is wrong: {count(findings)}")
    click.echo(f"{file}: {count(findings)}", err=True)
    files = rendered(target, with_local_token_bytes(plan_endpoint(reading.document)), door)
    if folder is not None:
        write(folder, files)
        return
    first_file, *others = files
    made = render_target(target)
    if made is None or not made.first_only:
        click.echo("".join(files.values()), nl=False)
        return
    click.echo(files[first_file], nl=False)
    if others:
        click.echo(f"kvroute: -o DIR also writes {', '.join(others)}", err=True)


def write(folder: Path, files: dict[str, str]) -> None:
    """Write `files` into `folder`, and print their paths. Raises WrongSpec if a file cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            if name == SECRET_FILE:
                _write_secret(folder / name, text)
            else:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
            click.echo(folder / name)
    except OSError as exc:
        raise WrongSpec(f"cannot write to {folder}: {exc.strerror}") from None


def _write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner may read, and keep the key of an existing one. Raises OSError."""
    if path.exists():
        try:
            text = with_earlier_keys(text, path.read_text(encoding="utf-8"))
        except ValueError as exc:
            raise WrongSpec(
                f"{path} was not written by render: {exc}; remove it to generate a new key"
            ) from None
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)
