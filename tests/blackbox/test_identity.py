"""Tokens with curl; keys, limits and tokens behind nginx and HAProxy, over TLS with client certificates."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from joserfc.jwk import ECKey
from tests.support.certificates import Authority
from tests.support.proxies import DEADLINE_S, PROXIES, curl, proxied
from tests.support.sockets import tcp_server
from tests.support.tokens import AUDIENCE, ISSUER, STRANGER, Issuer, token, unsigned
from tests.support.waiting import until

CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
PATH = "/v1/chat/completions"
SECOND = ECKey.generate_key("P-256", {"kid": "second"})
REFUSED = {
    "expired": (lambda: token(exp=int(time.time()) - 60), "expired_token"),
    "another audience": (lambda: token(aud="other"), "invalid_token"),
    "another issuer": (lambda: token(iss="https://other.test/"), "invalid_token"),
    "no signature": (unsigned, "invalid_token"),
    "a forged signature": (lambda: token(key=STRANGER), "invalid_token"),
    "an unknown signing key": (lambda: token(key=SECOND), "invalid_token"),
}


def entry(name: str, *keys: str, **fields: object) -> dict[str, object]:
    hashes = ["sha256:" + hashlib.sha256(key.encode()).hexdigest() for key in keys]
    return {"name": name, "hash": hashes, **fields}


@pytest.fixture
async def issuer():
    serving = Issuer()
    async with tcp_server(serving.serve) as port:
        serving.url = f"http://127.0.0.1:{port}/keys"
        yield serving


@pytest.fixture
def file(tmp_path):
    """Writes the file of keys."""
    path = tmp_path / "keys.json"

    def write(*entries: dict[str, object]) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"keys": entries}))
        new.replace(path)

    write(entry("team", "old", "new", jwt=["auth0|1"]))
    write.path = path
    return write


@pytest.fixture
def identified(serve, sim, file, issuer):
    """`await identified(...)`: a gateway with named keys and tokens before a simulated worker."""

    async def start(*arguments: str):
        settings = [
            f"client_keys.file={file.path}", "client_keys.reload_interval_s=0.1",
            f"jwt.jwks_url={issuer.url}", "jwt.algorithms=[ES256]", f"jwt.issuer={ISSUER}",
            f"jwt.audience={AUDIENCE}", "jwt.refresh_interval_s=0.2",
        ]  # fmt: skip
        words = [word for each in settings for word in ("--set", f"server.{each}")]
        return await serve("--worker", await sim("--time-scale", "0"), *words, *arguments)

    return start


@pytest.fixture
def through(identified, tmp_path):
    """`async with through(proxy) as (gateway, client)`: the gateway has TLS and asks for certificates."""

    @asynccontextmanager
    async def start(proxy: str):
        authority = Authority(tmp_path)
        pair = authority.issue("gateway")
        files = {"cert_file": pair.cert, "key_file": pair.key, "client_ca_file": authority.file}
        words = [word for name, each in files.items() for word in ("--set", f"server.tls.{name}={each}")]
        gateway = await identified(*words)
        async with (
            proxied(proxy, gateway.address, tmp_path, authority, authority.issue("proxy")) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=DEADLINE_S) as client,
        ):
            yield gateway, client

    return start


async def ask(client: httpx.AsyncClient, key: str) -> httpx.Response:
    return await client.post(PATH, json=CHAT, headers={"authorization": f"Bearer {key}"})


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def streamed(client: httpx.AsyncClient, key: str) -> int:
    """Number of chunks that the openai client gets."""
    async with openai.AsyncOpenAI(
        base_url=f"{str(client.base_url).rstrip('/')}/v1",
        api_key=key,
        http_client=httpx.AsyncClient(trust_env=False),
    ) as through:
        return len([chunk async for chunk in await through.chat.completions.create(**CHAT, stream=True)])


# --- curl -------------------------------------------------------------------------------------------------


async def with_curl(gateway, key: str) -> dict[str, object]:
    words = ["-H", f"authorization: Bearer {key}", "-H", "content-type: application/json"]
    code, answer = await curl(f"{gateway.url}{PATH}", *words, "-d", json.dumps(CHAT))
    assert code == 0, answer
    return json.loads(answer)


async def test_curl_is_answered_with_a_valid_token_and_refused_with_any_other(identified):
    gateway = await identified()

    assert (await with_curl(gateway, token()))["usage"]["completion_tokens"] == 4
    for name, (make, code) in REFUSED.items():
        wrong = make()
        error = (await with_curl(gateway, wrong))["error"]
        assert (name, error["code"], error["param"]) == (name, code, "authorization")
        assert wrong not in gateway.log
    assert (await with_curl(gateway, token("nobody")))["error"]["code"] == "client_not_permitted"


@pytest.mark.parametrize(
    ("limits", "named"),
    [({"requests_per_minute": 1}, "requests_per_minute"), ({"tokens_per_minute": 1}, "tokens_per_minute")],
)
async def test_curl_gets_429_with_the_seconds_until_it_may_retry(identified, file, limits, named):
    file(entry("limited", "limited", limits=limits), entry("free", "free"))
    gateway = await identified()
    words = ["-i", "-H", "authorization: Bearer limited", "-H", "content-type: application/json"]

    async def asked() -> tuple[str, dict[str, str], dict[str, object]]:
        code, answer = await curl(f"{gateway.url}{PATH}", *words, "-d", json.dumps(CHAT))
        assert code == 0, answer
        head, _, body = answer.partition("\r\n\r\n")
        status, *lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return status, headers, json.loads(body)

    status, _, _ = await asked()
    assert status == "HTTP/1.1 200 OK"
    status, headers, body = await asked()

    assert status == "HTTP/1.1 429 Too Many Requests"
    assert 1 <= int(headers["retry-after"]) <= 60 * 60
    assert body["error"]["code"] == "key_limit_reached"
    assert named in body["error"]["message"]
    assert "usage" in await with_curl(gateway, "free")


@pytest.mark.parametrize("count", [1, 2])
async def test_curl_uses_a_new_signing_key_and_no_withdrawn_one(identified, issuer, count):
    issuer.is_up = False
    gateway = await identified("--processes", str(count))
    assert (await with_curl(gateway, token()))["error"]["code"] == "signing_keys_unknown"

    async def answered(key: str) -> bool:
        """Each of ten new connections, which any of the processes may get."""
        return all(["usage" in await with_curl(gateway, key) for _ in range(10)])

    async def refused(key: str) -> bool:
        return all(["error" in await with_curl(gateway, key) for _ in range(10)])

    issuer.is_up = True
    await until(lambda: answered(token()), within_s=DEADLINE_S)
    issuer.keys.append(SECOND)
    await until(lambda: answered(token(key=SECOND)), within_s=DEADLINE_S)
    assert await answered(token())
    del issuer.keys[0]
    await until(lambda: refused(token()), within_s=DEADLINE_S)
    assert await answered(token(key=SECOND))
    issuer.is_up = False
    assert await answered(token(key=SECOND))


# --- proxies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proxy", PROXIES)
async def test_keys_are_checked_limited_and_rotated_behind_a_proxy(through, file, proxy):
    limits = {"requests_per_minute": 1, "body_bytes": 500}
    file(entry("team", "old", "new"), entry("small", "small", limits=limits))
    async with through(proxy) as (gateway, client):
        assert (await ask(client, "old")).status_code == (await ask(client, "new")).status_code == 200
        assert await streamed(client, "new") >= 4
        assert (await client.post(PATH, json=CHAT, headers={"x-api-key": "old"})).status_code == 200
        assert refusal(await ask(client, "wrong")) == (401, "invalid_api_key")
        assert refusal(await client.post(PATH, json=CHAT)) == (401, "invalid_api_key")

        large = {**CHAT, "user": "x" * 500}
        answer = await client.post(PATH, json=large, headers={"authorization": "Bearer small"})
        assert refusal(answer) == (413, "body_too_large")
        assert (await ask(client, "small")).status_code == 200
        answer = await ask(client, "small")
        assert refusal(answer) == (429, "key_limit_reached")
        assert 1 <= int(answer.headers["retry-after"]) <= 60

        file(entry("team", "new"))
        await gateway.logged("the changed file of keys is loaded")
        assert (await ask(client, "new")).status_code == 200
        assert refusal(await ask(client, "old")) == (401, "invalid_api_key")
        assert refusal(await ask(client, "small")) == (401, "invalid_api_key")


@pytest.mark.parametrize("proxy", PROXIES)
async def test_tokens_are_checked_and_signing_keys_rotate_behind_a_proxy(through, issuer, proxy):
    async with through(proxy) as (_, client):
        assert (await ask(client, token())).status_code == 200
        assert await streamed(client, token()) >= 4
        for make, code in REFUSED.values():
            assert refusal(await ask(client, make())) == (401, code)
        assert refusal(await ask(client, token("nobody"))) == (403, "client_not_permitted")

        async def status(key: ECKey, *, expected: int) -> bool:
            return (await ask(client, token(key=key))).status_code == expected

        issuer.keys = [SECOND]
        await until(lambda: status(SECOND, expected=200), within_s=DEADLINE_S)
        assert await status(issuer.keys[0], expected=200)
        assert refusal(await ask(client, token())) == (401, "invalid_token")
