"""`kvroute doctor`: examines a deployment and prints findings with their fixes."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import platform
import ssl
import tarfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import click
import httpx
from pydantic import SecretStr

from kvroute import __version__
from kvroute.access.admin_key import key_lines, key_path, user_state_folder
from kvroute.answers import BoundedTransport
from kvroute.caches.tokenizing import model_folder
from kvroute.cli.serve import InvalidConfiguration, configured
from kvroute.clock import SystemClock
from kvroute.config.config import Config
from kvroute.config.loading import Loaded, load, masked
from kvroute.config.paths import ConfigSetting
from kvroute.doctor.checks import diagnose, refused
from kvroute.doctor.gather import CompareTokenizer, Gatherer
from kvroute.doctor.observations import Deployment, Finding, Observations, Severity, exit_code
from kvroute.errors import ConfigError, InvalidConfig
from kvroute.fleet.discovery.file import read_workers_file
from kvroute.fleet.discovery.registry import sources_of
from kvroute.fleet.worker import WorkerId, WorkerSpec
from kvroute.options import Options
from kvroute.routing.strategy import Needs
from kvroute.tls import client_context
from kvroute.tokens.chat import EngineFlags
from kvroute.tokens.exact import ExactTokens, Mode, TokenThreads
from kvroute.upstream.options import UpstreamOptions

CLIENT_KEY = "KVROUTE_API_KEY"
"""Variable with a client's key for the gateway."""
_MASK = "**********"
TIMEOUT_S = 10.0
_OWN_DESCRIPTORS = 256
"""Files that the gateway itself has open, and idle connections."""


class CannotRun(InvalidConfiguration):
    exit_code = 2


