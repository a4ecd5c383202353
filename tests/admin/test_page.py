"""The live page's files, and what `/` answers."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from kvroute.admin.live import LiveFigures
from kvroute.admin.page import page_routes

UI = sorted(path.name for path in Path(str(files("kvroute") / "ui")).iterdir())


@pytest.fixture
async def client():
    application = FastAPI()
    application.include_router(page_routes(LiveFigures.__new__(LiveFigures)))
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def test_a_browser_is_led_to_the_page(client) -> None:
    answer = await client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})

    assert (answer.status_code, answer.headers["location"]) == (307, "ui")


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
async def test_others_get_the_paths(client, accept) -> None:
    answer = await client.get("/", headers={"accept": accept})

    assert answer.json()["paths"]["page"] == "/ui"


@pytest.mark.parametrize("name", ["", *(f"/{name}" for name in UI)])
async def test_every_file_forbids_foreign_and_inline_code(client, name) -> None:
    answer = await client.get(f"/ui{name}")

    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_other_files_are_not_served(client) -> None:
    assert (await client.get("/ui/../page.py")).status_code == 404
    assert (await client.get("/ui/nothing.js")).status_code == 404


def test_scripts_set_no_markup() -> None:
    """Names come from outside; `require-trusted-types-for` forbids the same at run time."""
    for name in UI:
        text = (files("kvroute") / "ui" / name).read_text()
        assert not any(
            sink in text for sink in ("innerHTML", "outerHTML", "insertAdjacent", "document.write")
        )
        assert "style=" not in text
        assert "<script>" not in text
