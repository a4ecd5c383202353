"""Generates the documentation of all options from the option classes, and that of the metrics.

`python -m kvroute.app.reference [FOLDER]` rewrites `configs/reference.yaml`, the tables in
`docs/configuration.md`, and `docs/metrics.md`. With `--check` it changes nothing and exits with 1 if a file
is stale.
"""

from __future__ import annotations

import inspect
import pathlib
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

import annotated_types
from pydantic.fields import FieldInfo

from kvroute.app import config_paths as paths
from kvroute.app.config import INDENT, LINE_CHARS, Config, flow, section_of, yaml_lines
from kvroute.app.config_paths import Path, dotted
from kvroute.app.metrics_reference import families, metrics_page
from kvroute.app.reloading import is_reloadable
from kvroute.options import Options

REFERENCE = pathlib.PurePath("configs/reference.yaml")
TABLES = pathlib.PurePath("docs/configuration.md")
METRICS = pathlib.PurePath("docs/metrics.md")
BEGIN, END = "<!-- options: begin (generated, make docs) -->", "<!-- options: end -->"

_HEADER = """\
# All options of kvroute with their defaults. Generated: edit the option classes, then run `make docs`.
# A configuration file needs only the options that differ. docs/configuration.md has the same as tables.
"""


def reference_yaml() -> str:
    """A configuration file with every option, its default and its description."""
    return _HEADER + "\n".join(yaml_lines(Config, Config().model_dump(mode="json"), above=_notes)) + "\n"


def _notes(path: Path, field: FieldInfo, is_section: bool) -> Sequence[str]:
    width = LINE_CHARS - len(INDENT) * (len(path) - 1) - len("# ")
    lines = _wrap(_summary(field), width)
    if is_section:
        return lines
    if is_reloadable(dotted(path)):
        lines += _wrap("Reload: yes", width)
    for label, text in _facts(field):
        lines += _wrap(f"{label}: {text}", width, subsequent_indent=INDENT)
    for entry in _entries(field):
        lines.append("Each one:")
        lines += _entry_lines(entry, width)
    return lines


