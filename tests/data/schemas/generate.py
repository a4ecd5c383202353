"""Make the schemas in this folder from packages that have the published definitions as pydantic classes, and
from CustomResourceDefinitions.

    pip download --no-deps --python-version 3.14 --only-binary=:all: -d WHEELS \\
        cloudcoil-models-keda==2.20.2.1 cloudcoil-models-prometheus-operator==0.93.1.1
    python tests/data/schemas/generate.py WHEELS [CRDS]

The packages themselves need Python 3.14 and a client library. Only the fields of their classes are taken, by
reading the source in the wheels: no text of theirs, no methods. CRDS is a folder with the released files
`httproutes.yaml` and `inferencepools.yaml`.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pydantic
import yaml

SOURCES = {
    "keda-scaledobject": ("cloudcoil_models_keda", "cloudcoil/models/keda/v1alpha1.py", "ScaledObject"),
    "servicemonitor": (
        "cloudcoil_models_prometheus_operator",
        "cloudcoil/models/prometheus_operator/v1.py",
        "ServiceMonitor",
    ),
    "prometheusrule": (
        "cloudcoil_models_prometheus_operator",
        "cloudcoil/models/prometheus_operator/v1.py",
        "PrometheusRule",
    ),
}
DEFINITIONS = {"httproute": ("httproutes.yaml", "v1"), "inferencepool": ("inferencepools.yaml", "v1")}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": TEXTS,
        "annotations": TEXTS,
    },
    "required": ["name"],
    "additionalProperties": False,
}
"""What kvroute writes of it; the rest is the same for every kind of object."""


class Fields(pydantic.BaseModel):
    """Replaces the packages' base class; refuses unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid")


class Anything(pydantic.BaseModel):
    """Replaces every type that is not described here."""


def needed(source: str, root: str) -> list[ast.ClassDef]:
    """`root` and the classes that its fields name, without their methods and inner classes."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    found: dict[str, ast.ClassDef] = {}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        if name in found or name not in classes:
            continue
        node = found[name] = classes[name]
        node.body = [
            line
            for line in node.body
            if isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and line.target.id[0] != "_"
        ] or [ast.Pass()]
        waiting += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    return [node for name, node in classes.items() if name in found]


def schema_of(source: str, root: str) -> dict[str, Any]:
    """JSON Schema of one kind of object, without status."""
    code = "\n".join(ast.unparse(node) for node in needed(source, root))
    module = sys.modules["generated"] = ModuleType("generated")  # pydantic looks for it there
    names = vars(module)
    for name in ("AwareDatetime", "ConfigDict", "Field", "RootModel"):
        names[name] = getattr(pydantic, name)
    names |= {"Annotated": Annotated, "Any": Any, "Literal": Literal}
    names |= {"BaseModel": Fields, "Resource": Fields, "ObjectMeta": Anything}
    exec(compile(f"from __future__ import annotations\n{code}", root, "exec"), names)
    for value in list(names.values()):
        if isinstance(value, type) and issubclass(value, pydantic.BaseModel):
            value.model_rebuild(_types_namespace=names)
    whole = names[root].model_json_schema(by_alias=True)
    schema = plain(whole)
    schema["properties"]["metadata"] = METADATA
    del schema["properties"]["status"]
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["$defs"] = used(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def plain(node: Any) -> Any:
    """Without titles and defaults; a field that may be left out need not be allowed to be null."""
    if isinstance(node, list):
        return [plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    node = {
        key: plain(value)
        for key, value in node.items()
        if key not in ("title", "default", "description") or isinstance(value, dict)
    }
    if str(node.get("pattern")).startswith("^(?i)"):  # Python wants the flag first
        node["pattern"] = f"(?i)^{node['pattern'].removeprefix('^(?i)')}"
    options = [each for each in node.get("anyOf", []) if each != {"type": "null"}]
    if len(options) == 1:
        del node["anyOf"]
        return {**options[0], **node}
    if options:
        node["anyOf"] = options
    return node


def used(schema: dict[str, Any]) -> dict[str, Any]:
    """The definitions that are referred to, directly or through others."""
    found: dict[str, Any] = {}
    text = json.dumps({key: value for key, value in schema.items() if key != "$defs"})
    while more := {n: d for n, d in schema["$defs"].items() if n not in found and f'"#/$defs/{n}"' in text}:
        found |= more
        text = json.dumps(more)
    return dict(sorted(found.items()))


def schema_of_definition(definition: dict[str, Any], version: str) -> dict[str, Any]:
    """JSON Schema of the objects of a CustomResourceDefinition, without status."""
    [found] = [each for each in definition["spec"]["versions"] if each["name"] == version]
    schema = closed(found["schema"]["openAPIV3Schema"])
    del schema["properties"]["status"]
    schema["properties"]["metadata"] = METADATA
    schema["properties"]["apiVersion"] = {"const": f"{definition['spec']['group']}/{version}"}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def closed(node: Any) -> Any:
    """Types, bounds, enumerations and patterns only; keys that are not defined are refused."""
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        if key == "properties":
            kept[key] = {name: closed(each) for name, each in value.items()}
        elif key not in ("default", "description") and not key.startswith("x-kubernetes-"):
            kept[key] = closed(value)
    if "properties" in kept and "x-kubernetes-preserve-unknown-fields" not in node:
        kept["additionalProperties"] = False
    return kept


def main(folder: Path, definitions: Path | None) -> None:
    for name, (package, module, root) in SOURCES.items():
        (wheel,) = folder.glob(f"{package}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            source = archive.read(module).decode()
        file = Path(__file__).with_name(f"{name}.json")
        file.write_text(json.dumps(schema_of(source, root), indent=1) + "\n")
        print(f"{file.name} from {wheel.name}")
    for name, (text, version) in DEFINITIONS.items() if definitions is not None else ():
        schema = schema_of_definition(yaml.safe_load((definitions / text).read_text()), version)
        file = Path(__file__).with_name(f"{name}.json")
        file.write_text(json.dumps(schema, indent=1) + "\n")
        print(f"{file.name} from {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
