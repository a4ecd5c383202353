"""Chooses the encoder of a model: Hugging Face's `tokenizers`, or `fastokens` if it gives the same ids.

fastokens reads the same tokenizer.json and is about ten times as fast (bench/micro_tokens.py). It is another
implementation, so it is used only after it gave the same ids for a set of difficult texts.
"""

from __future__ import annotations

import importlib
import json
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from tokenizers import Tokenizer

from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.tokens.options import Inexact
from kvroute.tokens.reading import TokenIds
from kvroute.tokens.segments import Cutter, Encode

# Each kind of text for which tokenizers have given different ids.
SAMPLES = (
    "",
    " ",
    "Hello, world! It's 2024; they'll say \"no\", I'D say it'S fine.",
    "  two leading, trailing   \n\n\n  newlines\t\ttabs\r\n",
    "def f(x: int) -> dict[str, list[int]]:\n\treturn {'a': [x**2, 0x1F, 1_000_000.5e-3]}\n",
    "1 12 123 1234 12345 123456789012345678901234567890 3.14159 1,000,000",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2.5, null, true]}}',
    "naïve café Ångström e\u0301 ﬁ ½ Ⅷ İ ß ǅ",  # composed, decomposed, ligatures, odd cases
    "你好，世界。日本語のテキスト 한국어 텍스트 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🇨🇭 👍🏽 \u200b\u200d\ufeff\u00a0\u2003|\x00\x07\x7f",
    "<|im_start|>user\n<s>[INST] <<SYS>> </s><tool_call></think><|end|><|turn|> <｜begin▁of▁sentence｜>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ----------------==========~~~~~~~~",
    "▁▁meta space ▁ Ġ Ċ",
)


@dataclass(frozen=True, slots=True)
class Encoder:
    """A function from text to token ids, and how it was chosen."""

    encode: Encode
    """The ids of a text, without special tokens that the tokenizer would add around it.

    Thread-safe; releases the interpreter lock while it runs."""
    name: str
    """The library."""
    why: str = ""
    """The reason for the choice."""
    quick_bytes: int = 2048
    """JSON of this size is parsed, rendered and encoded in well under a millisecond: it needs no thread."""


def choose_encoder(tokenizer: Tokenizer, *, allow_fastokens: bool = True) -> Encoder:
    """fastokens if it is installed and gives the ids of `tokenizer` for all samples, else `tokenizer`."""
    reference = _from_tokenizers(tokenizer)
    if not allow_fastokens:
        return Encoder(reference, "tokenizers", "fastokens is switched off")
    try:
        native = importlib.import_module("fastokens")
    except ImportError:
        return Encoder(reference, "tokenizers", "fastokens is not installed")
    try:
        other = native.Tokenizer.from_json_str(tokenizer.to_str())
        agrees = all(_flat(other, text) == reference(text) for text in _samples(tokenizer))
    except Exception as error:  # noqa: BLE001 - fastokens has no common error class; any error means no
        return Encoder(
            reference, "tokenizers", f"fastokens cannot read this tokenizer ({type(error).__name__})"
        )
    if not agrees:
        return Encoder(reference, "tokenizers", "fastokens gives other token ids")
    why = "agrees with tokenizers on all samples"
    return Encoder(lambda text: _flat(other, text), "fastokens", why, quick_bytes=8192)


def cuts_are_exact(tokenizer: Tokenizer, cutter: Cutter, encode: Encode) -> bool:
    """Whether all samples encode to the same ids in segments as in one piece."""
    for text in _samples(tokenizer):
        whole, pieces = encode(text), array("I")
        for segment in cutter.segments(text):
            pieces += encode(segment)
        if whole != pieces:
            return False
    return True


def _samples(tokenizer: Tokenizer) -> Iterable[str]:
    """The sample texts, alone and between the tokenizer's added tokens."""
    yield from SAMPLES
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:400]
    for gap in ("", " ", "\n", "  a ", "b"):
        pieces = [token + gap + SAMPLES[place % len(SAMPLES)] for place, token in enumerate(added)]
        yield gap.join(pieces)


def _from_tokenizers(tokenizer: Tokenizer) -> Encode:
    def encode(text: str) -> TokenIds:
        # `encode` holds the interpreter lock; the batch calls release it.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return array("I", encoding.ids)

    return encode


def _flat(tokenizer: object, text: str) -> TokenIds:
    ids = array("I")
    flat, _ = tokenizer.encode_batch_flat([text], add_special_tokens=False)  # type: ignore[attr-defined]
    ids.frombytes(flat)
    return ids


