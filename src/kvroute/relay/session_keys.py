"""Finds the session of a request: the key that its later requests share, and the session that began it.

Clients name their sessions in headers, cookies or members of the body. What cannot be read is absent: no
request is refused for its session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import Final, Protocol

import msgspec

from kvroute.errors import ConfigError, InvalidRequest
from kvroute.openai.bounded import SESSION_MEMBERS
from kvroute.openai.headers import FirstHeader, Headers, KnownHeaders, header
from kvroute.openai.request import InferenceRequest

_PARENT: Final = b"x-dynamo-parent-session-id"
_MAX_KEY_BYTES: Final = 4_096


class SessionId(msgspec.Struct, frozen=True, gc=False):
    """The session of a request."""

    key: str
    parent: str | None = None
    """The key of the session that began this one, as an agent begins sub-agents."""


class _Source(Protocol):
    def read(self, request: InferenceRequest, headers: Headers) -> str | None:
        """The key; None or "" without one."""
        ...


class _Headers:
    """Successive sources that are headers."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.first = FirstHeader((), _MAX_KEY_BYTES)

    def add(self, name: bytes) -> None:
        self.names.append(name)
        self.first = FirstHeader(self.names, _MAX_KEY_BYTES)

    def read(self, request: InferenceRequest, headers: Headers) -> str | None:
        value = self.first.read(headers)
        return value.decode("latin-1") if value else None


class _Members:
    """Successive sources that are members of the body."""

    def __init__(self) -> None:
        self._sources: list[Callable[[InferenceRequest], str | None]] = []
        self._are_usual = True
        """All of them are within `SESSION_MEMBERS`."""

    def add(self, path: str, *, is_embedded: bool) -> None:
        self._are_usual = self._are_usual and path.partition(".")[0] in SESSION_MEMBERS
        read = _embedded if is_embedded else _text
        self._sources.append(lambda request: read(request, path))

    def read(self, request: InferenceRequest, headers: Headers) -> str | None:
        if self._are_usual and not request.may_have_session:
            return None
        for source in self._sources:
            key = source(request)
            if key:
                return key
        return None


class SessionKeys:
    """Reads session keys from these sources, in this order. Immutable.

    A source is `header:NAME`, `cookie:NAME`, `body:DOTTED.PATH` or `embedded:DOTTED.PATH`: the session id
    within a text of the body, as Claude Code puts it into `metadata.user_id`. Raises ConfigError for anything
    else. A request without a session costs about 0.5 us.
    """

    def __init__(self, declared: Sequence[str]) -> None:
        first, *rest = _steps(declared) or [_Headers()]
        if not isinstance(first, _Headers):
            first, rest = _Headers(), [first, *rest]
        self._headers, self._rest = first.first.read, tuple(rest)
        """The sources that are asked first, if these are headers; and the others."""
        self._parent = FirstHeader([_PARENT], _MAX_KEY_BYTES).read
        self.fields = tuple(
            path.partition(".")[0]
            for kind, _, path in (text.partition(":") for text in declared)
            if kind in ("body", "embedded")
        )
        """The top-level members of bodies that are read."""

    def read(self, request: InferenceRequest, headers: Headers) -> SessionId | None:
        """The request's session; None if it has none."""
        given = self._headers(headers)
        key = given.decode("latin-1") if given else self._read_rest(request, headers)
        if not key:
            return None
        if type(headers) is KnownHeaders and _PARENT not in headers.places.by_name:
            return SessionId(key)
        parent = self._parent(headers)
        return SessionId(key, parent.decode("latin-1") if parent else None)

    def _read_rest(self, request: InferenceRequest, headers: Headers) -> str | None:
        return next((key for step in self._rest if (key := step.read(request, headers))), None)


def _steps(declared: Sequence[str]) -> list[_Source]:
    steps: list[_Source] = []
    for text in declared:
        kind, _, name = text.partition(":")
        last = steps[-1] if steps else None
        if kind == "header" and name:
            if not isinstance(last, _Headers):
                last = _Headers()
                steps.append(last)
            last.add(name.lower().encode())
        elif kind == "cookie" and name:
            steps.append(_Cookie(name))
        elif kind in ("body", "embedded") and name:
            if not isinstance(last, _Members):
                last = _Members()
                steps.append(last)
            last.add(name, is_embedded=kind == "embedded")
        else:
            raise ConfigError(
                "routing.session.keys",
                f"{text!r} is none of header:NAME, cookie:NAME, body:FIELD, embedded:FIELD",
            )
    return steps


class _Cookie:
    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, request: InferenceRequest, headers: Headers) -> str | None:
        raw = header(headers, b"cookie")
        if not raw:
            return None
        try:
            morsel = SimpleCookie(raw.decode("latin-1")).get(self._name)
        except CookieError:
            return None
        return morsel.value if morsel else None


def _text(request: InferenceRequest, path: str) -> str | None:
    try:
        return request.text(path)
    except InvalidRequest:  # too long
        return None


class _UserId(msgspec.Struct):
    session_id: str = ""


_decode_user_id = msgspec.json.Decoder(_UserId).decode


def _embedded(request: InferenceRequest, path: str) -> str | None:
    """The session id within a text: JSON with `session_id`, or what follows the last `_session_`."""
    text = _text(request, path)
    if text is None:
        return None
    if text.startswith("{"):
        try:
            return _decode_user_id(text).session_id
        except (msgspec.DecodeError, RecursionError):
            return None
    _, found, session = text.rpartition("_session_")
    return session if found else None
