"""`kvroute serve` and `kvroute vllm-router`: run the gateway. Also the configuration flags of `check`."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click
import yaml

from kvroute import __version__, yaml_text
from kvroute.access.admin_key import user_state_folder
from kvroute.cli.vllm_router import (
    API_KEY,
    DEFAULTS,
    DYNAMIC_FILES,
    LOG_LEVELS,
    check_whole_line,
    dynamic_flags,
    shown,
    translate,
)
from kvroute.cli.vllm_router import FLAGS as ROUTER_FLAGS
from kvroute.clock import SystemClock
from kvroute.config.config import Config
from kvroute.config.loading import FlagFile, Loaded, load
from kvroute.config.paths import ENVIRONMENT_PREFIX, ConfigSetting, Path, split
from kvroute.errors import ConfigError
from kvroute.routing.registry import STRATEGIES

log = logging.getLogger(__name__)

FLAGS: dict[str, Path] = {
    "host": ("server", "host"),
    "port": ("server", "port"),
    "processes": ("server", "processes"),
    "state_dir": ("server", "state_dir"),
    "admin_key_file": ("admin", "api_key_file"),
    "share": ("sharing", "url"),
    "strategy": ("routing", "strategy"),
    "log_level": ("logging", "level"),
    "log_format": ("logging", "format"),
}
"""Click parameter -> path of the option that it sets."""

_WORKER_FLAGS = (
    ("workers", "--worker", None),
    ("prefill", "--prefill", "prefill"),
    ("decode", "--decode", "decode"),
)
"""Click parameter, flag and role of the flags that together set `fleet.workers`."""


class InvalidConfiguration(click.ClickException):
    """A wrong configuration: printed as one line per problem, without a traceback."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"kvroute: {line}", err=True)


def configured(
    failure: type[InvalidConfiguration] = InvalidConfiguration,
    more: Callable[[dict[str, Any]], tuple[list[ConfigSetting], FlagFile | None]] = lambda flags: ([], None),
) -> Callable[[Callable[[Loaded], None]], Callable[..., None]]:
    """Add the configuration flags to a command, and call the command with the loaded configuration.

    A wrong configuration raises `failure`. `more` gets all flags, also the command's own ones, and returns
    additional settings, and the file that may change them later; it may change the flags, which win over
    these settings.
    """

    def decorate(command: Callable[[Loaded], None]) -> Callable[..., None]:
        @click.option(
            "-c",
            "--config",
            "file",
            metavar="FILE",
            type=click.Path(path_type=pathlib.Path),
            help="YAML configuration; every key is in configs/reference.yaml.",
        )
        @click.option(
            "--worker",
            "workers",
            metavar="[ID=]URL",
            multiple=True,
            help="A worker's base URL or HOST:PORT; repeat for more. Replaces fleet.workers.",
        )
        @click.option(
            "--prefill",
            metavar="[ID=]URL",
            multiple=True,
            help="A worker that computes long prompts for others; repeat for more. See fleet.workers.role.",
        )
        @click.option(
            "--decode",
            metavar="[ID=]URL",
            multiple=True,
            help="A worker that answers, and gets the KV of long prompts from prefill workers; repeatable.",
        )
        @click.option(
            "--inference-pool",
            metavar="NAME",
            help="InferencePool in this namespace whose pods are the workers. Sets fleet.kubernetes.pool.",
        )
        @click.option("--strategy", metavar="NAME", help=f"Routing strategy: {', '.join(STRATEGIES)}.")
        @click.option("--host", help="Address to listen on.")
        @click.option("--port", help="Port to listen on.")
        @click.option(
            "--processes", metavar="N", help="Number of processes that share the port, one per core."
        )
        @click.option(
            "--share",
            metavar="URL",
            help="Redis or Valkey through which several gateways route as one, such as redis://host:6379.",
        )
        @click.option(
            "--state-dir",
            metavar="DIR",
            help="Folder where the gateway stores the admin key that it generates.",
        )
        @click.option(
            "--admin-key-file", metavar="FILE", help="File with the admin key. Default: a key is generated."
        )
        @click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
        @click.option("--log-format", metavar="FORMAT", help="text or json.")
        @click.option(
            "--set",
            "assignments",
            metavar="PATH=VALUE",
            multiple=True,
            help="Set any option, such as fleet.health.interval_s=2; repeat for more.",
        )
        @functools.wraps(command)
        def run(file: pathlib.Path | None, assignments: tuple[str, ...], **flags: Any) -> None:
            try:
                settings, flag_file = more(flags)
                flag_options = tuple(flag_settings(flags))
                if flag_file is not None:
                    flag_file = replace(flag_file, then=flag_options)
                loaded = load(
                    file=file,
                    environ=os.environ,
                    assignments=assignments,
                    flags=[*settings, *flag_options],
                    flag_file=flag_file,
                )
                command(loaded)
            except ConfigError as exc:
                raise failure(str(exc)) from exc

        return run

    return decorate


