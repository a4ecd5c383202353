"""Draw the fields of HyperPod's CRDs into tests/data/hyperpod/: paths, types, defaults, enumerations, bounds.

    python scripts/crd_fields.py FOLDER

FOLDER has the CRD files of sagemaker-hyperpod-cli, which are in the folder
helm_chart/HyperPodHelmChart/charts/inference-operator/config/crd there. Descriptions are left out; the files
themselves are not part of this repository. One file for each kind and version, one field on each line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

OUTPUT = Path(__file__).parents[1] / "tests" / "data" / "hyperpod"
KINDS = ("InferenceEndpointConfig", "JumpStartModel")
KEPT = ("default", "enum", "minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength", "pattern")


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and facts of each field below `schema`: items of a list at `[]`, values of a map at `{}`."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here, facts(field, is_required=name in required)
        yield from below(field, here)


def below(field: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fields in the value of `field`."""
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        inner = field.get(key)
        if isinstance(inner, dict):
            if not inner.get("properties"):
                yield path + mark, facts(inner, is_required=False)
            yield from below(inner, path + mark)
    if field.get("properties"):
        yield from fields(field, path)


def facts(field: dict[str, Any], *, is_required: bool) -> dict[str, Any]:
    """The facts of one field that a document can break or rely on."""
    kind = "int-or-string" if field.get("x-kubernetes-int-or-string") else field.get("type", "any")
    found: dict[str, Any] = {"type": kind}
    if is_required:
        found["required"] = True
    return found | {name: field[name] for name in KEPT if name in field}


def main(folder: Path) -> None:
    """Write one file for each kind and version of the CRDs in `folder`."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.glob("*.yaml")):
        crd = yaml.safe_load(file.read_text())
        kind = crd["spec"]["names"]["kind"]
        for version in crd["spec"]["versions"] if kind in KINDS else ():
            drawn = dict(fields(version["schema"]["openAPIV3Schema"]))
            lines = [f"  {json.dumps(path)}: {json.dumps(drawn[path])}" for path in sorted(drawn)]
            target = OUTPUT / f"{kind}.{version['name']}.json"
            target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            print(f"{target.relative_to(OUTPUT.parents[2])}: {len(drawn)} fields")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
