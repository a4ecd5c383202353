"""Records the options of a release of vLLM or LMCache in tests/data/options, for tests of rendered commands.

    python scripts/record_options.py vllm 0.33.0
    python scripts/record_options.py lmcache 0.5.6 --python .venv-engine/bin/python

Downloads the release's wheel with pip (vLLM: 300 MB, deleted afterwards) and installs nothing. vLLM's options
are read from the source, as its parser needs the whole of vLLM. LMCache's own parser is built: `--python`
is an environment with torch, in which the wheel's files are imported. Releases before 0.4 have settings only.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "options"
FLAG, VALUE = "flag", "value"

# Runs in the environment with torch; prints the options of `lmcache server` after a marker.
PARSER = """
import argparse, json, sys
sys.path.insert(0, sys.argv[1])
from lmcache.cli.commands.server import ServerCommand
parser = argparse.ArgumentParser(add_help=False)
ServerCommand().add_arguments(parser)
rows = []
for action in parser._actions:
    row = {"flags": action.option_strings}
    if action.nargs == 0:
        row["action"] = "store_true"
    else:
        if action.nargs is not None:
            row["nargs"] = action.nargs
        if action.type in (int, float):
            row["type"] = action.type.__name__
        if action.choices is not None:
            row["choices"] = list(action.choices)
    if action.required:
        row["required"] = True
    rows.append(row)
print("options", json.dumps(rows))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", choices=["vllm", "lmcache"])
    parser.add_argument("release")
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = unpacked(arguments.package, arguments.release, Path(folder))
        if arguments.package == "vllm":
            record = vllm_record(source / "vllm")
        else:
            record = lmcache_record(source, arguments.python)
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{arguments.package}-{arguments.release}.json"
    file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def unpacked(package: str, release: str, folder: Path) -> Path:
    """Download a release's wheel and unpack its Python files. Returns the folder with the package."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir"]
    pip += ["--only-binary", ":all:", "-d", str(folder), f"{package}=={release}"]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        # LMCache imports some of its extension modules even for the parser.
        kept = (".py", ".so") if package == "lmcache" else (".py",)
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(kept)])
    wheel.unlink()
    return folder


def vllm_record(package: Path) -> dict[str, Any]:
    """Options of `vllm serve` with whether they take a value, and what else rendered commands name."""
    engine = ast.parse((package / "engine" / "arg_utils.py").read_text())
    flags = {name: kind for cls in _classes(engine, "EngineArgs") for name, kind in _fields(cls)}
    options = dict(_added(engine, flags))
    for file in sorted((package / "entrypoints").rglob("cli_args.py")):
        tree = ast.parse(file.read_text())
        for cls in _classes(tree, "Args"):
            options |= {f"--{name.replace('_', '-')}": kind for name, kind in _fields(cls)}
        options |= dict(_added(tree, flags))
    factory = ast.parse((package / "distributed/kv_transfer/kv_connector/factory.py").read_text())
    return {
        "options": options,
        "environment": sorted(_keys_of(package / "envs.py")),
        "kv_events_config": _config_fields(package / "config" / "kv_events.py"),
        "kv_transfer_config": _config_fields(package / "config" / "kv_transfer.py"),
        "connectors": sorted(
            _text(call.args[0]) for call in _calls(factory, "register_connector") if _text(call.args[0])
        ),
        "lmcache_connector": _connector_keys(package / "distributed/kv_transfer/kv_connector/v1"),
    }


def _classes(tree: ast.AST, end: str) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(end):
            yield node


def _fields(cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass, with whether the option made from each takes a value."""
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = ast.unparse(node.annotation)
            yield node.target.id, FLAG if annotation in ("bool", "bool | None", "Optional[bool]") else VALUE


def _added(tree: ast.AST, fields: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The options of all calls of `add_argument` with literal names."""
    for call in _calls(tree, "add_argument"):
        names = [_text(each) for each in call.args if _text(each).startswith("-")]
        actions = [ast.unparse(each.value) for each in call.keywords if each.arg == "action"]
        is_flag = any("store_true" in action or "BooleanOptional" in action for action in actions)
        for name in names:
            kind = FLAG if is_flag else VALUE
            longest = max(names, key=len).lstrip("-").replace("-", "_")
            yield name, fields.get(longest, kind)


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _keys_of(file: Path) -> set[str]:
    """The string keys of the dict `environment_variables` in a module."""
    for node in ast.walk(ast.parse(file.read_text())):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "environment_variables":
            assert isinstance(node, ast.AnnAssign)
            if isinstance(node.value, ast.Dict):
                return {_text(key) for key in node.value.keys if key is not None}
    raise SystemExit(f"{file.name} has no dict environment_variables")


def _config_fields(file: Path) -> list[str]:
    tree = ast.parse(file.read_text())
    return sorted({name for cls in _classes(tree, "Config") for name, _ in _fields(cls)})


def _connector_keys(folder: Path) -> list[str]:
    """The keys of `kv_connector_extra_config` that the modules of LMCache's MP connector name."""
    keys: set[str] = set()
    for file in folder.rglob("*.py"):
        text = file.read_text()
        keys |= {f"lmcache.mp.{name}" for name in re.findall(r"lmcache\.mp\.([a-z_]+)", text)}
        for cls in _classes(ast.parse(text), "ExtraConfigDefault"):
            names = [node.targets[0] for node in cls.body if isinstance(node, ast.Assign)]
            keys |= {f"lmcache.mp.{name.id}" for name in names if isinstance(name, ast.Name)}
    return sorted(keys)


def lmcache_record(source: Path, python: str) -> dict[str, Any]:
    """Options of `lmcache server`, the classic connector's settings, and keys of the connector for vLLM."""
    config = ast.parse((source / "lmcache" / "v1" / "config.py").read_text())
    settings: set[str] = set()
    for node in ast.walk(config):
        names = [each.id for each in getattr(node, "targets", []) if isinstance(each, ast.Name)]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        value = getattr(node, "value", None)
        if "_CONFIG_DEFINITIONS" in names and isinstance(value, ast.Dict):
            settings = {_text(key) for key in value.keys if key is not None}
    connector = _connector_keys(source / "lmcache" / "integration" / "vllm")
    record: dict[str, Any] = {"settings": sorted(settings), "connector": connector, "server": []}
    if (source / "lmcache" / "cli" / "commands" / "server.py").exists():
        done = subprocess.run(
            [python, "-c", PARSER, str(source)], capture_output=True, text=True, check=False, timeout=300
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("options ")]
        if not lines:
            raise SystemExit(f"the parser was not built:\n{done.stderr[-2000:]}")
        record["server"] = json.loads(lines[0].removeprefix("options "))
    return record


if __name__ == "__main__":
    main()
