"""JSON Web Tokens as keys, with real sockets: an issuer's JWKS over HTTP, the openai client, both lanes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from joserfc.jwk import ECKey, OctKey, RSAKey
from tests.support.certificates import Authority
from tests.support.sockets import tcp_server
from tests.support.tokens import AUDIENCE, FIRST, ISSUER, STRANGER, Issuer, token, unsigned
from tests.support.workers import ScriptedWorker

from kvroute.config.config import Config

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
COMPLETION = json.dumps(
    {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
).encode()
SECOND = RSAKey.generate_key(2048, {"kid": "second"})


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    serving = Issuer()
    async with tcp_server(serving.serve) as port:
        serving.url = f"http://127.0.0.1:{port}/keys"
        yield serving


def hash_of(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    entries = [
        {"name": "team", "jwt": ["auth0|1", "two"], "limits": {"body_bytes": 2000}},
        {"name": "small", "jwt": "three", "models": ["other"]},
        {"name": "rest", "jwt": []},
        {"name": "plain", "hash": hash_of("plain-key")},
        {"name": "past", "jwt": "four", "expires": "2001-01-01T00:00:00Z"},
    ]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": entries}))
    return path


def server_of(file: Path, **options: Any) -> dict[str, Any]:
    usual = {"algorithms": ["ES256", "RS256"], "issuer": ISSUER, "audience": AUDIENCE}
    jwt = {**usual, "refresh_interval_s": 0.1, "timeout_s": 20.0, **options}
    return {"jwt": jwt, "client_keys": {"file": str(file)}}


async def chat(running: Any, key: str, **fields: Any) -> Any:
    http = httpx.AsyncClient(trust_env=False)
    client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, http_client=http, max_retries=0)
    async with client:
        return await client.chat.completions.create(**{**CHAT, **fields})


def answering(worker: ScriptedWorker) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    worker.answer = head % len(COMPLETION) + COMPLETION


async def test_a_token_is_checked_once_and_has_its_entrys_rights(
    run_gateway, raw_worker, issuer, file
) -> None:
    answering(raw_worker)
    server = server_of(file, jwks_url=issuer.url, refresh_interval_s=300)
    async with run_gateway([raw_worker.url], server=server) as running:
        mine = token()
        for _ in range(3):
            assert (await chat(running, mine)).id == "c"
        assert (await chat(running, "plain-key")).id == "c"
        assert (await chat(running, token("two"))).id == "c"

        with pytest.raises(openai.PermissionDeniedError) as other_model:
            await chat(running, token("three"))
        assert other_model.value.body["code"] == "model_not_permitted"
        with pytest.raises(openai.APIStatusError) as too_large:
            await chat(running, mine, user="x" * 2000)
        assert "'team'" in too_large.value.body["message"]

        assert issuer.reads == 1
        assert running.metric("kvroute_key_requests_total", key="team") == 4
        assert b"authorization" not in b"".join(raw_worker.requests).lower()
        headers = {"x-api-key": mine}
        assert (await running.client.get("/v1/models", headers=headers)).json()["data"]
        assert (
            await running.client.get("/admin/workers", headers={"authorization": f"Bearer {mine}"})
        ).status_code == 401


def tampered() -> str:
    head, payload, signature = token().split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    forged = base64.urlsafe_b64encode(json.dumps({**claims, "sub": "two"}).encode()).rstrip(b"=").decode()
    return f"{head}.{forged}.{signature}"


def signed_with_the_public_key() -> str:
    """The attack that confuses algorithms: a public key, used as a shared secret."""
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"first"}').rstrip(b"=")
    signed = head + b"." + token().split(".")[1].encode()
    signature = hmac.digest(FIRST.as_pem(private=False), signed, "sha256")
    return (signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


REFUSED = {
    "expired": (lambda: token(exp=int(time.time()) - 60), "expired_token", "expired"),
    "no exp": (lambda: token(exp=None), "invalid_token", "exp"),
    "exp is text": (lambda: token(exp="9999999999"), "invalid_token", "exp"),
    "not yet valid": (lambda: token(nbf=int(time.time()) + 600), "invalid_token", "not valid yet"),
    "wrong signature": (lambda: token(key=STRANGER), "invalid_token", "signature"),
    "changed claims": (tampered, "invalid_token", "signature"),
    "unknown kid": (lambda: token(key=ECKey.generate_key("P-256", {"kid": "new"})), "invalid_token", "kid"),
    "wrong audience": (lambda: token(aud="other"), "invalid_token", "aud"),
    "no audience": (lambda: token(aud=None), "invalid_token", "aud"),
    "wrong issuer": (lambda: token(iss="https://other.test/"), "invalid_token", "iss"),
    "no client": (lambda: token(sub=None), "invalid_token", "sub"),
    "client is no text": (lambda: token(sub="", name="x"), "invalid_token", "sub"),
    "no algorithm": (unsigned, "invalid_token", "alg"),
    "another algorithm": (signed_with_the_public_key, "invalid_token", "alg"),
    "no token": (lambda: "a.b.c", "invalid_token", "no JSON Web Token"),
    "deep header": (
        lambda: base64.urlsafe_b64encode(b'{"alg":' + b"[" * 9000).decode() + ".b.c",
        "invalid_token",
        "no JSON Web Token",
    ),
    "entry has expired": (lambda: token("four"), "expired_api_key", "expired"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_wrong_token_is_answered_401_in_words(
    run_gateway, raw_worker, issuer, file, case, caplog
) -> None:
    make, code, words = REFUSED[case]
    server = server_of(file, jwks_url=issuer.url)
    async with run_gateway([raw_worker.url], server=server) as running:
        wrong = make()
        for _ in range(2):  # the second time, the outcome is remembered
            with pytest.raises(openai.AuthenticationError) as refused:
                await chat(running, wrong)
            assert refused.value.body["code"] == code
            assert words in refused.value.body["message"]
            assert wrong not in refused.value.response.text
    assert raw_worker.requests == []
    assert wrong not in caplog.text


async def test_a_client_without_an_entry_is_refused_or_gets_the_default_entry(
    run_gateway, raw_worker, issuer, file
) -> None:
    answering(raw_worker)
    async with run_gateway([raw_worker.url], server=server_of(file, jwks_url=issuer.url)) as running:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await chat(running, token("nobody"))
        assert refused.value.body["code"] == "client_not_permitted"

    server = {
        **server_of(file, jwks_url=issuer.url, default_key="rest"),
        "isolation": "per-key",
        "isolation_checks_release": False,  # the worker has no /version
    }
    async with run_gateway([raw_worker.url], server=server) as running:
        for client in ("nobody", "another", "nobody", "two"):
            assert (await chat(running, token(client))).id == "c"
        assert running.metric("kvroute_key_requests_total", key="rest") == 3
        salts = [json.loads(body)["cache_salt"] for body in raw_worker.bodies]
        assert salts[0] == salts[2]
        assert len(set(salts)) == 3


async def test_keys_rotate_and_an_unreachable_issuer_leaves_the_old_ones(
    run_gateway, raw_worker, issuer, file, caplog
) -> None:
    answering(raw_worker)
    async with run_gateway([raw_worker.url], server=server_of(file, jwks_url=issuer.url)) as running:
        old, new = token(), token(key=SECOND, alg="RS256")
        assert (await chat(running, old)).id == "c"
        with pytest.raises(openai.AuthenticationError):
            await chat(running, new)

        issuer.is_up = False
        await running.until(lambda: running.metric("kvroute_jwks_reads_total", outcome="failed") >= 2)
        assert (await chat(running, old)).id == "c"
        failures = [
            each for each in caplog.records if "signing keys of tokens cannot be read" in each.getMessage()
        ]
        assert len(failures) == 1

        issuer.keys, issuer.is_up = [SECOND], True
        await running.until(lambda: running.metric("kvroute_jwks_reads_total", outcome="loaded") == 2)
        assert (await chat(running, new)).id == "c"
        with pytest.raises(openai.AuthenticationError):
            await chat(running, old)  # verified before, but its key was withdrawn


async def test_until_the_keys_are_known_tokens_are_answered_503(
    run_gateway, raw_worker, issuer, file
) -> None:
    answering(raw_worker)
    issuer.is_up = False
    async with run_gateway([raw_worker.url], server=server_of(file, jwks_url=issuer.url)) as running:
        with pytest.raises(openai.InternalServerError) as early:
            await chat(running, token())
        assert early.value.status_code == 503
        assert early.value.body["code"] == "signing_keys_unknown"
        assert (await chat(running, "plain-key")).id == "c"

        issuer.is_up = True
        await running.until(lambda: running.metric("kvroute_jwks_reads_total", outcome="loaded") == 1)
        assert (await chat(running, token())).id == "c"


async def test_the_issuers_private_authority_is_trusted_by_configuration_only(
    run_gateway, raw_worker, issuer, file, tmp_path
) -> None:
    answering(raw_worker)
    authority = Authority(tmp_path)
    async with tcp_server(issuer.serve, tls=authority.server(authority.issue("issuer"))) as port:
        url = f"https://127.0.0.1:{port}/keys"
        async with run_gateway([raw_worker.url], server=server_of(file, jwks_url=url)) as running:
            assert running.metric("kvroute_jwks_reads_total", outcome="loaded") == 0

        server = server_of(file, jwks_url=url, tls={"ca_file": str(authority.file)})
        async with run_gateway([raw_worker.url], server=server) as running:
            assert (await chat(running, token())).id == "c"


async def test_shared_secrets_are_read_from_a_file_and_all_are_valid(
    run_gateway, raw_worker, file, tmp_path
) -> None:
    answering(raw_worker)
    secrets = [OctKey.import_key(bytes([letter]) * 32) for letter in b"ab"]
    path = tmp_path / "secrets"
    path.write_bytes(b"\n".join(bytes([letter]) * 32 for letter in b"ab"))
    server = server_of(file, secret_file=str(path), algorithms=["HS256"], issuer="", audience="")
    async with run_gateway([raw_worker.url], server=server) as running:
        for secret in secrets:
            assert (await chat(running, token(key=secret, alg="HS256", iss=None, aud=None))).id == "c"
        path.write_bytes(b"b" * 32)
        await running.until(lambda: running.metric("kvroute_jwks_reads_total", outcome="loaded") == 2)
        with pytest.raises(openai.AuthenticationError):
            await chat(running, token(key=secrets[0], alg="HS256"))


@pytest.mark.parametrize("lane", ["fast lane"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithms": []}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"algorithms": ["HS256"]}, "does not fit"),
        ({"issuer": ""}, "issuer"),
        ({"audience": ""}, "audience"),
        ({"jwks_file": "/x"}, "only one"),
        ({"jwks_url": "file:///x"}, "https://"),
        ({"jwks_url": "", "secret_file": "/x"}, "does not fit"),
    ],
)
def test_an_unsafe_configuration_is_refused(lane, options, words) -> None:
    usual = {"jwks_url": "https://i/keys", "algorithms": ["ES256"], "issuer": "i", "audience": "a"}
    with pytest.raises(ValueError, match=words):
        Config.model_validate({"server": {"jwt": {**usual, **options}, "client_keys": {"file": "/k"}}})
    with pytest.raises(ValueError, match=r"client_keys\.file"):
        Config.model_validate({"server": {"jwt": usual}})
