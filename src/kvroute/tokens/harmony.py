"""Tokenizes chats of gpt-oss, which vLLM renders with Harmony instead of a chat template.

Sources, in vLLM 0.32: entrypoints/openai/parser/harmony_utils.py (messages of chat completions, order,
dropped reasoning, headers of tool calls), entrypoints/openai/responses/harmony.py (items of responses).
The rendering itself is the library's that vLLM calls: the module `openai_harmony`. The distribution
`oss-harmony` has its vocabulary inside; `openai-harmony` reads it from a folder, and would fetch it
without one, so it gets no chance to.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvroute.blocks.known_prompts import PrefixIds
from kvroute.openai.request import InferenceRequest
from kvroute.tokens.chat import EngineFlags, objects, validated
from kvroute.tokens.encoders import SegmentCache, joined
from kvroute.tokens.options import Inexact, TokensReason, UnusableModel
from kvroute.tokens.reading import PickTemplate, TokenIds, messages_request, no_template, truncated

MODEL_TYPE: Final = "gpt_oss"
"""`model_type` in the config.json of models whose chats vLLM renders with Harmony."""
_PATHS: Final = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
VOCABULARY_VARIABLE: Final = "TIKTOKEN_ENCODINGS_BASE"
"""The environment variable by which `openai-harmony` finds its vocabulary."""
VOCABULARY_FILE: Final = "o200k_base.tiktoken"
_INSIDE: Final = "oss-harmony"
"""The distribution that has the vocabulary inside."""

_EFFORTS: Final = {"low": "Low", "medium": "Medium", "high": "High"}
_INSTRUCTING: Final = ("system", "developer")
_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal", "thinking")
_FUNCTIONS: Final = "functions"

HarmonyMessage = dict[str, Any]
"""A message in Harmony's JSON form."""


class Harmony:
    """Renders Harmony messages as token ids. Thread-safe.

    `encoding` is the library's, `today` this machine's date. Mutable: `follow` sets the engine's date.
    """

    def __init__(self, module: Any, encoding: Any, today: Callable[[], str]) -> None:
        self._message = module.Message.from_dict
        self._encoding = encoding
        self._options = [module.RenderOptions(conversation_has_function_tools=has) for has in (False, True)]
        self._today = today
        self._pinned = ""
        special = {token: self._special(f"<|{token}|>") for token in ("start", "channel", "constrain")}
        self._start, self._channel, self._constrain = special.values()
        self._body = self._special("<|message|>")
        self.next_turn: TokenIds = array("I", [self._start, *encoding.encode("assistant")])
        """The ids after the last message, where the answer begins."""

    def encode(self, key: str) -> TokenIds:
        """The ids of one message, given by `key_of`."""
        try:
            message = self._message(json.loads(key[1:]))
            ids = self._encoding.render(message, self._options[key[0] == "1"])
        except Exception:  # noqa: BLE001 - pydantic's and the library's errors: the engine refuses this, too
            raise Inexact(TokensReason.UNREADABLE) from None
        return array("I", self._with_old_header(ids))

    def today(self) -> str:
        """The date that the engine puts into the system message: this machine's, or what `follow` read."""
        return self._pinned or self._today()

    def follow(self, ids: Sequence[int]) -> None:
        """Take over the date in a prompt of the engine, if it has another one than this machine."""
        engine_date = self.date_in(ids)
        self._pinned = engine_date if engine_date is not None and engine_date != self._today() else ""

    def encode_text(self, text: str) -> TokenIds:
        """The ids of a text with special tokens, as the model's own tokenizer encodes it."""
        return array("I", self._encoding.encode(text, allowed_special="all"))

    def date_in(self, ids: Sequence[int]) -> str | None:
        """The date in the system message that a prompt of the engine begins with; None if there is none."""
        text = str(self._encoding.decode(list(ids[:200])))
        head, separator, tail = text.partition("\nCurrent date: ")
        return tail.partition("\n")[0] if separator and head.startswith("<|start|>system") else None

    def _special(self, token: str) -> int:
        (token_id,) = self._encoding.encode(token, allowed_special="all")
        return int(token_id)

    def _with_old_header(self, ids: list[int]) -> list[int]:
        """The ids with the header of a tool call as the model was trained with it, as vLLM writes it."""
        # Library 0.0.10: assistant<|channel|>commentary to=NAME <|constrain|>json
        # The model and older libraries: assistant to=NAME<|channel|>commentary json
        try:
            end = ids.index(self._body)
            channel = ids.index(self._channel, 0, end)
            constrain = ids.index(self._constrain, channel, end)
        except ValueError:
            return ids
        decode, encode = self._encoding.decode, self._encoding.encode
        name, separator, recipient = decode(ids[channel + 1 : constrain]).partition(" to=")
        kind = decode(ids[constrain + 1 : end])
        if decode(ids[1:channel]) != "assistant" or not separator or not recipient.endswith(" "):
            return ids
        if not name or not recipient[:-1] or not kind:
            return ids
        author = encode(f"assistant to={recipient[:-1]}")
        return [self._start, *author, self._channel, *encode(f"{name} {kind}"), *ids[end:]]


