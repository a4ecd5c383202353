"""TLS between clients and the gateway: with openai, curl, nginx and HAProxy; and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import ssl
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from tests.blackbox.raw import Client, post, statuses
from tests.support.certificates import Authority, Pair
from tests.support.programs import program
from tests.support.proxies import PROXIES, curl, output_of, proxied
from tests.support.waiting import until
from tests.support.workers import scripted_worker

DEADLINE_S = 60.0
CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
BODY = json.dumps(CHAT)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def pair(authority):
    return authority.issue("gateway")


def tls(pair: Pair, **settings: object) -> list[str]:
    values = {"cert_file": pair.cert, "key_file": pair.key, **settings}
    return [word for name, value in values.items() for word in ("--set", f"server.tls.{name}={value}")]


@pytest.fixture
def secured(serve, sim, pair):
    """`await secured(..., client_ca_file=...)`: a gateway with TLS before a simulated worker."""

    async def start(*arguments: str, **settings: object):
        worker = await sim("--time-scale", "0")
        return await serve("--worker", worker, *arguments, *tls(pair, **settings))

    return start


def client_of(url: str, context: ssl.SSLContext, **settings) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False, verify=context, **settings)


@asynccontextmanager
async def raw(address: tuple[str, int], context: ssl.SSLContext):
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def metrics_of(url: str, context: ssl.SSLContext) -> str:
    async with client_of(url, context) as client:
        return (await client.get("/metrics")).text


# --- clients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["on", "off"])
@pytest.mark.parametrize("count", [1, 2])
async def test_the_openai_client_gets_whole_and_streamed_answers(secured, authority, lane, count):
    gateway = await secured("--set", f"server.fast_lane={lane}", "--processes", str(count))
    assert gateway.url.startswith("https://")
    http = httpx.AsyncClient(verify=authority.client(), trust_env=False)

    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", http_client=http) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(8)))
        stream = await client.chat.completions.create(**CHAT, stream=True)
        chunks = [chunk async for chunk in stream]

    assert {answer.usage.completion_tokens for answer in answers if answer.usage} == {4}
    assert len(chunks) >= 4
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("version", ["1.2", "1.3"])
async def test_curl_gets_an_answer_and_a_large_one(secured, authority, version):
    gateway = await secured()
    words = ["--cacert", str(authority.file), f"--tlsv{version}", "--tls-max", version]
    words += ["-H", "content-type: application/json"]
    large = json.dumps({**CHAT, "max_tokens": 3000, "ignore_eos": True, "stream": True})

    code, answer = await curl(f"{gateway.url}/v1/chat/completions", *words, "-d", BODY)
    large_code, stream = await curl(f"{gateway.url}/v1/chat/completions", *words, "-d", large)

    assert (code, large_code) == (0, 0)
    assert json.loads(answer)["usage"]["completion_tokens"] == 4
    assert stream.count("data: ") >= 3000
    assert stream.rstrip().endswith("data: [DONE]")


async def test_a_large_body_arrives_whole(serve, authority, pair):
    async with scripted_worker() as worker:
        gateway = await serve("--worker", worker.url, *tls(pair))
        prompt = "a b c d " * 500_000
        async with client_of(gateway.url, authority.client()) as client:
            answer = await client.post("/v1/completions", json={"model": "m", "prompt": prompt})

        assert answer.status_code == 200
        assert json.loads(worker.bodies[0])["prompt"] == prompt


async def test_the_openai_client_presents_a_certificate(secured, authority):
    gateway = await secured(client_ca_file=authority.file)

    async def answer(context: ssl.SSLContext):
        http = httpx.AsyncClient(verify=context, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="x", http_client=http, max_retries=0
        ) as client:
            return await client.chat.completions.create(**CHAT)

    assert (await answer(authority.client(authority.issue("known")))).usage.completion_tokens == 4
    with pytest.raises(openai.APIConnectionError):
        await answer(authority.client())


# --- proxies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proxy", PROXIES)
async def test_a_proxy_reaches_the_gateway_with_its_client_certificate(secured, authority, tmp_path, proxy):
    gateway = await secured(client_ca_file=authority.file)
    client = authority.issue("proxy")
    http = httpx.AsyncClient(trust_env=False)

    async with (
        proxied(proxy, gateway.address, tmp_path, authority, client) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", http_client=http) as through,
    ):
        answers = [await through.chat.completions.create(**CHAT) for _ in range(5)]
        chunks = [chunk async for chunk in await through.chat.completions.create(**CHAT, stream=True)]

    assert [answer.choices[0].finish_reason for answer in answers] == ["length"] * 5
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("proxy", PROXIES)
async def test_a_proxy_uses_a_renewed_certificate_and_refuses_a_foreign_one(
    secured, authority, pair, tmp_path, proxy
):
    gateway = await secured(client_ca_file=authority.file, reload_interval_s=0.1)
    foreign = Authority(tmp_path, "foreign").issue("foreign-gateway")
    client = authority.issue("proxy")
    async with (
        proxied(proxy, gateway.address, tmp_path, authority, client) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=DEADLINE_S) as through,
    ):

        async def status() -> int:
            return (await through.post("/v1/chat/completions", json=CHAT)).status_code

        assert await status() == 200
        authority.issue("renewed").copy_to(pair)
        await gateway.logged("the changed TLS files are loaded")
        assert [await status() for _ in range(3)] == [200] * 3

        foreign.copy_to(pair)

        async def is_refused() -> bool:
            return await status() in (502, 503)

        await until(is_refused, within_s=DEADLINE_S, every_s=0.05)


# --- what is refused --------------------------------------------------------------------------------------


async def test_with_an_authority_for_clients_only_their_certificates_are_accepted(
    secured, authority, tmp_path
):
    gateway = await secured(client_ca_file=authority.file)
    known, foreign = authority.issue("known"), Authority(tmp_path, "foreign").issue("stranger")
    words = ["--cacert", str(authority.file)]

    async def code(*more: object) -> int:
        return (await curl(f"{gateway.url}/health", *words, *map(str, more)))[0]

    assert await code("--cert", known.cert, "--key", known.key) == 0
    assert await code() != 0
    assert await code("--cert", foreign.cert, "--key", foreign.key) != 0
    metrics = await metrics_of(gateway.url, authority.client(known))
    assert 'kvroute_tls_handshakes_total{outcome="no_client_certificate"} 1.0' in metrics
    assert 'kvroute_tls_handshakes_total{outcome="client_certificate"} 1.0' in metrics


async def test_tls_1_1_and_plain_http_are_refused(secured, authority):
    gateway = await secured()
    host, port = gateway.address
    old = ["-tls1_1", "-cipher", "DEFAULT@SECLEVEL=0"]

    code, written = await output_of(program("openssl"), "s_client", "-connect", f"{host}:{port}", *old)
    plain, _ = await curl(f"http://{host}:{port}/health")

    assert code != 0
    assert "Cipher is (NONE)" in written
    assert plain != 0
    metrics = await metrics_of(gateway.url, authority.client())
    assert 'kvroute_tls_handshakes_total{outcome="version"} 1.0' in metrics
    assert 'kvroute_tls_handshakes_total{outcome="plain_http"} 1.0' in metrics


@pytest.mark.parametrize("command", ["serve", "check"])
async def test_a_wrong_file_is_an_error_of_the_configuration_with_its_path(
    run, authority, pair, tmp_path, command
):
    other = authority.issue("other")
    missing = tmp_path / "missing.pem"
    worker = ("--worker", "http://127.0.0.1:9")
    processes = ("--processes", "2")

    async def refusal(*arguments: str) -> tuple[int, str]:
        running = await run(command, *worker, *arguments)
        return await running.ended(), running.log

    for expected, text in [
        (f"server.tls.cert_file: cannot read {missing}", await refusal(*tls(pair, cert_file=missing))),
        (
            f"server.tls.key_file: cannot read {missing}",
            await refusal(*tls(pair, key_file=missing), *processes),
        ),
        (f"server.tls.key_file: {other.key} is not the key", await refusal(*tls(pair, key_file=other.key))),
        ("server.tls.client_ca_file", await refusal(*tls(pair, client_ca_file=pair.key))),
        ("server.tls", await refusal("--set", f"server.tls.cert_file={pair.cert}")),
    ]:
        assert text[0] == (2 if command == "serve" else 1)
        assert expected in text[1]
        assert "Traceback" not in text[1]


# --- towards workers --------------------------------------------------------------------------------------


async def test_workers_with_a_private_authority_get_the_gateways_client_certificate(
    serve, authority, tmp_path
):
    own, foreign = authority.issue("own"), Authority(tmp_path, "foreign")
    async with scripted_worker(tls=authority.server(authority.issue("worker"), asks=True)) as worker:
        files = {"ca_file": authority.file, "cert_file": own.cert, "key_file": own.key}

        async def answer(**chosen: object) -> tuple[int, str]:
            words = [
                word for name, file in chosen.items() for word in ("--set", f"upstream.tls.{name}={file}")
            ]
            gateway = await serve("--worker", worker.url, *words, workers=1 if chosen == files else 0)
            await gateway.logged("w" if chosen == files else "unhealthy")
            async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
                reply = await client.post(f"{gateway.url}/v1/completions", json={"model": "m", "prompt": "a"})
            return reply.status_code, reply.text

        assert await answer(**files) == (200, "{}")
        assert (await answer(ca_file=authority.file))[0] != 200  # the worker wants a certificate
        assert (await answer(**{**files, "ca_file": foreign.file}))[0] != 200
        assert len(worker.requests) == 1


@pytest.mark.parametrize("section", ["upstream.tls", "lmcache.l2.tls", "lmcache.coordinator.server_tls"])
async def test_a_wrong_file_towards_a_server_is_an_error_too(run, tmp_path, section):
    missing = tmp_path / "missing.pem"
    for command, code in (("serve", 2), ("check", 1)):
        running = await run(
            command, "--worker", "https://127.0.0.1:9", "--set", f"{section}.ca_file={missing}",
            "--set", "lmcache.l2.redis_url=rediss://127.0.0.1",
            "--set", "lmcache.coordinator.server_scheme=https",
        )  # fmt: skip

        assert await running.ended() == code
        assert f"{section}.ca_file: cannot read {missing}" in running.log


# --- limits -----------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lane", ["on", "off"])
async def test_the_edges_limits_hold(serve, authority, pair, lane):
    async with scripted_worker() as worker:
        gateway = await serve(
            "--worker", worker.url, "--set", f"server.fast_lane={lane}", "--set", "server.keep_alive_s=2",
            "--set", "server.head_timeout_s=1", "--set", "server.body_timeout_s=2",
            *tls(pair, handshake_timeout_s=1),
        )  # fmt: skip
        context, address = authority.client(), gateway.address
        worker.may_answer.set()

        async def sent(*segments: bytes) -> list[int]:
            async with raw(address, context) as client:
                for segment in segments:
                    await client.send(segment)
                return statuses(await client.read_all(DEADLINE_S))

        async def silent_handshake(first: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(first)
            async with asyncio.timeout(DEADLINE_S):
                try:
                    return await reader.read()
                except ConnectionError:
                    return b""
                finally:
                    writer.transport.abort()

        long_head = b"GET /health HTTP/1.1\r\nhost: g\r\n" + b"x-a: aaaaaaaa\r\n" * 6000
        seen = await asyncio.gather(
            sent(),
            sent(b"POST /v1/comple"),
            sent(post()[:-8]),
            sent(long_head),
            sent(b"GET /health HTTP/1.1\r\nhost: g\r\nx-a: " + b"a" * 20_000),
            sent(b"GET /health HTTP/1.1\r\n\r\n"),
            sent(post(b"connection: close")),
            silent_handshake(b""),
            silent_handshake(b"\x16\x03\x01\x02\x00\x01"),
        )

        assert seen == [[], [408], [408], [431], [431], [400], [200], b"", b""]
        metrics = await metrics_of(gateway.url, context)
        for wait, count in (("idle", 1), ("head", 1), ("body", 1)):
            assert f'kvroute_client_timeouts_total{{wait="{wait}"}} {count}.0' in metrics
        assert "Traceback" not in gateway.log


async def test_a_slow_client_holds_the_worker_back(serve, authority, pair):
    size = 24 << 20  # `read_all` copies what it has for each part
    async with scripted_worker() as worker:
        worker.answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size)
        gateway = await serve("--worker", worker.url, *tls(pair))
        before = gateway.rss_mb
        async with raw(gateway.address, authority.client()) as client:
            await client.send(post(b"connection: close"))
            await until(lambda: worker.unsent_bytes)
            await client.until(b"200 OK")
            held = gateway.peak_rss_mb - before

            answer = await client.read_all(DEADLINE_S)

        assert len(answer) > size
        assert held < 16


# --- reload and shutdown ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
async def test_each_process_uses_a_changed_certificate_and_keeps_it_when_the_next_is_wrong(
    secured, authority, pair, count
):
    gateway = await secured("--processes", str(count), reload_interval_s=0.1)
    context = authority.client()

    async def names() -> set[str]:
        found = set()
        for _ in range(12):
            async with raw(gateway.address, context) as client:
                subject = client.writer.get_extra_info("peercert")["subject"]
                found.add(subject[0][0][1])
        return found

    async def counted(outcome: str) -> float:
        page = await metrics_of(gateway.url, context)
        found = re.search(rf'kvroute_tls_reloads_total{{outcome="{outcome}"}} (\S+)', page)
        return float(found[1]) if found else 0.0

    assert await names() == {"gateway"}
    async with raw(gateway.address, context) as kept:
        authority.issue("renewed").copy_to(pair)

        async def all_loaded() -> bool:
            return await counted("loaded") >= count

        await until(all_loaded, within_s=DEADLINE_S, every_s=0.05)
        assert await names() == {"renewed"}
        await kept.send(b"GET /health HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n")
        assert statuses(await kept.read_all()) == [200]

    pair.key.write_bytes(authority.issue("third").key.read_bytes())

    async def all_refused() -> bool:
        return await counted("refused") >= count

    await until(all_refused, within_s=DEADLINE_S, every_s=0.05)
    assert await names() == {"renewed"}
    assert "are refused" in await gateway.logged(f"{pair.key} is not the key")


async def test_openai_and_curl_meet_a_new_certificate_and_running_answers_end_whole(
    serve, authority, pair, tmp_path
):
    other = Authority(tmp_path, "other")
    async with scripted_worker({"id": "sim-model", "object": "model"}) as worker:
        gateway = await serve("--worker", worker.url, *tls(pair, reload_interval_s=0.1))
        chunk = {
            "id": "x", "object": "chat.completion.chunk", "created": 1, "model": "sim-model",
            "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}],
        }  # fmt: skip
        event = b"data: %b\n\n" % json.dumps(chunk).encode()
        end = event + b"data: [DONE]\n\n"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
        worker.answer, worker.rest = head % len(event + end) + event, end

        def client(trusted: Authority) -> openai.AsyncOpenAI:
            http = httpx.AsyncClient(verify=trusted.client(), trust_env=False)
            return openai.AsyncOpenAI(
                base_url=f"{gateway.url}/v1", api_key="x", http_client=http, max_retries=0
            )

        async def answer(through: openai.AsyncOpenAI) -> str:
            stream = await through.chat.completions.create(**CHAT, stream=True)
            return "".join([each.choices[0].delta.content async for each in stream])

        async def with_curl(trusted: Authority) -> tuple[int, str]:
            words = ["--cacert", str(trusted.file), "-H", "content-type: application/json", "-d", BODY]
            return await curl(f"{gateway.url}/v1/chat/completions", *words)

        async with client(authority) as kept:
            running = await kept.chat.completions.create(**CHAT, stream=True)
            first = await anext(aiter(running))
            other.issue("gateway").copy_to(pair)
            await gateway.logged("the changed TLS files are loaded")
            worker.may_finish.set()
            texts = [each.choices[0].delta.content async for each in running]
            assert [first.choices[0].delta.content, *texts] == ["a", "a"]
            assert await answer(kept) == "aa"  # on its open connection: it trusts no new one
        async with client(other) as informed, client(authority) as uninformed:
            assert await answer(informed) == "aa"
            with pytest.raises(openai.APIConnectionError):
                await answer(uninformed)
        code, written = await with_curl(other)
        assert (code, written.count("data: ")) == (0, 3)
        assert (await with_curl(authority))[0] == 60  # curl: the peer's certificate cannot be verified
        assert "Traceback" not in gateway.log


@pytest.mark.parametrize("lane", ["on", "off"])
async def test_shutdown_finishes_running_answers_and_does_not_wait_for_idle_connections(
    serve, authority, pair, lane
):
    async with scripted_worker() as worker:
        worker.may_answer.clear()
        gateway = await serve("--worker", worker.url, "--set", f"server.fast_lane={lane}", *tls(pair))
        async with (
            raw(gateway.address, authority.client()) as idle,
            raw(gateway.address, authority.client()) as busy,
        ):
            await idle.send(b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n")
            await idle.until(b"200 OK")
            await busy.send(post())
            await until(lambda: worker.requests)
            gateway.process.send_signal(signal.SIGTERM)
            await gateway.logged("waiting for 1 requests")
            worker.may_answer.set()

            assert statuses(await busy.read_all()) == [200]
            assert await gateway.ended(within_s=20) == 0