def added_around(tokenizer: Tokenizer) -> tuple[TokenIds, TokenIds] | None:
    """The ids that the tokenizer adds before and after a text; None if it changes the text's ids."""
    around: tuple[TokenIds, TokenIds] | None = None
    for text in ("a", "The quick brown fox, 42."):
        bare = tokenizer.encode(text, add_special_tokens=False).ids
        full = tokenizer.encode(text, add_special_tokens=True).ids
        for before in range(len(full) - len(bare) + 1):
            if full[before : before + len(bare)] == bare:
                break
        else:
            return None
        seen = array("I", full[:before]), array("I", full[before + len(bare) :])
        if around is not None and around != seen:
            return None
        around = seen
    return around


def tokenizer_json(folder_text: str) -> Tokenizer:
    """A tokenizer from the text of a tokenizer.json, with its truncation and padding switched off."""
    settings = json.loads(folder_text)
    settings["truncation"] = settings["padding"] = None
    return Tokenizer.from_str(json.dumps(settings))


Tokenize = Callable[[InferenceRequest], Awaitable[tuple[Sequence[int], ...]]]

_TEXT = "\n".join(SAMPLES).replace("\x00", "")
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CLOCK = {"type": "function", "function": {"name": "clock"}}
_SYSTEM = {"role": "system", "content": "  You are helpful.\n"}
_USER = {"role": "user", "content": "What is the weather in Zürich?  "}
_CALL = {
    "id": "call_12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": [1, 2.5]}'},
}
_TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_TOOL_RESULT = {"role": "tool", "tool_call_id": "call_12345", "content": '{"celsius": 21}'}
_PARTS = {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two\n"}]}
_ANSWER = {"role": "assistant", "content": "Sunny, and\n\nwarm. "}

_SAMPLES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("a question", "chat/completions", {"messages": [_USER]}),
    ("a conversation", "chat/completions", {"messages": [_SYSTEM, _USER, _ANSWER, _USER]}),
    ("odd text", "chat/completions", {"messages": [{"role": "user", "content": _TEXT}]}),
    ("content in parts", "chat/completions", {"messages": [_SYSTEM, _PARTS, _ANSWER, _PARTS]}),
    ("tools", "chat/completions", {"messages": [_USER], "tools": [_WEATHER, _CLOCK]}),
    (
        "a tool's answer",
        "chat/completions",
        {"messages": [_SYSTEM, _USER, _TOOL_CALL, _TOOL_RESULT, _ANSWER, _USER], "tools": [_WEATHER]},
    ),
    ("a developer message", "chat/completions", {"messages": [{**_SYSTEM, "role": "developer"}, _USER]}),
    (
        "a message to continue",
        "chat/completions",
        {"messages": [_USER, _ANSWER], "add_generation_prompt": False, "continue_final_message": True},
    ),
    ("no generation prompt", "chat/completions", {"messages": [_USER], "add_generation_prompt": False}),
    ("added special tokens", "chat/completions", {"messages": [_USER], "add_special_tokens": True}),
    ("reasoning", "chat/completions", {"messages": [_USER, {**_ANSWER, "reasoning": "Hm."}, _USER]}),
    ("an effort", "chat/completions", {"messages": [_USER], "reasoning_effort": "low"}),
    ("a text", "completions", {"prompt": _TEXT}),
    ("a bare text", "completions", {"prompt": "  " + _TEXT, "add_special_tokens": False}),
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of a comparison of token ids with a reference, by sample."""

    agreed: int
    differing: tuple[str, ...]
    """Names of samples with different ids, or with ids by the reference only."""
    unanswered: int
    """Number of samples that the reference refused; these do not count."""


def sample_requests(model: str) -> list[tuple[str, InferenceRequest]]:
    """Name and request of each sample."""
    return [
        (shows, parse_request(ENDPOINTS[f"/v1/{path}"], msgspec.json.encode({"model": model, **body})))
        for shows, path, body in _SAMPLES
    ]


async def compare(model: str, ours: Tokenize, reference: Tokenize) -> Agreement:
    """Tokenize every sample with both functions, one after another, and compare the ids."""
    agreed = unanswered = 0
    differing = []
    for shows, request in sample_requests(model):
        expected = await _ids(reference, request)
        if expected is None:
            unanswered += 1
        elif await _ids(ours, request) == expected:
            agreed += 1
        else:
            differing.append(shows)
    return Agreement(agreed, tuple(differing), unanswered)


async def _ids(tokenize: Tokenize, request: InferenceRequest) -> tuple[Sequence[int], ...] | None:
    try:
        return await tokenize(request)
    except Inexact:
        return None