class Refused(CannotRun):
    """The deployment cannot be examined. A wrong configuration is printed as findings."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        context = click.get_current_context(silent=True)
        flags = context.params if context is not None else {}
        self._as_json = bool(flags.get("as_json"))
        self._source = str(flags.get("spec") or flags.get("file") or "")
        self._flag = "-f" if flags.get("spec") else "-c"

    def show(self, file: Any = None) -> None:
        cause = self.__cause__
        if not isinstance(cause, InvalidConfig):
            super().show(file)
            return
        findings = refused(cause.problems, self._source, self._flag)
        click.echo(as_document(findings) if self._as_json else as_text(findings, Observations(())), nl=False)


@dataclasses.dataclass(frozen=True, slots=True)
class _Examined:
    """The deployment with the options that describe it."""

    deployment: Deployment
    config: Config


url_option = click.option("--url", metavar="URL", help="A running gateway; its own configuration is used.")


@click.command()
@url_option
@click.option(
    "-f",
    "--file",
    "spec",
    metavar="SPEC",
    type=click.Path(path_type=Path),
    help="An endpoint spec, as `kvroute up -f` runs it on this machine (state: --state-dir, else .kvroute).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--probe/--no-probe", default=True, help="Send two short prompts to each worker (default).")
@click.option(
    "--bundle",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a support archive (tar.gz) without secrets and prompts.",
)
@configured(Refused, lambda flags: (_spec_settings(flags), None))
@click.pass_context
def doctor(context: click.Context, loaded: Loaded) -> None:
    """Examine a deployment: workers, events, LMCache, L2, keys and limits; each finding with its fix.

    Takes the configuration of `kvroute serve` (-c and the other flags), an endpoint spec (-f) or a running
    gateway (--url; without any of them, the one on this machine). Exit code 0: no error, 1: at least one,
    2: could not run. Warnings do not count.
    """
    flags = context.params
    config, findings, seen = asyncio.run(examine(loaded.config, url=flags["url"], probes=flags["probe"]))
    if flags["bundle"] is not None:
        try:
            write_bundle(flags["bundle"], config, loaded.config, seen, findings)
        except OSError as error:
            raise ConfigError("bundle", f"cannot write {flags['bundle']}: {error.strerror}") from error
    click.echo(as_document(findings) if flags["as_json"] else as_text(findings, seen), nl=False)
    context.exit(exit_code(findings))


def _spec_settings(flags: dict[str, Any]) -> list[ConfigSetting]:
    """The settings of the gateway that `kvroute up -f` started from an endpoint spec. Raises ConfigError."""
    if flags["spec"] is None:
        return []
    # Imported here: another source does not need these modules.
    from kvroute.cli import deployments
    from kvroute.deploy.endpoint import GATEWAY_CONFIG
    from kvroute.deploy.up_state import StateFolder

    try:
        reading = deployments.reading_of(deployments.read_text(flags["spec"]))
    except click.ClickException as error:
        raise ConfigError("", error.message) from error
    if reading.document is None:
        raise ConfigError("", f"{flags['spec']} is not valid: `kvroute check -f {flags['spec']}` says why")
    folder = Path(flags["state_dir"] or ".kvroute")
    state = StateFolder(folder).read()
    if state is None or not (folder / GATEWAY_CONFIG).is_file():
        raise ConfigError(
            "",
            f"no endpoint runs in {folder}: start it with `kvroute up -f {flags['spec']}`, or name its "
            "folder with --state-dir",
        )
    config = load(file=folder / GATEWAY_CONFIG).config
    flags["url"] = flags["url"] or state.gateway
    if state.admin_key_file and not flags["admin_key_file"]:
        flags["admin_key_file"] = state.admin_key_file
    settings = config.model_dump(exclude_unset=True, exclude_defaults=True)
    plain = {name: _revealed(value) for name, value in settings.items()}
    return [ConfigSetting((name,), value, str(flags["spec"])) for name, value in plain.items()]


def _revealed(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {key: _revealed(inner) for key, inner in value.items()}
    return [_revealed(inner) for inner in value] if isinstance(value, (list, tuple)) else value


async def examine(
    config: Config, *, url: str | None = None, probes: bool = True
) -> tuple[Config, list[Finding], Observations]:
    """Examine the deployment of `config`, or with `url` of the gateway there, with the secrets of `config`.

    Returns the configuration in force, the findings, and what was seen. Raises ConfigError.
    """
    examined = await _examined(config, url)
    seen = await _gather(examined, probes=probes)
    return examined.config, diagnose(examined.deployment, seen), seen


# --- what to examine --------------------------------------------------------------------------------------


async def _examined(config: Config, url: str | None) -> _Examined:
    """The deployment that `config` describes, or that the gateway at `url` runs. Raises ConfigError."""
    gateway = (url or _own_url(config)).rstrip("/")
    admin = admin_key(config, gateway)
    workers: tuple[WorkerSpec, ...] = ()
    async with _client(config) as client:
        described = None
        if url is not None or not sources_of(config.fleet, SystemClock()):
            described = await _ask(client, gateway, "/admin/config", admin)
            if described is None and url is None:
                raise ConfigError(
                    "fleet",
                    f"no workers to examine, and no gateway at {gateway} shows its configuration: give -c, "
                    "--worker, -f, or --url of a running gateway",
                )
            if described is None:
                raise ConfigError(
                    "url",
                    f"{gateway} does not show its configuration: give its admin key with --admin-key-file, "
                    "or its configuration with -c",
                )
            url = gateway
            config = _with_secrets(described, config)
        listed = await _ask(client, gateway, "/admin/workers", admin)
    ignored: _Ignored = ()
    unknown = ""
    if url is None or listed is None:
        # Also beside a running gateway: its list lacks the workers that it ignores.
        workers, ignored, unknown = _configured_workers(config, may_be_none=listed is not None)
    if listed is not None:
        unknown = ""
        workers = tuple(
            WorkerSpec(WorkerId(entry["id"]), entry["url"], tuple(entry.get("models") or ()))
            for entry in listed["workers"]
        )
    deployment = _deployment(config, workers, unknown, gateway, admin)
    return _Examined(dataclasses.replace(deployment, ignored=ignored), config)


def _own_url(config: Config) -> str:
    host = config.server.host
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "*": "127.0.0.1"}.get(host, host)
    return f"{'https' if config.server.tls.is_on else 'http'}://{host}:{config.server.port}"


def admin_key(config: Config, gateway: str) -> str | None:
    """The configured admin key, else the one that a gateway on this machine generated."""
    if config.admin.keys:
        return config.admin.keys[0]
    port = urlsplit(gateway).port
    with suppress(OSError, ConfigError, UnicodeDecodeError, IndexError):
        folder = config.server.state_dir or user_state_folder(os.environ)
        return key_lines(key_path(folder, port or 0).read_text(encoding="utf-8"))[0]
    return None


def _client(config: Config) -> httpx.AsyncClient:
    options = config.upstream
    return httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, transport=_transport(options))


def _transport(options: UpstreamOptions) -> BoundedTransport:
    return BoundedTransport(httpx.AsyncHTTPTransport(verify=_verification(options), trust_env=False))


def _verification(options: UpstreamOptions) -> ssl.SSLContext | bool:
    if options.tls.is_set:
        return client_context(options.tls, "upstream.tls", ssl.create_default_context)
    return options.verify_tls


async def _ask(client: httpx.AsyncClient, url: str, path: str, key: str | None) -> dict[str, Any] | None:
    """The JSON object at `path` of the gateway's admin API; None without an answer."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = await client.get(url + path, headers=headers)
        document = answer.json() if answer.is_success else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _with_secrets(described: Mapping[str, Any], local: Config) -> Config:
    """The gateway's masked configuration, with those secrets that are known here."""
    options = {section: value for section, value in described.items() if section != "in_force"}
    config = Config.model_validate(_without_masks(options))
    worker_key = local.fleet.worker_api_key
    fleet = config.fleet.model_copy(update={"worker_api_key": worker_key}) if worker_key else config.fleet
    l2 = config.lmcache.l2
    if local.lmcache.l2.redis_url is not None:
        l2 = local.lmcache.l2
    return config.model_copy(update={"fleet": fleet, "lmcache": config.lmcache.model_copy(update={"l2": l2})})


