"""Validates Kubernetes objects against the published schemas, with unknown keys refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry, Resource

NEWEST: str = kubernetes_validate.latest_version()
RELEASES = tuple(f"1.{minor}.0" for minor in range(29, 38))
"""The releases of Kubernetes whose schemas the tests check."""

_SCHEMAS = Path(__file__).parents[1] / "data" / "schemas"
_CUSTOM = {
    kind: json.loads((_SCHEMAS / f"{name}.json").read_text())
    for kind, name in (
        ("HTTPRoute", "httproute"),
        ("InferencePool", "inferencepool"),
        ("PrometheusRule", "prometheusrule"),
        ("ScaledObject", "keda-scaledobject"),
        ("ServiceMonitor", "servicemonitor"),
    )
}


def check(each: dict[str, Any], release: str = NEWEST) -> None:
    """One object: valid in this release of Kubernetes. Raises jsonschema.ValidationError."""
    if each["kind"] in _CUSTOM:
        _custom_validator(each["kind"]).validate(each)
    else:
        _validator(each["kind"].lower(), each["apiVersion"], release).validate(each)


@functools.cache
def _custom_validator(kind: str) -> Validator:
    """A cached validator; jsonschema.validate checks the whole schema again for each object."""
    schema = _CUSTOM[kind]
    validator = validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


@functools.cache
def _definitions(release: str) -> Registry[Any]:
    """All types of a release; unknown keys are refused."""
    return (Resource.from_contents(_schema("_definitions", release)) @ Registry()).crawl()


def _schema(name: str, release: str) -> Any:
    file = f"kubernetes-json-schema/v{release}-local-strict/{name}.json"
    return kubernetes_validate.utils.schema_contents(file, release)


@functools.cache
def _validator(kind: str, api_version: str, release: str) -> jsonschema.Draft202012Validator:
    """A cached validator; kubernetes_validate.validate makes one per object, which takes most of a second."""
    group, _, version = api_version.rpartition("/")
    name = f"{kind}-{group.split('.')[0]}-{version}" if group else f"{kind}-{version}"
    contents = _schema(name, release)
    return jsonschema.Draft202012Validator(
        contents, registry=Resource.from_contents(contents) @ _definitions(release)
    )
