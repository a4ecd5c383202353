"""Tokenizes prompts in this process, with the tokenizer and chat template from the model's files.

transformers 5 reads the same files. This module follows its rules that change token ids: which template wins,
and which tokens tokenizer_config.json adds. `add_bos_token` has no effect with a tokenizer.json, because the
post-processor adds the special tokens around a text.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from weakref import ref

from jinja2 import TemplateSyntaxError
from tokenizers import AddedToken, Tokenizer

from kvroute.blocks.known_prompts import PrefixIds, PromptIds
from kvroute.openai.request import InferenceRequest
from kvroute.tokens.chat import Chat, EngineFlags, chat_completion, render_chat
from kvroute.tokens.conversations import (
    CHAT_PATH,
    CachedConversation,
    ContinuationState,
    Conversations,
    Mark,
    appended_messages,
    continuation,
    new_conversation,
    signature_of,
)
from kvroute.tokens.encoders import (
    Cutter,
    Encoder,
    RawToken,
    SegmentCache,
    added_around,
    choose_encoder,
    cuts_are_exact,
    is_cut,
    joined,
    tokenizer_json,
)
from kvroute.tokens.harmony import (
    MODEL_TYPE,
    Harmony,
    HarmonyTurn,
    HarmonyTurns,
    harmony_chat,
    is_chat,
    load_harmony,
    tokens_of,
)
from kvroute.tokens.options import Inexact, TokensReason, UnusableModel
from kvroute.tokens.reading import Plain, TokenIds, decoded, read, truncated
from kvroute.tokens.template import ChatTemplate
from kvroute.tokens.windows import MOST_MESSAGES, Proofs, Window, Windows

log = logging.getLogger(__name__)

_OF_PROCESSOR: Final = "/processor"
"""The template of a processor for media. It renders chats without tools; no file can have its name."""
_RENDERED_IN_PYTHON: Final = frozenset(
    (
        *("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"),
        *("DeepseekV41ForCausalLM", "KimiK3ForConditionalGeneration", "InklingForCausalLM"),
        *("InklingForConditionalGeneration",),
    )
)
"""Architectures whose chats vLLM renders without a chat template."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Everything from a model's files that tokenizing needs. Read-only, shared by threads."""

    encoder: Encoder
    cutter: Cutter
    added_around: tuple[TokenIds, TokenIds] | None
    """The special tokens before and after a text; None if the tokenizer changes the text's ids, too."""
    templates: Mapping[str, ChatTemplate] = field(default_factory=dict)
    is_harmony: bool = False
    """Whether the engine renders chats with Harmony, not with a template."""
    harmony: Harmony | None = None
    why_no_harmony: str = ""

    @property
    def shows_dates(self) -> bool:
        """Whether prompts contain the date."""
        return self.harmony is not None or any(template.shows_dates for template in self.templates.values())

    def template(self, has_tools: bool) -> ChatTemplate | None:
        special = "tool_use" if has_tools else _OF_PROCESSOR
        if special in self.templates:
            return self.templates[special]
        return self.templates.get("default")


def load_model(
    folder: Path,
    flags: EngineFlags | None = None,
    *,
    allow_fastokens: bool = True,
    now: Callable[[], datetime] = datetime.now,
    harmony_vocabulary: Path | None = None,
) -> ModelFiles:
    """Load a model's folder: tokenizer.json, tokenizer_config.json, chat templates.

    Raises UnusableModel. Takes up to seconds for a large vocabulary, so call it in a thread.
    """
    # Requests already run in several threads; the tokenizer's own pool would compete with the event loop.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    config = _json_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older models have two more files
        config |= _json_object(folder / "special_tokens_map.json")
        config["added_tokens_decoder"] = _older_added_tokens(folder, config)
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
    model = _json_object(folder / "config.json")
    is_harmony = model.get("model_type") == MODEL_TYPE
    harmony, why_no_harmony = None, ""
    if is_harmony:
        try:
            harmony = load_harmony(harmony_vocabulary, lambda: now().strftime("%Y-%m-%d"))
        except UnusableModel as error:
            why_no_harmony = str(error)
    return ModelFiles(
        encoder=encoder,
        cutter=cutter,
        added_around=added_around(tokenizer),
        templates={}
        if _has_renderer(folder, model)
        else _templates(folder, config, flags or EngineFlags(), now),
        is_harmony=is_harmony,
        harmony=harmony,
        why_no_harmony=why_no_harmony,
    )