def is_chat(request: InferenceRequest) -> bool:
    """Whether the engine renders this request as a chat."""
    path = request.endpoint.path
    if path == "/invocations":
        return "messages" in (request.fields or {})
    return path in _PATHS


def looks_like_harmony(name: str) -> bool:
    """Whether a model of this name or path is one of gpt-oss. For workers whose files are not here."""
    return "gpt-oss" in name.lower().replace("_", "-")


def load_harmony(vocabulary: Path | None, today: Callable[[], str] | None = None) -> Harmony:
    """Load the library and its vocabulary, in about a second. Raises UnusableModel; never fetches.

    `vocabulary` is the folder with `o200k_base.tiktoken`, for `openai-harmony`.
    """
    try:
        module = importlib.import_module("openai_harmony")
    except ImportError as error:
        raise UnusableModel("its chats are rendered with Harmony: install kvroute[harmony]") from error
    if vocabulary is None and os.environ.get(VOCABULARY_VARIABLE):
        vocabulary = Path(os.environ[VOCABULARY_VARIABLE])
    if vocabulary is not None:
        if not (vocabulary / VOCABULARY_FILE).is_file():
            raise UnusableModel(f"tokens.harmony_vocabulary has no {VOCABULARY_FILE}")
        os.environ[VOCABULARY_VARIABLE] = str(vocabulary)
    elif not _is_installed(_INSIDE):
        raise UnusableModel(
            f"openai-harmony needs a folder with {VOCABULARY_FILE} (tokens.harmony_vocabulary), or install "
            f"{_INSIDE} instead, which has it inside"
        )
    try:
        encoding = module.load_harmony_encoding(module.HarmonyEncodingName.HARMONY_GPT_OSS)
        return Harmony(module, encoding, today or _local_date)
    except Exception as error:  # the library has no narrower class
        raise UnusableModel(f"Harmony's vocabulary cannot be read: {type(error).__name__}") from error


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _local_date() -> str:
    return datetime.now().strftime("%Y-%m-%d")


@dataclass(frozen=True, slots=True)
class HarmonyChat:
    """A conversation of Harmony messages, before reasoning is dropped."""

    messages: list[HarmonyMessage]
    has_functions: bool
    names: dict[str, str] = field(default_factory=dict)
    """Tool call id -> function name, for the results in later messages."""
    truncate_to: Any = None

    def keys(self) -> list[str]:
        """Each message as the text that `Harmony.encode` takes, without the reasoning of earlier answers."""
        mark = "1" if self.has_functions else "0"
        return [key_of(message, mark) for message in without_old_reasoning(self.messages)]


def key_of(message: HarmonyMessage, mark: str) -> str:
    """The text form of a message. `mark`: "1" in a conversation with functions, else "0"."""
    try:
        return mark + msgspec.json.encode(message).decode()
    except (UnicodeEncodeError, ValueError, TypeError, OverflowError):
        raise Inexact(TokensReason.UNREADABLE) from None


def without_old_reasoning(messages: Sequence[HarmonyMessage]) -> list[HarmonyMessage]:
    """The messages without the reasoning before the last final answer."""
    final = last_final(messages)
    return [
        message
        for index, message in enumerate(messages)
        if index >= final or message.get("channel") != "analysis"
    ]


