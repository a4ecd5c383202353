"""The texts of the simulated worker: the prompts of requests, and answers that are computed from them.

A request is checked as in vLLM, rendered with a chat template and tokenized on its way to the engine. The
template is ChatML: tools, then the messages in order, each between special tokens. This module does not
use `kvroute.openai`, because tests compare the gateway's reading of a prompt with the simulated worker's:
shared code would have the same mistakes. There is no model: equal prompts get equal answers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from kvroute.sim.http import ApiError

VOCABULARY = 1 << 25
"""All ids are lower: 0-255 are one byte, 256-511 special tokens, from 1 << 16 two bytes, from 1 << 24
three."""

SPECIAL = {256: "<|im_start|>", 257: "<|im_end|>", 258: "<|image|>", 259: "<|tools|>"}
IM_START, IM_END, IMAGE, TOOLS = SPECIAL

_PAIR, _TRIPLE = 1 << 16, 1 << 24


def encode(text: str) -> array[int]:
    """Token ids of `text` as unsigned 32-bit ints; lone surrogates become question marks.

    About 1 us per thousand bytes, because slices write the three-byte tokens.
    """
    data = text.encode("utf-8", "replace")
    whole = len(data) // 3
    body = data[: whole * 3]
    packed = bytearray(whole * 4)
    packed[0::4], packed[1::4], packed[2::4] = body[2::3], body[1::3], body[0::3]
    packed[3::4] = b"\x01" * whole
    ids = array("I")
    ids.frombytes(bytes(packed))
    if sys.byteorder == "big":
        ids.byteswap()
    tail = data[whole * 3 :]
    if len(tail) == 1:
        ids.append(tail[0])
    elif tail:
        ids.append(_PAIR | tail[0] << 8 | tail[1])
    return ids


def decode(ids: Iterable[int]) -> str:
    """Text of `ids`; ids that `encode` never returns become U+FFFD."""
    parts = bytearray()
    for token in ids:
        parts += token_bytes(token)
    return parts.decode("utf-8", "replace")


def token_bytes(token: int) -> bytes:
    """The bytes of one token."""
    if token < 256:
        return bytes((token,))
    if token in SPECIAL:
        return SPECIAL[token].encode()
    if _TRIPLE <= token < VOCABULARY:
        return (token & 0xFFFFFF).to_bytes(3, "big")
    if _PAIR <= token < 2 * _PAIR:
        return (token & 0xFFFF).to_bytes(2, "big")
    return "�".encode()


Json = Mapping[str, Any]
_FORBIDDEN_IN_SALTS = frozenset("@/\\\0")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The fields of a generating request that the simulation uses. `limit`: tokens; None if the request has
    none."""

    limit: int | None
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None
    """Number of alternatives for each token's logprob; None: no logprobs."""
    return_token_ids: bool
    cache_salt: str | None
    session_id: str | None
    reads_cache: bool
    report_full: bool
    transfer: Json
    """`kv_transfer_params`."""


def _without_nulls(value: Any) -> Any:
    """`value` without members that are null: the chat endpoint and /tokenize get the same tools with and
    without them."""
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def chat_tokens(
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    *,
    generate: bool = True,
    open_end: bool = False,
    harmony: bool = False,
) -> array[int]:
    """Render a chat. `generate` appends the assistant's header; `open_end` omits the end of the last message.

    With `harmony` a system message of the model's own comes first and the client's become developer messages,
    as in vLLM's rendering for gpt-oss, which its /tokenize does not use (0.32).
    """
    ids: array[int] = array("I")
    if harmony:
        ids.append(IM_START)
        ids += encode("system\nReasoning: medium")
        ids.append(IM_END)
        messages = [{**m, "role": "developer"} if m["role"] == "system" else m for m in messages]
    if tools:
        ids.append(TOOLS)
        ids += encode(json.dumps(_without_nulls(tools), ensure_ascii=False, sort_keys=True))
        ids.append(IM_END)
    for message in messages:
        ids.append(IM_START)
        ids += encode(f"{message['role']}\n")
        content = message.get("content")
        _content(ids, _without_billing_lines(content) if message["role"] == "system" else content)
        for call in message.get("tool_calls") or ():
            ids += encode(json.dumps(call.get("function"), ensure_ascii=False, sort_keys=True))
        ids.append(IM_END)
    if open_end and messages:
        ids.pop()
    elif generate:
        ids.append(IM_START)
        ids += encode("assistant\n")
    return ids


