from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx
from joserfc import jwt
from joserfc.jwk import ECKey, Key, OctKey
from tests.support.clocks import AdvancingClock, ManualClock

from kvroute.access.client_keys import KeyRing, tenant_of
from kvroute.access.jwt import JwtOptions, Refusal, TokenVerifier, Verified, check_key_file
from kvroute.access.key_file import read_keys
from kvroute.errors import ConfigError
from kvroute.metrics import Metrics

KEY = ECKey.generate_key("P-256", {"kid": "k"})
OTHER = ECKey.generate_key("P-256", {"kid": "other"})
URL = "https://issuer.test/keys"


def jwks(*keys: Key, **more: Any) -> str:
    return json.dumps({"keys": [{**key.as_dict(private=False), **more} for key in keys]})


def signed(clock: ManualClock, key: Key = KEY, **claims: Any) -> bytes:
    usual = {"iss": "i", "aud": "a", "sub": "c", "exp": int(clock.wall()) + 100}
    head = {"alg": "ES256", "kid": key.kid or "none"}
    return jwt.encode(head, {**usual, **claims}, key, algorithms=["ES256"]).encode()


def options(**more: Any) -> JwtOptions:
    return JwtOptions(algorithms=("ES256",), issuer="i", audience="a", **more)


def verify(verifier: TokenVerifier, token: bytes) -> Verified | Refusal:
    return verifier.verify(token, hashlib.sha256(token).digest())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    path.write_text(jwks(KEY))
    return path


@pytest.fixture
async def loaded(file: Path) -> tuple[TokenVerifier, ManualClock]:
    clock = ManualClock()
    verifier = TokenVerifier(options(jwks_file=file), Metrics(), clock)
    await verifier.load()
    return verifier, clock


async def test_a_remembered_token_still_expires(loaded) -> None:
    verifier, clock = loaded
    token = signed(clock)

    assert verify(verifier, token) == Verified("c", int(clock.wall()) + 130)
    clock.time += 129
    assert isinstance(verify(verifier, token), Verified)
    clock.time += 2
    refused = verify(verifier, token)
    assert isinstance(refused, Refusal)
    assert refused.code == "expired_token"


async def test_a_token_that_came_too_early_is_valid_later(loaded) -> None:
    verifier, clock = loaded
    token = signed(clock, nbf=int(clock.wall()) + 60)

    assert isinstance(verify(verifier, token), Refusal)
    clock.time += 40  # the leeway is 30 s
    assert isinstance(verify(verifier, token), Verified)


async def test_only_so_many_tokens_are_remembered(file) -> None:
    clock, metrics = ManualClock(), Metrics()
    verifier = TokenVerifier(options(jwks_file=file, max_cached=2), metrics, clock)
    await verifier.load()
    checked = metrics.tokens_checked.labels("valid")
    tokens = [signed(clock, n=number) for number in range(3)]

    for number in (0, 1, 0, 1, 2, 0):
        verify(verifier, tokens[number])

    assert checked.value == 4  # the last one was forgotten


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no json", "no JWKS"),
        ("{}", "no JWKS"),
        ('{"keys": 3}', "no list"),
        ('{"keys": []}', "no key for signatures"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "no key for signatures"),
        (jwks(KEY, use="enc"), "no key for signatures"),
        ('{"keys": [{"kty": "magic"}, 5]}', "no key for signatures"),
    ],
)
async def test_a_jwks_without_a_usable_key_is_refused_and_the_old_keys_stay(
    loaded, file, text, reason, caplog
) -> None:
    verifier, clock = loaded
    file.write_text(text)

    await verifier.load()

    assert reason in caplog.text
    assert isinstance(verify(verifier, signed(clock)), Verified)
    with pytest.raises(ConfigError, match=reason):
        check_key_file(options(jwks_file=file))


