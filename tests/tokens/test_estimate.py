from array import array

import pytest

from kvroute.blocks.keys import CacheSpace
from kvroute.openai.prompt import Prompt
from kvroute.tokens.estimate import TokenEstimator

TEXT = Prompt(b"x" * 4000)
SPACE = CacheSpace("m")


def test_a_token_is_four_bytes_until_an_answer_corrects_it():
    estimator = TokenEstimator()

    before = estimator.prompt_keys(TEXT, SPACE)
    estimator.observe("m", [TEXT], 2000)
    after = estimator.prompt_keys(TEXT, SPACE)

    assert (before.tokens, before.block_tokens) == (1000, 16.0)
    assert (after.tokens, after.block_tokens) == (2000, 32.0)
    assert before.keys == after.keys


def test_the_ratio_moves_slowly_once_known():
    estimator = TokenEstimator()
    estimator.observe("m", [TEXT], 1000)

    estimator.observe("m", [TEXT], 2000)

    assert 3.8 < estimator.bytes_per_token("m") < 4.0


def test_models_learn_apart():
    estimator = TokenEstimator()

    estimator.observe("m", [TEXT], 2000)

    assert estimator.bytes_per_token("other") == 4.0


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [(Prompt(b"short"), 20), (TEXT, 0), (Prompt(array("I", range(500)).tobytes(), is_token_ids=True), 100)],
)
def test_an_answer_without_usage_changes_nothing(prompt, tokens):
    estimator = TokenEstimator()

    estimator.observe("m", [prompt], tokens)

    assert estimator.bytes_per_token("m") == 4.0


def test_token_ids_are_counted_exactly_whatever_was_learned():
    estimator = TokenEstimator()
    estimator.observe("m", [TEXT], 2000)

    keys = estimator.prompt_keys(Prompt(array("I", range(64)).tobytes(), is_token_ids=True), SPACE)

    assert (keys.tokens, keys.block_tokens, len(keys.keys)) == (64, 16.0, 4)


def test_salted_prompts_share_no_key():
    estimator = TokenEstimator()

    plain = estimator.prompt_keys(TEXT, SPACE)
    salted = estimator.prompt_keys(TEXT, CacheSpace("m", "tenant"))

    assert not set(plain.keys) & set(salted.keys)