def harmony_files(vocabulary: Path | None) -> ModelFiles:
    """What stands in for the files of a gpt-oss model that are not here. Raises UnusableModel."""
    harmony = load_harmony(vocabulary)
    return ModelFiles(
        encoder=Encoder(harmony.encode_text, "harmony", "whose vocabulary is the model's"),
        cutter=Cutter(()),
        added_around=(array("I"), array("I")),
        is_harmony=True,
        harmony=harmony,
    )


def _has_renderer(folder: Path, model: Mapping[str, Any]) -> bool:
    """Whether vLLM renders this model's chats in Python, and passes over a chat template.

    Source: vLLM 0.32, config/model.py (tokenizer_mode) and tokenizers/registry.py (files of Mistral).
    """
    architectures = model.get("architectures")
    if isinstance(architectures, list) and not _RENDERED_IN_PYTHON.isdisjoint(map(str, architectures)):
        return True
    return any(folder.glob("consolidated*.safetensors")) and any(
        next(folder.glob(pattern), None) for pattern in ("tekken.json", "tokenizer.model.v*")
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
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    declared = config.get("added_tokens_decoder") or {}
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if token.get("content") not in vocabulary:
            tokenizer.add_tokens([_added_token(token)])
    for token in (*_named_tokens(config).values(), *_unnamed_tokens(config)):
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


def _named_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> special token. Beside the usual names a model may have its own, such as `image_token`."""
    named = {name: config[name] for name in _NAMED_TOKENS if config.get(name) is not None}
    named |= {
        name: token
        for name, token in config.items()
        if name not in _NAMED_TOKENS
        and name.endswith("_token")
        and (isinstance(token, str) or (isinstance(token, dict) and token.get("__type") == "AddedToken"))
    }
    extra = config.get("extra_special_tokens")
    return named | extra if isinstance(extra, dict) else named


def _unnamed_tokens(config: Mapping[str, Any]) -> Sequence[Any]:
    extra = config.get("extra_special_tokens")
    return extra if extra and isinstance(extra, list) else config.get("additional_special_tokens") or ()


def _older_added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tokens of added_tokens.json in the form of `added_tokens_decoder`."""
    named = (config.get(name) for name in _NAMED_TOKENS)
    special = {_text(token) for token in (*named, *_unnamed_tokens(config)) if token}
    return {
        str(number): {"content": text, "special": text in special, "normalized": text not in special}
        for text, number in _json_object(folder / "added_tokens.json").items()
    }


def _text(token: Any) -> str:
    """The text of a special token that is given as a string or as an object."""
    return str(token.get("content", "") if isinstance(token, dict) else token)


def _templates(
    folder: Path, config: Mapping[str, Any], flags: EngineFlags, now: Callable[[], datetime]
) -> Mapping[str, ChatTemplate]:
    variables = {name: _text(token) for name, token in _named_tokens(config).items()}
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
    file_sources = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    return (file_sources or sources) | _processor_source(folder)


def _processor_source(folder: Path) -> dict[str, str]:
    """The template that only a processor for media reads, by transformers 5, processing_utils.py."""
    if not any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")):
        return {}
    for name in ("processor_config.json", "chat_template.json"):
        if isinstance(text := _json_object(folder / name).get("chat_template"), str):
            return {_OF_PROCESSOR: text}
    return {}


_QUICK_MESSAGES: Final = 32
"""More messages take too long to render on the event loop, even if they are short."""


class LocalTokenizer:
    """Tokenizes the prompts of one model. Blocking: call it in a thread. Thread-safe.

    `cache` and `conversations` must not be shared with other models, whose token ids differ.
    """

    def __init__(
        self,
        files: ModelFiles,
        cache: SegmentCache,
        flags: EngineFlags | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        self._files = files
        self._cache = cache
        self._flags = flags or EngineFlags()
        self._conversations = Conversations(0) if conversations is None else conversations
        self._messages = SegmentCache(cache.max_bytes)
        """The ids of Harmony's messages. Not in `cache`: a client may send their JSON as text."""
        self._harmony = None if files.harmony is None else HarmonyTurns(files.harmony, self._messages)
        self._windows = {
            id(template): Windows(template, files.cutter, self._parts, Proofs(), self._flags)
            for template in files.templates.values()
            if not template.is_separable
        }
        self.turns: Counter[str] = Counter()
        """Next turns of cached chats: `continued`, `compared` with the whole chat, `differed` from it."""

    @property
    def files(self) -> ModelFiles:
        return self._files

    @property
    def cache(self) -> SegmentCache:
        return self._cache

    def prompts(self, request: InferenceRequest) -> tuple[Sequence[int], ...]:
        """The token ids of the request's prompts, in order. Raises Inexact.

        The next turn of a cached chat costs only its new messages, if the chat template renders message by
        message. Otherwise a cached chat of 32,000 tokens takes 0.4 ms with fastokens and 1.5 to 4 ms with
        tokenizers; a new one takes 4 ms, and 60 ms or more (bench/micro_tokens.py).
        """
        cached = self._conversations.find(request)
        if cached is not None and (ids := self._continue_conversation(request, cached)) is not None:
            self.turns["continued"] += 1
            return (ids,)
        return self._encode_whole(request)

    def prompts_if_quick(self, request: InferenceRequest) -> tuple[Sequence[int], ...] | None:
        """As `prompts` if it takes well under a millisecond, else None. Raises Inexact.

        May be called on the event loop. Quick: at most `Encoder.quick_bytes` of JSON and 32 messages are new.
        """
        body, quick = request.body, self._files.encoder.quick_bytes
        if len(body) <= quick:
            messages = request.messages
            if messages is not None and len(messages) > _QUICK_MESSAGES:
                return None
            return self.prompts(request)
        cached = self._conversations.find(request)
        if cached is None or len(body) - cached.end + len(cached.carry) > quick:
            return None
        ids = self._continue_conversation(request, cached, most=_QUICK_MESSAGES)
        if ids is None:
            return None
        self.turns["continued"] += 1
        return (ids,)

    def text_of(self, chat: Chat) -> str:
        """The rendered text of a chat."""
        return render_chat(chat, self._template(chat), self._flags)

    def _template(self, chat: Chat) -> ChatTemplate:
        template = self._files.template(chat.tools is not None)
        if template is None:
            raise Inexact(TokensReason.NO_TEMPLATE)
        return template

    def _encode_whole(self, request: InferenceRequest) -> tuple[Sequence[int], ...]:
        """As `prompts`, without a search for a cached chat."""
        return self._encode_alone(request, is_cached=True)

    def _encode_alone(
        self, request: InferenceRequest, *, is_cached: bool = False
    ) -> tuple[Sequence[int], ...]:
        """As `prompts`, whatever is known of the chat. With `is_cached` its next turn will find it."""
        if self._files.is_harmony and is_chat(request):
            return (self._encode_harmony(request),)
        prompt = read(request, self._flags, self._files.template)
        if isinstance(prompt, Chat):
            text = self.text_of(prompt)
            ids = self._start_conversation(request, prompt, text) if is_cached else None
            return (self._encoded(text, prompt) if ids is None else ids,)
        if prompt.ids:
            return tuple(truncated(ids, prompt.truncate_to, prompt.truncation_side) for ids in prompt.ids)
        return tuple(self._encoded(text, prompt) for text in prompt.texts)

    def _encode_harmony(self, request: InferenceRequest) -> Sequence[int]:
        """The ids of a chat that the engine renders with Harmony."""
        harmony = self._files.harmony
        if harmony is None:
            raise Inexact(TokensReason.HARMONY)
        assert self._harmony is not None
        body, today = decoded(request), harmony.today()
        chat = harmony_chat(request.endpoint.path, body, self._flags, today, self._files.template)
        if not self._is_cached(request) or (started := new_conversation(request)) is None:
            return tokens_of(chat, harmony, self._messages)
        grown = self._harmony.first_turn(chat, body["messages"], today)
        empty = CachedConversation(
            (0, 0), (), b"", started.leading_fields, Chat(()), b"", 0, "", "", PrefixIds(), None, grown.turn
        )
        return self._store_rest(empty, started.mark, request, grown.turn, grown.prefix, grown.suffix)

    def _is_cached(self, request: InferenceRequest) -> bool:
        return request.endpoint.path == CHAT_PATH and len(request.body) >= self._conversations.least_bytes

    def _store_rest(
        self,
        cached: CachedConversation,
        mark: Mark,
        request: InferenceRequest,
        state: ContinuationState,
        prefix: PrefixIds,
        ids: TokenIds,
    ) -> PromptIds:
        """Cache the chat that continues `cached`; return its ids: `prefix`, then `ids`."""
        if mark != cached.mark:
            body, seen = request.body, request.seen
            stored = CachedConversation(
                mark,
                cached.body_parts(mark[0], body),
                body[mark[0] :],
                cached.leading_fields,
                cached.chat,
                cached.signature,
                0,
                "",
                "",
                prefix,
                None if seen is None else ref(seen.longer_prefix or seen.prefix),
                state,
            )
            self._conversations.store(stored, cached if cached.end else None)
        return PromptIds(prefix, ids, cached.ids)

    def _start_conversation(self, request: InferenceRequest, chat: Chat, text: str) -> Sequence[int] | None:
        """Tokenize a chat and cache it; None if a chat of this kind cannot be continued."""
        if not self._is_cached(request):
            return None
        template = self._template(chat)
        signature = signature_of(chat)
        if signature is None or (started := new_conversation(request)) is None:
            return None
        without_messages = Chat(messages=(), tools=chat.tools, kwargs=chat.kwargs)
        if not template.is_separable:
            turn = self._windows[id(template)].first_turn(chat, text)
            if turn is None:
                return None
            empty = CachedConversation(
                (0, 0), (), b"", started.leading_fields, without_messages, signature, 0, "", "", PrefixIds()
            )
            return self._store_rest(empty, started.mark, request, turn.window, turn.prefix, turn.suffix)
        if not _is_separable(chat.messages, template):
            return None
        head, tail = template.around(**_arguments(chat))
        empty = CachedConversation(
            (0, 0),
            (),
            b"",
            started.leading_fields,
            without_messages,
            signature,
            len(head),
            tail,
            "",
            PrefixIds(),
        )
        return self._encode_and_store(empty, started.mark, request, text, None)

    def _continue_conversation(
        self, request: InferenceRequest, cached: CachedConversation, most: int | None = None
    ) -> Sequence[int] | None:
        """The token ids of a request whose body begins with that of `cached`.

        None if the request cannot be rendered as a continuation, or has more than `most` new messages.
        """
        appended = appended_messages(request, cached)
        if appended is not None:
            chat, mark = appended
        elif isinstance(cached.render_state, HarmonyTurn):
            return None
        else:
            continued = continuation(request, cached)
            if continued is None:
                return None
            chat, mark = chat_completion(continued.fields, self._flags), continued.mark
            if signature_of(chat) != cached.signature:
                return None
        if most is not None and len(chat.messages) > most:
            return None
        if isinstance(cached.render_state, HarmonyTurn):
            assert self._harmony is not None
            grown = self._harmony.next_turn(cached.render_state, cached.ids, chat.messages)
            if grown is None:
                return None
            return self._store_rest(cached, mark, request, grown.turn, grown.prefix, grown.suffix)
        template = self._template(chat)
        if isinstance(cached.render_state, Window):
            return self._continue_window(request, cached, cached.render_state, chat, mark, template, most)
        if not _is_separable(chat.messages, template):
            return None
        if template.content_format == "string" and (plain := template.between(chat.messages)) is not None:
            text = cached.carry + plain + cached.tail
            return self._encode_and_store(cached, mark, request, text, cached)
        # Render the new messages alone: their text is between the same head and tail as in the whole chat.
        text = (
            render_chat(chat, template, self._flags)
            if chat.messages
            else "".join(template.around(**_arguments(chat)))
        )
        text = cached.carry + text[cached.head :]
        return self._encode_and_store(cached, mark, request, text, cached)

    def _continue_window(
        self,
        request: InferenceRequest,
        cached: CachedConversation,
        window: Window,
        chat: Chat,
        mark: Mark,
        template: ChatTemplate,
        most: int | None,
    ) -> Sequence[int] | None:
        """As `_continue_conversation`, for a template that does not render message by message."""
        if most is not None and len(window.head) + len(window.recent) > most:
            return None
        windows = self._windows[id(template)]
        turn = windows.next_turn(chat, window, cached.ids)
        if turn is None:
            return None
        if turn.kind is not None and windows.proofs.needs(turn.kind):
            if most is not None:
                return None
            (whole,) = self._encode_alone(request)
            is_equal = PromptIds(turn.prefix, turn.suffix) == whole
            windows.proofs.count(turn.kind, is_equal=is_equal)
            self.turns["compared"] += 1
            if not is_equal:
                self.turns["differed"] += 1
                log.warning(
                    "a next turn had other token ids than the whole chat: chats of more than %d messages are "
                    "rendered as a whole for each turn from now on",
                    MOST_MESSAGES,
                )
                return None
        return self._store_rest(cached, mark, request, turn.window, turn.prefix, turn.suffix)

    def _encode_and_store(
        self,
        cached: CachedConversation,
        mark: Mark,
        request: InferenceRequest,
        text: str,
        replaces: CachedConversation | None,
    ) -> PromptIds:
        """The ids of `cached.ids` followed by those of `text`, which ends with the template's tail.

        Caches the chat with the ids that later messages cannot change.
        """
        segments = self._files.cutter.segments(text)
        end = len(text) - len(cached.tail)
        # The text after `end` changes with the next turn. A cut depends on at most `reach` characters after
        # it, so a cut at or before `limit` is final, and so are all segments before the last such cut.
        limit, final, start = end - self._files.cutter.reach, 0, 0
        offset = 0
        for index, segment in enumerate(segments):
            if offset > limit:
                break
            final, start = index, offset
            offset += len(segment)
        parts = self._parts(segments)
        stable = cached.ids.extended(joined(parts[:final])) if final else cached.ids
        if replaces is None or mark != replaces.mark:
            body, seen = request.body, request.seen
            stored = CachedConversation(
                mark,
                cached.body_parts(mark[0], body),
                body[mark[0] :],
                cached.leading_fields,
                cached.chat,
                cached.signature,
                cached.head,
                cached.tail,
                text[start:end],
                stable,
                None if seen is None else ref(seen.longer_prefix or seen.prefix),
            )
            self._conversations.store(stored, replaces)
        return PromptIds(stable, joined(parts[final:]), cached.ids)

    def _parts(self, segments: Sequence[str]) -> list[TokenIds]:
        try:
            return self._cache.encode_each(segments, self._files.encoder.encode)
        except (UnicodeEncodeError, TypeError):  # a lone surrogate, from an escape in a tool call's arguments
            raise Inexact(TokensReason.UNREADABLE) from None

    def _encoded(self, text: str, how: Chat | Plain) -> TokenIds:
        ids = joined(self._parts(self._files.cutter.segments(text)))
        if not how.add_special_tokens:
            return truncated(ids, how.truncate_to, how.truncation_side)
        if self._files.added_around is None:
            raise Inexact(TokensReason.UNSUPPORTED)
        prefix, suffix = self._files.added_around
        if how.truncate_to is None or how.truncation_side is not None:
            return truncated(prefix + ids + suffix, how.truncate_to, how.truncation_side)
        # Without a `truncation_side` the tokenizer truncates, and it keeps the special tokens that it adds.
        room = how.truncate_to - len(prefix) - len(suffix)
        if room <= 0:
            raise Inexact(TokensReason.TRUNCATION)
        return prefix + truncated(ids, room, None) + suffix


def _is_separable(messages: Sequence[Any], template: ChatTemplate) -> bool:
    """Whether the template renders these messages one by one."""
    # If the template does not know the role "developer", such a message changes the order of the others.
    return template.is_separable and (
        template.knows_developer or all(message.get("role") != "developer" for message in messages)
    )


def _arguments(chat: Chat) -> dict[str, Any]:
    """The template's arguments except the messages."""
    kwargs = {"add_generation_prompt": False, **chat.kwargs, "tools": chat.tools}
    kwargs.pop("continue_final_message", None)
    return kwargs
