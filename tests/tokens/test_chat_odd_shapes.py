"""Odd shapes of chats, compared with the ids that vLLM 0.32 renders, for templates of seven manners.

`tests/data/odd_shapes.json` has the number of ids and a digest of them for each manner and shape, by vLLM's
own renderer; null if it refuses the shape (`tests/engine/test_templates.py` writes and checks it).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.support.chat_templates import MANNERS, write_model
from tests.support.odd_shapes import INEXACT, ODD_SHAPES
from tests.tokens.test_harmony import DAY, digest, request_of

from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.local import LocalTokenizer, load_model
from kvroute.tokens.options import Inexact

ENGINES = Path(__file__).parents[1] / "data" / "odd_shapes.json"
HARMONY = "harmony"
"""A model of gpt-oss, whose chats vLLM renders without a template."""
INEXACT_IN_HARMONY = frozenset(
    (
        *("contents: tool reference", "contents: tool reference and a text", "contents: image"),
        *("contents: result as an object", "messages: reference in a result"),
    )
)


def model_of(manner: str, folder: Path) -> Path:
    if manner != HARMONY:
        return write_model(manner, folder)
    folder = write_model("gptoss", folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gpt_oss"}))
    return folder


@pytest.mark.parametrize("manner", [*MANNERS, HARMONY])
def test_ids_of_odd_shapes_are_the_engines_or_there_are_none(tmp_path: Path, manner: str) -> None:
    expected = json.loads(ENGINES.read_text())[manner]
    local = LocalTokenizer(load_model(model_of(manner, tmp_path), now=lambda: DAY), SegmentCache(10_000_000))
    may_be_inexact = INEXACT | INEXACT_IN_HARMONY if manner == HARMONY else INEXACT
    wrong, totals = [], Counter[str]()
    for name, (path, body) in ODD_SHAPES.items():
        try:
            (ids,) = local.prompts(request_of(path, body))
        except Inexact:
            outcome = "inexact" if name in may_be_inexact else "unexpected"
        else:
            outcome = "equal" if digest(ids) == expected[name] else "other ids"
        # A body that the engine refuses reaches no cache.
        outcome = "refused" if expected[name] is None else outcome
        totals[outcome] += 1
        wrong += [(name, outcome)] if outcome in ("unexpected", "other ids") else []

    assert wrong == []
    assert totals["equal"] > 190
