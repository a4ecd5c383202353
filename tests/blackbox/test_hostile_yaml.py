"""YAML that means harm, in every file that kvroute reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.blackbox.conftest import StartServe

SPEC = Path(__file__).parents[2] / "configs" / "kubernetes.yaml"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "a: !!timestamp x\n",
        "a: !!bool x\n",
        "a: !!int x\n",
        "a: !!float x\n",
        "a: &a [*a]\n",
        "? {a: 1}\n",
    ],
    ids=["bomb", "timestamp", "bool", "int", "float", "itself", "key"],
)
@pytest.mark.parametrize("place", ["--config", "-f", "fleet.file", "keys"])
async def test_it_is_refused_in_words(run: StartServe, tmp_path: Path, place: str, text: str) -> None:
    file = tmp_path / "it.yaml"
    file.write_text(text)
    words = {
        "--config": ("check", "--config", str(file)),
        "-f": ("check", "-f", str(file)),
        "fleet.file": ("check", "--set", f"fleet.file={file}"),
        "keys": ("keys", "check", str(file)),
    }[place]

    checking = await run(*words)

    assert await checking.ended(within_s=20) not in (0, -9)
    assert "Traceback" not in checking.log


@pytest.mark.parametrize("amount", ["1@x", ".inf", ".nan", "1.5", "1k", "-1", "0x@", "١"])
@pytest.mark.parametrize("name", ["nvidia.com/gpu", "memory"])
async def test_an_amount_that_is_none_is_an_error_with_its_place(run, tmp_path, name, amount):
    if name == "memory" and amount in ("1.5", "1k", "-1"):
        pytest.skip("a quantity")
    file = tmp_path / "spec.yaml"
    text = SPEC.read_text()
    changed = re.sub(rf"{name}: .*", f"{name}: {amount}", text, count=1)
    assert changed != text
    file.write_text(changed)

    checking = await run("check", "-f", str(file))

    assert await checking.ended(within_s=60) not in (0, -9)
    assert "Traceback" not in checking.log
