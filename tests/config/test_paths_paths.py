from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, SecretStr

from kvroute.config import paths as config_loading
from kvroute.options import Options, Switch, option


class Color(Enum):
    RED = "red"


class Item(Options):
    name: str = option(..., "A name.")
    keys: tuple[SecretStr, ...] = option((), "Keys.")


class Section(Options):
    text: str | None = option(None, "Text.")
    number: Annotated[int, Field(gt=0)] = option(1, "A number.")
    switch: Annotated[bool, Switch] = option(False, "A switch.")
    word: Literal["a", "b"] = option("a", "A word.")
    color: Color = option(Color.RED, "A colour.")
    file: Path | None = option(None, "A file.")
    items: tuple[Annotated[Item, Field()] | str, ...] = option((), "Items.")
    by_name: dict[str, Item] = option({}, "Items by name.")
    bare: dict = option({}, "Anything.")


class Root(Options):
    section: Section = option(default_factory=Section)
    maybe: Section | None = option(None, "Another, or none.")


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ((), (Root,)),
        (("section",), (Section,)),
        (("maybe",), (Section, type(None))),
        (("maybe", "number"), (int,)),
        (("section", "text"), (str, type(None))),
        (("section", "switch"), (bool,)),
        (("section", "items", 3), (Item, str)),
        (("section", "items", 3, "name"), (str,)),
        (("section", "by_name", "x", "keys", 0), (SecretStr,)),
        (("section", "nothing"), ()),
        (("section", "text", "deeper"), ()),
        (("section", "bare", "x"), ()),
    ],
)
def test_the_shape_at_a_path_is_the_declared_one(path, shape):
    assert config_loading.shape_at(Root, path) == shape


def test_a_shape_is_text_if_it_needs_no_parsing():
    def is_text(name: str) -> bool:
        return all(map(config_loading.is_text, config_loading.shape_at(Root, ("section", name))))

    assert [name for name in Section.model_fields if is_text(name)] == ["text", "word", "color", "file"]


def test_secrets_are_found_inside_lists_but_not_across_sections():
    assert config_loading.is_secret(config_loading.shape_at(Root, ("section", "by_name", "x", "keys")))
    assert not config_loading.is_secret(config_loading.shape_at(Root, ("section",)))
    assert not config_loading.is_secret(config_loading.shape_at(Root, ("section", "text")))


def test_walking_visits_sections_but_no_list_items():
    visited = [config_loading.dotted(path) for path, _ in config_loading.walk(Root)]

    assert visited[:2] == ["section", "section.text"]
    assert "maybe.number" in visited
    assert not any(name.endswith(".name") for name in visited)


def test_item_options_are_the_classes_inside_lists_and_mappings():
    assert config_loading.item_options(config_loading.shape_at(Root, ("section", "items"))) == (Item,)
    assert config_loading.item_options(config_loading.shape_at(Root, ("section", "by_name"))) == (Item,)
    assert config_loading.item_options(config_loading.shape_at(Root, ("section",))) == ()


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        (("section", "nubmer"), ("section", "number")),
        (("section", "by-name"), ("section", "by_name")),
        (("section", "by_name", "x", "naem"), ("section", "by_name", "x", "name")),
        (("number",), ("section", "number")),
        (("section", "zzz"), None),
    ],
)
def test_a_suggestion_is_a_close_sibling_or_the_same_name_elsewhere(path, meant):
    assert config_loading.suggestion(Root, path) == meant


def test_users_and_passwords_in_urls_are_hidden():
    text = "see redis://u:p@host:1/0 and http://host/a@b"

    assert config_loading.without_userinfo(text) == "see redis://**********@host:1/0 and http://host/a@b"
