"""Every field of HyperPod's CRDs is known, with its type, its default and its values.

tests/data/hyperpod/KIND.VERSION.json has the fields, drawn from the CRDs by scripts/crd_fields.py.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvroute.deploy.spec.endpoint import shape_of_kind
from kvroute.deploy.spec.source import Shape, ValueKind, dotted, shape_at

DATA = Path(__file__).parents[2] / "data" / "hyperpod"
CRDS = {tuple(file.stem.split(".")): json.loads(file.read_text()) for file in sorted(DATA.glob("*.json"))}
Crd = tuple[str, str]
Fields = dict[str, dict[str, Any]]

PLACEHOLDER_VALUES = {"integer": 7, "number": 7.5, "boolean": True, "string": "text", "int-or-string": 7}
# Values that are as the CRD's pattern wants them, by the end of the field's path.
PATTERNED = {
    "acmArn": "arn:aws:acm:us-west-2:123456789012:certificate/0a-1b",
    "domainName": "models.example.com",
    "hostedZoneId": "Z0123456789",
    "instanceType": "ml.g5.24xlarge",
    "acceleratorPartitionType": "mig-1g.5gb",
    "executionRole": "arn:aws:iam::123456789012:role/inference",
    "gatedModelDownloadRole": "arn:aws:iam::123456789012:role/inference",
    "commitSHA": "0123456789abcdef0123456789abcdef01234567",
    "huggingFaceModel.modelId": "a/b",
    "model.modelVersion": "1.2.3",
    "serverAddress": "https://aps-workspaces.us-west-2.amazonaws.com/workspaces/ws-1",
    "s3Uri": "s3://bucket/folder",
    "tlsCertificateOutputS3Uri": "s3://bucket/folder",
    "healthCheckPath": "/ping",
    "modelMetrics.path": "/metrics",
    "modelInvocationPort.name": "http",
    "l2CacheBackend": "redis",
    "l2CacheLocalUrl": "redis://cache:6379",
}
# Rules over several fields that a document with all fields breaks.
BROKEN_TOGETHER = {
    "spec.instanceTypes",  # beside instanceType
    "spec.kubernetes.volumes",  # the model's volume is not among them
}
# v1 does not require it.
NOT_REQUIRED = {"spec.instanceType"}
# The CRD has a default where kvroute must know whether the field is written.
WITHOUT_DEFAULT = {"spec.replicas": 1}


def value_of(path: str, facts: dict[str, Any]) -> Any:
    """A value that the CRD accepts."""
    for end, value in PATTERNED.items():
        if path.endswith(end):
            return value
    if "enum" in facts:
        return facts["enum"][0]
    if "default" in facts:
        return facts["default"]
    value = PLACEHOLDER_VALUES[facts["type"]]
    if facts["type"] in ("integer", "number"):
        return min(max(value, facts.get("minimum", value)), facts.get("maximum", value))
    return value


def whole_document(kind: str, version: str, fields: Fields) -> dict[str, Any]:
    """One document with every field of the CRD."""
    document: dict[str, Any] = {}
    for path, facts in fields.items():
        if facts["type"] in ("object", "array"):
            continue
        place: Any = document
        keys = re.findall(r"[^.\[\]{}]+|\[\]|\{\}", path)
        for key, after in zip(keys, [*keys[1:], ""], strict=True):
            name = {"[]": 0, "{}": "key"}.get(key, key)
            if not after:
                value = value_of(path, facts)
            else:
                value = [] if after == "[]" else {}
            if name == 0:
                if not place:
                    place.append(value)
                place = place[0]
            else:
                place = place.setdefault(name, value)
    document |= {"apiVersion": f"inference.sagemaker.aws.amazon.com/{version}", "kind": kind}
    document["metadata"] = {"name": "whole"}
    document.setdefault("x-kvroute", {})["awsRegion"] = "us-west-2"
    return document


def shape_of_path(kind: str, path: str) -> Shape | None:
    keys = re.findall(r"[^.\[\]{}]+|\[\]|\{\}", path)
    return shape_at(shape_of_kind(kind), tuple({"[]": 0, "{}": "key"}.get(key, key) for key in keys))


def put_value(document: dict[str, Any], path: str, value: object) -> None:
    keys = [{"[]": 0, "{}": "key"}.get(key, key) for key in re.findall(r"[^.\[\]{}]+|\[\]|\{\}", path)]
    place: Any = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value


def plain_path(path: str) -> str:
    return path.replace("[]", "[0]")


@pytest.fixture(scope="module")
def documents() -> dict[Crd, dict[str, Any]]:
    return {crd: whole_document(*crd, fields) for crd, fields in CRDS.items()}


@pytest.fixture(scope="module")
def short_documents(documents) -> dict[Crd, dict[str, Any]]:
    """The documents without the parts that are copied unread, which are most of them."""
    short = copy.deepcopy(documents)
    for document in short.values():
        document.pop("status")
        document["spec"].pop("kubernetes", None)
    return short


def test_both_kinds_in_both_versions_are_drawn():
    assert set(CRDS) == {
        (kind, version)
        for kind in ("InferenceEndpointConfig", "JumpStartModel")
        for version in ("v1", "v1alpha1")
    }
    assert len(CRDS["InferenceEndpointConfig", "v1"]) > 1000


@pytest.mark.parametrize("crd", CRDS, ids=" ".join)
def test_a_document_with_every_field_has_no_unknown_field(crd, documents, read):
    reading = read(documents[crd])
    messages = {dotted(each.path): each.text for each in reading.findings}

    assert [path for path in CRDS[crd] if shape_of_path(crd[0], path) is None] == []
    assert not [text for text in messages.values() if "unknown field" in text or "belongs" in text]
    assert {dotted(each.path) for each in reading.wrong} <= BROKEN_TOGETHER


@pytest.mark.parametrize("crd", CRDS, ids=" ".join)
def test_each_field_that_the_document_has_is_explained(crd, documents, read):
    explained = {dotted(each.path) for each in read(documents[crd]).findings}
    opaque = (ValueKind.ANYTHING, ValueKind.FREE)

    silent = [
        path
        for path, facts in CRDS[crd].items()
        if facts["type"] not in ("object", "array")
        and not any(plain_path(path).startswith(name) for name in explained)
        and (shape := shape_of_path(crd[0], path)) is not None
        and shape.kind not in opaque
    ]

    assert silent == []


@pytest.mark.parametrize("crd", CRDS, ids=" ".join)
def test_the_defaults_are_those_of_the_crd(crd):
    different = {}
    for path, facts in CRDS[crd].items():
        above = shape_of_path(crd[0], path.rpartition(".")[0].removesuffix("[]")) if "." in path else None
        if above is not None and above.item is not None:
            above = above.item
        field = above.field(path.rpartition(".")[2]) if above is not None and above.model else None
        if field is None or "default" not in facts:
            continue
        ours = field.get_default(call_default_factory=True)
        # An empty name is no name.
        if ours != facts["default"] and not (ours is None and facts["default"] == ""):
            different[path] = facts["default"]

    assert {path: value for path, value in different.items() if WITHOUT_DEFAULT.get(path) != value} == {}


CHOICES = [
    (crd, path)
    for crd, fields in CRDS.items()
    for path, facts in fields.items()
    if "enum" in facts
    and (shape := shape_of_path(crd[0], path)) is not None
    and shape.kind is ValueKind.SCALAR
]


@pytest.mark.parametrize("crd", CRDS, ids=" ".join)
def test_the_choices_are_those_of_the_crd(crd, short_documents, read):
    def wrong_with(values: dict[str, str]) -> set[str]:
        document = copy.deepcopy(short_documents[crd])
        for path, value in values.items():
            put_value(document, path, value)
        wrong = {dotted(each.path) for each in read(document).wrong}
        return {path for path in values if plain_path(path) in wrong}

    choices = {path: CRDS[crd][path]["enum"] for each, path in CHOICES if each == crd}
    most = max(map(len, choices.values()))
    # A rule decides about the strategy, and rules apply only where every single value is possible.
    strategies = {path: "something else" for path in choices if path.endswith("routingStrategy")}
    others = {path: "something else" for path in choices if path not in strategies}

    for number in range(most):
        assert wrong_with({path: values[number % len(values)] for path, values in choices.items()}) == set()
    assert wrong_with(strategies) == set(strategies)
    assert wrong_with(others) == set(others)


REQUIRED = [
    (crd, path)
    for crd, fields in CRDS.items()
    for path, facts in fields.items()
    # A field with a default is never missing.
    if path.startswith("spec.")
    and not path.startswith(("spec.pdSpec", "spec.kubernetes", "spec.nodeAffinity", "spec.dataCapture"))
    and "default" not in facts
    and facts.get("required")
    and (above := shape_of_path(crd[0], path.rpartition(".")[0].removesuffix("[]"))) is not None
    and above.kind in (ValueKind.MODEL, ValueKind.LIST)
]


@pytest.mark.parametrize("crd", CRDS, ids=" ".join)
def test_a_required_field_that_is_missing_is_wrong(crd, short_documents, read):
    paths = [path for each, path in REQUIRED if each == crd]

    accepted = set()
    for depth in sorted({path.count(".") for path in paths}):
        document, missing = copy.deepcopy(short_documents[crd]), [p for p in paths if p.count(".") == depth]
        for path in missing:
            put_value(document, path, None)
        wrong = {dotted(each.path) for each in read(document).wrong}
        accepted |= {path for path in missing if plain_path(path) not in wrong}

    assert len(paths) > 3
    assert accepted <= NOT_REQUIRED
