"""Named API keys of clients while the gateway runs: who a key or a token is, what it may do, and its limits.

The keys come from a file (`key_file.py`), which is loaded again when it changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec import Struct

from kvroute.access.jwt import Refusal, TokenVerifier, check_default_key
from kvroute.access.key_file import PREFIX, ClientKey, KeyLimits, digest, read_key_file
from kvroute.clock import Clock
from kvroute.errors import (
    BodyTooLarge,
    ConfigError,
    Forbidden,
    GatewayError,
    KeyLimitReached,
    PromptTooLong,
    Unauthorized,
)
from kvroute.metrics import DepartedSeries, Metrics
from kvroute.openai.request import InferenceRequest
from kvroute.tallies import FastCounter
from kvroute.tls import Signature, signatures

log = logging.getLogger(__name__)

_MINUTE_S = 60.0
_SETTLE_S = 0.02
"""Pause between two messages to other processes about one key."""
_MAX_SILENT = 1024
"""Bound of the processes that are gone and whose last uses are kept, in case they send messages again."""
_ROUNDING_S = 1e-6
"""Waits up to this are rounding errors."""
_CLIENT_LEFT = 499
_TOKEN_DOTS = 2


class Bucket:
    """A rate limit per minute: an amount that refills evenly, up to a whole minute's. Mutable.

    `take` may use more than is left, because tokens are charged after they were used.
    """

    # Not the library `limits` (5.8): its memory storage reads the wall clock and starts a timer thread
    # every 10 ms while it is used.

    __slots__ = ("_full_at", "_unit_s")

    def __init__(self, per_minute: float, now: float) -> None:
        self._unit_s = _MINUTE_S / per_minute
        """Seconds in which 1 refills."""
        self._full_at = now
        """When nothing is used any longer. This moment alone is the whole state (GCRA, as in ATM)."""

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available, for amounts up to a minute's; 0.0 if it is now. O(1)."""
        wait_s = self._full_at - now + amount * self._unit_s - _MINUTE_S
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def take(self, amount: float, now: float) -> None:
        """Use `amount`, also if it is not available."""
        full_at = self._full_at
        self._full_at = (full_at if full_at > now else now) + amount * self._unit_s  # `max` costs twice this

    def used(self, now: float) -> float:
        """What has not refilled yet; above a minute's amount if more was used than was available."""
        return max(0.0, self._full_at - now) / self._unit_s

    def excess(self, now: float) -> float:
        """What was used beyond a minute's amount."""
        return max(0.0, self._full_at - now - _MINUTE_S) / self._unit_s

    def resize(self, per_minute: float, now: float) -> None:
        """Change the limit; what was used of the old one stays used."""
        used = self.used(now)
        self._unit_s = _MINUTE_S / per_minute
        self._full_at = now + used * self._unit_s


class SharedUse(NamedTuple):
    """What the requests of one key use: since the last message, since the start, and now."""

    key: str
    requests: int
    tokens: int
    all_requests: int
    all_tokens: int
    in_flight: int


class Account:
    """What the requests of one key have used, and its limits. Mutable: each request changes it.

    `in_flight`, `all_requests` and `all_tokens` are those of this process. The buckets and `elsewhere`,
    requests in flight, also count other processes, a moment later (`KeyRing.share`).
    """

    __slots__ = (
        "all_requests",
        "all_tokens",
        "elsewhere",
        "in_flight",
        "max_body_bytes",
        "max_in_flight",
        "max_prompt_tokens",
        "requests",
        "requests_tally",
        "sent_requests",
        "sent_tokens",
        "tokens",
        "tokens_tally",
    )

    def __init__(self) -> None:
        self.in_flight = self.elsewhere = 0
        self.all_requests = self.all_tokens = self.sent_requests = self.sent_tokens = 0
        self.max_in_flight = self.max_body_bytes = self.max_prompt_tokens = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        # Created at their first count, so that keys without requests have no series.
        self.requests_tally: FastCounter | None = None
        self.tokens_tally: FastCounter | None = None

    def apply(self, limits: KeyLimits, now: float) -> None:
        """Use these limits from now on."""
        self.max_in_flight = limits.concurrent_requests
        self.max_body_bytes, self.max_prompt_tokens = limits.body_bytes, limits.prompt_tokens
        self.requests = _resized(self.requests, limits.requests_per_minute, now)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now)


