"""HTTP by the letter: what is no valid request is refused, and what is refused harms no other request."""

from __future__ import annotations

import pytest
from tests.blackbox.raw import BODY, answers_to, connected, post, statuses
from tests.support.waiting import until
from tests.support.workers import scripted_worker

CLOSE = b"connection: close"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LAST = post(CLOSE)


@pytest.fixture
async def worker():
    async with scripted_worker() as running:
        yield running


@pytest.fixture(params=["true", "false"], ids=["fast lane", "ASGI path"])
def start(request, serve, worker):
    async def run(*arguments, **others):
        lane = f"server.fast_lane={request.param}"
        return await serve("--worker", worker.url, "--set", lane, *arguments, **others)

    return run


def coded(*lines: bytes, version: bytes = b"1.1") -> bytes:
    return post(*lines, CLOSE, length=False, body=CHUNKED, version=version)


REFUSED = {
    "no host": (post(CLOSE, host=b""), 400),
    "two hosts": (post(CLOSE, host=b"host: g\r\nhost: g\r\n"), 400),
    "a host with a blank": (post(CLOSE, host=b"host: g h\r\n"), 400),
    "a host with a path": (post(CLOSE, host=b"host: g/h\r\n"), 400),
    "no host in a GET": (b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n", 400),
    "two hosts in HTTP/1.0": (post(host=b"host: g\r\nhost: g\r\n", version=b"1.0"), 400),
    "version 2.0": (post(CLOSE, version=b"2.0"), 505),
    "version 0.9": (post(CLOSE, version=b"0.9"), 505),
    "version 1.2": (post(CLOSE, version=b"1.2"), 505),
    "gzip, chunked": (coded(b"transfer-encoding: gzip, chunked"), 501),
    "gzip and chunked in two lines": (
        coded(b"transfer-encoding: gzip", b"transfer-encoding: chunked"), 501),
    "gzip": (coded(b"transfer-encoding: gzip"), 501),
    "chunked twice": (coded(b"transfer-encoding: chunked, chunked"), 400),
    "a coding in HTTP/1.0": (coded(b"transfer-encoding: chunked", version=b"1.0"), 400),
    "a length and a coding": (post(b"transfer-encoding: chunked", CLOSE, body=CHUNKED), 400),
    "two lengths": (post(b"content-length: %d" % len(BODY), CLOSE), 400),
    "a length with a sign": (post(b"content-length: +5", CLOSE, length=False), 400),
    "a folded line": (post(b"x-a: 1", b" 2", CLOSE), 400),
    "a bare line feed": (post(b"x-a: 1\nx-b: 2", CLOSE), 400),
    "a bare carriage return": (post(b"x-a: 1\rx-b: 2", CLOSE), 400),
    "NUL": (post(b"x-a: 1\x002", CLOSE), 400),
    "a blank before the colon": (post(b"x-a : 1", CLOSE), 400),
    "a chunk beyond 64 bits": (
        post(b"transfer-encoding: chunked", length=False, body=b"fffffffffffffffff\r\n"), 400),
    "a body in very many tiny chunks": (
        post(b"transfer-encoding: chunked", length=False, body=b"1\r\n \r\n" * 20_000), 400),
    "no method": (post(CLOSE).replace(b"POST", b"PO(ST", 1), 400),
    "a target without a path": (post(CLOSE, target=b"http://"), 400),
}  # fmt: skip


async def test_invalid_requests_are_refused(start, worker):
    gateway = await start()
    seen = {name: statuses(await answers_to(gateway.address, raw)) for name, (raw, _) in REFUSED.items()}

    assert seen == {name: [status] for name, (_, status) in REFUSED.items()}
    assert worker.requests == []
    assert "Traceback" not in gateway.log


async def test_valid_requests_are_served(start, worker):
    gateway = await start()
    valid = [
        post(CLOSE),
        post(CLOSE, host=b"Host: example.org:8080\r\n"),
        post(CLOSE, host=b"Host: [::1]:80\r\n"),
        post(CLOSE, host=b"Host:\r\n"),
        post(version=b"1.0"),
        post(version=b"1.0", host=b""),
        post(CLOSE, target=b"http://evil.example/v1/completions"),
        coded(b"Transfer-Encoding: Chunked"),
        post(b"expect: 100-continue", CLOSE),
    ]
    for raw in valid:
        assert statuses(await answers_to(gateway.address, raw)) == [200], raw

    assert set(worker.targets) == {b"/v1/completions"}
    assert not any(b"evil" in asked for asked in worker.requests)


BAD = {
    "garbage": b"\x00\x01garbage\r\n\r\n",
    "no host": post(host=b""),
    "version 2": post(version=b"2.0"),
    "a bad line": post(b"x a: 1"),
    "a bad chunk": post(b"transfer-encoding: chunked", length=False, body=b"zz\r\n"),
    "a line that is too long": post(b"x-a: " + b"a" * 200_000),
}


@pytest.mark.parametrize("separate", [False, True], ids=["one segment", "two segments"])
async def test_a_bad_request_behind_a_good_one_does_not_lose_its_answer(start, worker, separate):
    gateway = await start()
    for name, bad in BAD.items():
        worker.requests.clear()
        worker.may_answer.clear()
        async with connected(gateway.address) as client:
            if separate:
                await client.send(post())
                await client.send(bad)
            else:
                await client.send(post() + post() + bad)
            await until(lambda: worker.requests)
            worker.may_answer.set()
            answered = await client.read_all()

        first, *others = statuses(answered)
        assert first == 200, name
        assert others[: len(others) - 1] == ([] if separate else [200]), name
        assert others[-1] >= 400, name
        assert len(worker.requests) == (1 if separate else 2), name
    assert "Traceback" not in gateway.log


async def test_a_client_that_leaves_with_pipelined_requests_causes_no_traceback(start, worker):
    gateway = await start()
    for _ in range(3):
        worker.requests.clear()
        worker.may_answer.clear()
        async with connected(gateway.address) as client:
            await client.send(post() + post() + post(length=False, host=b""))
            await until(lambda: worker.requests)
        worker.may_answer.set()
        assert statuses(await answers_to(gateway.address, LAST)) == [200]

    assert await gateway.stop() == 0
    assert "Traceback" not in gateway.log


async def test_a_workers_status_that_is_none_is_a_bad_gateway(start, worker):
    gateway = await start()
    bodies = (b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    for status in (b"600", b"999", b"099", b"000"):
        for body in bodies:
            worker.answer = b"HTTP/1.1 %b Odd\r\n" % status + body
            for lines in ((CLOSE,), (b"x-a: 1", b"x-a: 2", CLOSE)):
                answered = await answers_to(gateway.address, post(*lines))

                assert statuses(answered) == [502], status
                assert b"worker_unreachable" in answered
    assert "Traceback" not in gateway.log


MISLEADING = [
    b"/v1/responses/..",
    b"/v1/responses/.",
    b"/v1/responses/%2e%2e",
    b"/v1/responses/.%2E",
    b"/v1/responses/..%2fmodels",
    b"/v1/responses/a%2fb",
    b"/v1/models/..%2fa",
    b"/v1/responses/a%00",
    b"/v1/responses/a%0d%0ab",
    b"/v1/responses/a\\b",
    b"/v1/responses/../completions",
    b"/v1%2fcompletions",
    b"/v1/./completions",
    b"/v1/%2e%2e/v1/completions",
    b"/v1/../v1/completions",
]


async def test_a_path_that_may_be_read_in_two_ways_reaches_no_worker(start, worker):
    gateway = await start()
    seen = {}
    for target in MISLEADING:
        for method in (b"GET", b"POST", b"DELETE"):
            raw = post(CLOSE, target=target).replace(b"POST", method, 1)
            (status,) = statuses(await answers_to(gateway.address, raw))
            if status not in (400, 404, 405):
                seen[method, target] = status

    assert seen == {}
    assert worker.requests == []


async def test_an_endpoint_is_relayed_under_its_own_path(start, worker):
    gateway = await start()
    assert statuses(await answers_to(gateway.address, post(CLOSE, target=b"/v1/compl%65tions?a=%2f"))) == [
        200
    ]

    assert worker.targets == [b"/v1/completions?a=%2f"]


async def test_a_key_of_the_gateway_never_reaches_a_worker(start, worker):
    gateway = await start(env={"KVROUTE__SERVER__API_KEYS": "sesame"})
    spellings = [
        (b"x-api-key: sesame",),
        (b"X-API-Key:sesame",),
        (b"authorization: Bearer sesame", b"x-api-key: sesame"),
        (b"authorization: Bearer sesame", b"x-api-key: other"),
    ]
    for lines in spellings:
        for more in ((), (b"x-a: 1", b"x-a: 2")):
            assert statuses(await answers_to(gateway.address, post(*lines, *more, CLOSE))) == [200]

    assert len(worker.requests) == 8
    assert not any(b"sesame" in asked or b"x-api-key" in asked.lower() for asked in worker.requests)


async def test_without_keys_the_header_is_the_workers(start, worker):
    gateway = await start()
    assert statuses(await answers_to(gateway.address, post(b"x-api-key: theirs", CLOSE))) == [200]

    assert b"x-api-key: theirs" in worker.requests[0]


async def test_a_models_name_may_have_an_encoded_slash(start, worker):
    gateway = await start()

    answers = await answers_to(
        gateway.address, b"GET /v1/models/some%2Fmodel HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n"
    )

    assert statuses(answers) == [404]
    assert b"model_not_found" in answers
