"""The `kvroute` command. A subcommand's module is imported when the subcommand is used."""

from __future__ import annotations

import errno
import importlib
from typing import Any

import click

from kvroute import __version__

COMMANDS = {
    "serve": ("kvroute.cli.serve", "Run the gateway."),
    "epp": ("kvroute.cli.serve", "Run an endpoint picker: Envoy relays, kvroute decides."),
    "vllm-router": ("kvroute.cli.serve", "Run the gateway with a command line of production-stack's router."),
    "up": ("kvroute.cli.deployments", "Run the gateway and its workers as local processes."),
    "ps": ("kvroute.cli.deployments", "List what `kvroute up` runs."),
    "logs": ("kvroute.cli.deployments", "Show the logs of what `kvroute up` runs."),
    "down": ("kvroute.cli.deployments", "End what `kvroute up` runs."),
    "sim": ("kvroute.cli.servers", "Run one simulated worker."),
    "tierd": ("kvroute.cli.servers", "Run a node's cache daemon: LMCache's second tier in shared memory."),
    "render": (
        "kvroute.cli.deployments",
        "Generate compose, Kubernetes and other files from an endpoint spec.",
    ),
    "keys": ("kvroute.cli.check", "Make and check entries of a file of API keys."),
    "doctor": ("kvroute.cli.doctor", "Examine a deployment: what is wrong, why it matters, how to fix it."),
    "explain": ("kvroute.cli.explain", "Say where a prompt goes, or a request went, and why."),
    "check": ("kvroute.cli.check", "Validate a configuration or an endpoint spec."),
}
"""Command name -> its module, which has the command under the same name, and its line in the help."""

_OWN_FLAGS = ("-h", "--help", "--version")


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class LazyGroup(click.Group):
    """Imports a command only when it runs, so that `kvroute --version` does not load the gateway.

    A command line that begins with another flag is one of `vllm-router`: production-stack's Helm chart gives
    its router's image flags and no command.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in _OWN_FLAGS:
            args = ["vllm-router", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in _NO_SPACE and "temporary directory" not in str(error.strerror):
                raise
            where = f" to {error.filename}" if error.filename else ""
            raise click.ClickException(f"cannot write{where}: {error.strerror}") from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return _plugin_command(cmd_name)
        command: click.Command = getattr(
            importlib.import_module(COMMANDS[cmd_name][0]), cmd_name.replace("-", "_")
        )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _plugin_command(name: str) -> click.Command | None:
    """A command of another distribution (entry points `kvroute.commands`)."""
    from kvroute import plugins
    from kvroute.errors import ConfigError

    if plugins.find(plugins.COMMANDS, name) is None:
        return None
    try:
        command: click.Command = plugins.load(plugins.COMMANDS, name)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvroute", message="kvroute %(version)s")
def main() -> None:
    """KV-cache-aware, OpenAI-compatible gateway for fleets of vLLM workers."""