BILLING_HEADER = "x-anthropic-billing-header"


def _without_billing_lines(content: Any) -> Any:
    """A system message's content without each first line that is a client's billing header."""
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(BILLING_HEADER) else content
    if content is None:
        return None
    kept: list[Any] = []
    for content_part in content:
        text = content_part.get("text") if isinstance(content_part, dict) else content_part
        if isinstance(text, str) and text.startswith(BILLING_HEADER):
            kept_text = text.partition("\n")[2]
            kept += (
                ([{**content_part, "text": kept_text}] if isinstance(content_part, dict) else [kept_text])
                if kept_text
                else []
            )
        else:
            kept.append(content_part)
    return kept


def _content(ids: array[int], content: Any) -> None:
    if content is None:
        return
    if isinstance(content, str):
        ids += encode(content)
        return
    text: list[str] = []
    for content_part in content:
        if isinstance(content_part, str):
            text.append(content_part)
        elif "text" in content_part:
            text.append(str(content_part["text"]))
        else:
            # An image or a file becomes placeholder tokens: a hash of its bytes.
            digest = hashlib.sha256(json.dumps(content_part, sort_keys=True).encode()).digest()
            if text:
                ids += encode("\n".join(text))
                text = []
            ids.append(IMAGE)
            ids.extend(digest)
    if text:
        ids += encode("\n".join(text))


MEDIA_TOKENS = 33
"""Placeholders of an image or a file."""


def with_placeholders(ids: array[int]) -> tuple[array[int], tuple[tuple[int, str], ...]]:
    """A prompt's ids as an engine shows them, and its media as pairs of offset and identifier.

    An engine has `MEDIA_TOKENS` equal ids where this simulation has a mark and the hash of the content, so
    that prompts with different images have different ids.
    """
    indexes = list(_media_indexes(ids))
    if not indexes:
        return ids, ()
    shown = ids[:]
    for index in indexes:
        shown[index : index + MEDIA_TOKENS] = array("I", [IMAGE] * MEDIA_TOKENS)
    return shown, tuple((index, bytes(ids[index + 1 : index + MEDIA_TOKENS]).hex()) for index in indexes)


def _media_indexes(ids: array[int]) -> Iterator[int]:
    """Where media begin. A prompt of token ids may have the id of the mark without one."""
    start = 0
    while True:
        try:
            at = ids.index(IMAGE, start)
        except ValueError:
            return
        content = ids[at + 1 : at + MEDIA_TOKENS]
        is_media = len(content) == MEDIA_TOKENS - 1 and max(content) < 256
        start = at + (MEDIA_TOKENS if is_media else 1)
        if is_media:
            yield at


def messages_of(body: Json) -> list[dict[str, Any]]:
    """The checked `messages` of a chat request."""
    if "messages" not in body:
        raise ApiError.validation("missing", "body.messages", "Field required")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise ApiError.validation("list_type", "body.messages", "Input should be a valid list")
    for position, message in enumerate(messages):
        where = f"body.messages.{position}"
        if not isinstance(message, dict):
            raise ApiError.validation("dict_type", where, "Input should be a valid dictionary")
        if not isinstance(message.get("role"), str):
            raise ApiError.validation("missing", f"{where}.role", "Field required")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            parts_fit = isinstance(content, list) and all(
                isinstance(content_part, dict | str) for content_part in content
            )
            if not parts_fit:
                raise ApiError.validation("string_type", f"{where}.content", "Input should be a valid string")
    if not messages:
        raise ApiError.invalid("list index out of range")
    return messages


