"""JSON Web Tokens of clients: the signing keys, the checks of a token, and the cache of verified tokens.

A token names its client in a claim; `client_keys` has what that client may do. Signing keys come from a JWKS
(RFC 7517, by URL or file) or from a file of shared secrets, and are loaded again in the background. The
library `joserfc` checks signatures and claims.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from base64 import urlsafe_b64decode
from collections.abc import Collection, Container, Mapping, Sequence
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import httpx
import msgspec
from msgspec import Struct
from pydantic import model_validator

from kvroute.answers import AnswerRefused, BoundedTransport
from kvroute.clock import Clock
from kvroute.errors import ConfigError, GatewayError, KvrouteError, SigningKeysUnknown, Unauthorized
from kvroute.lru import Lru
from kvroute.metrics import Metrics
from kvroute.options import Options, option
from kvroute.secret_files import writers_problem
from kvroute.tls import ClientTlsOptions, client_context

if TYPE_CHECKING:
    from joserfc.jwk import Key

log = logging.getLogger(__name__)

SECTION: Final = "server.jwt"
_MAX_BYTES: Final = 1024 * 1024
_MAX_KEYS: Final = 64
_MAX_TRIED: Final = 8
"""Keys that are tried for a token that names none."""
_MAX_TOKEN_BYTES: Final = 16 * 1024
_MAX_CLIENT_CHARS: Final = 256
_MIN_SECRET_BYTES: Final = 32
_FILE_INTERVAL_S: Final = 5.0
_RETRY_S: Final = 10.0
"""Shortest time between two reads of a JWKS that fails or lacks a key."""
_CHECKED: Final = ("exp", "iss", "aud", "nbf", "iat")
_KINDS: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP", "HS": "oct"}
"""The type of key (RFC 7518, 8037) by the first letters of an algorithm."""

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA",
    "HS256", "HS384", "HS512",
]  # fmt: skip


class JwtOptions(Options):
    """JSON Web Tokens as API keys; off unless one of `jwks_url`, `jwks_file` and `secret_file` is set."""

    jwks_url: str = option(
        "",
        "URL of the issuer's JWKS (its public keys). Use https: who can change this answer can sign tokens.",
    )
    jwks_file: Path | None = option(None, "File with a JWKS, loaded again when it changes.")
    secret_file: Path | None = option(
        None,
        "File with shared secrets, one per line, each of 32 bytes or more and all valid. Loaded again when "
        "it changes.",
    )
    tls: ClientTlsOptions = option(default_factory=ClientTlsOptions)
    algorithms: tuple[Algorithm, ...] = option(
        (),
        "Algorithms that a token may be signed with. Required: a token's own header never decides. `HS...` "
        "needs `secret_file`, all others a JWKS; `none` does not exist.",
    )
    issuer: str = option("", "Value of the claim `iss`. Required with a JWKS; empty: not checked.")
    audience: str = option(
        "",
        "Value that the claim `aud` must have or contain. Required with a JWKS, because an issuer signs "
        "tokens for others too; empty: not checked.",
    )
    claim: str = option("sub", "The claim that names the client. Its value is text.", min_length=1)
    default_key: str = option(
        "",
        "Name of the entry of `server.client_keys.file` for tokens whose client has no entry of its own. "
        "Empty: such clients are answered 403.",
    )
    leeway_s: float = option(
        30.0,
        "Difference of clocks that is allowed when `exp`, `nbf` and `iat` are checked.",
        unit="s",
        higher="an issuer with a wrong clock is tolerated",
        lower="expired tokens are refused sooner",
        ge=0,
        le=600,
    )
    refresh_interval_s: float = option(
        300.0,
        "Time between two reads of `jwks_url`. A token with an unknown key causes an earlier read, every "
        "10 s at most.",
        unit="s",
        higher="fewer requests to the issuer",
        lower="a withdrawn key counts sooner",
        gt=0,
    )
    timeout_s: float = option(
        5.0, "Longest time of one read of `jwks_url`. At the start, the gateway waits for it.", unit="s", gt=0
    )
    max_cached: int = option(
        10_000,
        "Verified tokens that are remembered until they expire, about 400 bytes each.",
        unit="tokens",
        higher="fewer signatures are checked: about 0.2 ms each",
        lower="less memory",
        ge=1,
    )

    @property
    def is_on(self) -> bool:
        return bool(self.jwks_url or self.jwks_file or self.secret_file)

    @model_validator(mode="after")
    def _are_complete(self) -> JwtOptions:
        if not self.is_on:
            return self
        if sum(map(bool, (self.jwks_url, self.jwks_file, self.secret_file))) > 1:
            raise ValueError("set only one of jwks_url, jwks_file and secret_file")
        if self.jwks_url and not self.jwks_url.startswith(("https://", "http://")):
            raise ValueError("jwks_url: must start with https:// or http://")
        if not self.algorithms:
            raise ValueError("algorithms: list the algorithms that tokens may have")
        wrong = [each for each in self.algorithms if each.startswith("HS") is not bool(self.secret_file)]
        if wrong:
            source = (
                "secret_file takes HS256, HS384 and HS512" if self.secret_file else "a JWKS takes no HS..."
            )
            raise ValueError(f"algorithms: {wrong[0]} does not fit, because {source}")
        if not self.secret_file and not (self.issuer and self.audience):
            raise ValueError(f"{'audience' if self.issuer else 'issuer'}: is required with a JWKS")
        return self


class Verified(NamedTuple):
    """The client that a valid token names, and when the token expires (seconds since the epoch)."""

    client: str
    expires: float


class Refusal(NamedTuple):
    """Why a token is refused, in words without the token's content."""

    reason: str
    code: str = "invalid_token"

    def error(self) -> GatewayError:
        if self.code == SigningKeysUnknown.code:
            return SigningKeysUnknown(self.reason, retry_after_s=1)
        return Unauthorized(self.reason, param="authorization", code=self.code)


