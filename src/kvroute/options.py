"""How an option is declared: default, unit, and what rising and falling do, in one place.

Option classes live next to their owner and are frozen pydantic models that refuse unknown keys.
`configs/reference.yaml` and the README's tables are generated from what is declared here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


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
    **constraints: Any,
) -> Any:
    """Declare one option.

    `unit` is written out ("s", "bytes", "tokens"); `higher` and `lower` say in a few words what
    gets better or worse when the value rises or falls. `constraints` are pydantic's (`ge`, `gt`,
    `le`, `default_factory`...).
    """
    extra: dict[str, Any] = {"unit": unit, "higher": higher, "lower": lower}
    if "default_factory" in constraints:
        return Field(description=description, json_schema_extra=extra, **constraints)
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def _switch(value: object) -> object:
    """`on`/`off`/`yes`/`no` as text mean what YAML 1.1 says they mean; all else is pydantic's business."""
    return (
        {"on": True, "yes": True, "off": False, "no": False}.get(value.lower(), value)
        if isinstance(value, str)
        else value
    )


Switch = BeforeValidator(_switch)
"""Use as `Annotated[bool, Switch]`: true/false/on/off from YAML, environment and flags alike."""
