"""The live page in Chromium, of real gateways in front of simulated workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect
from tests.support.redis import redis_server
from tests.support.sockets import free_ports, tcp_server
from tests.support.waiting import until

from kvroute.fleet.worker import WorkerId, WorkerSpec
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import Fault

IMAGES = Path(__file__).parents[2] / "docs" / "images"
"""The screenshots of README and docs: made anew with KVROUTE_SCREENSHOTS=1."""
HOSTILE = '<img src=x onerror="document.title=1">'
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None and os.environ.get("CI"):
    pytest.fail("chromium is missing (.ci/run installs it)", pytrace=False)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
    pytest.mark.heavy,
    pytest.mark.asyncio(loop_scope="module"),
]

expect.set_options(timeout=20_000)


@pytest.fixture
def lane() -> str:
    return "fast lane"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One for all tests, which share its event loop. Each opens its pages in a context of its own, so that no
    storage, cache or connection of another test is there."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--no-proxy-server", "--disable-gpu"]
        )
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(
    browser: Browser,
    gateway,
    *,
    width: int = 1280,
    scheme: str = "light",
    path: str = "/ui#key=admin-key-of-the-tests",
) -> AsyncIterator[Page]:
    """The page, connected; at the end it must have made no error and no request to another host."""
    context = await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = await context.new_page()
    wrong: list[str] = []
    page.on("console", lambda line: line.type in ("error", "warning") and wrong.append(line.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: request.url.startswith(gateway.url) or wrong.append(request.url))
    await page.goto(gateway.url + path)
    await expect(page.locator("#figures")).to_be_visible()
    yield page
    await context.close()
    assert wrong == []


@pytest_asyncio.fixture(loop_scope="module")
async def instant_sim() -> AsyncIterator[RunningSim]:
    """That of the other tests, on this module's event loop."""
    async with run_sim(SimOptions(time_scale=0)) as sim:
        yield sim


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(run_gateway):
    """A gateway with the workers A and B, and five conversations of four turns, each with 20 requests."""
    async with AsyncExitStack() as stack:
        sims = [await stack.enter_async_context(run_sim(SimOptions(time_scale=0.05))) for _ in "AB"]
        workers = [{"id": name, "url": sim.url} for name, sim in zip("AB", sims, strict=True)]
        yield await stack.enter_async_context(run_gateway(workers))


@pytest_asyncio.fixture(loop_scope="module")
async def full(run_gateway, tmp_path):
    """As `fleet`, with data in every section: `kvaware`, a named key (`team-key`), a queue, and a member."""
    keys = tmp_path / "keys.json"
    hashed = "sha256:" + hashlib.sha256(b"team-key").hexdigest()
    limits = {"tokens_per_minute": 10**9}
    keys.write_text(json.dumps({"keys": [{"name": "team", "hash": hashed, "limits": limits}]}))
    async with AsyncExitStack() as stack:
        sims = [await stack.enter_async_context(run_sim(SimOptions(time_scale=0.05))) for _ in "AB"]
        redis = await stack.enter_async_context(redis_server())
        gateway = await stack.enter_async_context(
            run_gateway(
                [{"id": name, "url": sim.url} for name, sim in zip("AB", sims, strict=True)],
                sharing={"url": redis.url, "member": "g1"},
                routing={"strategy": "kvaware"},
                tokens={"timeout_ms": 5000},
                server={"client_keys": {"file": str(keys)}},
                admission={"max_concurrent": 8},
            )
        )
        await gateway.until(lambda: not gateway.runtime.cache_tracker.notes())
        yield gateway


async def converse(client: httpx.AsyncClient, key: str = "") -> dict[int, str]:
    """Send 20 requests, four turns of five conversations; returns the last worker of each conversation."""
    authorization = {"authorization": f"Bearer {key}"} if key else {}
    model = (await client.get("/v1/models", headers=authorization)).json()["data"][0]["id"]
    workers: dict[int, str] = {}
    number = 0
    for turn in range(4):
        for conversation in range(5):
            number += 1
            text = f"This is conversation {conversation}. " * 40 + "And then? " * turn
            body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
            if turn:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            headers = {"x-request-id": f"conversation-{conversation}-request-{number}", **authorization}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            workers[conversation] = answer.headers["x-kvroute-worker"]
    return workers


