"""`kvroute check`: validates a configuration or an endpoint spec without running anything."""

from __future__ import annotations

from pathlib import Path

import click

from kvroute.access.key_file import new_key, read_key_file
from kvroute.cli.serve import InvalidConfiguration, configured
from kvroute.config.loading import Loaded, check_files
from kvroute.config.yaml_output import resolved_yaml
from kvroute.errors import ConfigError
from kvroute.fleet.discovery.file import read_workers_file
from kvroute.openai.rewriting import key_space

_FIX = "kvroute.check.fix"
_VERSIONS = "kvroute.check.versions"


class NotValid(InvalidConfiguration):
    exit_code = 1


def _store_fix(context: click.Context, _: click.Parameter, fix: bool) -> None:
    context.meta[_FIX] = fix


def _check_spec(context: click.Context, _: click.Parameter, file: Path | None) -> None:
    if file is not None:
        context.exit(fix_spec(file) if context.meta[_FIX] else check_spec(file, context.meta[_VERSIONS]))


def _store_versions(context: click.Context, _: click.Parameter, versions: str | None) -> None:
    context.meta[_VERSIONS] = versions


@click.command()
@click.option(
    "-f",
    "--file",
    "spec",
    metavar="SPEC",
    type=click.Path(path_type=Path),
    expose_value=False,
    callback=_check_spec,
    help="Check an endpoint spec instead: report each field as applied, noted or wrong.",
)
@click.option(
    "--fix",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_store_fix,
    help="With -f: print the spec with the correct indentation of each line.",
)
@click.option(
    "--versions",
    metavar="VLLM+LMCACHE",
    is_eager=True,
    expose_value=False,
    callback=_store_versions,
    help="With -f: the versions in the workers' image, such as 0.19.1+0.4.3. Default: what the spec or the "
    "image's name says.",
)
@configured(NotValid)
def check(loaded: Loaded) -> None:
    """Validate a configuration and print it resolved, or an endpoint spec (-f) field by field.

    A configuration is printed as YAML with masked secrets; a comment after a value names its origin. Exit
    code 0: valid, 1: not valid. With --fix, 0 means that the indentation of every line is known.
    """
    check_workers_file(loaded)
    check_files(loaded.config)
    if not loaded.config.lmcache.isolate_adapters:
        click.echo(
            "kvroute: lmcache.isolate_adapters is off: with LMCache, LoRA adapters and their base model get "
            "each other's KV, and answers become wrong",
            err=True,
        )
    click.echo(resolved_yaml(loaded), nl=False)


def check_workers_file(loaded: Loaded) -> None:
    """Read `fleet.file` once; `serve` polls it. Raises ConfigError."""
    file = loaded.config.fleet.file
    if file is None:
        return
    try:
        read_workers_file(file)
    except ConfigError as exc:
        raise ConfigError("fleet.file", f"{file}: {exc}") from exc


def check_spec(file: Path, versions: str | None = None) -> int:
    """Print a finding for each field of a spec. Returns the exit code."""
    # Imported here: checking a configuration does not need this module.
    from kvroute.cli import deployments

    reading = deployments.reading_of(deployments.read_text(file), versions)
    deployments.print_findings(file, reading.findings, err=False)
    click.echo(f"{file}: {deployments.count(reading.findings)}")
    return 0 if reading.document is not None else 1


def fix_spec(file: Path) -> int:
    """Print a spec with corrected indentation, and its remaining errors. Returns the exit code."""
    from kvroute.cli import deployments
    from kvroute.deploy.spec.loading import fix_layout

    layout = fix_layout(deployments.read_text(file))
    click.echo(layout.text, nl=False)
    deployments.print_findings(file, deployments.reading_of(layout.text).wrong, err=True)
    return 0 if layout.is_complete else 1


@click.group()
def keys() -> None:
    """Make and check entries of a file of named API keys (`server.client_keys.file`)."""


@keys.command("new")
@click.argument("name")
def new(name: str) -> None:
    """Print a new random key, which is stored nowhere, and its entry for the file."""
    try:
        key, entry = new_key(name)
    except ConfigError as error:
        raise NotValid(str(error)) from error
    click.echo(f"# Give this key to the client; it is shown only here: {key}")
    click.echo(entry, nl=False)


@keys.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--salts", is_flag=True, help="Print each name's tenant and cache_salt under server.isolation.")
def check_keys(file: Path, salts: bool) -> None:
    """Read a file of keys and print the names, or the line and reason of its first error."""
    try:
        keys = read_key_file(file)
    except ConfigError as error:
        raise NotValid(str(error)) from error
    for key in keys:
        tenant = key.tenant or key.name
        click.echo(f"{key.name} {tenant} {key_space('', '', '', tenant)}" if salts else key.name)