def flag_settings(flags: dict[str, Any]) -> list[ConfigSetting]:
    """The flags on the command line, as settings."""
    settings = []
    given = [(flag, role, text) for name, flag, role in _WORKER_FLAGS for text in flags[name]]
    if given:
        origin = ", ".join(dict.fromkeys(flag for flag, _, _ in given))
        entries = [worker(text, role) for _, role, text in given]
        settings.append(ConfigSetting(("fleet", "workers"), entries, origin))
    if (pool := flags["inference_pool"]) is not None:
        for option, value in (("enabled", True), ("pool", pool)):
            settings.append(ConfigSetting(("fleet", "kubernetes", option), value, "--inference-pool"))
    for name, path in FLAGS.items():
        if (value := flags[name]) is not None:
            settings.append(ConfigSetting(path, value, f"--{name.replace('_', '-')}"))
    return settings


def worker(text: str, role: str | None = None) -> str | dict[str, str]:
    """`URL` or `ID=URL` as an entry of `fleet.workers`; `HOST:PORT` is `http://HOST:PORT`."""
    entry = {} if role is None else {"role": role}
    name, separator, url = text.partition("=")
    if separator and "://" not in name:
        entry["id"], text = name, url
    return {**entry, "url": _with_scheme(text)} if entry else _with_scheme(text)


_host_and_port = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:.]+\]):\d+/?").fullmatch


def _with_scheme(url: str) -> str:
    return f"http://{url}" if _host_and_port(url) else url


# --- the command lines of production-stack's router -------------------------------------------------------

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SECRET = ("api_key", "worker_api_key")


def router_flags(command: _Command) -> _Command:
    """Add that router's flags to a click command; `--help` does not list them."""
    for name, flag in ROUTER_FLAGS.items():
        # Only with dashes: click treats `--k8s_port` as an unknown flag.
        command = click.option(f"--{name}", _parameter(name), is_flag=flag.is_switch, hidden=True)(command)
    return command


def _parameter(name: str) -> str:
    """The name of a flag's click parameter."""
    return "router_" + name.replace("-", "_")


def router_settings(
    flags: dict[str, Any], *, is_whole_line: bool = False
) -> tuple[list[ConfigSetting], FlagFile | None]:
    """The settings of that router's flags, and its dynamic configuration file; prints one line per flag.

    `is_whole_line`: that router would have to accept the command line, too. Replaces values of kvroute's own
    flags that only that router knows. Raises ConfigError. Blocks: reads the file.
    """
    given = {
        name: "true" if ROUTER_FLAGS[name].is_switch else str(flags[_parameter(name)])
        for name in ROUTER_FLAGS
        if flags.get(_parameter(name)) not in (None, False)
    }
    if not given and not is_whole_line:
        return [], None
    if all(name in given for name in DYNAMIC_FILES):
        raise ConfigError("--dynamic-config-json", "is not allowed with --dynamic-config-yaml")
    file_flags, unknown = dict[str, str](), tuple[str, ...]()
    dynamic = next((name for name in DYNAMIC_FILES if name in given), None)
    if dynamic is not None:
        file_flags, unknown = _read(dynamic, pathlib.Path(given[dynamic]))
    together = {**file_flags, **given}  # the command line wins at the start, as in that router
    if is_whole_line:
        check_whole_line(together)
    translation = translate(together)
    defaults = _defaults(flags, has_file=dynamic is not None)
    lines = [
        *translation.lines,
        *(_unknown(key) for key in unknown),
        *(f"{_path_shown(setting)}: {setting.origin}" for setting in defaults),
    ]
    level = LOG_LEVELS.get(flags["log_level"])
    if level is not None:
        lines.append(f"--log-level: logging.level={level}")
        flags["log_level"] = level
    for line in lines:
        click.echo(f"kvroute: {line}", err=True)
    flag_file = None
    if dynamic is not None:
        read = functools.partial(_reread, dynamic, given, tuple(defaults), is_whole_line=is_whole_line)
        flag_file = FlagFile(pathlib.Path(given[dynamic]), read)
    return [*defaults, *translation.settings], flag_file


def _reread(
    dynamic: str, given: Mapping[str, str], defaults: Sequence[ConfigSetting], *, is_whole_line: bool
) -> Sequence[ConfigSetting]:
    """The settings after a change of the file `--dynamic`. Raises ConfigError. Blocks."""
    file_flags, unknown = _read(dynamic, pathlib.Path(given[dynamic]))
    for key in unknown:
        log.warning("%s", _unknown(key))
    together = {**given, **file_flags}  # the file wins, as in that router once its watcher has read the file
    if is_whole_line:
        check_whole_line(together)
    return *defaults, *translate(together).settings


def _unknown(key: str) -> str:
    return f"{key}: no effect: kvroute has no such option"


def _path_shown(setting: ConfigSetting) -> str:
    path = ".".join(map(str, setting.path))
    return path if setting.path[-1] in _SECRET else f"{path}={shown(setting.value)}"


