from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvroute.deploy.tiny_model import (
    END,
    END_TEXT,
    PAD,
    PAD_TEXT,
    TINY_MODELS,
    TURN,
    TURN_TEXT,
    VOCABULARY,
    write_tiny_model,
)

EXPECTED_IDS = [888, 1058, 1582, 2229, 4343, 1510, 85, 29, 289, 67, 130, 110, 309, 223, 161, 249, 228, 16]
# Head sizes that vLLM 0.32's CPU attention takes.
CPU_HEAD_SIZES = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}


@pytest.fixture(scope="module", params=list(TINY_MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param)


def test_a_model_is_four_small_files(folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}

    assert sorted(sizes) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sum(sizes.values()) < 500_000


def test_the_shape_fits_the_engine(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())

    assert config["head_dim"] in CPU_HEAD_SIZES
    assert config["num_attention_heads"] * config["head_dim"] == config["hidden_size"]
    assert config["vocab_size"] == VOCABULARY


def test_the_tokenizer_agrees_with_the_configuration(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert tokenizer.get_vocab_size() == VOCABULARY
    for text, token in ((PAD_TEXT, PAD), (TURN_TEXT, TURN), (END_TEXT, END)):
        assert tokenizer.token_to_id(text) == token


def test_token_ids_never_change(folder: Path) -> None:
    """Other tests, and the expectations of captured data, rely on them."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    ids = tokenizer.encode("The careful gardener counts 12 tokens; naïve ☃.").ids

    assert ids == EXPECTED_IDS
    assert tokenizer.decode(ids) == "The careful gardener counts 12 tokens; naïve ☃."


def test_writing_twice_changes_nothing(folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    write_tiny_model(folder.name, folder)

    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_kv_bytes_per_token() -> None:
    assert TINY_MODELS["tiny"].kv_bytes_per_token == 2048
    assert TINY_MODELS["small"].kv_bytes_per_token == 8192