def last_final(messages: Sequence[HarmonyMessage]) -> int:
    """The place of the last final answer; -1 without one."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("channel") == "final" and messages[index]["role"] == "assistant":
            return index
    return -1


class HarmonyTurn(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The part of a chat that its next turn may change, and what that turn needs."""

    today: str
    has_functions: bool
    names: dict[str, str]
    """Tool call id -> function name, for all calls and results."""
    open: tuple[HarmonyMessage, ...]
    """The last messages, from the first reasoning on that a later answer would remove."""

    __repr__ = object.__repr__  # keeps prompts out of logs

    @property
    def size(self) -> int:
        texts = sum(
            len(content_part.get("text") or "")
            for message in self.open
            for content_part in message["content"]
        )
        return 500 * (1 + len(self.open)) + 2 * texts + 150 * len(self.names)


class HarmonyTurns:
    """Tokenizes first and next turns of chats, message by message. Thread-safe: `cache` is."""

    def __init__(self, harmony: Harmony, cache: SegmentCache) -> None:
        self._harmony = harmony
        self._cache = cache

    def first_turn(self, chat: HarmonyChat, turns: Sequence[Mapping[str, Any]], today: str) -> Grown:
        names = dict(chat.names)
        _add_unnamed(turns, names)
        return self._grown(chat.messages, HarmonyTurn(today, chat.has_functions, names, ()), PrefixIds())

    def next_turn(
        self, cached: HarmonyTurn, prefix: PrefixIds, turns: Sequence[Mapping[str, Any]]
    ) -> Grown | None:
        """The chat with these messages added; None if they change what earlier ones mean. Raises Inexact."""
        if self._harmony.today() != cached.today:
            return None
        added: dict[str, str] = {}
        add_names(turns, added)
        if any(cached.names.get(call, name) != name for call, name in added.items()):
            return None
        names = cached.names | added
        new = [message for turn in turns for message in converted(turn, names)]
        _add_unnamed(turns, names)
        turn = HarmonyTurn(cached.today, cached.has_functions, names, ())
        return self._grown([*cached.open, *new], turn, prefix)

    def _grown(self, messages: Sequence[HarmonyMessage], turn: HarmonyTurn, prefix: PrefixIds) -> Grown:
        kept = without_old_reasoning(messages)
        mark = "1" if turn.has_functions else "0"
        parts = self._cache.encode_each([key_of(message, mark) for message in kept], self._harmony.encode)
        reasoning_indexes = (
            index for index, message in enumerate(kept) if message.get("channel") == "analysis"
        )
        final = next(reasoning_indexes, len(kept))
        stable = prefix.extended(joined(parts[:final])) if final else prefix
        turn = HarmonyTurn(turn.today, turn.has_functions, turn.names, tuple(kept[final:]))
        return Grown(turn, stable, joined(parts[final:]) + self._harmony.next_turn)


class Grown(NamedTuple):
    """A chat's turn."""

    turn: HarmonyTurn
    prefix: PrefixIds
    """The ids that no later turn changes."""
    suffix: TokenIds


def _add_unnamed(turns: Iterable[Mapping[str, Any]], names: dict[str, str]) -> None:
    """Remember the results whose call is unknown: a later call of this id would change them."""
    for turn in turns:
        if turn.get("role") == "tool":
            names.setdefault(str(turn.get("tool_call_id", "")), "")


def tokens_of(chat: HarmonyChat, harmony: Harmony, cache: SegmentCache) -> TokenIds:
    """The token ids of a conversation, ready for the answer. Raises Inexact."""
    ids = cache.encode([*chat.keys()], harmony.encode) + harmony.next_turn
    return truncated(ids, chat.truncate_to, None)


def harmony_chat(
    path: str, body: Mapping[str, Any], flags: EngineFlags, today: str, pick: PickTemplate = no_template
) -> HarmonyChat:
    """The conversation that vLLM builds from a body of `path`. Raises Inexact if kvroute cannot build it.

    `pick`: the chat templates that the model has beside Harmony.
    """
    if path == "/v1/responses":
        return _responses(body, today)
    if path == "/v1/messages":
        return _messages(body, flags, today, pick)
    if isinstance(transfer := body.get("kv_transfer_params"), dict) and transfer.get("prompt_token_ids"):
        raise Inexact(TokensReason.UNSUPPORTED)
    turns = [validated(message) for message in objects(body.get("messages"))]
    dropped = body.get("tool_choice") == "none" and flags.tools_dropped_for_none
    tools = None if dropped else _function_tools(body)
    return _chat(turns, tools, body.get("reasoning_effort"), today)