def _defaults(flags: dict[str, Any], *, has_file: bool) -> list[ConfigSetting]:
    """production-stack's defaults, except where a file, flag or variable sets the option.

    `has_file`: it has a dynamic configuration file.
    """
    if click.get_current_context().params.get("file") is not None:
        return []
    defaults = [
        ConfigSetting(split(path), value, "that router's default")
        for path, value in DEFAULTS.items()
        if flags.get(path.rpartition(".")[2]) is None and not _is_set(path)
        if has_file or path != "server.config_poll_s"
    ]
    if (key := os.environ.get(API_KEY)) and not _is_set("fleet.worker_api_key"):
        defaults.append(ConfigSetting(split("fleet.worker_api_key"), key, API_KEY))
    if flags.get("admin_key_file") is None and not _is_set("admin.api_key"):
        defaults += _closed_admin_api(flags.get("state_dir"))
    return defaults


def _is_set(path: str) -> bool:
    """Whether a variable or `--set` sets the option, or the option with `_file` for its file."""
    name = ENVIRONMENT_PREFIX + path.upper().replace(".", "__")
    assignments = click.get_current_context().params.get("assignments", ())
    return any(variable in os.environ for variable in (name, f"{name}_FILE")) or any(
        text.startswith((f"{path}=", f"{path}_file=")) for text in assignments
    )


def _closed_admin_api(state_dir: str | None) -> list[ConfigSetting]:
    """An admin key that nobody knows, where the gateway cannot keep a key file; else nothing."""
    # That router needs no writable folder: with the chart's `readOnlyRootFilesystem` or another `runAsUser`
    # kvroute would otherwise end at its start.
    reason = _why_not_writable(state_dir)
    if not reason:
        return []
    origin = f"the admin API is closed: {reason}; set --state-dir or --admin-key-file to open it"
    return [ConfigSetting(split("admin.api_key"), secrets.token_urlsafe(32), origin)]


def _why_not_writable(state_dir: str | None) -> str:
    """Why no key can be kept in the state folder; "" if it can."""
    try:
        folder = pathlib.Path(state_dir) if state_dir else user_state_folder(os.environ)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except ConfigError:
        return "this user has no home folder"
    except OSError as exc:
        return f"{folder} cannot be created ({exc.strerror})"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"


def _read(name: str, file: pathlib.Path) -> tuple[dict[str, str], tuple[str, ...]]:
    try:
        return dynamic_flags(yaml_text.load(file.read_text(encoding="utf-8")) or {})  # JSON is YAML
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--{name}", f"cannot read {file}: {reason}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"--{name}", f"{file} is not YAML or JSON") from exc
    except ConfigError as exc:
        raise ConfigError(f"--{name}", f"{file}: {exc}") from exc


# --- the commands -----------------------------------------------------------------------------------------


@click.command()
@router_flags
@configured(more=router_settings)
def serve(loaded: Loaded) -> None:
    """Run the gateway.

    Settings come from the file, then KVROUTE__SECTION__KEY variables, then --set, then the other flags; the
    last one wins. The flags of production-stack's router are accepted, too
    (docs/migration/production-stack.md).
    """
    _run(loaded)


@click.command()
@click.version_option(__version__, prog_name="vllm-router", message="%(prog)s (kvroute %(version)s)")
@router_flags
@configured(more=functools.partial(router_settings, is_whole_line=True))
def vllm_router(loaded: Loaded) -> None:
    """Run the gateway with a command line of production-stack's router, unchanged.

    Every flag of that router is accepted, and printed with the option that it sets; what that router refuses
    is refused (docs/migration/production-stack.md). kvroute's own flags work, too.
    """
    _run(loaded)


def _picker_settings(flags: dict[str, Any]) -> tuple[list[ConfigSetting], FlagFile | None]:
    return [
        ConfigSetting(("epp", name), flags[name], f"--{name.replace('_', '-')}")
        for name in ("http_port", "fallbacks")
        if flags[name] is not None
    ], None


@click.command()
@click.option("--http-port", help="Port of /metrics, /ready, the admin API and the live page.")
@click.option("--fallbacks", help="Addresses after the first one that Envoy gets.")
@configured(more=_picker_settings)
def epp(loaded: Loaded) -> None:
    """Run an endpoint picker: Envoy relays the requests and asks this process which worker gets each one.

    It takes the options of `kvroute serve`; --host and --port are those of its gRPC listener (ext_proc). See
    docs/endpoint-picker.md.
    """
    _run(loaded, is_picker=True)


def _run(loaded: Loaded, *, is_picker: bool = False) -> None:
    require_workers(loaded.config)
    from kvroute.app.server import (
        run,
    )  # imported late: a wrong configuration is reported without loading the server

    sys.exit(run(loaded.config, loaded.source, loaded.signature, is_picker=is_picker))


def require_workers(config: Config) -> None:
    """Raise ConfigError when no discovery source is configured."""
    from kvroute.fleet.discovery.registry import sources_of

    if not config.fleet.may_be_empty and not sources_of(config.fleet, SystemClock()):
        raise ConfigError(
            "fleet",
            "no workers: set --worker http://HOST:PORT (repeat for more), or fleet.workers, or fleet.file "
            "(a watched list, which may be empty at first), or fleet.kubernetes, or fleet.dns, or "
            "fleet.may_be_empty to add workers later through the admin API. "
            "`kvroute up` starts its own workers.",
        )
