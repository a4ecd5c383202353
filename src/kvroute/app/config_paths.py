"""Paths of options: their notation, and the types that the option classes allow at a path.

A path is a tuple of keys from the root, `("fleet", "workers", 0, "url")`, written
`fleet.workers.0.url`; a key with a dot in it is quoted: `routing.models."Qwen2.5".strategy`.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from kvroute.options import Options

Path = tuple[str | int, ...]
Shape = tuple[object, ...]
"""The plain types that are allowed at a path: the members of a union, without `Annotated`."""

_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SEGMENT = re.compile(r'"([^"]*)"|([^."]+)')


def dotted(path: Iterable[str | int]) -> str:
    """`path` in dotted notation."""
    return ".".join(f'"{key}"' if not key or re.search(r'[."\s]', key) else key for key in map(str, path))


def split(text: str) -> Path:
    """Parse a dotted path. Raises ValueError."""
    keys: list[str] = []
    rest = text
    while True:
        match = _SEGMENT.match(rest)
        if match is None:
            raise ValueError(f"{text!r} is not a dotted path")
        keys.append(match[1] if match[1] is not None else match[2])
        rest = rest[match.end() :]
        if not rest:
            return tuple(keys)
        if rest[0] != ".":
            raise ValueError(f"{text!r} is not a dotted path")
        rest = rest[1:]


def shape_of(annotation: object) -> Shape:
    """The plain types that `annotation` allows."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return shape_of(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(plain for part in typing.get_args(annotation) for plain in shape_of(part))
    return (annotation,)


def shape_at(root: type[Options], path: Path) -> Shape:
    """The types that are allowed at `path`; empty if there is no such option."""
    shape: Shape = (root,)
    for key in path:
        shape = tuple(plain for parent in shape for plain in _child(parent, key))
    return shape


def _child(parent: object, key: str | int) -> Shape:
    if is_options(parent):
        field = parent.model_fields.get(str(key))
        return shape_of(field.annotation) if field is not None else ()
    origin, args = typing.get_origin(parent), typing.get_args(parent)
    if not isinstance(origin, type) or not args:
        return ()
    if issubclass(origin, Mapping):
        return shape_of(args[1])
    if issubclass(origin, (Sequence, Set)):
        return shape_of(args[0])
    return ()


def is_options(plain: object) -> typing.TypeGuard[type[Options]]:
    return isinstance(plain, type) and issubclass(plain, Options)


def is_list(plain: object) -> bool:
    kind = typing.get_origin(plain) or plain
    return isinstance(kind, type) and issubclass(kind, (Sequence, Set)) and not issubclass(kind, (str, bytes))


def is_mapping(plain: object) -> bool:
    kind = typing.get_origin(plain) or plain
    return isinstance(kind, type) and (issubclass(kind, Mapping) or is_options(kind))


def is_text(plain: object) -> bool:
    """Whether a text is used unchanged as a value of this type: text, secrets, paths, literals."""
    if typing.get_origin(plain) is typing.Literal:
        return all(isinstance(word, str) for word in typing.get_args(plain))
    return isinstance(plain, type) and not is_mapping(plain) and not issubclass(plain, (bool, int, float))


def is_secret(shape: Shape) -> bool:
    """Whether a value of this shape, or one of its items, is a credential."""
    return any(plain is SecretStr or is_secret(_items(plain)) for plain in shape)


def without_userinfo(text: str) -> str:
    """`text` with asterisks instead of user and password in its URLs."""
    return _USERINFO.sub("**********", text)


def _items(plain: object) -> Shape:
    return tuple(inner for argument in typing.get_args(plain) for inner in shape_of(argument))


def options_of(shape: Shape) -> tuple[type[Options], ...]:
    """The option classes in `shape`, without those of its items."""
    return tuple(plain for plain in shape if is_options(plain))


def item_options(shape: Shape) -> tuple[type[Options], ...]:
    """The option classes of the items of lists and mappings in `shape`."""
    return tuple(
        inner
        for plain in shape
        if not is_options(plain) and (is_list(plain) or is_mapping(plain))
        for inner in options_of(_items(plain))
    )


def walk(owner: type[Options], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """All fields of `owner` and its sections, depth first in the order of declaration; not those in lists."""
    for name, field in owner.model_fields.items():
        path = (*prefix, name)
        yield path, field
        for inner in options_of(shape_of(field.annotation)):
            yield from walk(inner, path)


def suggestion(root: type[Options], path: Path) -> Path | None:
    """The option that was probably meant by the unknown `path`, or None."""
    *parent, last = path
    wanted = str(last).lower().replace("-", "_")
    siblings = [name for owner in options_of(shape_at(root, tuple(parent))) for name in owner.model_fields]
    close = difflib.get_close_matches(wanted, siblings, n=1, cutoff=0.6)
    if close:
        return (*parent, close[0])
    return next((found for found, _ in walk(root) if found[-1] == wanted), None)
