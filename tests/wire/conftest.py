from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest

CAPTURES = Path(__file__).parent.parent / "data" / "captures"


@pytest.fixture
def capture() -> Callable[[str], list[list[bytes]]]:
    """Frames of every message of a capture."""

    def load(name: str) -> list[list[bytes]]:
        with (CAPTURES / f"{name}.jsonl").open() as lines:
            return [[base64.b64decode(frame) for frame in json.loads(line)["frames"]] for line in lines]

    return load
