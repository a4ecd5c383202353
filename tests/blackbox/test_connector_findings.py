"""What `kvroute check` says of a connector that turns vLLM's hybrid KV cache manager off."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml
from tests.blackbox.conftest import command
from tests.deploy.spec.conftest import OWN


@pytest.mark.parametrize(("layers", "is_noted"), [("sliding_attention", True), ("full_attention", False)])
def test_check_names_the_connector_that_makes_a_hybrid_models_cache_larger(tmp_path, layers, is_noted):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"layer_types": [layers, "full_attention"]}))
    document = json.loads(json.dumps(OWN))
    document["spec"]["model"] = str(model)
    document["x-kvroute"] = {**document.get("x-kvroute", {}), "lmcache": {"mode": "classic"}}
    file = tmp_path / "endpoint.yaml"
    file.write_text(yaml.safe_dump(document))

    checked = subprocess.run(
        [*command(), "check", "--file", str(file)], capture_output=True, text=True, check=False, timeout=60
    )

    assert "spec.kvCacheSpec" in checked.stdout, checked
    assert ("hybrid KV cache manager" in checked.stdout) is is_noted
