"""Writes the configuration as YAML, with comments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from kvroute import plugins
from kvroute.config import paths as config_loading
from kvroute.config.config import Config
from kvroute.config.loading import Loaded, masked
from kvroute.config.paths import Path
from kvroute.options import Options
from kvroute.routing.registry import STRATEGIES

Note = Callable[[Path, FieldInfo, bool], Sequence[str]]
"""Returns the comment lines above an option; the flag is True for a section."""
INDENT = "  "
LINE_CHARS = 110
"""Maximum length of a line that has a list or mapping."""


def resolved_yaml(loaded: Loaded) -> str:
    """The effective configuration as YAML; a comment names the origin of each value that is not a default."""
    lines = ["# Resolved configuration. Secrets are masked; a comment names the origin of a value."]
    lines += _plugin_lines(loaded.config)
    lines += yaml_lines(
        type(loaded.config),
        masked(loaded.config),
        trailing=lambda path: ", ".join(
            dict.fromkeys(origin for node, origin in loaded.origins.items() if node[: len(path)] == path)
        ),
    )
    return "\n".join(lines) + "\n"


def _plugin_lines(config: Config) -> Iterator[str]:
    """Which distributions the parts, strategies and sources of workers come from that are not built in."""
    named = (
        *((plugins.PARTS, f"parts.{name}", name) for name in type(config.parts).model_fields),
        *((plugins.STRATEGIES, f"routing.{name}", name) for name in config.routing.types),
        *((plugins.DISCOVERY, f"fleet.{name}", name) for name in config.fleet.sources),
    )
    for group, path, name in named:
        if name not in STRATEGIES and (point := plugins.find(group, name)) is not None:
            yield f"# {path} comes from {plugins.distribution_of(point)}."


def yaml_lines(
    owner: type[Options],
    values: Mapping[str, Any],
    *,
    above: Note = lambda path, field, is_section: (),
    trailing: Callable[[Path], str] = lambda path: "",
    prefix: Path = (),
) -> Iterator[str]:
    """`values`, the JSON dump of `owner`, as YAML lines with comments, in the order of declaration."""
    indent = INDENT * len(prefix)
    for name, field in owner.model_fields.items():
        path = (*prefix, name)
        section = section_of(field, values[name])
        if not prefix:
            yield ""
        yield from (f"{indent}# {line}".rstrip() for line in above(path, field, section is not None))
        if section is not None:
            yield f"{indent}{name}:"
            yield from yaml_lines(section, values[name], above=above, trailing=trailing, prefix=path)
            continue
        first, *rest = _entry(name, values[name], LINE_CHARS - len(indent))
        comment = trailing(path)
        yield indent + first + (f"  # {comment}" if comment else "")
        yield from (indent + line for line in rest)


def section_of(field: FieldInfo, value: object) -> type[Options] | None:
    """The option class whose fields `value` has; None if the value is not a section."""
    if not isinstance(value, Mapping):
        return None
    classes = config_loading.options_of(config_loading.shape_of(field.annotation))
    return next((cls for cls in classes if value and value.keys() == cls.model_fields.keys()), None)


def _entry(name: str, value: object, width: int) -> list[str]:
    """`name: value`: lists and mappings of plain values on one line if they fit, all others as a block."""
    is_deep = isinstance(value, (list, dict)) and any(
        isinstance(inner, (list, dict)) for inner in (value.values() if isinstance(value, dict) else value)
    )
    line = f"{name}: {flow(value)}"
    if is_deep or (len(line) > width and isinstance(value, (list, dict))):
        block = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=10**6)
        return block.rstrip("\n").split("\n")
    return [line]


def flow(value: object) -> str:
    """`value` on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
