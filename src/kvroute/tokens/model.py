"""Loads a model's tokenizer and chat templates from the model's files.

transformers 5 reads the same files. This module follows its rules that change token ids: which template wins,
and which tokens tokenizer_config.json adds. `add_bos_token` has no effect with a tokenizer.json, because the
post-processor adds the special tokens around a text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import AddedToken, Tokenizer

from kvroute.tokens.chat import EngineFlags
from kvroute.tokens.encoders import Encoder, added_around, choose_encoder, cuts_are_exact, tokenizer_json
from kvroute.tokens.options import UnusableModel
from kvroute.tokens.reading import TokenIds
from kvroute.tokens.segments import Cutter, RawToken, is_cut
from kvroute.tokens.template import ChatTemplate

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Everything from a model's files that tokenizing needs. Read-only, shared by threads."""

    encoder: Encoder
    cutter: Cutter
    added_around: tuple[TokenIds, TokenIds] | None
    """The special tokens before and after a text; None if the tokenizer changes the text's ids, too."""
    templates: Mapping[str, ChatTemplate] = field(default_factory=dict)

    def template(self, has_tools: bool) -> ChatTemplate | None:
        if has_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        return self.templates.get("default")


def load_model(
    folder: Path,
    flags: EngineFlags | None = None,
    *,
    allow_fastokens: bool = True,
    now: Callable[[], datetime] = datetime.now,
) -> ModelFiles:
    """Load a model's folder: tokenizer.json, tokenizer_config.json, chat templates.

    Raises UnusableModel. Takes up to seconds for a large vocabulary, so call it in a thread.
    """
    # Requests already run in several threads; the tokenizer's own pool would compete with the event loop.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    config = _json_object(folder / "tokenizer_config.json")
    for name, value in _json_object(folder / "special_tokens_map.json").items():
        config.setdefault(name, value)
    if config.get("split_special_tokens"):
        raise UnusableModel("split_special_tokens is set: special tokens are encoded as text")
    tokenizer = _tokenizer(folder, config)
    raw = [
        RawToken(
            token.content,
            is_cut(token.content, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word),
        )
        for token in tokenizer.get_added_tokens_decoder().values()
        if not token.normalized
    ]
    cutter = Cutter(raw)
    encoder = choose_encoder(tokenizer, allow_fastokens=allow_fastokens)
    if not cuts_are_exact(tokenizer, cutter, encoder.encode):
        cutter = Cutter(())
    return ModelFiles(
        encoder=encoder,
        cutter=cutter,
        added_around=added_around(tokenizer),
        templates=_templates(folder, config, flags or EngineFlags(), now),
    )


def _json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnusableModel(f"{path.name} cannot be read: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise UnusableModel(f"{path.name} is no JSON object")
    return value


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    try:
        tokenizer = tokenizer_json((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnusableModel("there is no tokenizer.json") from error
    except Exception as error:  # tokenizers raises nothing narrower
        raise UnusableModel(f"tokenizer.json cannot be read: {type(error).__name__}") from error
    known = tokenizer.get_vocab(with_added_tokens=True)
    declared = config.get("added_tokens_decoder") or {}
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if token.get("content") not in known:
            tokenizer.add_tokens([_added_token(token)])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    for token in (*(config.get(name) for name in _NAMED_TOKENS), *extra):
        if token and _text(token) not in tokenizer.get_vocab(with_added_tokens=True):
            tokenizer.add_special_tokens([_added_token({"content": _text(token)})])
    return tokenizer


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    return AddedToken(
        str(token["content"]),
        single_word=bool(token.get("single_word", False)),
        lstrip=bool(token.get("lstrip", False)),
        rstrip=bool(token.get("rstrip", False)),
        normalized=bool(token.get("normalized", False)),
        special=bool(token.get("special", True)),
    )


def _text(token: Any) -> str:
    """The text of a special token that is given as a string or as an object."""
    return str(token.get("content", "") if isinstance(token, dict) else token)


def _templates(
    folder: Path, config: Mapping[str, Any], flags: EngineFlags, now: Callable[[], datetime]
) -> Mapping[str, ChatTemplate]:
    variables = {name: _text(config[name]) for name in _NAMED_TOKENS if config.get(name) is not None}
    templates = {}
    for name, source in _sources(folder, config).items():
        try:
            templates[name] = ChatTemplate(source, variables, format_override=flags.content_format, now=now)
        except TemplateSyntaxError as error:
            raise UnusableModel(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
    return templates


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template texts by name. Template files win over tokenizer_config.json."""
    sources: dict[str, str] = {}
    inside = config.get("chat_template")
    if isinstance(inside, str):
        sources["default"] = inside
    elif isinstance(inside, list):
        sources.update((entry["name"], entry["template"]) for entry in inside)
    elif isinstance(inside, dict):
        sources.update(inside)
    files = {"default": folder / "chat_template.jinja"}
    files.update((path.stem, path) for path in (folder / "additional_chat_templates").glob("*.jinja"))
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    return found or sources