_NOT_A_TOKEN = Refusal("The token is no JSON Web Token.")
_EXPIRED = Refusal("The token has expired.", "expired_token")
_TOO_EARLY = Refusal("The token is not valid yet (claim `nbf` or `iat`).")
_UNKNOWN_KEY = Refusal("The token's signing key (`kid`) is unknown.")
_WRONG_SIGNATURE = Refusal("The token's signature is wrong.")
_NO_KEYS = Refusal("The signing keys of tokens could not be read yet.", SigningKeysUnknown.code or "")
_PASSING = frozenset({_TOO_EARLY, _NO_KEYS})
"""Refusals that end without a change of the keys, so they are not remembered."""


class _Header(Struct):
    alg: str
    kid: str | None = None


_read_header = msgspec.json.Decoder(_Header).decode


class KeysUnreadable(KvrouteError):
    """The signing keys cannot be read; the text says why, without their content."""


class TokenVerifier:
    """Verifies tokens with the keys that were loaded last.

    Mutable: `load` and `run` replace the keys, `verify` remembers outcomes by the token's digest. A token's
    first check costs about 0.2 ms (a signature), each later one a lookup.
    `__init__` raises ConfigError if `joserfc` is not installed, and TlsFileError.
    """

    def __init__(self, options: JwtOptions, metrics: Metrics, clock: Clock) -> None:
        _require_library()
        self.options = options
        self._metrics = metrics
        self._clock = clock
        self._keys: tuple[Key, ...] = ()
        self._raw = b""
        self._is_failing = False
        self._lacks_key = False
        self._outcomes = Lru[bytes, Verified | Refusal](options.max_cached)
        self._client: httpx.AsyncClient | None = None
        if options.jwks_url:
            context = client_context(options.tls, f"{SECTION}.tls", ssl.create_default_context)
            bounded = BoundedTransport(
                httpx.AsyncHTTPTransport(verify=context, trust_env=False),
                max_bytes=_MAX_BYTES,
                on_refused=metrics.answer_refused,
            )
            self._client = httpx.AsyncClient(transport=bounded, trust_env=False, follow_redirects=False)
        for outcome in ("loaded", "unchanged", "failed"):
            metrics.jwks_reads.labels(outcome)

    def verify(self, token: bytes, digest: bytes) -> Verified | Refusal:
        """Check a token; `digest` is its SHA-256."""
        outcome = self._outcomes.get(digest)
        if outcome is None:
            outcome = self._verify(token)
            self._metrics.tokens_checked.labels("valid" if type(outcome) is Verified else "refused").inc()
            if outcome is _UNKNOWN_KEY:
                self._lacks_key = True
            if outcome not in _PASSING:
                self._outcomes.put(digest, outcome)
        elif type(outcome) is Verified and outcome.expires <= self._clock.wall():
            return _EXPIRED
        return outcome

    def _verify(self, token: bytes) -> Verified | Refusal:
        options = self.options
        if len(token) > _MAX_TOKEN_BYTES:
            return Refusal(f"The token is larger than {_MAX_TOKEN_BYTES} bytes.")
        if not self._keys:
            return _NO_KEYS
        try:
            header = _read_header(urlsafe_b64decode(token.split(b".", 1)[0] + b"=="))
        except (ValueError, msgspec.MsgspecError, RecursionError):
            return _NOT_A_TOKEN
        if header.alg not in options.algorithms:
            return Refusal("The token's algorithm (`alg`) is none of server.jwt.algorithms.")
        keys = _fitting(self._keys, header)
        if not keys:
            return _UNKNOWN_KEY
        for key in keys:
            claims = _claims(token, key, header.alg)
            if claims is not None:
                return self._checked(claims)
        return _WRONG_SIGNATURE

    def _checked(self, claims: Mapping[str, Any]) -> Verified | Refusal:
        from joserfc.errors import ExpiredTokenError, InvalidClaimError, JoseError, MissingClaimError
        from joserfc.jwt import JWTClaimsRegistry

        options = self.options
        expected: dict[str, Any] = {"exp": {"essential": True}}
        if options.issuer:
            expected["iss"] = {"essential": True, "value": options.issuer}
        if options.audience:
            expected["aud"] = {"essential": True, "value": options.audience}
        now = self._clock.wall()
        try:
            JWTClaimsRegistry(now=int(now), leeway=int(options.leeway_s), **expected).validate(dict(claims))
            expires = float(claims["exp"])
        except ExpiredTokenError:
            return _EXPIRED
        except (MissingClaimError, InvalidClaimError) as error:
            names = [each for each in _CHECKED if each in error.claim.split(",")]
            if not names:
                return Refusal("A claim of the token is wrong.")
            if names[0] in ("nbf", "iat"):
                return _TOO_EARLY
            return Refusal(f"The token's claim `{names[0]}` is absent or wrong.")
        except (JoseError, ValueError, TypeError, OverflowError):
            return Refusal("A claim of the token is wrong.")
        client = claims.get(options.claim)
        if not isfinite(expires) or not isinstance(client, str) or not 0 < len(client) <= _MAX_CLIENT_CHARS:
            return Refusal(f"The token's claim `{options.claim}` names no client (server.jwt.claim).")
        return Verified(client, expires + options.leeway_s)

    async def load(self) -> None:
        """Read the keys once. A failure is counted and logged, and the keys from before stay."""
        try:
            raw = await self._read()
            if raw == self._raw:
                self._metrics.jwks_reads.labels("unchanged").inc()
            else:
                keys = await asyncio.to_thread(_parse, raw, is_secret=self.options.secret_file is not None)
                self._keys, self._raw = keys, raw
                self._outcomes.evict(0)  # a token of a withdrawn key must not stay valid
                self._metrics.jwks_reads.labels("loaded").inc()
                log.info("the signing keys of tokens are loaded: %d keys", len(keys))
        except KeysUnreadable as error:
            self._metrics.jwks_reads.labels("failed").inc()
            if not self._is_failing:
                log.error("the signing keys of tokens cannot be read, the old ones stay valid: %s", error)
            self._is_failing = True
        else:
            if self._is_failing:
                log.info("the signing keys of tokens can be read again")
            self._is_failing = False

    async def run(self) -> None:
        """Load the keys again at intervals, until cancelled; sooner after a failure or for an unknown key."""
        normal = self.options.refresh_interval_s
        if not self.options.jwks_url:
            normal = min(normal, _FILE_INTERVAL_S)
        early = min(normal, _RETRY_S)
        waited = 0.0
        while True:
            await self._clock.sleep(early)
            waited += early
            if waited >= normal or self._lacks_key or self._is_failing or not self._keys:
                waited, self._lacks_key = 0.0, False
                await self.load()

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _read(self) -> bytes:
        options = self.options
        if self._client is None:
            file = options.jwks_file or options.secret_file
            assert file is not None
            return await asyncio.to_thread(_read_file, file)
        try:
            async with asyncio.timeout(options.timeout_s):
                async with self._client.stream("GET", options.jwks_url) as answer:
                    if answer.status_code != 200:
                        raise KeysUnreadable(f"{SECTION}.jwks_url answers {answer.status_code}")
                    parts = [part async for part in answer.aiter_raw()]
        except AnswerRefused as error:
            raise KeysUnreadable(f"{SECTION}.jwks_url: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise KeysUnreadable(f"{SECTION}.jwks_url: {type(error).__name__}") from None
        return b"".join(parts)


def check_key_file(options: JwtOptions) -> None:
    """Raise ConfigError if `joserfc` is needed and absent, or a file of keys cannot be used.

    Reads no URL. Blocks.
    """
    if options.is_on:
        _require_library()
    for name, file in (("jwks_file", options.jwks_file), ("secret_file", options.secret_file)):
        if file is not None:
            try:
                _parse(_read_file(file), is_secret=name == "secret_file")
            except KeysUnreadable as error:
                raise ConfigError(f"{SECTION}.{name}", str(error)) from None


def check_default_key(options: JwtOptions, names: Container[str]) -> None:
    """Raise ConfigError if the default key is none of the `names` in the file of keys."""
    if options.is_on and options.default_key and options.default_key not in names:
        raise ConfigError(f"{SECTION}.default_key", f"the file of keys has no {options.default_key!r}")


def _require_library() -> None:
    # Gateways without tokens need neither joserfc nor cryptography.
    if find_spec("joserfc") is None:
        raise ConfigError(SECTION, "tokens need the library joserfc: pip install 'kvroute[jwt]'")


def _read_file(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise KeysUnreadable(f"cannot read {file}: {error.strerror}") from None
    if len(raw) > _MAX_BYTES:
        raise KeysUnreadable(f"{file} is larger than {_MAX_BYTES} bytes")
    if problem := writers_problem(file):
        raise KeysUnreadable(problem)
    return raw


def _parse(raw: bytes, *, is_secret: bool) -> tuple[Key, ...]:
    """The keys of a JWKS, or of a file of secrets. Keys for other uses and of unknown types are skipped."""
    from joserfc.jwk import JWKRegistry, OctKey

    if is_secret:
        secrets = [line.strip() for line in raw.splitlines() if line.strip()]
        if not secrets or min(map(len, secrets)) < _MIN_SECRET_BYTES:
            raise KeysUnreadable(f"a secret needs {_MIN_SECRET_BYTES} bytes or more, and there must be one")
        try:
            return tuple(OctKey.import_key(secret) for secret in secrets[:_MAX_TRIED])
        except ValueError:
            raise KeysUnreadable("a secret is a public key") from None
    try:
        listed = msgspec.json.decode(raw, type=dict[str, Any])["keys"]
        if not isinstance(listed, list):
            raise KeysUnreadable("`keys` of the JWKS is no list")
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError):
        raise KeysUnreadable("it is no JWKS") from None
    found: list[Key] = []
    for each in listed[:_MAX_KEYS]:
        # A public document must not contain shared secrets: everybody could sign with them.
        if not isinstance(each, dict) or each.get("kty") == "oct" or each.get("use", "sig") != "sig":
            continue
        try:
            found.append(JWKRegistry.import_key(each))
        except Exception as error:  # noqa: BLE001 - joserfc and cryptography document no common class
            log.warning("a key of the JWKS is skipped: %s", type(error).__name__)
    if not found:
        raise KeysUnreadable("the JWKS has no key for signatures")
    return tuple(found)


def _fitting(keys: Collection[Key], header: _Header) -> Sequence[Key]:
    """The keys that may have signed a token with this header."""
    kind = _KINDS[header.alg[:2]]
    found = [key for key in keys if key.key_type == kind and key.alg in (None, header.alg)]
    if header.kid is not None and kind != "oct":
        return [key for key in found if key.kid == header.kid]
    return found[:_MAX_TRIED]


def _claims(token: bytes, key: Key, algorithm: str) -> Mapping[str, Any] | None:
    """The claims of a token that `key` has signed; None if the signature is wrong."""
    from joserfc import jwt
    from joserfc.errors import JoseError

    try:
        return jwt.decode(token, key, algorithms=[algorithm]).claims
    except (JoseError, ValueError, TypeError, RecursionError):
        return None