def completion_prompts(body: Json) -> list[array[int]]:
    """All prompts of a completion request: a text, a list of texts, token ids, or a list of lists of ids."""
    prompt = body.get("prompt")
    if prompt is None:
        raise ApiError.invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str):
        return [encode(prompt)]
    if not isinstance(prompt, list):
        raise ApiError.validation("string_type", "body.prompt", "Input should be a valid string")
    if prompt and all(isinstance(item, str) for item in prompt):
        return [encode(item) for item in prompt]
    if prompt and all(type(item) is int for item in prompt):
        return [_ids(prompt)]
    if prompt and all(isinstance(item, list) for item in prompt):
        return [_ids(item) for item in prompt]
    if not prompt:
        raise ApiError.invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    raise ApiError.validation("string_type", "body.prompt", "Input should be a valid string")


def _ids(items: Sequence[Any]) -> array[int]:
    for item in items:
        if type(item) is not int:
            raise ApiError.validation("int_type", "body.prompt", "Input should be a valid integer")
        if not 0 <= item < VOCABULARY:
            raise ApiError.invalid(f"Token id {item} is out of vocabulary", "prompt")
    return array("I", items)


def sampling(
    body: Json, *, limits: Sequence[str], default_limit: int | None = None, session: str | None = None
) -> Sampling:
    """Read the fields that determine the answer. Raises `ApiError`.

    `limits` are the names of the field with the limit; the first one in the body counts. `session` is the
    X-Session-ID header; a `session_id` in the body takes precedence.
    """
    limit = default_limit
    for name in limits:
        value = _integer(body, name)
        if value is not None:
            if value < 1 and not (value == 0 and body.get("echo")):
                raise ApiError.invalid(f"{name} must be at least 1, got {value}.", name)
            limit = value
            break
    n = _integer(body, "n")
    n = 1 if n is None else n
    if n < 1:
        raise ApiError.invalid(f"n must be at least 1, got {n}.", "n")
    stop = body.get("stop") or ()
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, list | tuple) or not all(isinstance(item, str) for item in stop):
        raise ApiError.validation("string_type", "body.stop", "Input should be a valid string")
    stream = bool(_flag(body, "stream"))
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise ApiError.validation("model_type", "body.stream_options", "Input should be a valid object")
        if not stream:
            raise ApiError.invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    options = options or {}
    temperature = body.get("temperature")
    if temperature is not None:
        if not isinstance(temperature, int | float):
            raise ApiError.validation("float_type", "body.temperature", "Input should be a valid number")
        if temperature < 0:
            raise ApiError.invalid(f"temperature must be non-negative, got {temperature}.", "temperature")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ApiError.invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if salt is not None and (len(salt) > 128 or not _FORBIDDEN_IN_SALTS.isdisjoint(salt)):
        raise ApiError.invalid(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', "
            "or NUL.",
            "cache_salt",
        )
    params = body.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        raise ApiError.validation(
            "dict_type", "body.kv_transfer_params", "Input should be a valid dictionary"
        )
    extra = body.get("vllm_xargs")
    extra = extra if isinstance(extra, dict) else {}
    session = body.get("session_id") or session or extra.get("session_id")
    return Sampling(
        limit=limit,
        n=n,
        stop=tuple(stop),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        logprobs=_logprobs(body),
        return_token_ids=bool(body.get("return_token_ids")),
        cache_salt=salt,
        session_id=session if isinstance(session, str) else None,
        reads_cache=_reads_cache(body),
        report_full=extra.get("kv_cache_report_mode") == "full",
        transfer=params or {},
    )


def _reads_cache(body: Json) -> bool:
    """Whether vLLM 0.32 looks the prompt up: not if each of its tokens needs a log probability."""
    wanted = body.get("prompt_logprobs")
    if wanted is None and body.get("echo"):
        wanted = body.get("top_logprobs", 0) if "messages" in body else body.get("logprobs")
    return wanted is None


def _logprobs(body: Json) -> int | None:
    requested = body.get("logprobs")
    if requested is None or requested is False:
        return None
    if requested is True:
        return _integer(body, "top_logprobs") or 0
    if not isinstance(requested, int) or requested < 0:
        raise ApiError.invalid("`logprobs` must be a non-negative value.", "logprobs")
    return requested


def _integer(body: Json, name: str) -> int | None:
    value = body.get(name)
    if value is None or type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ApiError.validation("int_type", f"body.{name}", "Input should be a valid integer")