def _chat(turns: list[dict[str, Any]], tools: list[Any] | None, effort: Any, today: str) -> HarmonyChat:
    instructions, turns = _instructions(turns)
    messages, has_functions = _preamble(instructions, tools, effort, today)
    names: dict[str, str] = {}
    add_names(turns, names)
    for turn in turns:
        messages += converted(turn, names)
    return HarmonyChat(messages, has_functions, names)


def _messages(body: Mapping[str, Any], flags: EngineFlags, today: str, pick: PickTemplate) -> HarmonyChat:
    # vLLM takes the least effort for disabled thinking, because Harmony has no effort "none". Where later
    # system messages go depends on the chat template, though it renders nothing.
    is_disabled = isinstance(thinking := body.get("thinking"), dict) and thinking.get("type") == "disabled"
    if is_disabled:
        body = {name: value for name, value in body.items() if name != "thinking"}
    tools_dropped = EngineFlags(tools_dropped_for_none=flags.tools_dropped_for_none)
    chat = messages_request(body, tools_dropped, pick)
    tools = None if chat.tools is None else [tool["function"] for tool in chat.tools]
    effort = "low" if is_disabled else chat.kwargs.get("reasoning_effort")
    return _chat(list(chat.messages), tools, effort, today)


def _function_tools(body: Mapping[str, Any]) -> list[Any] | None:
    tools = body.get("tools")
    if tools is None:
        return None
    if any(tool.get("type", "function") != "function" for tool in objects(tools)):
        raise Inexact(TokensReason.UNSUPPORTED)
    return [tool.get("function") for tool in tools]


def _instructions(turns: list[dict[str, Any]]) -> tuple[str | None, list[dict[str, Any]]]:
    """The text of a first system or developer message, and the messages after it."""
    if not turns or turns[0].get("role") not in _INSTRUCTING:
        return None, turns
    return flat_text(turns[0].get("content")), turns[1:]


def _preamble(
    instructions: str | None, tools: list[Any] | None, effort: Any, today: str
) -> tuple[list[HarmonyMessage], bool]:
    """The messages before the client's, and whether they declare functions."""
    system: dict[str, Any] = {"type": "system_content", "conversation_start_date": today}
    if effort is not None:
        if effort not in _EFFORTS:
            raise Inexact(TokensReason.TEMPLATE_REFUSED)
        system["reasoning_effort"] = _EFFORTS[effort]
    messages: list[HarmonyMessage] = [{"role": "system", "content": [system]}]
    if instructions or tools:
        developer = _developer(instructions)
        if tools:
            described = [_described(tool) for tool in tools]
            functions = {"name": _FUNCTIONS, "description": None, "tools": described}
            developer["content"][0]["tools"] = {_FUNCTIONS: functions}
        messages.append(developer)
    return messages, bool(tools)


def _developer(instructions: str | None) -> HarmonyMessage:
    content: dict[str, Any] = {"type": "developer_content"}
    if instructions is not None:
        content["instructions"] = instructions
    return {"role": "developer", "content": [content]}