async def press(page: Page, selector: str, key: str = "Enter") -> None:
    await page.locator(selector).focus()
    await page.keyboard.press(key)


class Up:
    """`kvroute up` on a terminal, as `make up` starts it. Its output is read as long as it runs."""

    def __init__(self, *arguments: str) -> None:
        self._terminal, end = os.openpty()
        argv = [sys.executable, "-m", "kvroute", "up", *arguments]
        self._process = subprocess.Popen(argv, stdin=end, stdout=end, stderr=end, start_new_session=True)
        os.close(end)
        self.printed = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the last process has closed the terminal
            while text := os.read(self._terminal, 65536):
                self.printed += text.decode(errors="replace")

    def address(self) -> str:
        """The address of the page that it prints when it is ready; "" before."""
        is_ready = "Ctrl-C ends everything" in self.printed
        assert is_ready or self._process.poll() is None, self.printed
        return re.findall(r"live page +(http\S+)", self.printed)[0] if is_ready else ""

    def end(self) -> int:
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(60)
        finally:
            # The whole session: its workers would keep the terminal open.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join(10)
            os.close(self._terminal)


@pytest.mark.timeout(240)
async def test_the_page_of_kvroute_up_answers_the_three_questions(browser, tmp_path, monkeypatch) -> None:
    """`make up`, then the page at the address that it prints."""
    monkeypatch.chdir(tmp_path)
    up = Up("--port", str(free_ports(1)[0]))
    try:
        address = await until(up.address, within_s=90)
        url, _, path = address.partition("/ui")
        gateway = SimpleNamespace(url=url)
        async with (
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
            opened(browser, gateway, path=f"/ui{path}") as page,
        ):
            await tell_the_story(page, await converse(client), ["worker-0", "worker-1"])
    finally:
        code = await asyncio.to_thread(up.end)
    assert code == 0


async def test_it_answers_the_three_questions_by_keyboard(browser, fleet) -> None:
    async with opened(browser, fleet) as page:
        await tell_the_story(page, await converse(fleet.client), ["A", "B"])


async def tell_the_story(page: Page, workers: dict[int, str], names: list[str]) -> None:
    """Which worker holds conversation 3, why did request 17 go there, what would roundrobin have done?"""
    await expect(page.locator("#request-table")).to_contain_text("conversation-1-request-17")

    await page.locator("#search").focus()
    await page.keyboard.type("conversation-3")
    await page.keyboard.press("Enter")
    await expect(page.locator("#search-result")).to_contain_text(
        f"4 requests match conversation-3. The last one went to {workers[3]}"
    )
    await expect(page.locator("#request-table tbody tr")).to_have_count(4)
    await press(page, "#clear")

    await press(page, '#request-table button:has-text("request-17")')
    decision = page.locator("#decision")
    await expect(decision).to_be_focused()
    await expect(decision).to_contain_text(f"went to {workers[1]}, because")
    await expect(decision).to_contain_text("(prefix_hit)")
    await expect(decision).to_contain_text(f"Cost on {workers[1]}: max(wait")
    [other] = set(names) - {workers[1]}
    await expect(decision).to_contain_text(f"{other} would have cost")
    await expect(decision.locator("tbody tr")).to_have_count(2)
    await press(page, "#decision button")
    await expect(page.locator('#request-table button:has-text("request-17")')).to_be_focused()

    await page.locator("#strategy").select_option("roundrobin")
    await press(page, "#what-if-form button")
    await expect(page.locator("#what-if-result")).to_contain_text("roundrobin would have sent")
    await expect(page.locator("#what-if-result")).to_contain_text("of 20 requests to the same worker")
    for worker in names:
        row = page.locator("#what-if-table tbody tr", has=page.locator(f'th:text-is("{worker}")'))
        await expect(row.locator("td").last).to_have_text("10")


async def test_a_strategy_that_cannot_decide_again_is_explained(browser, fleet) -> None:
    async with opened(browser, fleet) as page:
        await converse(fleet.client)
        await page.locator("#strategy").select_option("kvaware")
        await press(page, "#what-if-form button")

        await expect(page.locator("#what-if-result")).to_contain_text("None of the last 20 requests")
        await expect(page.locator("#what-if-notes")).to_contain_text("prefixaware reads no token ids")