def _resized(bucket: Bucket | None, per_minute: float, now: float) -> Bucket | None:
    if not per_minute:
        return None
    per_minute = max(1.0, per_minute)
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


class KnownClient(NamedTuple):
    """A valid key, when it expires (seconds since the epoch), and what it has used."""

    key: ClientKey
    expires: float
    account: Account
    ring: KeyRing
    tenant: str
    is_key: bool = True
    """False for a token."""


class KeyRing:
    """The named keys that are valid now, by hash, and their accounts.

    Mutable: `install` replaces all keys; `run` does it when the file changes.
    """

    def __init__(
        self,
        keys: Sequence[ClientKey],
        metrics: Metrics,
        clock: Clock,
        *,
        tokens: TokenVerifier | None = None,
    ) -> None:
        """`tokens` verifies JSON Web Tokens."""
        self._metrics = metrics
        self._tokens = tokens
        self._by_client: dict[str, KnownClient] = {}
        self._default: KnownClient | None = None
        self._wall = clock.wall
        self._clock = clock
        self._publish: Callable[[SharedUse], None] | None = None
        self._unsent: dict[str, Account] = {}
        """Accounts that have changed since they were published."""
        self._timer: asyncio.TimerHandle | None = None
        self._elsewhere: dict[int | str, dict[str, SharedUse]] = {}
        """The last use of each key by each other process."""
        self._silent: dict[int | str, tuple[float, dict[str, SharedUse]]] = {}
        """For each process that is gone: since when, and its last uses before."""
        self._by_digest: dict[bytes, KnownClient] = {}
        self._seen: dict[bytes, KnownClient] = {}
        """By values of Authorization that named a key since the last `install`. Without it a key is hashed
        for each request, and all headers are read."""
        self._accounts: dict[str, Account] = {}
        self._departed = DepartedSeries(metrics, clock, metrics.forget_keys)
        for outcome in ("loaded", "refused"):
            metrics.key_reloads.labels(outcome)
        self.install(keys)

    def install(self, keys: Sequence[ClientKey]) -> None:
        """Replace all keys at one moment. Keys that keep their name keep what they have used.

        Raises ConfigError if the default key is not among them.
        """
        by_digest: dict[bytes, KnownClient] = {}
        by_client: dict[str, KnownClient] = {}
        by_name: dict[str, KnownClient] = {}
        accounts: dict[str, Account] = {}
        now = self._clock.now()
        for key in keys:
            account = accounts[key.name] = self._accounts.get(key.name) or Account()
            account.apply(key.limits, now)
            account.elsewhere = sum(
                each[key.name].in_flight for each in self._elsewhere.values() if key.name in each
            )
            tenant = key.tenant or key.name
            known = by_name[key.name] = KnownClient(key, _seconds(key.expires), account, self, tenant)
            by_client.update(dict.fromkeys(key.jwt or (), known))
            for each in key.hash:
                by_digest[bytes.fromhex(each.removeprefix(PREFIX))] = known
        if self._tokens is not None:
            check_default_key(self._tokens.options, by_name)
        for name in self._accounts:
            if name not in accounts:
                self._departed.mark_departed(name)
        for name in accounts:
            self._departed.returned(name)
        self._by_digest, self._by_client, self._accounts = by_digest, by_client, accounts
        self._seen = {}
        self._default = None if self._tokens is None else by_name.get(self._tokens.options.default_key)

    def find(self, given: bytes) -> KnownClient | None:
        """The client of a key, also of an expired one. O(1)."""
        # No comparison in constant time is needed. The time of the lookup depends on the hash only, and no
        # client can choose a key so that a part of its hash is right.
        if not given:
            return None
        hashed = digest(given)
        found = self._by_digest.get(hashed)
        if found is None and self._tokens is not None and given.count(b".") == _TOKEN_DOTS:
            return self._of_token(self._tokens, given, hashed)
        return found

    def seen(self, authorization: bytes) -> KnownClient | None:
        """The client of a value of Authorization that `remember` was called with, unless its key has expired.

        O(1), a fifth of `find`.
        """
        found = self._seen.get(authorization)  # as with `find`: Python's hash of bytes has a secret seed
        return found if found is not None and found.expires > self._wall() else None

    def remember(self, authorization: bytes, client: KnownClient) -> None:
        """Let `seen` find a client whose key is in `authorization`, until the keys are replaced.

        Not for a token: its signing key may be withdrawn, and `TokenVerifier` remembers it.
        """
        if client.is_key:
            self._seen[authorization] = client

    def _of_token(self, tokens: TokenVerifier, token: bytes, hashed: bytes) -> KnownClient | None:
        """The client of a valid token: its own entry, or the default one."""
        verified = tokens.verify(token, hashed)
        if isinstance(verified, Refusal):
            return None
        client, expires = verified
        known = self._by_client.get(client, self._default)
        if known is None:
            return None
        key, until, account, ring, tenant, _ = known
        if known is self._default and client not in self._by_client and key.tenant is None:
            tenant = (
                f"jwt:{client}"  # clients that share this entry are tenants; no name of a key has a colon
            )
        return KnownClient(key, min(expires, until), account, ring, tenant, is_key=False)

    def refusal(self, given: bytes) -> GatewayError | None:
        """Why `given` is not valid; None if nothing is known about it."""
        found = self.find(given)
        if found is not None:
            return Unauthorized("The API key has expired.", param="authorization", code="expired_api_key")
        if self._tokens is None or given.count(b".") != _TOKEN_DOTS:
            return None
        verified = self._tokens.verify(given, digest(given))
        if isinstance(verified, Refusal):
            return verified.error()
        return Forbidden(
            "The token's client has no entry in server.client_keys.file.", code="client_not_permitted"
        )

    def is_expired(self, client: KnownClient) -> bool:
        return self._wall() >= client.expires

    def admit(self, client: KnownClient, request: InferenceRequest, strategy: bytes, now: float) -> KeyUse:
        """Check what is known before routing, and account for the request until `KeyUse.end`.

        `now` is the request's time. `strategy` is the value of the strategy header, b"" if absent. Raises
        Forbidden, BodyTooLarge and KeyLimitReached. `check_model` checks the model.
        """
        key, account = client.key, client.account
        if strategy and key.strategies is not None and strategy.decode("latin-1") not in key.strategies:
            raise Forbidden(
                f"The key {key.name!r} does not permit this strategy.",
                param="x-kvroute-strategy",
                code="strategy_not_permitted",
            )
        if account.max_body_bytes and len(request.body) > account.max_body_bytes:
            self._count(key, "body_bytes")
            raise BodyTooLarge(account.max_body_bytes, f"limits.body_bytes of the key {key.name!r}")
        if account.max_in_flight and account.in_flight + account.elsewhere >= account.max_in_flight:
            raise self._reached(key, "concurrent_requests", 1.0)
        tokens, requests = account.tokens, account.requests
        if tokens is not None and (wait_s := tokens.wait_s(1.0, now)):
            raise self._reached(key, "tokens_per_minute", wait_s)
        if requests is not None:
            if wait_s := requests.wait_s(1.0, now):
                raise self._reached(key, "requests_per_minute", wait_s)
            requests.take(1.0, now)
        account.in_flight += 1
        if self._publish is not None:
            account.all_requests += 1
            self._changed(key.name, account)
        tally = account.requests_tally
        if tally is None:
            tally = account.requests_tally = self._metrics.key_requests.labels(key.name)
        tally.value += 1.0
        return KeyUse(client)

    def check_prompt(self, client: KnownClient, tokens: int) -> None:
        """Raises PromptTooLong if the key does not permit a prompt of `tokens`."""
        key, most = client.key, client.account.max_prompt_tokens
        if most and tokens > most:
            self._count(key, "prompt_tokens")
            raise PromptTooLong(tokens, most, key.name)

    # Other processes

    def share(self, publish: Callable[[SharedUse], None]) -> None:
        """Publish the use of each key, at most every `_SETTLE_S`."""
        self._publish = publish

    def own_uses(self) -> list[SharedUse]:
        """What this process has used since its start: so others know which part they have charged."""
        return [
            SharedUse(name, 0, 0, account.all_requests, account.all_tokens, account.in_flight)
            for name, account in self._accounts.items()
            if account.all_requests
        ]

    def refilling(self) -> list[tuple[str, int, int]]:
        """Requests and tokens of all processes that have not refilled yet, by key, for one that joins."""
        now, found = self._clock.now(), []
        for name, account in self._accounts.items():
            requests = 0 if account.requests is None else round(account.requests.used(now))
            tokens = 0 if account.tokens is None else round(account.tokens.used(now))
            if requests or tokens:
                found.append((name, requests, tokens))
        return found

    def charge(self, key: str, requests: float, tokens: float) -> None:
        """Charge what other processes have used of a key's limits."""
        account, now = self._accounts.get(key), self._clock.now()
        if account is None:
            return
        for bucket, amount, limit in (
            (account.requests, requests, "requests_per_minute"),
            (account.tokens, tokens, "tokens_per_minute"),
        ):
            if bucket is not None and amount > 0:
                excess = bucket.excess(now)
                bucket.take(amount, now)
                if (more := bucket.excess(now) - excess) > 0:
                    self._metrics.key_overshoot.labels(key, limit).inc(more)

    def used_elsewhere(self, peer: int | str, use: SharedUse) -> None:
        """Charge what another process has published. Uses that were lost on the way are in its totals."""
        account = self._accounts.get(use.key)
        known = self._elsewhere.setdefault(peer, {})
        before, part = known.get(use.key), 1.0
        if before is None and peer in self._silent:
            before, part = self._use_before_silence(peer, use.key)
        known[use.key] = use
        if account is None:
            return
        account.elsewhere += use.in_flight - (0 if before is None else before.in_flight)
        is_first = use.requests == use.all_requests > 0 and use.tokens == use.all_tokens
        if before is None or is_first or use.all_requests < before.all_requests:  # its account there is new
            self.charge(use.key, use.requests, use.tokens)
        else:
            requests, tokens = use.all_requests - before.all_requests, use.all_tokens - before.all_tokens
            self.charge(use.key, part * requests, part * tokens)

    def _use_before_silence(self, peer: int | str, key: str) -> tuple[SharedUse, float]:
        """What a process had used before it was gone, and which part of its later use to charge (0 to 1)."""
        gone_at, uses = self._silent[peer]
        # Limits refill within a minute, so of a longer silence only the last minute's part counts: a client
        # that stayed within its limits is not refused after it.
        part = _MINUTE_S / max(_MINUTE_S, self._clock.now() - gone_at)
        return uses.pop(key, SharedUse(key, 0, 0, 0, 0, 0)), part

    def peer_gone(self, peer: int | str) -> None:
        """Another process is gone, and its requests with it. What it uses until it is heard again is charged
        then, by its totals."""
        uses = self._elsewhere.pop(peer, {})
        for name, use in uses.items():
            if name in self._accounts:
                self._accounts[name].elsewhere -= use.in_flight
        # A key of which it has sent nothing since it was gone before keeps its last use.
        last = self._silent.pop(peer, (0.0, {}))[1]
        last |= {name: use._replace(in_flight=0) for name, use in uses.items()}
        self._silent[peer] = self._clock.now(), last
        if len(self._silent) > _MAX_SILENT:
            del self._silent[next(iter(self._silent))]

    def _changed(self, name: str, account: Account) -> None:
        self._unsent[name] = account
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SETTLE_S, self._send)

    def _send(self) -> None:
        self._timer = None
        unsent, self._unsent = self._unsent, {}
        for name, changed in unsent.items():
            # A key that was removed may have been added again: it then has a new account. The others need the
            # figures of the new one even if it is unused, because they still count the old one's requests.
            account = self._accounts.get(name, changed)
            requests = account.all_requests - account.sent_requests
            tokens = account.all_tokens - account.sent_tokens
            account.sent_requests, account.sent_tokens = account.all_requests, account.all_tokens
            if self._publish is not None:
                self._publish(
                    SharedUse(
                        name, requests, tokens, account.all_requests, account.all_tokens, account.in_flight
                    )
                )

    def ended(self, client: KnownClient, tokens: int) -> None:
        """A request of this key has ended and was charged `tokens`."""
        if self._publish is not None:
            client.account.all_tokens += tokens
            self._changed(client.key.name, client.account)

    def tokens_tally(self, client: KnownClient) -> FastCounter:
        """The counter of the tokens that were charged to a key."""
        return self._metrics.key_tokens.labels(client.key.name)

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
            self.install(keys)
        except ConfigError as error:
            self._metrics.key_reloads.labels("refused").inc()
            log.error("the changed file of keys is refused, the old keys stay valid: %s", error)
        else:
            self._metrics.key_reloads.labels("loaded").inc()
            log.info("the changed file of keys is loaded: %d names", len(keys))

    def _reached(self, key: ClientKey, limit: str, wait_s: float) -> KeyLimitReached:
        self._count(key, limit)
        return KeyLimitReached(
            key.name, limit, getattr(key.limits, limit), max(1, ceil(wait_s - _ROUNDING_S))
        )

    def _count(self, key: ClientKey, limit: str) -> None:
        self._metrics.key_limited.labels(key.name, limit).inc()


