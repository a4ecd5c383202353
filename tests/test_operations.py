"""docs/operations.md has a row for each error code, alert and log line, and no row for others."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import yaml

import kvroute
from kvroute.app.reference import families
from kvroute.config.config import Config
from kvroute.errors import OUT_OF_DESCRIPTORS, GatewayError
from kvroute.http.overload import LOW_MEMORY

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvroute"
PAGE = (ROOT / "docs" / "operations.md").read_text()
CODES_ELSEWHERE = {OUT_OF_DESCRIPTORS, LOW_MEMORY, "method_not_allowed"}
"""Codes that are neither an attribute of a class nor a `code=` argument."""

PASSED_ON = {"code", "self.code"}
"""Values of `code=` that are another `code`, which is found where it is set."""

NOT_THE_GATEWAY = ("sim/", "doctor/", "cli/", "deploy/")
"""Rooms that do not serve: their messages are answers to a command."""

LOGGED = {"warning", "error", "exception", "critical", "log"}
WHOLE_TEXT = {"%s"}
"""Messages that are one argument: why an address cannot be bound, and that hashes of LMCache differ."""


@cache
def trees() -> Mapping[str, ast.Module]:
    """The modules of kvroute, by file."""
    files = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in files}


def section(title: str) -> str:
    _, found, rest = PAGE.partition(f"\n## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """The code spans of each row's first column."""
    rows = re.findall(r"^\| (.*?) \| ", text, re.MULTILINE)
    return [span for row in rows for span in re.findall(r"`([^`]+)`", row)]


def subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def codes() -> set[str]:
    """Every code that the gateway can answer; the type where there is no code."""
    for module in pkgutil.walk_packages([str(SOURCE / "gateway")], f"{kvroute.__name__}.gateway."):
        importlib.import_module(module.name)
    found = {kind.code for kind in (GatewayError, *subclasses(GatewayError))}  # type: ignore[attr-defined]
    given = {str(code) for code in found if code} | {GatewayError.type} | CODES_ELSEWHERE
    for file, tree in trees().items():
        for node in ast.walk(tree) if not file.startswith(NOT_THE_GATEWAY) else ():
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            values = [each.value for each in node.keywords if each.arg == "code"]
            values += node.args[1:2] if name == "Refusal" else []
            for value in values:
                if isinstance(value, ast.Constant):
                    given.add(value.value)
                else:
                    assert ast.unparse(value) in PASSED_ON | {"SigningKeysUnknown.code or ''"}, (file, name)
    return given | {"invalid_token"}


def test_each_error_code_has_one_row_and_no_row_has_another_code() -> None:
    rows = first_cells(section("Error codes"))

    assert len(rows) == len(set(rows))
    # The base class of 429 has subclasses; each other base class is raised itself.
    assert set(rows) == codes()


def test_each_row_of_an_error_has_the_status_of_its_class() -> None:
    statuses = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", section("Error codes"), re.MULTILINE))

    for kind in subclasses(GatewayError):
        code = kind.code  # type: ignore[attr-defined]
        if code:
            assert statuses[code] == str(kind.status), code  # type: ignore[attr-defined]


def test_each_alert_has_a_section_and_each_section_an_alert() -> None:
    rules = yaml.safe_load((ROOT / "configs" / "alerts" / "kvroute.yaml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]

    assert re.findall(r"^### (\w+)$", section("Alerts"), re.MULTILINE) == alerts


def test_each_metric_that_the_page_names_exists() -> None:
    exposed = {f"{family.name}{end}" for family in families() for end in ("", "_total", "_bucket")}
    named = set(re.findall(r"\bkvroute_[a-z0-9_]+", PAGE))

    assert {name for name in named - exposed if not name.startswith("kvroute_tierd_")} == set()


def test_each_option_that_the_page_names_exists() -> None:
    options = (ROOT / "docs" / "configuration.md").read_text()
    sections = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)`", PAGE)

    for path in sections:
        if path.split(".")[0] in Config.model_fields:
            assert f"| `{path.split('.')[-1]}` |" in options or f"`{path}`" in options, path


def messages() -> Iterator[tuple[str, str]]:
    """File and format of each message that the gateway and tierd log at `warning` or `error`."""
    constants = {
        target.id: node.value.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }
    for file, tree in trees().items():
        if file.startswith(NOT_THE_GATEWAY):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LOGGED
                and ast.unparse(node.func.value) in ("log", "_log", "logger", "self._log")
                and node.args
            ):
                argument = node.args[node.func.attr == "log"]
                if isinstance(argument, ast.Name):
                    assert argument.id in constants, (file, argument.id)
                    yield file, constants[argument.id]
                    continue
                assert isinstance(argument, ast.Constant), (file, ast.unparse(argument))
                yield file, argument.value


LINES = first_cells(section("Log lines"))


def documents(line: str, message: str) -> bool:
    """Whether a line of the page, with `...` for what varies, is this message."""
    pattern = ".*".join(re.escape(part) for part in line.split("..."))
    return re.fullmatch(pattern, message, re.DOTALL) is not None


def test_each_logged_warning_and_error_has_a_row() -> None:
    logged = {each for each in messages() if each[1] not in WHOLE_TEXT}

    assert {each for each in logged if not any(documents(line, each[1]) for line in LINES)} == set()


def test_each_line_of_the_page_is_logged() -> None:
    """Or its parts are in texts of the code: messages that are passed to the logger as a whole."""
    logged = {message for _, message in messages()}
    texts = {
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }

    def is_in_the_code(line: str) -> bool:
        parts = [part.strip(" :,") for part in line.split("...") if part.strip(" :,;")]
        return bool(parts) and all(any(part in text for text in texts) for part in parts)

    unknown = {line for line in LINES if not any(documents(line, message) for message in logged)}
    assert {line for line in unknown if not is_in_the_code(line)} == set()
