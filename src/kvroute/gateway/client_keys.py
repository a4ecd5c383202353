"""Named API keys of clients: the file that lists them, what each key may do, and its limits.

A file has the keys' hashes and is loaded again when it changes, all or nothing:

    keys:
      - name: team-a
        hash: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        models: [llama]
        limits: {requests_per_minute: 600}
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import Annotated, NamedTuple

import yaml
from msgspec import Struct
from pydantic import AfterValidator, AwareDatetime, BeforeValidator, StringConstraints, ValidationError

from kvroute.clock import Clock
from kvroute.errors import BodyTooLarge, ConfigError, Forbidden, KeyLimitReached, PromptTooLong
from kvroute.gateway.downstream import Downstream
from kvroute.metrics import Metrics
from kvroute.openai.request import InferenceRequest
from kvroute.options import Options, option
from kvroute.routing.registry import STRATEGIES
from kvroute.tls import Signature, signatures

log = logging.getLogger(__name__)

OPTION = "server.client_keys.file"
_MAX_FILE_BYTES = 8 * 1024 * 1024
_MAX_KEYS = 10_000
_PREFIX = "sha256:"
_MINUTE_S = 60.0
_OK_STATUSES = range(200, 400)
_CLIENT_LEFT = 499
_TAIL_BYTES = 4096
_BYTES_PER_TOKEN = 4
_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)\s*[,}]').search
_EVENT = b"data: {"


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
    if not value <= STRATEGIES.keys():
        raise ValueError(f"a strategy is none of {', '.join(STRATEGIES)}")
    return value


_Hash = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]


class ClientKey(Options):
    """One entry of the file: who the client is and what it may do. None for a list: everything."""

    name: _Name
    hash: Annotated[tuple[_Hash, ...], BeforeValidator(_as_list), option(min_length=1)]
    """Several are valid at the same time, so that a new key can replace an old one under the same name."""
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
    document = {"keys": [{"name": name, "hash": _PREFIX + digest(key.encode()).hex()}]}
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
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise ConfigError(OPTION, f"{file}:1: it is not UTF-8 text") from None
    return read_keys(text, str(file))


def read_keys(text: str, file: str) -> tuple[ClientKey, ...]:
    """The keys of a document. Raises ConfigError with `FILE:LINE: reason`; reasons contain no value of the
    document, because a key may have been put in the place of its hash."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(OPTION, f"{file}:{line}: it is not YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(OPTION, f"{file}:1: it is not YAML") from None
    lines: dict[tuple[str | int, ...], int] = {}
    repeated = _survey(root, (), lines)
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
    for number, key in enumerate(keys):
        place = ("keys", number)
        if names.setdefault(key.name, number) != number:
            reason = f"the name is also the one of keys[{names[key.name]}]; `hash` may be a list"
            raise ConfigError(OPTION, f"{file}:{_line(lines, (*place, 'name'))}: {_dotted(place)}: {reason}")
        for each in key.hash:
            if hashes.setdefault(each, number) != number:
                reason = f"the hash is also one of keys[{hashes[each]}]"
                where = _line(lines, (*place, "hash"))
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


class Bucket:
    """A rate limit per minute: a level that refills evenly, up to a whole minute's amount. Mutable.

    `take` may make the level negative, because tokens are charged after they were used.
    """

    # Not the library `limits` (5.8): its memory storage reads the wall clock and starts a timer thread
    # every 10 ms while it is used.

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available; 0.0 if it is now. O(1)."""
        rate = self.per_minute / _MINUTE_S
        self._level = min(self.per_minute, self._level + (now - self._at) * rate)
        self._at = now
        return max(0.0, (min(amount, self.per_minute) - self._level) / rate)

    def take(self, amount: float) -> None:
        self._level -= amount

    def resize(self, per_minute: float) -> None:
        """Change the limit; what was used of the old one stays used."""
        self._level = min(per_minute, self._level + per_minute - self.per_minute)
        self.per_minute = per_minute


class Account:
    """What the requests of one key have used in this process. Mutable: each request changes it."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def apply(self, limits: KeyLimits, processes: int, now: float) -> None:
        """Use these limits from now on."""
        self.requests = _resized(self.requests, limits.requests_per_minute / processes, now)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute / processes, now)


def _resized(bucket: Bucket | None, per_minute: float, now: float) -> Bucket | None:
    if not per_minute:
        return None
    per_minute = max(1.0, per_minute)
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.resize(per_minute)
    return bucket


class KnownClient(NamedTuple):
    """A valid key, when it expires (seconds since the epoch), and what it has used."""

    key: ClientKey
    expires: float
    account: Account
    ring: KeyRing