async def test_figures_workers_and_prefixes_are_shown(browser, fleet) -> None:
    async with opened(browser, fleet) as page:
        await converse(fleet.client)

        await expect(page.locator("#worker-table tbody tr")).to_have_count(2)
        await expect(page.locator("#worker-table")).to_contain_text("healthy")
        await expect(page.locator("#summary")).to_contain_text("Tokens saved")
        await expect(page.locator("#summary")).to_contain_text("20 answers reported cached tokens")
        await expect(page.locator("#prefix-table tbody tr")).not_to_have_count(0)
        await expect(page.locator("#accuracy-table tbody tr")).not_to_have_count(0)
        assert "conversation 3" not in (await page.content())  # of the prompts, only hashes


async def test_both_workers_of_a_handover_are_named(browser, run_gateway) -> None:
    options = SimOptions(time_scale=0, nixl=True)
    async with run_sim(options) as prefill, run_sim(options) as decode:
        workers = [
            {"id": "P", "url": prefill.url, "role": "prefill"},
            {"id": "D", "url": decode.url, "role": "decode"},
        ]
        routing = {"prefill_decode": {"threshold_tokens": 256}}
        async with run_gateway(workers, routing=routing) as gateway, opened(browser, gateway) as page:
            body = {"model": "sim-model", "prompt": "long " * 400, "max_tokens": 2, "stream": True}
            headers = {"x-request-id": "handed-over"}
            answer = await gateway.client.post("/v1/completions", json=body, headers=headers)
            moved = f"{int(answer.headers['x-kvroute-moved-tokens']):,}"

            await expect(page.locator("#worker-table")).to_contain_text("prefill")
            await expect(page.locator("#request-table")).to_contain_text("P, then D")
            await press(page, '#request-table button:has-text("handed-over")')
            decision = page.locator("#decision")
            await expect(decision).to_contain_text(
                "P was to compute the prompt; it was expected to hold 0 tokens"
            )
            await expect(decision).to_contain_text(f"{moved} tokens were to move to D; the answer began")

            prefill.worker.faults.add(Fault(path="/v1/completions", kind="status", status=400))
            await gateway.client.post("/v1/completions", json={**body, "prompt": "other " * 400})
            await expect(page.locator("#request-table")).to_contain_text("D, without P (status)")


async def test_clients_and_their_queue_are_shown(browser, run_gateway, instant_sim, tmp_path) -> None:
    hashed = "sha256:" + hashlib.sha256(b"team-key").hexdigest()
    keys = tmp_path / "keys.json"
    limits = {"requests_per_minute": 2}
    keys.write_text(json.dumps({"keys": [{"name": "team", "hash": hashed, "limits": limits}]}))
    server = {"client_keys": {"file": str(keys)}}
    async with (
        run_gateway([instant_sim.url], server=server, admission={"max_concurrent": 4}) as gateway,
        opened(browser, gateway) as page,
    ):
        await expect(page.locator("#client-note")).to_contain_text("No named keys")
        body = {"model": "sim-model", "prompt": "hello", "max_tokens": 1}
        headers = {"authorization": "Bearer team-key"}
        statuses = [
            (await gateway.client.post("/v1/completions", json=body, headers=headers)).status_code
            for _ in range(3)
        ]
        assert statuses == [200, 200, 429]

        row = page.locator("#client-table tbody tr")
        await expect(row).to_have_count(1)
        await expect(row.locator("th")).to_have_text("team")
        await expect(row.locator("td").nth(3)).to_have_text("2")
        await expect(row.locator("td").last).to_have_text("1")


async def test_the_gateways_that_share_and_the_one_that_decided_are_shown(browser, run_gateway, instant_sim):
    workers = [instant_sim.url]
    async with redis_server() as server, AsyncExitStack() as stack:
        one, _ = [
            await stack.enter_async_context(run_gateway(workers, sharing={"url": server.url, "member": name}))
            for name in ("g1", "g2")
        ]
        async with opened(browser, one) as page:
            await converse(one.client)

            await expect(page.locator("#member-table")).to_contain_text("g1/0 (this one)", timeout=15_000)
            await expect(page.locator("#member-table")).to_contain_text("g2/0", timeout=15_000)
            await expect(page.locator("#request-table")).to_contain_text("g1/0")
            await page.locator("#request-table button").first.click()
            await expect(page.locator("#decision")).to_contain_text("g1/0 decided.")


