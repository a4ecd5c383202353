"""Record the KV events of real engines: `python -m tests.engine.record_models [NAME...]`.

Writes `tests/data/captures/models/NAME.jsonl.xz`, a file per row of `RECORDINGS`, as `recorder.py` says.
Needs the engine's environment (`make test-engine` installs it), half a minute per row, and no network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.engine.models import ARCHITECTURES, write_model

from kvroute.deploy.engine_install import DEFAULT_PATH, EngineVenv, separate_environment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "captures" / "models"


@dataclass(frozen=True, slots=True)
class Recording:
    """One engine. Its pool holds a part of what the workload computes, so that blocks are evicted."""

    architecture: str
    blocks: int
    arguments: Mapping[str, object] = field(default_factory=dict)


RECORDINGS: dict[str, Recording] = {
    "llama": Recording("llama", 80),
    "llama_eagle": Recording("llama_eagle", 80),
    "gpt_oss": Recording("gpt_oss", 140),
    "gpt_oss_eviction": Recording("gpt_oss", 50),
    "gpt_oss_dense": Recording("gpt_oss", 140, {"prefix_cache_retention_interval": None}),
    "gpt_oss_eagle": Recording("gpt_oss_eagle", 140),
    "gemma3": Recording("gemma3", 240),
    "gemma3_retention": Recording("gemma3", 240, {"prefix_cache_retention_interval": 32}),
    "mistral_window": Recording("mistral_window", 60),
    "llama4": Recording("llama4", 200),
    "qwen3_next": Recording("qwen3_next", 100),
    "qwen3_next_unit": Recording("qwen3_next", 100, {"prefix_match_unit": 32}),
    "granite4": Recording("granite4", 100),
    "jamba": Recording("jamba", 100),
    "mamba": Recording("mamba", 24),
    "deepseek2": Recording("deepseek2", 160),
}


def run_of(name: str, models: Path, out: Path) -> dict[str, object]:
    """The row `name` as `recorder.py` reads it."""
    recording = RECORDINGS[name]
    architecture = ARCHITECTURES[recording.architecture]
    arguments: dict[str, object] = {
        "block_size": 32,
        "max_model_len": -1,  # what fits into the pool
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": recording.blocks,
        "enable_prefix_caching": True,
        **architecture.engine,
        **recording.arguments,
    }
    if architecture.drafting:
        drafting = dict(architecture.drafting)
        if architecture.drafter:
            drafting["model"] = str(write_model(architecture.drafter, models / architecture.drafter))
        arguments["speculative_config"] = drafting
    return {
        "name": name,
        "model": str(write_model(recording.architecture, models / recording.architecture)),
        "arguments": arguments,
        "zeroed_kernels": architecture.zeroed_kernels,
        "unit": 0,
        "out": str(out / f"{name}.jsonl.xz"),
        "log": str(models / f"{name}.log"),
    }


def main(names: Sequence[str]) -> int:
    """Record the named rows, or all. Returns the exit code."""
    venv = EngineVenv.at(Path(os.environ.get("ENGINE_VENV", ROOT / DEFAULT_PATH)))
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(scratch)
        runs = models / "runs.json"
        runs.write_text(json.dumps([run_of(name, models, FOLDER) for name in names or RECORDINGS]))
        argv = [str(venv.script("python")), str(Path(__file__).with_name("recorder.py")), str(runs)]
        return subprocess.run(argv, env=separate_environment(os.environ), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