def _flag(body: Json, name: str) -> bool | None:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise ApiError.validation("bool_type", f"body.{name}", "Input should be a valid boolean")


_WORDS = [
    "the",
    "cache",
    "holds",
    "what",
    "was",
    "seen",
    "before",
    "and",
    "a",
    "worker",
    "answers",
    "soon",
    "when",
    "its",
    "blocks",
    "are",
    "near",
    "so",
    "every",
    "prefix",
    "that",
    "returns",
    "home",
    "saves",
    "time",
    "while",
    "new",
    "words",
    "take",
    "their",
    "turn",
    "in",
    "line",
    "behind",
    "the",
    "long",
    "ones",
]


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer. `pieces`: the text of each token. `finish_reason`: vLLM's "stop" or
    "length"."""

    token_ids: array[int]
    pieces: tuple[str, ...]
    finish_reason: str
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def fingerprint(prompt: array[int], model: str, choice: int = 0) -> int:
    """A 64-bit seed of an answer: the same on every worker for the same prompt, model and choice."""
    return xxh3_64_intdigest(prompt.tobytes(), xxh3_64_intdigest(model.encode(), choice))


def plain(seed: int, limit: int | None, natural: int, stop: Sequence[str] = ()) -> Choice:
    """Words computed from `seed`: exactly `limit` tokens, or `natural` tokens if `limit` is None.

    The answer ends before the first `stop` string, as in vLLM.
    """
    count = natural if limit is None else limit
    return _cut(_words(seed, count * 3), limit, stop)


def fixed(text: str, limit: int | None, stop: Sequence[str] = ()) -> Choice:
    """An answer with this ASCII text (a tool's arguments, a JSON document), at most `limit` tokens."""
    return _cut(text, limit, stop, whole=True)


def _cut(text: str, limit: int | None, stop: Sequence[str], *, whole: bool = False) -> Choice:
    earliest_stop = min(((text.find(s), s) for s in stop if s and s in text), default=None)
    stopped = earliest_stop is not None and (limit is None or earliest_stop[0] < limit * 3)
    if stopped:
        assert earliest_stop is not None
        text = text[: earliest_stop[0]]
    ids = encode(text)
    cut = limit is not None and not stopped and (len(ids) > limit or not whole)
    if limit is not None and len(ids) > limit:
        ids = ids[:limit]
        text = text[: limit * 3]
    pieces = tuple(text[start : start + 3] for start in range(0, len(text), 3))
    return Choice(
        ids, pieces, "length" if cut else "stop", earliest_stop[1] if stopped and earliest_stop else None
    )


def _words(seed: int, characters: int) -> str:
    parts: list[str] = []
    length, state = 0, seed
    while length < characters:
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        word = _WORDS[(state >> 33) % len(_WORDS)]
        parts.append(word)
        length += len(word) + 1
    return " ".join(parts)[:characters].ljust(characters, ".") if parts else ""


def instance_of(schema: Any, depth: int = 0, root: Any = None) -> Any:
    """A small value that a JSON schema accepts. Supports the part of JSON Schema that tests need."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > 16:
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    if "default" in schema:
        return schema["default"]
    if isinstance(reference := schema.get("$ref"), str):
        target = root
        for key in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(key, {}) if isinstance(target, Mapping) and key else target
        return instance_of(target, depth + 1, root)
    for combiner in ("anyOf", "oneOf", "allOf"):
        if schema.get(combiner):
            return instance_of(schema[combiner][0], depth + 1, root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = next((k for k in kind if k != "null"), "null")
    if kind == "object":
        properties = schema.get("properties") or {}
        required = schema.get("required") or list(properties)
        return {name: instance_of(properties.get(name, {}), depth + 1, root) for name in required}
    if kind == "array":
        item = instance_of(schema.get("items", {}), depth + 1, root)
        return [item] * int(schema.get("minItems") or 0)
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        number = low + 1 if "exclusiveMinimum" in schema else low
        return int(number) if kind == "integer" else number
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    return "x".ljust(int(schema.get("minLength") or 1), "x")


def document(schema: Any) -> str:
    """`instance_of` as ASCII JSON."""
    return json.dumps(instance_of(schema))