async def test_a_worker_is_drained_and_returned(browser, fleet) -> None:
    async with opened(browser, fleet) as page:
        row = page.locator("#worker-table tbody tr").first
        await press(page, "#worker-table tbody tr:first-child button")
        await expect(row).to_contain_text("draining")
        await press(page, "#worker-table tbody tr:first-child button")
        await expect(row).to_contain_text("healthy")


async def test_a_paused_page_stands_still_and_catches_up(browser, fleet) -> None:
    async with opened(browser, fleet) as page:
        await press(page, "#pause")
        await converse(fleet.client)
        await expect(page.locator("#connection")).to_contain_text("paused")
        await expect(page.locator("#request-table tbody tr")).to_have_count(0)
        await press(page, "#pause")
        await expect(page.locator("#request-table tbody tr")).to_have_count(20)


async def test_hostile_names_stay_text(browser, run_gateway) -> None:
    """Such an id is refused in configuration and admin API; the page must not depend on that."""
    async with (
        run_sim(SimOptions(time_scale=0, models=(HOSTILE,))) as sim,
        run_gateway([], wait=False) as gateway,
        opened(browser, gateway) as page,
    ):
        gateway.runtime.fleet.add(WorkerSpec(WorkerId(HOSTILE), sim.url))
        await gateway.until_healthy(1)
        body = {"model": HOSTILE, "messages": [{"role": "user", "content": "hello " * 200}], "max_tokens": 1}
        headers = {"x-request-id": HOSTILE.replace(" ", "_")}
        await gateway.client.post("/v1/chat/completions", json=body, headers=headers)

        await expect(page.locator("#request-table tbody tr")).to_have_count(1)
        await press(page, "#request-table button")
        await expect(page.locator("#decision")).to_contain_text(HOSTILE)
        await expect(page.locator("#worker-table th[scope=row]")).to_have_text(HOSTILE)
        assert await page.locator("img").count() == 0
        assert await page.title() == "kvroute"


async def test_the_key_stays_out_of_the_address_and_a_wrong_one_is_asked_again(browser, fleet) -> None:
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(f"{fleet.url}/ui#key=wrong")
    await expect(page.locator("#key-problem")).to_contain_text("refuses this key")
    assert "wrong" not in page.url

    await page.locator("#key").fill("admin-key-of-the-tests")
    await page.keyboard.press("Enter")
    await expect(page.locator("#figures")).to_be_visible()
    await page.reload()
    await expect(page.locator("#figures")).to_be_visible()
    await context.close()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_is_accessible(browser, full, width, scheme) -> None:
    async with opened(browser, full, width=width, scheme=scheme) as page:
        await converse(full.client, "team-key")
        await expect(page.locator("#request-table")).to_contain_text("request-20")
        await press(page, '#request-table button:has-text("request-17")')
        await page.locator("#strategy").select_option("roundrobin")
        await press(page, "#what-if-form button")
        await expect(page.locator("#what-if-table tbody tr")).to_have_count(2)

        tables = page.locator(".scroll table")
        await expect(page.locator("#accuracy-table tbody tr")).not_to_have_count(0)
        await expect(page.locator("#client-table tbody tr")).to_have_count(1)
        empty = [
            await tables.nth(number).get_attribute("id")
            for number in range(await tables.count())
            if not await tables.nth(number).is_visible()
        ]
        assert empty == []

        found = await Axe().run(page)

        assert [
            (each["id"], [node["html"] for node in each["nodes"]]) for each in found.response["violations"]
        ] == []
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        if os.environ.get("KVROUTE_SCREENSHOTS"):
            await take_screenshots(page, width, scheme)


async def take_screenshots(page: Page, width: int, scheme: str) -> None:
    """The page as two images, divided below the decision. Of a phone, docs show the first one only."""
    await page.evaluate("window.scrollTo(0, 0)")
    await page.evaluate("document.activeElement.blur()")
    whole = await page.evaluate("document.documentElement.scrollHeight")
    end = await page.evaluate("document.getElementById('what-if').getBoundingClientRect().top")
    for name, top, bottom in ((f"page-{width}", 0, end), (f"page-{width}-more", end, whole)):
        is_shown = f"{name}-{scheme}" in ("page-1280-light", "page-1280-more-light", "page-390-dark")
        file = IMAGES / f"{name}.png" if is_shown else Path(tempfile.gettempdir()) / f"{name}-{scheme}.png"
        clip = {"x": 0, "y": top, "width": width, "height": bottom - top}
        await page.screenshot(path=file, full_page=True, clip=clip)


