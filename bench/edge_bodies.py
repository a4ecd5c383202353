"""Request bodies that cost a naive parser far more than their size: attacks, and legitimate large requests.

`BODIES` maps names to builders; a builder takes the model's name and returns a `Shot`. Nothing is sent.
`bench/edge.py` measures them, `tests/blackbox/test_huge_bodies.py` asserts bounds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

MB = 1_000_000
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
RERANK = "/v1/rerank"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
_BOUNDARY = b"----edge7MA4YWxkTrZu0gW"
_JSON = {"content-type": "application/json"}
_FORM = {"content-type": "multipart/form-data; boundary=" + _BOUNDARY.decode()}


class Shot(NamedTuple):
    """One request. `is_legitimate`: a worker could answer it, and the gateway must route it by content."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    is_legitimate: bool = False


Build = Callable[[str], Shot]


def _object(model: str, name: str, value: bytes, rest: bytes = b"") -> bytes:
    return b'{"model":%b,"%b":%b%b,"max_tokens":1}' % (json.dumps(model).encode(), name.encode(), value, rest)


def _array(item: bytes, size: int) -> bytes:
    """About `size` bytes: one array of equal items."""
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


def _listed(path: str, name: str, item: bytes, size: int, model: str, rest: bytes = b"") -> Shot:
    return Shot(path, _JSON, _object(model, name, _array(item, size), rest))


def _beside(name: str, value: Callable[[], bytes], model: str) -> Shot:
    """A small chat with one additional large field."""
    messages = b'[{"role":"user","content":"hi"}],"%b":%b' % (name.encode(), value())
    return Shot(CHAT, _JSON, _object(model, "messages", messages))


def _chat(content: bytes, model: str, *, is_legitimate: bool = False, rest: bytes = b"") -> Shot:
    messages = b'[{"role":"user","content":%b}]%b' % (content, rest)
    return Shot(CHAT, _JSON, _object(model, "messages", messages), is_legitimate)


def _parts(item: bytes, size: int, model: str) -> Shot:
    return _chat(_array(item, size), model)


