"""Declares options: default, unit, and the effect of a higher or lower value, in one place.

Option classes are frozen pydantic models in the room that uses them; they refuse unknown keys.
`configs/reference.yaml` and the tables of `docs/configuration.md` are generated from the declarations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model


class Options(BaseModel):
    """Base of every option class: frozen, unknown keys are errors, defaults are validated."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=False
    )


def option(
    default: Any = ...,
    description: str = "",
    *,
    unit: str = "",
    higher: str = "",
    lower: str = "",
    reload: bool = False,
    **constraints: Any,
) -> Any:
    """Declare one option.

    `unit` is written out ("s", "bytes", "tokens"). `higher` and `lower` say in a few words what improves or
    gets worse with a higher or lower value. `reload`: the option, or each option of this section, may change
    while the gateway runs. `constraints` are pydantic's (`ge`, `gt`, `le`,
    `default_factory`...).
    """
    extra: dict[str, Any] = {"unit": unit, "higher": higher, "lower": lower, "reload": reload}
    if "default_factory" in constraints:
        return Field(description=description, json_schema_extra=extra, **constraints)
    return Field(default, description=description, json_schema_extra=extra, **constraints)


_O = TypeVar("_O", bound=Options)


def with_sections(base: type[_O], sections: Mapping[str, type[Options]]) -> type[_O]:
    """A subclass of `base` with one more section for each option class, by name."""
    fields: dict[str, Any] = {
        name: (options, option(default_factory=options)) for name, options in sections.items()
    }
    return create_model(
        base.__name__, __base__=base, __doc__=base.__doc__, __module__=base.__module__, **fields
    )


def may_change(owner: type[Options], path: Sequence[str]) -> bool:
    """Whether the option at `path`, or a section that contains it, is declared with `reload`."""
    for key in path:
        field = owner.model_fields.get(key)
        if field is None:
            return False
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("reload"):
            return True
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, Options)):
            return False
        owner = section
    return False


def _switch(value: object) -> object:
    """Turn the texts `on`, `off`, `yes` and `no` into booleans, as YAML 1.1 does; pydantic checks the
    rest."""
    return (
        {"on": True, "yes": True, "off": False, "no": False}.get(value.lower(), value)
        if isinstance(value, str)
        else value
    )


Switch = BeforeValidator(_switch)
"""Use as `Annotated[bool, Switch]`: accepts true/false/on/off from YAML, environment and flags."""
