"""How a compose file is written: variables, quantities, health checks."""

from __future__ import annotations

from typing import Any

import yaml

Service = dict[str, Any]


def http_health(
    port: int, python: str, *, path: str = "/health", start_period: str, interval: str = "5s"
) -> dict[str, Any]:
    """A check by the container's own Python, which every image here has."""
    code = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}{path}', timeout=3)"
    return {
        "test": ["CMD", python, "-c", code],
        "interval": interval,
        "timeout": "5s",
        "retries": 3,
        "start_period": start_period,
    }


def literal(text: str) -> str:
    """`text` where compose would look for variables."""
    return text.replace("$", "$$")


def byte_count(quantity: str) -> str:
    """A Kubernetes quantity of memory as compose writes it, in bytes."""
    units = {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4, "k": 10**3, "M": 10**6, "G": 10**9}
    for unit, factor in units.items():
        if quantity.endswith(unit):
            return str(round(float(quantity.removesuffix(unit)) * factor))
    return quantity


def yaml_text(value: object) -> str:
    """A document in block style, `${VARIABLES}` in quotes."""
    text: str = yaml.dump(
        value, Dumper=_NoAliases, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=False
    )
    return text


class _NoAliases(yaml.SafeDumper):
    """Writes what occurs twice twice, and text with variables in quotes: their values are text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_none(self, data: None) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:null", "")

    def represent_text(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "${" in data else None)


_NoAliases.add_representer(type(None), _NoAliases.represent_none)
_NoAliases.add_representer(str, _NoAliases.represent_text)