def _many_fields(size: int, model: str) -> Shot:
    fields = b",".join(b'"f%d":1' % number for number in range(size // 14))
    return Shot(CHAT, _JSON, _object(model, "messages", b'[{"role":"user","content":"hi"}],' + fields))


def _repeated(before: bytes, member: bytes, after: bytes, size: int, model: str) -> Shot:
    """One object with the same member again and again. `before` and `after` are the body around them."""
    members = b",".join([member] * (size // (len(member) + 1)))
    path = CHAT if b"messages" in before else COMPLETIONS
    return Shot(path, _JSON, b'{"model":%b,%b%b%b}' % (json.dumps(model).encode(), before, members, after))


def _twice(size: int, model: str) -> Shot:
    again = b',"messages":' + _array(b"{}", size // 2)
    return Shot(CHAT, _JSON, _object(model, "messages", _array(b"{}", size // 2), again))


def _nested(opener: bytes, size: int, model: str) -> Shot:
    return Shot(CHAT, _JSON, _object(model, "messages", opener * (size // len(opener))))


def _model_fields(size: int, model: str) -> Shot:
    """As many nested `model` fields with the right name as fit, before the request's own field."""
    inner = b'{"model":%b}' % json.dumps(model).encode()
    return Shot(CHAT, _JSON, b'{"metadata":%b,"model":%b,"messages":[{"role":"user","content":"hi"}]}' % (
        _array(inner, size), json.dumps(model).encode()
    ))  # fmt: skip


def _blank_run(size: int, model: str) -> Shot:
    """Blanks between two messages: a parser that searches backwards for the end of a message reads all of the
    blanks."""
    one = b'{"role":"user","content":"hello"}'
    value = b"[" + one + b"," + b" " * size + one + b"," + b",".join([one] * 1000) + b"]"
    return Shot(CHAT, _JSON, _object(model, "messages", value))


def _part(name: bytes, value: bytes, file: bytes = b"") -> bytes:
    return b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (
        _BOUNDARY,
        name,
        file,
        value,
    )


def _form(parts: bytes, model: str, *, is_legitimate: bool = False) -> Shot:
    body = _part(b"model", model.encode()) + parts + b"--%b--\r\n" % _BOUNDARY
    return Shot(TRANSCRIPTIONS, _FORM, body, is_legitimate)


def _form_parts(size: int, model: str) -> Shot:
    part = _part(b"a", b"")
    return _form(part * (size // len(part)), model)


def _form_header(size: int, model: str) -> Shot:
    part = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\nx\r\n' % (_BOUNDARY, b"a" * size)
    return _form(part, model)


def _form_almost(size: int, model: str) -> Shot:
    """A file that consists of near-boundaries."""
    almost = b"\r\n--" + _BOUNDARY[:-1]
    return _form(_part(b"file", almost * (size // len(almost)), b'; filename="a.wav"'), model)


def _token_ids(count: int, model: str) -> Shot:
    ids = b",".join([b"%d" % (1000 + number * 7919 % 120_000) for number in range(count)])
    return Shot(COMPLETIONS, _JSON, _object(model, "prompt", b"[" + ids + b"]"), True)


def _image(size: int, model: str) -> Shot:
    data = base64.b64encode(bytes(range(256)) * (size * 3 // 4 // 256))
    part = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}' % data
    text = b"What is this? " * 100  # enough for several blocks
    return _chat(b'[{"type":"text","text":"%b"},' % text + part + b"]", model, is_legitimate=True)


def _long_chat(messages: int, model: str) -> Shot:
    turns = [
        {"role": "user" if place % 2 == 0 else "assistant", "content": f"turn {place}: " + "word " * 40}
        for place in range(messages)
    ]
    return Shot(CHAT, _JSON, _object(model, "messages", json.dumps(turns).encode()), True)


def _text(size: int, model: str, words: bytes = b"a,[{b}],c: ") -> Shot:
    """One text with characters that would be structure outside a string."""
    return Shot(COMPLETIONS, _JSON, _object(model, "prompt", b'"%b"' % (words * (size // len(words)))), True)


def _utf16(size: int, model: str) -> Shot:
    text = json.dumps({"model": model, "prompt": "a" * (size // 2)})
    return Shot(COMPLETIONS, _JSON, text.encode("utf-16"))


def _invalid_end(item: bytes, size: int, model: str) -> Shot:
    """A huge complete body that is not JSON because of its last byte but one."""
    return Shot(COMPLETIONS, _JSON, _object(model, "prompt", _array(item, size))[:-1] + b"!}")


BODIES: Mapping[str, Build] = {
    # Measured on 1fd48c2: 22.6 s, 3.3 s, 9.3 s and 1.2 s without an answer on /health.
    "prompts_20mb": partial(_listed, COMPLETIONS, "prompt", b"[1]", 20 * MB),
    "messages_12mb": partial(_listed, CHAT, "messages", b"{}", 12 * MB),
    "form_parts_52mb": partial(_form_parts, 52 * MB),
    "content_parts_20mb": partial(_parts, b'{"type":"text","text":"a"}', 20 * MB),
    # Up to server.max_body_bytes (64 MiB).
    "prompts_16mb": partial(_listed, COMPLETIONS, "prompt", b"[1]", 16 * MB),
    "prompts_64mb": partial(_listed, COMPLETIONS, "prompt", b"[1]", 64 * MB),
    "text_prompts_16mb": partial(_listed, COMPLETIONS, "prompt", b'"a"', 16 * MB),
    "text_prompts_64mb": partial(_listed, COMPLETIONS, "prompt", b'"a"', 64 * MB),
    "mixed_prompts_16mb": partial(_listed, COMPLETIONS, "prompt", b'1,"a",{}', 16 * MB),
    "token_ids_64mb": partial(_listed, COMPLETIONS, "prompt", b"1", 64 * MB),
    "messages_64mb": partial(_listed, CHAT, "messages", b"{}", 64 * MB),
    "content_parts_64mb": partial(_parts, b"{}", 64 * MB),
    "content_in_messages_16mb": partial(
        _listed, CHAT, "messages", b'{"role":"user","content":[%b]}' % b",".join([b"{}"] * 1000), 16 * MB
    ),
    "twice_16mb": partial(_twice, 16 * MB),
    "repeated_16mb": partial(_repeated, b"", b'"prompt":"a"', b"", 16 * MB),
    "repeated_64mb": partial(_repeated, b"", b'"echo":1', b"", 64 * MB),
    "repeated_model_16mb": partial(_repeated, b"", b'"model":"m"', b"", 16 * MB),
    "repeated_in_message_16mb": partial(_repeated, b'"messages":[{', b'"role":1', b"}]", 16 * MB),
    "repeated_in_part_16mb": partial(
        _repeated, b'"messages":[{"role":"user","content":[{', b'"text":""', b"}]}]", 16 * MB
    ),
    "repeated_in_metadata_16mb": partial(
        _repeated, b'"messages":[],"metadata":{', b'"session_id":1', b"}", 16 * MB
    ),
    "fields_16mb": partial(_many_fields, 16 * MB),
    "fields_64mb": partial(_many_fields, 64 * MB),
    "tools_64mb": partial(_beside, "tools", lambda: _array(b'{"type":"function"}', 64 * MB)),
    "metadata_64mb": partial(_beside, "metadata", lambda: _array(b'{"session_id":1}', 64 * MB)),
    "stop_16mb": partial(_beside, "stop", lambda: _array(b'"a"', 16 * MB)),
    "user_64mb": partial(_beside, "user", lambda: b'"%b"' % (b"u" * 64 * MB)),
    "cache_salt_64mb": partial(_beside, "cache_salt", lambda: b'"%b"' % (b"s" * 64 * MB)),
    "stream_64mb": partial(_beside, "stream", lambda: b'"%b"' % (b"s" * 64 * MB)),
    "nan_60mb": partial(_beside, "stop", lambda: b"[NaN" + b",[]" * (20 * MB) + b"]"),
    "big_number_64mb": partial(_beside, "seed", lambda: b"9" * (64 * MB)),
    "model_64mb": lambda _model: Shot(CHAT, _JSON, b'{"model":"%b","messages":[]}' % (b"m" * 64 * MB)),
    "models_inside_16mb": partial(_model_fields, 16 * MB),
    "arrays_nested_64mb": partial(_nested, b"[", 64 * MB),
    "objects_nested_64mb": partial(_nested, b'{"a":', 64 * MB),
    "escapes_64mb": lambda model: Shot(
        COMPLETIONS, _JSON, _object(model, "prompt", b'"%b"' % (b"\\u00e9" * (64 * MB // 6)))
    ),
    "line_breaks_64mb": lambda model: Shot(
        COMPLETIONS, _JSON, _object(model, "prompt", b'"%b"' % (b"\\n" * (32 * MB)))
    ),
    "invalid_utf8_64mb": lambda model: Shot(
        COMPLETIONS, _JSON, _object(model, "prompt", b'"%b"' % (b"\xff" * (64 * MB)))
    ),
    "utf16_60mb": partial(_utf16, 60 * MB),
    "blanks_64mb": lambda model: Shot(CHAT, _JSON, b" " * (64 * MB) + _object(model, "messages", b"[]")),
    "blank_run_60mb": partial(_blank_run, 60 * MB),
    "no_json_64mb": lambda _model: Shot(CHAT, _JSON, b"x" * (64 * MB)),
    "invalid_end_64mb": partial(_invalid_end, b"[1]", 64 * MB),
    "inputs_16mb": partial(_listed, EMBEDDINGS, "input", b'"a"', 16 * MB),
    "items_16mb": partial(_listed, RESPONSES, "input", b"{}", 16 * MB),
    "documents_16mb": partial(_listed, RERANK, "documents", b'"a"', 16 * MB, rest=b',"query":"q"'),
    "queries_16mb": partial(_listed, "/v1/score", "queries", b'"a"', 16 * MB, rest=b',"documents":["d"]'),
    "form_header_64mb": partial(_form_header, 64 * MB),
    "form_almost_64mb": partial(_form_almost, 64 * MB),
    # Legitimate requests, routed by content.
    "token_ids_1m": partial(_token_ids, 1_000_000),
    "image_20mb": partial(_image, 20 * MB),
    "chat_4000": partial(_long_chat, 4_000),
    "text_16mb": partial(_text, 16 * MB),
    "text_64mb": partial(_text, 64 * MB),
    "audio_25mb": lambda model: _form(
        _part(b"file", bytes(range(256)) * (25 * MB // 256), b'; filename="a.wav"'), model, is_legitimate=True
    ),
}
"""By name; each body is below 64 MiB (67.1 MB)."""
