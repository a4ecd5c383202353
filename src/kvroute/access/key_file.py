"""The file of named API keys: its options, its entries, and how it is read.

A file has the keys' hashes and is read all or nothing:

    keys:
      - name: team-a
        hash: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        models: [llama]
        limits: {requests_per_minute: 600}
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)

from kvroute import yaml_text
from kvroute.errors import ConfigError
from kvroute.options import Options, option
from kvroute.routing.registry import STRATEGIES, is_strategy
from kvroute.secret_files import writers_problem

OPTION: Final = "server.client_keys.file"
PREFIX: Final = "sha256:"
_MAX_FILE_BYTES = 8 * 1024 * 1024
_MAX_KEYS = 10_000


class ClientKeysOptions(Options):
    """Named API keys with models, strategies and limits of their own."""

    file: Path | None = option(
        None,
        "YAML or JSON file with named keys: docs/keys.md. It has hashes, not keys; `kvroute keys new NAME` "
        "makes an entry. It is loaded again when it changes; an invalid file is refused, and the old keys "
        "stay valid. Keys of `server.api_keys` are valid too, without name and limits.",
    )
    reload_interval_s: float = option(
        5.0,
        "Time between checks whether the file has changed. 0: no checks.",
        unit="s",
        higher="fewer checks",
        lower="a new or removed key counts sooner",
        ge=0,
    )


class KeyLimits(Options):
    """Limits of one key; 0 means no limit. `requests_per_minute`, `tokens_per_minute` and
    `concurrent_requests` are divided by the number of gateway processes."""

    requests_per_minute: int = option(0, ge=0)
    tokens_per_minute: int = option(0, ge=0)
    """Prompt and completion tokens. A request is charged at its end."""
    concurrent_requests: int = option(0, ge=0)
    """Requests in flight, streamed or not."""
    body_bytes: int = option(0, ge=0)
    prompt_tokens: int = option(0, ge=0)
    """As the gateway estimates them."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _known_strategies(value: frozenset[str]) -> frozenset[str]:
    if not all(map(is_strategy, value)):
        # Without the value: a key may stand in the wrong line.
        raise ValueError(f"a strategy is none of {', '.join(STRATEGIES)}, nor of an installed distribution")
    return value


_Hash = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]


class ClientKey(Options):
    """One entry of the file: who the client is and what it may do. None for a list: everything."""

    name: _Name
    hash: Annotated[tuple[_Hash, ...], BeforeValidator(_as_list)] = ()
    """Several are valid at the same time, so that a new key can replace an old one under the same name."""
    jwt: Annotated[tuple[str, ...], BeforeValidator(_as_list)] | None = None
    """Clients whose tokens (`server.jwt`) this entry is for. Empty: only as `server.jwt.default_key`."""
    models: frozenset[str] | None = None
    strategies: Annotated[frozenset[str], AfterValidator(_known_strategies)] | None = None
    limits: KeyLimits = KeyLimits()
    priority: int = option(0, ge=-1_000_000, le=1_000_000)
    """Class in the queue of waiting requests; a lower value is served earlier, as in vLLM."""
    weight: float = option(1.0, gt=0, le=1_000_000)
    """Share of the workers' time while keys of the same class wait."""
    expires: AwareDatetime | None = None
    tenant: _Name | None = None
    """Keys with the same tenant share KV under `server.isolation`. None: the key's name."""

    @model_validator(mode="after")
    def _admits_somebody(self) -> ClientKey:
        if not self.hash and self.jwt is None:
            raise ValueError("set `hash` or `jwt`")
        return self


class KeyFile(Options):
    """The whole document."""

    keys: Annotated[tuple[ClientKey, ...], option(max_length=_MAX_KEYS)]


def digest(key: bytes) -> bytes:
    """The SHA-256 of a key: what the file has.

    A slow hash protects passwords that can be guessed. A key of 256 random bits cannot, and each request
    computes this hash: 0.5 us.
    """
    return hashlib.sha256(key).digest()


def new_key(name: str) -> tuple[str, str]:
    """A new random key of 256 bits, and its entry for the file. Raises ConfigError for an invalid name."""
    key = "kvr-" + secrets.token_urlsafe(32)
    document = {"keys": [{"name": name, "hash": PREFIX + digest(key.encode()).hex()}]}
    read_keys(yaml.safe_dump(document), "NAME")
    entry = document["keys"][0]
    return key, f"- name: {entry['name']}\n  hash: {entry['hash']}\n"


def read_key_file(file: Path) -> tuple[ClientKey, ...]:
    """The keys of a file. Raises ConfigError with `FILE:LINE: reason`. Blocks."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(OPTION, f"cannot read {file}: {error.strerror}") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(OPTION, f"{file} is larger than {_MAX_FILE_BYTES} bytes")
    if problem := writers_problem(file):
        raise ConfigError(OPTION, problem)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise ConfigError(OPTION, f"{file}:1: it is not UTF-8 text") from None
    return read_keys(text, str(file))


def read_keys(text: str, file: str) -> tuple[ClientKey, ...]:
    """The keys of a document. Raises ConfigError with `FILE:LINE: reason`; reasons contain no value of the
    document, because a key may have been put in the place of its hash."""
    lines: dict[tuple[str | int, ...], int] = {}
    try:
        # libyaml's parser where PyYAML has it: reading takes 0.2 ms for each key. Python's own takes 1.7 ms,
        # and competes with the event loop for the interpreter lock meanwhile.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        root = loader.get_single_node()
        if root is not None:
            yaml_text.check(root)
        repeated = _survey(root, (), lines)
        data = None if root is None else yaml_text.construct(loader, root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(OPTION, f"{file}:{line}: it is not YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(OPTION, f"{file}:1: it is not YAML") from None
    if repeated is not None:
        raise ConfigError(OPTION, f"{file}:{lines[repeated]}: {_dotted(repeated)}: given twice")
    try:
        keys = KeyFile.model_validate(data).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = first["loc"]
        reason = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(OPTION, f"{file}:{_line(lines, place)}: {_dotted(place)}: {reason}") from None
    names: dict[str, int] = {}
    hashes: dict[str, int] = {}
    clients: dict[str, int] = {}
    for number, key in enumerate(keys):
        place = ("keys", number)
        if names.setdefault(key.name, number) != number:
            reason = f"the name is also the one of keys[{names[key.name]}]; `hash` may be a list"
            raise ConfigError(OPTION, f"{file}:{_line(lines, (*place, 'name'))}: {_dotted(place)}: {reason}")
        for field, seen, values in (("hash", hashes, key.hash), ("jwt", clients, key.jwt or ())):
            for each in values:
                if seen.setdefault(each, number) != number:
                    reason = f"the {field} is also one of keys[{seen[each]}]"
                    where = _line(lines, (*place, field))
                    raise ConfigError(OPTION, f"{file}:{where}: {_dotted(place)}: {reason}")
    return keys


def _survey(
    node: yaml.Node | None, place: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int]
) -> tuple[str | int, ...] | None:
    """Store the line of every place in `lines`; return the first key that a mapping has twice."""
    repeated = None
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines[*place, number] = item.start_mark.line + 1
            repeated = repeated or _survey(item, (*place, number), lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*place, str(key.value))
            repeated = repeated or (here if here in lines else None)
            lines[here] = key.start_mark.line + 1
            repeated = repeated or _survey(value, here, lines)
    return repeated


def _line(lines: dict[tuple[str | int, ...], int], place: tuple[str | int, ...]) -> int:
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 1)


def _dotted(place: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".") or "document"
