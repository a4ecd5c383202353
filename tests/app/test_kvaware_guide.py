"""docs/kvaware.md: its configuration loads, and the options, metrics and reasons that it names exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from kvroute.config.config import Config
from kvroute.index.map_trust import TrustReason
from kvroute.lmcache.membership import Doubt

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "kvaware.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_loads(example: str) -> None:
    Config.model_validate(yaml.safe_load(example))


def test_every_option_exists() -> None:
    paths = set(re.findall(r"`((?:kv_events|lmcache|tokens|routing)(?:\.[a-z0-9_]+)+)`", GUIDE))
    paths = {
        path for path in paths if not path.startswith("lmcache.tag.")
    }  # LMCache's, in `kv_transfer_params`
    assert len(paths) > 10
    for path in paths:
        model: Any = Config
        for name in path.split("."):
            assert isinstance(model, type), path
            assert issubclass(model, BaseModel), path
            assert name in model.model_fields, path
            model = model.model_fields[name].annotation


def test_every_metric_and_reason_exists() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    metrics = {name.removesuffix("_total") for name in re.findall(r"\bkvroute_[a-z_]+\b", GUIDE)}
    streams = {f"kvroute_kv_events_{name}" for name in re.findall(r'^    "(\w+)": "', source, re.MULTILINE)}
    assert {name for name in metrics if f'"{name}' not in source} <= streams
    for reason in (*TrustReason, *Doubt):
        assert f"`{reason}`" in GUIDE or f": {reason}`" in GUIDE, reason
