"""YAML that means harm, in every file that kvroute reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.blackbox.conftest import StartServe

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
