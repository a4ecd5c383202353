"""Chats of gpt-oss, compared with the ids that vLLM 0.32 renders.

`tests/data/harmony.json` has the number of ids and a digest of them for each shape, by vLLM's own renderer
(`tests/engine/test_templates.py` writes and checks it).
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.chat_shapes import NATIVE, SHAPES

from kvroute.deploy.tiny_model import write_tiny_model
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.tokens.chat import EngineFlags
from kvroute.tokens.conversations import Conversations
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.harmony import load_harmony, looks_like_harmony
from kvroute.tokens.local import LocalTokenizer, load_model
from kvroute.tokens.options import Inexact, TokensReason, UnusableModel

ENGINES = Path(__file__).parents[1] / "data" / "harmony.json"
DAY = datetime(2026, 11, 28, 12)
REQUESTS = {name: ("chat/completions", body) for name, body in SHAPES.items()} | NATIVE
REFUSED = ("no tools", "no effort")
"""Bodies that vLLM refuses for this model."""


def digest(ids: Sequence[int]) -> str:
    return f"{len(ids)} {hashlib.sha256(array('I', ids).tobytes()).hexdigest()[:16]}"


def request_of(path: str, body: dict[str, Any]) -> InferenceRequest:
    return parse_request(ENDPOINTS[f"/v1/{path}"], json.dumps({"model": "gpt-oss", **body}).encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model("tiny", tmp_path_factory.mktemp("gpt-oss"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> LocalTokenizer:
    files = load_model(folder, now=lambda: DAY)
    return LocalTokenizer(files, SegmentCache(10_000_000), EngineFlags(), Conversations(10_000_000))


@pytest.mark.parametrize("name", [name for name in REQUESTS if name not in REFUSED])
def test_ids_are_the_engines_for_every_shape_of_chat(tokenizer: LocalTokenizer, name: str) -> None:
    expected = json.loads(ENGINES.read_text())[name]
    (ids,) = tokenizer.prompts(request_of(*REQUESTS[name]))

    assert digest(ids) == expected


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "media"),
        ("chat/completions", {"messages": [{"role": "poet", "content": "x"}]}, "unreadable"),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "unreadable"),
        ("responses", {"input": "x", "tools": [{"type": "code_interpreter"}]}, "unsupported"),
        ("responses", {"input": "x", "previous_response_id": "r1"}, "stored_response"),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "1"}]}, "unsupported"),
    ],
)
def test_a_chat_that_harmony_cannot_render_gives_a_reason(
    tokenizer: LocalTokenizer, path: str, body: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Inexact) as refused:
        tokenizer.prompts(request_of(path, body))

    assert refused.value.reason is TokensReason(reason)


def test_the_engines_date_is_followed(folder: Path) -> None:
    files = load_model(folder, now=lambda: DAY)
    assert files.harmony is not None
    tokenizer = LocalTokenizer(files, SegmentCache(100_000))
    other = LocalTokenizer(load_model(folder, now=lambda: datetime(2025, 1, 2)), SegmentCache(100_000))
    request = request_of("chat/completions", SHAPES["a question"])
    (ids,), (others,) = tokenizer.prompts(request), other.prompts(request)
    assert list(ids) != list(others)

    files.harmony.follow(list(others))
    assert tokenizer.prompts(request) == other.prompts(request)
    files.harmony.follow(list(ids))
    assert files.harmony.today() == "2026-11-28"


def test_without_the_library_or_a_vocabulary_the_remedy_is_named_and_nothing_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(_: Any) -> None:
        raise AssertionError("the library was asked for its vocabulary")

    library = SimpleNamespace(
        load_harmony_encoding=never, HarmonyEncodingName=SimpleNamespace(HARMONY_GPT_OSS=1)
    )
    monkeypatch.setitem(sys.modules, "openai_harmony", library)
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    monkeypatch.setattr("kvroute.tokens.harmony._is_installed", lambda _: False)
    with pytest.raises(UnusableModel, match=r"tokens\.harmony_vocabulary"):
        load_harmony(None)
    with pytest.raises(UnusableModel, match="has no o200k_base"):
        load_harmony(tmp_path)
    monkeypatch.setitem(sys.modules, "openai_harmony", None)
    with pytest.raises(UnusableModel, match=r"install kvroute\[harmony\]"):
        load_harmony(None)


def test_gpt_oss_is_known_by_its_name_if_its_files_are_not_here() -> None:
    assert looks_like_harmony("openai/gpt-oss-120b")
    assert looks_like_harmony("/models/GPT_OSS_20b")
    assert not looks_like_harmony("meta-llama/Llama-3.1-8B")