def _without_masks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_masks(inner) for key, inner in value.items() if inner != _MASK}
    if isinstance(value, list):
        return [_without_masks(inner) for inner in value if inner != _MASK]
    return value


_Ignored = tuple[tuple[WorkerSpec, WorkerSpec], ...]


def _configured_workers(
    config: Config, *, may_be_none: bool = False
) -> tuple[tuple[WorkerSpec, ...], _Ignored, str]:
    """The workers of `fleet.workers` and `fleet.file`, `Deployment.ignored` and `.unknown_workers`.

    Raises ConfigError.
    """
    listed = [entry.spec() for entry in config.fleet.workers]
    if config.fleet.file is not None:
        try:
            listed += read_workers_file(config.fleet.file)
        except ConfigError as exc:
            raise InvalidConfig([ConfigError("fleet.file", f"{config.fleet.file}: {exc}")]) from exc
    workers: dict[WorkerId, WorkerSpec] = {}
    ignored = []
    for spec in listed:
        kept = workers.setdefault(spec.id, spec)
        if kept.url != spec.url:
            ignored.append((spec, kept))
    unknown = ""
    if config.fleet.kubernetes.enabled or config.fleet.dns.names:
        unknown = "workers from Kubernetes or DNS: only a running gateway with its admin key lists them"
    elif not workers and not may_be_none:
        raise ConfigError(
            "fleet", "no workers to examine: give -c, --worker, -f, or --url of a running gateway"
        )
    return tuple(workers.values()), tuple(ignored), unknown


def _deployment(
    config: Config, workers: tuple[WorkerSpec, ...], unknown: str, gateway: str, admin: str | None
) -> Deployment:
    used = config.routing.strategies_used()
    key = config.fleet.worker_api_key
    api_keys = config.server.api_keys
    return Deployment(
        workers=workers,
        strategies=used,
        reads_caches=config.routing.may_need(Needs.TOKENS),
        uses_caches=any(config.routing.types[name].has_affinity for name in used),
        kv_events=config.kv_events,
        lmcache=config.lmcache,
        worker_key=key.get_secret_value() if key else None,
        gateway_url=gateway,
        client_key=os.environ.get(CLIENT_KEY) or (api_keys[0].get_secret_value() if api_keys else None),
        admin_key=admin,
        open_files=2 * config.server.max_in_flight + _OWN_DESCRIPTORS,
        unknown_workers=unknown,
        isolates_tenants=config.server.isolation == "per-key",
    )


async def _gather(examined: _Examined, *, probes: bool) -> Observations:
    config = examined.config
    async with _client(config) as client, TokenThreads(1) as threads:
        key = examined.deployment.worker_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(
            trust_env=False, timeout=TIMEOUT_S, headers=headers, transport=_transport(config.upstream)
        ) as worker_client:
            gatherer = Gatherer(
                examined.deployment,
                client,
                compare=_comparison(config, worker_client, threads),
                probes=probes,
            )
            return await gatherer.gather()


def _comparison(config: Config, client: httpx.AsyncClient, threads: TokenThreads) -> CompareTokenizer:
    tokens = config.tokens
    flags = EngineFlags(
        chat_template_kwargs=tokens.chat_template_kwargs,
        content_format=tokens.content_format,
        tools_dropped_for_none=tokens.tools_dropped_for_none,
    )

    async def compare(model: str, root: str, url: str) -> str | None:
        folder = await asyncio.to_thread(model_folder, model, root, tokens.models, os.environ)
        if folder is None:
            return None
        exact = ExactTokens(threads, client, flags=flags, allow_fastokens=tokens.fastokens)
        source = await exact.prepare(model, folder=folder, url=url)
        return "" if source.mode is Mode.LOCAL else f"{folder}: {source.explanation}"

    return compare


