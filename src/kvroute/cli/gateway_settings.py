"""Whether the gateway would take what a spec says of it: options that the spec only passes on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvroute.app.config import load
from kvroute.deploy.render.config import config_text, gateway_config
from kvroute.deploy.render.plan import plan_endpoint
from kvroute.deploy.render.site import local_site
from kvroute.deploy.spec.endpoint import Document
from kvroute.deploy.spec.fields import Path as Field
from kvroute.errors import ConfigError, InvalidConfig

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