def _described(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise Inexact(TokensReason.UNREADABLE)
    return {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters"),
    }


def add_names(turns: Iterable[Mapping[str, Any]], names: dict[str, str]) -> None:
    """Add the function names of all tool calls in these messages, by call id."""
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            names[str(call.get("id"))] = str((call.get("function") or {}).get("name"))


def converted(turn: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[HarmonyMessage]:
    """The Harmony messages of one chat message."""
    role, content = turn.get("role"), turn.get("content")
    if role == "assistant":
        if calls := turn.get("tool_calls"):
            if text := flat_text(content):
                yield _said("commentary", [text])
            if turn.get("reasoning"):
                yield _said("analysis", [turn["reasoning"]])
            for call in objects(calls):
                function = call.get("function") or {}
                yield _called(function.get("name", ""), function.get("arguments") or "")
            return
        if turn.get("reasoning"):
            yield _said("analysis", [turn["reasoning"]])
        texts = _texts(content)
        if texts and texts[0]:
            yield _said("final", texts)
    elif role == "tool":
        yield _result(names.get(str(turn.get("tool_call_id", "")), ""), flat_text(content) or "")
    elif role in _INSTRUCTING:
        if (text := flat_text(content)) is not None:
            yield _developer(text)
    elif role == "user":
        yield {"role": "user", "content": [{"type": "text", "text": text} for text in _texts(content)]}
    else:
        raise Inexact(TokensReason.UNREADABLE)


def _said(channel: str, texts: Sequence[Any]) -> HarmonyMessage:
    content = [{"type": "text", "text": text} for text in texts]
    return {"role": "assistant", "content": content, "channel": channel}


def _called(name: Any, arguments: Any) -> HarmonyMessage:
    if not isinstance(arguments, str):
        raise Inexact(TokensReason.UNREADABLE)
    recipient = f"{_FUNCTIONS}.{name}"
    return {**_said("commentary", [arguments]), "recipient": recipient, "content_type": "json"}


def _result(name: str, text: str) -> HarmonyMessage:
    return {
        "role": "tool",
        "name": f"{_FUNCTIONS}.{name}",
        "content": [{"type": "text", "text": text}],
        "channel": "commentary",
        "recipient": "assistant",
    }


def flat_text(content: Any) -> str | None:
    """The texts of a content in one; None if there is none."""
    if content is None or isinstance(content, str):
        return content
    texts = [text for text in _parts(content) if text is not None]
    return "".join(texts) if texts else None


def _texts(content: Any) -> list[str]:
    """The texts of a content, one for each part."""
    if content is None or isinstance(content, str):
        return [content or ""]
    return [text or "" for text in _parts(content)]


def _parts(content: Any) -> list[str | None]:
    texts: list[str | None] = []
    for content_part in objects(content):
        if content_part.get("type") not in _TEXT_PARTS:
            raise Inexact(TokensReason.MEDIA)
        text = content_part.get("text")
        if text is not None and not isinstance(text, str):
            raise Inexact(TokensReason.UNREADABLE)
        texts.append(text)
    return texts


def _responses(body: Mapping[str, Any], today: str) -> HarmonyChat:
    if body.get("previous_response_id") is not None:
        raise Inexact(TokensReason.STORED_RESPONSE)
    if body.get("truncation") not in (None, "disabled"):
        raise Inexact(TokensReason.TRUNCATION)
    if body.get("previous_input_messages") is not None:
        raise Inexact(TokensReason.UNSUPPORTED)
    instructions, given = body.get("instructions"), body.get("input")
    items = [] if isinstance(given, str) else objects(given)
    if instructions is None:
        instructions, items = _instructions(items)
    tools = body.get("tools") or None
    if tools is not None and any(tool.get("type") != "function" for tool in objects(tools)):
        raise Inexact(TokensReason.UNSUPPORTED)
    effort = reasoning.get("effort") if isinstance(reasoning := body.get("reasoning"), dict) else None
    messages, has_functions = _preamble(instructions, tools, effort, today)
    if isinstance(given, str):
        messages.append({"role": "user", "content": [{"type": "text", "text": given}]})
    names: dict[str, str] = {}
    for item in items:
        messages += _item(item, names)
    return HarmonyChat(messages, has_functions, names)


def _item(item: Mapping[str, Any], names: dict[str, str]) -> Iterator[HarmonyMessage]:
    """The Harmony message of one item of a response's input, if it has one."""
    kind = item.get("type", "message")
    if kind == "message":
        role, content = item.get("role"), item.get("content")
        if role in _INSTRUCTING:
            if text := flat_text(content):
                yield _developer(text)
        elif role == "assistant":
            yield _said("final", _texts(content))
        elif role == "user":
            yield {"role": role, "content": [{"type": "text", "text": text} for text in _texts(content)]}
        else:
            raise Inexact(TokensReason.UNREADABLE)
    elif kind == "function_call":
        if item.get("namespace"):
            raise Inexact(TokensReason.UNSUPPORTED)
        names[str(item.get("call_id"))] = str(item.get("name"))
        yield _called(item.get("name"), item.get("arguments"))
    elif kind == "function_call_output":
        name, output = names.get(str(item.get("call_id"))), item.get("output")
        if name is None or not isinstance(output, str):
            raise Inexact(TokensReason.UNSUPPORTED)
        yield _result(name, output)
    elif kind == "reasoning":
        if content := item.get("content"):
            yield _said(
                "analysis",
                ["\n".join(str(content_part.get("text", "")) for content_part in objects(content))],
            )
    else:
        raise Inexact(TokensReason.UNSUPPORTED)