def _wrap(text: str, width: int, *, initial_indent: str = "", subsequent_indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=initial_indent,
        subsequent_indent=subsequent_indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _entry_lines(entry: type[Options], width: int, depth: int = 1) -> Iterator[str]:
    """One `name (default): description` for each field of a list's or mapping's items."""
    for name, field in entry.model_fields.items():
        text = " ".join([field.description or "", *(f"{label}: {what}." for label, what in _facts(field))])
        yield from _wrap(
            f"{name} ({_default(field)}): {text}",
            width,
            initial_indent=INDENT * depth,
            subsequent_indent=INDENT * (depth + 1),
        )
        for inner in paths.options_of(paths.shape_of(field.annotation)):
            if _section_of(inner) is None:
                yield from _entry_lines(inner, width, depth + 1)


def tables() -> str:
    """The options as Markdown, one table per section."""
    return "\n".join(_section((), Config, Config().model_dump(mode="json")))


def _section(path: Path, owner: type[Options], values: Mapping[str, typing.Any]) -> Iterator[str]:
    below: list[tuple[Path, type[Options], Mapping[str, typing.Any]]] = []
    rows: list[str] = []
    entries: list[tuple[Path, type[Options]]] = []
    for name, field in owner.model_fields.items():
        here = (*path, name)
        section = section_of(field, values[name])
        if section is not None:
            below.append((here, section, values[name]))
            continue
        if paths.options_of(paths.shape_of(field.annotation)):
            continue  # a section without options
        note = " Applies at a reload." if is_reloadable(dotted(here)) else ""
        rows.append(_row(name, field, flow(values[name]), note))
        entries += [(here, entry) for entry in _entries(field)]
    if path:
        yield f"### `{dotted(path)}`\n\n{_doc(owner)}\n"
    if rows:
        yield from _table(rows)
    for here, entry in entries:
        yield f"#### Each of `{dotted(here)}`\n\n{_doc(entry)}\n"
        yield from _table([_row(name, field, _default(field)) for name, field in _fields_below(entry)])
    for here, section, inner in below:
        yield from _section(here, section, inner)


def _fields_below(entry: type[Options], prefix: Path = ()) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in entry.model_fields.items():
        inner = [
            cls for cls in paths.options_of(paths.shape_of(field.annotation)) if _section_of(cls) is None
        ]
        if not inner:
            yield dotted((*prefix, name)), field
        for cls in inner:
            yield from _fields_below(cls, (*prefix, name))


def _section_of(cls: type[Options]) -> str | None:
    """The section whose keys this class has, so that they are not listed twice; None if there is none."""
    for path, field in paths.walk(Config):
        if cls in paths.options_of(paths.shape_of(field.annotation)):
            return dotted(path)
    return None


def _table(rows: Sequence[str]) -> list[str]:
    return ["| option | default | unit | what it does |", "| --- | --- | --- | --- |", *rows, ""]


def _row(name: str, field: FieldInfo, default: str, note: str = "") -> str:
    facts = "".join(f" {label}: {text}." for label, text in _facts(field) if label != "Unit")
    unit = _extra(field, "unit")
    cells = (f"`{name}`", f"`{default}`", unit, (field.description or "") + facts + note)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _facts(field: FieldInfo) -> Iterator[tuple[str, str]]:
    """Unit, allowed values, and the effects of a higher and a lower value."""
    shape = paths.shape_of(field.annotation)
    if unit := _extra(field, "unit"):
        yield "Unit", unit
    if allowed := _allowed(field, shape):
        yield "Allowed", allowed
    is_switch = bool in shape
    if higher := _extra(field, "higher"):
        yield "On" if is_switch else "Higher", higher.removeprefix("on: ")
    if lower := _extra(field, "lower"):
        yield "Off" if is_switch else "Lower", lower.removeprefix("off: ")
    for cls in paths.options_of(shape):
        if cls.model_fields and (section := _section_of(cls)):
            yield "Keys", f"as in `{section}`"


def _allowed(field: FieldInfo, shape: paths.Shape) -> str:
    words = [str(word) for plain in shape for word in _words(plain)]
    if words:
        return ", ".join(words)
    bounds = []
    for constraint in field.metadata:
        for kind, attribute, sign in (
            (annotated_types.Gt, "gt", ">"),
            (annotated_types.Ge, "ge", ">="),
            (annotated_types.Lt, "lt", "<"),
            (annotated_types.Le, "le", "<="),
        ):
            if isinstance(constraint, kind):
                bounds.append(f"{sign} {getattr(constraint, attribute)}")
    return ", ".join(bounds)


def _words(plain: object) -> tuple[object, ...]:
    if typing.get_origin(plain) is typing.Literal:
        return typing.get_args(plain)
    if isinstance(plain, type) and issubclass(plain, Enum):
        return tuple(member.value for member in plain)
    return ()


def _entries(field: FieldInfo) -> tuple[type[Options], ...]:
    return paths.item_options(paths.shape_of(field.annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, tuple):
        default = list(default)
    return flow(default)


def _extra(field: FieldInfo, key: str) -> str:
    extra = field.json_schema_extra
    return str(extra.get(key, "")) if isinstance(extra, dict) else ""


def _summary(field: FieldInfo) -> str:
    """The description of a section or an option."""
    classes = paths.options_of(paths.shape_of(field.annotation))
    return field.description or (" ".join(_doc(classes[0]).split()) if classes else "")


def _doc(owner: type[Options]) -> str:
    return inspect.cleandoc(owner.__doc__ or "")


def documents(folder: pathlib.Path) -> dict[pathlib.Path, str]:
    """The expected text of each generated file below `folder`."""
    page = (folder / TABLES).read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{TABLES} has lost its markers {BEGIN!r} and {END!r}")
    return {
        folder / REFERENCE: reference_yaml(),
        folder / TABLES: f"{before}{BEGIN}\n\n{tables()}\n{END}{after}",
        folder / METRICS: metrics_page(families()),
    }


def main(arguments: Sequence[str]) -> int:
    check = "--check" in arguments
    folders = [argument for argument in arguments if argument != "--check"]
    stale = 0
    for file, text in documents(pathlib.Path(folders[0] if folders else ".")).items():
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if not check:
            file.write_text(text, encoding="utf-8")
        print(f"{file} {'is stale: run `make docs`' if check else 'written'}")  # noqa: T201
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
