"""The chats of the comparison on real engines (bench/engines.py, bench/engines_chats.py)."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from engines import engine_arguments
from engines_chats import BLOCK, MODEL, Shape, one_token_words, sessions
from kvroute.deploy.tiny_model import CHAT_TEMPLATE, write_tiny_model


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(MODEL, tmp_path_factory.mktemp("models") / MODEL) / "tokenizer.json"


def test_a_sessions_last_prompt_has_the_length_of_its_shape(tokenizer_file: Path) -> None:
    shape = Shape(sessions=3, turns=3, common=40, opening=(100, 300), question=20, answer=8)
    words = one_token_words(tokenizer_file)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)

    for session, opening in zip(sessions(shape, words, 1), (100, 200, 300), strict=True):
        messages = [{"role": "system", "content": session.system}]
        for question in session.questions:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": "".join(words[: shape.answer])})
        rendered = template.render(messages=messages)
        assert len(tokenizer.encode(rendered, add_special_tokens=False)) == shape.last_prompt(opening)


def test_sessions_share_the_system_prompt_and_nothing_else() -> None:
    words = [f" word{number}" for number in range(500)]

    first, second, *_ = sessions(Shape(), words, 1)

    assert first.system == second.system
    assert first.questions[0][:200] != second.questions[0][:200]
    assert first == sessions(Shape(), words, 1)[0]
    assert first.system != sessions(Shape(), words, 2)[0].system


@pytest.mark.parametrize("count", [2, 12, 40])
def test_a_pool_holds_any_one_chat_but_not_all(count: int) -> None:
    shape = Shape(sessions=count)

    assert shape.pool_blocks * BLOCK >= shape.longest
    if count > 2:
        assert shape.pool_blocks * BLOCK < shape.sessions * shape.last_prompt(sum(shape.opening) // 2)


def test_prompts_are_between_two_and_eight_thousand_tokens() -> None:
    shape = Shape()

    assert shape.common + shape.opening[0] >= 2000
    assert shape.longest <= 8000


def test_float32_where_the_cpu_has_no_bfloat16() -> None:
    assert engine_arguments("flags : avx avx2 fma") == ("--dtype", "float32")
    assert engine_arguments("flags : avx2 avx512f avx512_bf16") == ()
