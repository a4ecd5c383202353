from __future__ import annotations

import json
from typing import Any

import pytest

from kvroute.sim.prompts import document, encode, fingerprint, fixed, plain


def test_the_same_seed_gives_the_same_answer_and_another_seed_another() -> None:
    assert plain(1, 20, 32).text == plain(1, 20, 32).text
    assert plain(1, 20, 32).text != plain(2, 20, 32).text


def test_prompt_model_and_choice_all_matter() -> None:
    prompts = [encode("a"), encode("b")]
    seeds = {fingerprint(p, model, choice) for p in prompts for model in ("x", "y") for choice in (0, 1)}

    assert len(seeds) == 8


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_pieces_are_the_tokens_of_the_text(limit: int) -> None:
    answer = plain(7, limit, 32)

    assert answer.token_ids == encode(answer.text)
    assert len(answer.pieces) == len(answer.token_ids) == limit
    assert answer.finish_reason == "length"


def test_without_a_limit_an_answer_has_the_natural_length() -> None:
    answer = plain(7, None, 5)

    assert (len(answer.pieces), answer.finish_reason) == (5, "stop")


def test_a_fixed_text_ends_with_stop_unless_the_limit_cuts_it() -> None:
    assert (fixed('{"a": 1}', None).text, fixed('{"a": 1}', None).finish_reason) == ('{"a": 1}', "stop")
    assert (fixed('{"a": 1}', 2).text, fixed('{"a": 1}', 2).finish_reason) == ('{"a": ', "length")
    assert fixed('{"a": 1}', 3).finish_reason == "stop"


def test_the_first_stop_string_wins_and_one_beyond_the_limit_does_not() -> None:
    cut = fixed("one two three", None, ["three", "two", ""])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("one ", "stop", "two")

    late = fixed("one two three", 2, ["three"])
    assert (late.text, late.finish_reason, late.stop_reason) == ("one tw", "length", None)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({}, "x"),
        ({"type": "string", "minLength": 3}, "xxx"),
        ({"type": "integer", "minimum": 4}, 4),
        ({"type": "number", "exclusiveMinimum": 4}, 5),
        ({"type": "boolean"}, True),
        ({"type": "null"}, None),
        ({"type": ["null", "integer"]}, 0),
        ({"enum": ["red", "blue"]}, "red"),
        ({"const": 9}, 9),
        ({"default": 3, "type": "integer"}, 3),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [0, 0]),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 0}),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"type": "boolean"}}}, True),
        (True, None),
    ],
)
def test_documents_fit_their_schema(schema: Any, value: Any) -> None:
    assert json.loads(document(schema)) == value


def test_a_schema_that_contains_itself_terminates() -> None:
    endless = {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}

    assert json.loads(document(endless))