class KeyRing:
    """The named keys that are valid now, by hash, and their accounts.

    Mutable: `install` replaces all keys; `run` does it when the file changes.
    """

    def __init__(
        self, keys: Sequence[ClientKey], metrics: Metrics, clock: Clock, *, processes: int = 1
    ) -> None:
        self._metrics = metrics
        self._wall = clock.wall
        self._clock = clock
        self._processes = processes
        self._by_digest: dict[bytes, KnownClient] = {}
        self._accounts: dict[str, Account] = {}
        for outcome in ("loaded", "refused"):
            metrics.key_reloads.labels(outcome)
        self.install(keys)

    def install(self, keys: Sequence[ClientKey]) -> None:
        """Replace all keys at one moment. Keys that keep their name keep what they have used."""
        by_digest: dict[bytes, KnownClient] = {}
        accounts: dict[str, Account] = {}
        now = self._clock.now()
        for key in keys:
            account = accounts[key.name] = self._accounts.get(key.name) or Account()
            account.apply(key.limits, self._processes, now)
            known = KnownClient(key, _seconds(key.expires), account, self)
            for each in key.hash:
                by_digest[bytes.fromhex(each.removeprefix(_PREFIX))] = known
        self._by_digest, self._accounts = by_digest, accounts

    def find(self, given: bytes) -> KnownClient | None:
        """The client of a key, also of an expired one. O(1)."""
        # No comparison in constant time is needed. The time of the lookup depends on the hash only, and no
        # client can choose a key so that a part of its hash is right.
        return self._by_digest.get(digest(given)) if given else None

    def is_expired(self, client: KnownClient) -> bool:
        return self._wall() >= client.expires

    def admit(self, client: KnownClient, request: InferenceRequest, strategy: bytes) -> KeyUse:
        """Check what is known before routing, and account for the request until `KeyUse.end`.

        `strategy` is the value of the strategy header, b"" if absent. Raises Forbidden, BodyTooLarge and
        KeyLimitReached. `check_model` checks the model.
        """
        key, account = client.key, client.account
        limits = key.limits
        if strategy and key.strategies is not None and strategy.decode("latin-1") not in key.strategies:
            raise Forbidden(
                f"The key {key.name!r} does not permit this strategy.",
                param="x-kvroute-strategy",
                code="strategy_not_permitted",
            )
        if limits.body_bytes and len(request.body) > limits.body_bytes:
            self._count(key, "body_bytes")
            raise BodyTooLarge(limits.body_bytes, f"limits.body_bytes of the key {key.name!r}")
        now = self._clock.now()
        allowed = ceil(limits.concurrent_requests / self._processes)
        if allowed and account.in_flight >= allowed:
            raise self._reached(key, "concurrent_requests", 1.0)
        if account.tokens is not None and (wait_s := account.tokens.wait_s(1.0, now)):
            raise self._reached(key, "tokens_per_minute", wait_s)
        if account.requests is not None:
            if wait_s := account.requests.wait_s(1.0, now):
                raise self._reached(key, "requests_per_minute", wait_s)
            account.requests.take(1.0)
        account.in_flight += 1
        self._metrics.key_requests.labels(key.name).inc()
        return KeyUse(client)

    def check_prompt(self, use: KeyUse, tokens: int) -> None:
        """Raises PromptTooLong if the key does not permit a prompt of `tokens`."""
        key = use.client.key
        if key.limits.prompt_tokens and tokens > key.limits.prompt_tokens:
            self._count(key, "prompt_tokens")
            raise PromptTooLong(tokens, key.limits.prompt_tokens, key.name)

    def charge(self, client: KnownClient, prompt_tokens: int, completion_tokens: int) -> None:
        """Charge the tokens of a finished request."""
        if client.account.tokens is not None:
            client.account.tokens.wait_s(0.0, self._clock.now())  # refill up to now, before it is charged
            client.account.tokens.take(prompt_tokens + completion_tokens)
            self._metrics.key_tokens.labels(client.key.name).inc(prompt_tokens + completion_tokens)

    async def run(self, file: Path, interval_s: float, seen: Signature | None) -> None:
        """Load the file again whenever it has changed, until cancelled. `seen`: its signature when its keys
        were read."""
        while True:
            await self._clock.sleep(interval_s)
            (found,) = await asyncio.to_thread(signatures, (file,))
            if found != seen:
                seen = found  # a refused file is tried again only when it changes again
                await self._reload(file)

    async def _reload(self, file: Path) -> None:
        try:
            keys = await asyncio.to_thread(read_key_file, file)
        except ConfigError as error:
            self._metrics.key_reloads.labels("refused").inc()
            log.error("the changed file of keys is refused, the old keys stay valid: %s", error)
        else:
            self.install(keys)
            self._metrics.key_reloads.labels("loaded").inc()
            log.info("the changed file of keys is loaded: %d names", len(keys))

    def _reached(self, key: ClientKey, limit: str, wait_s: float) -> KeyLimitReached:
        self._count(key, limit)
        return KeyLimitReached(key.name, limit, getattr(key.limits, limit), max(1, ceil(wait_s)))

    def _count(self, key: ClientKey, limit: str) -> None:
        self._metrics.key_limited.labels(key.name, limit).inc()