# --- output -----------------------------------------------------------------------------------------------


def as_text(findings: Iterable[Finding], seen: Observations) -> str:
    """The findings for a reader, a summary last."""
    findings = list(findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.severity.value}: {finding.subject}: {finding.what} [{finding.code}]")
        if finding.why:
            lines.append(f"    why: {finding.why}")
        if finding.fix:
            lines.append(f"    fix: {finding.fix}")
    counts = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    workers = len(seen.workers)
    lines.append(
        f"{workers} worker{'s' * (workers != 1)} examined: {counts[Severity.ERROR]} errors, "
        f"{counts[Severity.WARNING]} warnings, {counts[Severity.NOT_CHECKED]} not checked"
    )
    return "\n".join(lines) + "\n"


def as_document(findings: Iterable[Finding]) -> str:
    """The findings as JSON: a list of objects, `severity` as text."""
    entries = [{**dataclasses.asdict(finding), "severity": finding.severity.value} for finding in findings]
    return json.dumps({"version": __version__, "findings": entries}, indent=2, ensure_ascii=False) + "\n"


def write_bundle(
    path: Path, config: Config, local: Config, seen: Observations, findings: Iterable[Finding]
) -> None:
    """Write the support archive. Every secret of the two configurations is replaced in every file.

    Raises OSError. Contains no prompts: the gateway's answers have none.
    """
    findings = list(findings)
    texts = {
        "findings.txt": as_text(findings, seen),
        "findings.json": as_document(findings),
        "config.json": json.dumps(masked(config), indent=2),
        "versions.json": json.dumps(_versions(seen), indent=2),
    }
    if seen.gateway is not None:
        texts |= {f"gateway/{name}": text for name, text in seen.gateway.texts.items()}
    for worker in seen.workers:
        name = quote(worker.spec.id, safe="")
        texts[f"workers/{name}/metrics.txt"] = worker.metrics_reply.body.decode("utf-8", "replace")
        texts[f"workers/{name}/models.json"] = worker.models_reply.body.decode("utf-8", "replace")
    hidden = sorted(
        {*_secrets(config), *_secrets(local), os.environ.get(CLIENT_KEY, ""), *_keys(config, seen)} - {""},
        key=len,
        reverse=True,
    )
    now = int(time.time())
    with tarfile.open(path, "w:gz") as archive:
        for name, text in texts.items():
            for secret in hidden:
                for form in {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]}:
                    text = text.replace(form, _MASK)
            data = text.encode()
            member = tarfile.TarInfo(f"kvroute-support/{name}")
            member.size, member.mtime, member.mode = len(data), now, 0o600
            archive.addfile(member, io.BytesIO(data))


def _keys(config: Config, seen: Observations) -> set[str]:
    """The admin key in use, which may come from the gateway's own file."""
    key = admin_key(config, seen.gateway.url) if seen.gateway is not None else None
    return {key} if key else set()


def _secrets(options: object) -> set[str]:
    """Every secret value in the options, and the password inside a URL."""
    secrets: set[str] = set()
    if isinstance(options, Options):
        for name in type(options).model_fields:
            secrets |= _secrets(getattr(options, name))
    elif isinstance(options, SecretStr):
        text = options.get_secret_value()
        secrets.add(text)
        with suppress(ValueError):
            password = urlsplit(text).password
            if password:
                secrets |= {password, unquote(password)}
    elif isinstance(options, Mapping):
        secrets |= {secret for value in options.values() for secret in _secrets(value)}
    elif isinstance(options, (list, tuple, set, frozenset)):
        secrets |= {secret for value in options for secret in _secrets(value)}
    return secrets


def _versions(seen: Observations) -> dict[str, Any]:
    return {
        "kvroute": __version__,
        "gateway": seen.gateway.version if seen.gateway is not None else None,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {
            name: metadata.version(name)
            for name in ("fastapi", "httpx", "pyzmq", "redis", "tokenizers", "uvicorn")
        },
        "workers": {
            worker.spec.id: ".".join(map(str, worker.release)) if worker.release else None
            for worker in seen.workers
        },
    }