def test_short_secrets_and_missing_files_are_configuration_errors(tmp_path) -> None:
    path = tmp_path / "secret"
    of_secret = JwtOptions(algorithms=("HS256",), secret_file=path)
    with pytest.raises(ConfigError, match=r"server\.jwt\.secret_file: cannot read"):
        check_key_file(of_secret)
    for text in ("", "short\n", "x" * 32 + "\nshort\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="32 bytes"):
            check_key_file(of_secret)
    path.write_text("x" * 32)
    check_key_file(of_secret)


async def test_a_key_is_used_for_its_own_algorithm_only(file) -> None:
    clock = ManualClock()
    file.write_text(jwks(KEY, alg="ES384"))
    verifier = TokenVerifier(options(jwks_file=file), Metrics(), clock)
    await verifier.load()

    refused = verify(verifier, signed(clock))

    assert isinstance(refused, Refusal)
    assert "kid" in refused.reason


@pytest.fixture
async def remote() -> Any:
    """A verifier whose JWKS is served by respx, its clock, and the route."""
    clock = AdvancingClock()
    with respx.mock(assert_all_called=False) as mock:
        route = mock.get(URL).mock(return_value=httpx.Response(200, text=jwks(KEY)))
        verifier = TokenVerifier(options(jwks_url=URL), Metrics(), clock)
        await verifier.load()
        task = asyncio.create_task(verifier.run())
        yield verifier, clock, route
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await verifier.aclose()


async def settled(clock: AdvancingClock, is_done: Callable[[], bool]) -> None:
    """Let the thread that parses keys finish."""
    async with asyncio.timeout(10):
        while not is_done():
            await clock.settle()


async def test_an_unknown_key_causes_one_early_read_however_many_tokens_have_it(remote) -> None:
    verifier, clock, route = remote
    route.mock(return_value=httpx.Response(200, text=jwks(KEY, OTHER)))
    tokens = [signed(clock, OTHER, n=number) for number in range(3)]

    await clock.advance(50)
    assert route.call_count == 1
    assert all(isinstance(verify(verifier, token), Refusal) for token in tokens)
    await clock.advance(10)
    await settled(clock, lambda: isinstance(verify(verifier, tokens[0]), Verified))

    assert route.call_count == 2
    assert all(isinstance(verify(verifier, token), Verified) for token in tokens)
    await clock.advance(100)
    assert route.call_count == 2


async def test_the_keys_are_read_at_the_interval_and_sooner_after_a_failure(remote) -> None:
    _, clock, route = remote
    route.mock(side_effect=httpx.ConnectError("no"))

    await clock.advance(299)
    assert route.call_count == 1
    await clock.advance(2)
    assert route.call_count == 2
    await clock.advance(10)
    assert route.call_count == 3


@pytest.mark.parametrize("answer", [httpx.Response(302), httpx.Response(200, content=b"x" * 1_100_000)])
async def test_a_redirect_or_an_endless_jwks_is_a_failure(remote, answer, caplog) -> None:
    verifier, clock, route = remote
    route.mock(return_value=answer)

    await verifier.load()

    assert "server.jwt.jwks_url" in caplog.text
    assert isinstance(verify(verifier, signed(clock)), Verified)


async def test_clients_of_the_default_entry_are_tenants_that_no_name_of_a_key_can_equal(file) -> None:
    clock = ManualClock()
    verifier = TokenVerifier(options(jwks_file=file, default_key="rest"), Metrics(), clock)
    await verifier.load()
    entries = [{"name": "rest", "jwt": []}, {"name": "mine", "jwt": "own"}]
    ring = KeyRing(read_keys(json.dumps({"keys": entries}), "f"), Metrics(), clock, tokens=verifier)

    clients = ("x", "y", "own", "rest", "mine")
    tenants = [tenant_of(ring.find(signed(clock, sub=client))) for client in clients]

    assert tenants == ["jwt:x", "jwt:y", "mine", "jwt:rest", "jwt:mine"]
    with pytest.raises(ConfigError, match="default_key"):
        ring.install(read_keys(json.dumps({"keys": entries[1:]}), "f"))
    assert tenant_of(ring.find(signed(clock, sub="x"))) == "jwt:x"


def test_without_the_library_tokens_are_a_configuration_error(monkeypatch, file) -> None:
    monkeypatch.setattr("kvroute.access.jwt.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"kvroute\[jwt\]"):
        check_key_file(options(jwks_file=file))
    with pytest.raises(ConfigError, match=r"kvroute\[jwt\]"):
        TokenVerifier(options(jwks_file=file), Metrics(), ManualClock())
    check_key_file(JwtOptions())


@pytest.mark.parametrize(
    ("entry", "words"),
    [({"name": "b", "jwt": ["c"]}, "the jwt is also one of keys"), ({"name": "b"}, "set `hash` or `jwt`")],
)
def test_an_ambiguous_or_empty_entry_is_refused(entry, words) -> None:
    with pytest.raises(ConfigError, match=words):
        read_keys(json.dumps({"keys": [{"name": "a", "jwt": "c"}, entry]}), "f")


async def test_a_secret_in_a_jwks_is_never_used(loaded, file) -> None:
    verifier, clock = loaded
    secret = OctKey.import_key(b"s" * 32, {"kid": "k2"})
    listed = json.loads(jwks(KEY))["keys"] + [secret.as_dict(private=True)]
    file.write_text(json.dumps({"keys": listed}))
    await verifier.load()
    forged = jwt.encode(
        {"alg": "HS256", "kid": "k2"},
        {"iss": "i", "aud": "a", "sub": "c", "exp": int(clock.wall()) + 9},
        secret,
        algorithms=["HS256"],
    )

    assert isinstance(verify(verifier, forged.encode()), Refusal)
    assert isinstance(verify(verifier, signed(clock)), Verified)
