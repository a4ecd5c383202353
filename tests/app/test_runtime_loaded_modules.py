"""A gateway loads what its configuration asks for."""

import subprocess
import sys

import pytest

HEAVY = {"jinja2", "redis", "tokenizers", "zmq"}
"""What following the workers' caches needs: some 16 MiB."""

SHOW = """
import sys
import kvroute.cli.serve, kvroute.app.server
from kvroute.config.config import Config
from kvroute.app.runtime import Runtime
Runtime(Config.model_validate({"routing": {"strategy": sys.argv[1]}}))
print(" ".join(sys.modules))
"""


@pytest.mark.parametrize(("strategy", "loaded"), [("prefixaware", set()), ("kvaware", HEAVY)])
def test_cache_tracking_modules_are_loaded_only_for_a_strategy_that_needs_the_map(strategy, loaded):
    shown = subprocess.run(
        [sys.executable, "-c", SHOW, strategy], capture_output=True, text=True, check=True, timeout=60
    )

    assert HEAVY & set(shown.stdout.split()) == loaded
