import json
from array import array

import pytest

from kvroute.blocks.keys import CacheSpace
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.prefix_cache import SeenBodies
from kvroute.openai.prompt import Prompt
from kvroute.openai.request import parse_request, prompts_of
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


IMAGES = [
    [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}, {"type": "text", "text": "w" * 4000}],
    [{"type": "text", "text": "w" * 4000}, {"type": "input_image", "image_url": "data:" + "A" * 5000}],
    [{"type": "tool_result", "content": [{"type": "image", "source": {"data": "A" * 500}}, "w" * 4000]}],
]


@pytest.mark.parametrize("content", IMAGES)
def test_answers_about_images_do_not_spoil_the_ratio_of_texts(content):
    estimator = TokenEstimator()
    (asked,) = prompts_with(content)

    estimator.observe("m", [asked], 256)

    assert estimator.bytes_per_token("m") == 4.0


def test_answers_about_tool_results_are_learned():
    estimator = TokenEstimator()
    (asked,) = prompts_with([{"type": "tool_result", "tool_use_id": "t", "content": 'an "image"' * 60}])

    estimator.observe("m", [asked], 2000)

    assert estimator.bytes_per_token("m") != 4.0


def test_an_image_in_the_known_part_of_a_chat_counts_as_one_in_the_new_part():
    estimator, bodies = TokenEstimator(), SeenBodies(seed=1, cut_bytes=64)
    messages = [{"role": "user", "content": IMAGES[0]}]
    for _ in range(6):
        messages = [
            *messages,
            {"role": "assistant", "content": "x" * 20_000},
            {"role": "user", "content": "y"},
        ]
        asked = bodies.read(ENDPOINTS["/v1/chat/completions"], json.dumps({"messages": messages}).encode())
    assert asked.seen is not None
    assert asked.seen.prefix.whole_bytes > 8_000

    estimator.observe("m", [asked.seen], 256)

    assert estimator.bytes_per_token("m") == 4.0


def prompts_with(content):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    return prompts_of(parse_request(ENDPOINTS["/v1/chat/completions"], body))