def _seconds(moment: datetime | None) -> float:
    return float("inf") if moment is None else moment.timestamp()


def tenant_of(client: KnownClient | None) -> str:
    """The tenant of a client. All keys without a name together are one tenant, with a name that no key can
    have."""
    return "-" if client is None else client.tenant


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


class CompletionMeter(Protocol):
    """Counts the completion tokens of one answer."""

    def estimate(self, now: float) -> int:
        """The tokens of an answer that reported none, at `now` (`Clock.now`)."""
        ...

    def reported(self, completion_tokens: int, now: float) -> None:
        """The answer reported this number."""
        ...


class KeyUse(Struct, eq=False):
    """One request of a named key, until `end`. Mutable: `metered` and `end`."""

    client: KnownClient
    _meter: CompletionMeter | None = None
    _is_over: bool = False

    @property
    def is_metered(self) -> bool:
        """Whether the key limits tokens."""
        return self.client.account.tokens is not None

    def metered(self, meter: CompletionMeter) -> None:
        """The answer's tokens are counted by `meter`."""
        self._meter = meter

    def end(
        self, now: float, prompt_tokens: int, completion_tokens: int | None, *, attempts: int, status: int
    ) -> None:
        """Release and charge the request. A request that no worker got, or that failed, is not charged.

        `completion_tokens` is None if the answer reported none; then they are estimated.
        """
        if self._is_over:
            return
        self._is_over = True
        account = self.client.account
        account.in_flight -= 1
        tokens, meter, self._meter = 0, self._meter, None  # the meter holds the body
        if account.tokens is not None and attempts and (200 <= status < 400 or status == _CLIENT_LEFT):
            if completion_tokens is None:
                completion_tokens = 0 if meter is None else meter.estimate(now)
            elif meter is not None:
                meter.reported(completion_tokens, now)
            tokens = prompt_tokens + completion_tokens
            account.tokens.take(tokens, now)
            tally = account.tokens_tally
            if tally is None:
                tally = account.tokens_tally = self.client.ring.tokens_tally(self.client)
            tally.value += tokens
        self.client.ring.ended(self.client, tokens)