class StrippingProxy:
    """Publishes a gateway below `/team/llm`, and does not tell it. Each connection carries one request."""

    def __init__(self, gateway: str) -> None:
        self._address = gateway.removeprefix("http://").split(":")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, rest = head.split(b" ", 2)
        path = target.removeprefix(b"/team/llm")
        assert path != target
        from_gateway, to_gateway = await asyncio.open_connection(*self._address)
        try:
            to_gateway.write(b" ".join([method, path, rest.replace(b"keep-alive", b"close")]))
            while data := await from_gateway.read(65536):
                writer.write(data)
                await writer.drain()
        finally:
            to_gateway.close()


@pytest.mark.parametrize("root", ["/vllm", ""])
async def test_it_works_below_a_path_of_a_proxy(browser, run_gateway, instant_sim, root) -> None:
    """A proxy that keeps the path (`server.root_path`), and one that removes it."""
    async with (
        run_gateway([instant_sim.url], server={"root_path": root}) as gateway,
        tcp_server(StrippingProxy(gateway.url).serve) as port,
    ):
        url = gateway.url + root if root else f"http://127.0.0.1:{port}/team/llm"
        async with opened(browser, SimpleNamespace(url=url), path="/#key=admin-key-of-the-tests") as page:
            assert page.url == f"{url}/ui"
            await gateway.client.post("/v1/completions", json={"model": "sim-model", "prompt": "hello"})
            await expect(page.locator("#request-table tbody tr")).to_have_count(1)
            await press(page, "#request-table button")
            await expect(page.locator("#decision")).to_contain_text("went to w0, because")
            await press(page, "#what-if-form button")
            await expect(page.locator("#what-if-result")).to_contain_text("of 1 requests to the same worker")
            await press(page, "#worker-table tbody tr:first-child button")
            await expect(page.locator("#worker-table tbody tr")).to_contain_text("draining")


async def test_under_roundrobin_it_says_what_it_cannot_know(browser, run_gateway, instant_sim) -> None:
    async with (
        run_gateway([instant_sim.url], routing={"strategy": "roundrobin"}) as gateway,
        opened(browser, gateway) as page,
    ):
        await expect(page.locator("#notes")).to_contain_text("No predictions under roundrobin")
        await expect(page.locator("#prefix-note")).to_contain_text("roundrobin does not read prompts")
        await expect(page.locator("#stream-note")).to_contain_text("No event streams")


async def test_with_kvaware_it_shows_tiers_streams_and_tokenizers(browser, run_gateway, instant_sim) -> None:
    async with (
        run_gateway(
            [instant_sim.url], routing={"strategy": "kvaware"}, tokens={"timeout_ms": 5000}
        ) as gateway,
        opened(browser, gateway) as page,
    ):
        await gateway.until(lambda: not gateway.runtime.cache_tracker.notes())
        await converse(gateway.client)

        await expect(page.locator("#stream-table")).to_contain_text("whole")
        await expect(page.locator("#token-table tbody tr")).to_have_count(1)
        await expect(page.locator("#prefix-table tbody")).to_contain_text("w0:")
        await expect(page.locator("#worker-note")).to_contain_text("Tiers as the workers' events tell them")


async def test_a_page_that_connects_again_counts_no_request_twice(browser, fleet) -> None:
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(f"{fleet.url}/ui#key=admin-key-of-the-tests")
    await expect(page.locator("#connection")).to_have_text("connected")
    await converse(fleet.client)
    requests = page.locator("#summary dd span").first
    await expect(requests).to_have_text("20")

    for connection in [each for each in fleet.server.server_state.connections if each.cycle is not None]:
        connection.transport.abort()  # of the page's stream: nothing else runs
    await expect(page.locator("#connection")).not_to_have_text("connected")
    await expect(page.locator("#connection")).to_have_text("connected")

    await converse(fleet.client)
    await expect(requests).to_have_text("40")
    await context.close()