def _seconds(moment: datetime | None) -> float:
    return float("inf") if moment is None else moment.timestamp()


def tenant_of(client: KnownClient | None) -> str:
    """The tenant of a client. All keys without a name together are one tenant, with a name that no key can
    have."""
    return "-" if client is None else client.key.tenant or client.key.name


def permits_model(client: KnownClient, requested: str | None, resolve: Callable[[str | None], str]) -> bool:
    """Whether the key permits the model: the name in the request, or the one that an alias means.

    Raises what `resolve` raises.
    """
    models = client.key.models
    return models is None or requested in models or resolve(requested) in models


def check_model(client: KnownClient, requested: str | None, resolve: Callable[[str | None], str]) -> None:
    """Raises Forbidden if the key does not permit the model, and what `resolve` raises."""
    if not permits_model(client, requested, resolve):
        raise Forbidden(
            f"The key {client.key.name!r} does not permit this model.",
            param="model",
            code="model_not_permitted",
        )


class KeyUse(Struct, eq=False):
    """One request of a named key, until `end`. Mutable: `metered` and `end`."""

    client: KnownClient
    _meter: Meter | None = None
    _is_over: bool = False

    def metered(self, client: Downstream) -> Downstream:
        """`client`, or what counts the answer's tokens on their way to it, if the key limits tokens."""
        if self.client.account.tokens is None:
            return client
        self._meter = Meter(client)
        return self._meter

    def end(self, prompt_tokens: int, *, attempts: int, status: int) -> None:
        """Release and charge the request. A request that no worker got, or that failed, is not charged."""
        if self._is_over:
            return
        self._is_over = True
        self.client.account.in_flight -= 1
        if attempts and (status in _OK_STATUSES or status == _CLIENT_LEFT):
            completion = self._meter.completion_tokens() if self._meter is not None else 0
            self.client.ring.charge(self.client, prompt_tokens, completion)


class Meter:
    """Passes an answer on to a client and counts its completion tokens. Mutable, by the exchange's calls.

    It is used only for keys with a limit on tokens, so other requests do not pay for it.
    """

    def __init__(self, client: Downstream) -> None:
        self._client = client
        self._events = 0
        self._bytes = 0
        self._tail = b""
        self.start = client.start
        self.cut = client.cut

    @property
    def is_paused(self) -> bool:
        return self._client.is_paused

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        self._client.start_relayed(status, fields, is_sized=is_sized)

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        self._count(body)
        self._client.answer(status, fields, body, is_sized)

    def write(self, chunk: bytes) -> None:
        self._count(chunk)
        self._client.write(chunk)

    def framed_writer(self) -> Callable[[bytes], None] | None:
        write = self._client.framed_writer()
        if write is None:
            return None

        def counted(framed: bytes) -> None:
            self._count(framed)
            write(framed)

        return counted

    def finish(self, chunk: bytes = b"") -> None:
        if chunk:
            self._count(chunk)
        self._client.finish(chunk)

    def completion_tokens(self) -> int:
        """The number in the answer's `usage`; without it an estimate: one token for each event of a stream,
        or for every four bytes of another answer."""
        start = self._tail.rfind(b'"usage"')
        if start >= 0:
            found = _COMPLETION_TOKENS(self._tail, start)
            if found is not None:
                return int(found[1])
            if b'"prompt_tokens"' in self._tail[start:]:
                return 0  # the usage of an endpoint that generates nothing, such as embeddings
        return self._events or self._bytes // _BYTES_PER_TOKEN

    def _count(self, chunk: bytes) -> None:
        self._events += chunk.count(_EVENT)
        self._bytes += len(chunk)
        self._tail = (
            chunk[-_TAIL_BYTES:] if len(chunk) >= _TAIL_BYTES else (self._tail + chunk)[-_TAIL_BYTES:]
        )
