"""The parts of a gateway: which there are, and how they are built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvroute import plugins
from kvroute.errors import ConfigError
from kvroute.options import Options
from kvroute.parts.part import Gateway, Part


class BuiltPart(NamedTuple):
    """A part that is on."""

    name: str
    part: Part


def part_type(name: str) -> type[Part] | None:
    """The part of an installed distribution; None if none has it. Raises ConfigError if its import fails."""
    if plugins.find(plugins.PARTS, name) is None:
        return None
    found: type[Part] = plugins.load(plugins.PARTS, name)
    return found


def build_parts(sections: Options, gateway: Gateway) -> tuple[BuiltPart, ...]:
    """The parts whose sections `sections` has, without those that are off.

    Raises ConfigError with the part's name if one cannot be built.
    """
    built = []
    for name in type(sections).model_fields:
        cls = part_type(name)
        assert cls is not None, "the configuration has sections of installed parts only"
        try:
            part = cls.build(getattr(sections, name), gateway)
        except Exception as error:  # the code of another distribution may fail in any way
            path, reason = f"parts.{name}", str(error) if isinstance(error, ConfigError) else repr(error)
            raise ConfigError(path, f"this part cannot be started: {reason}") from error
        if part is not None:
            built.append(BuiltPart(name, part))
    return tuple(built)


def distributions(parts: Iterable[BuiltPart]) -> dict[str, str]:
    """By part, the distribution that it comes from."""
    found = {built.name: plugins.find(plugins.PARTS, built.name) for built in parts}
    return {name: plugins.distribution_of(point) for name, point in found.items() if point is not None}
