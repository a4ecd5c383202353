"""The steps that docs/architecture.md names for each seam, followed in a copy of the package.

A toy is added by exactly these steps, and a request reaches it. Without one of the steps, none does.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.seams.package import ROOT, NewFile, NewLine, Package, Step, changed_package

LONG = "What is a prefix cache? " * 40


async def drive_strategy(package: Package, folder: Path) -> None:
    worker = await package.sim(
        "--event-endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0"
    )
    gateway = await package.serve(
        "--worker", worker, "--worker", await package.sim("--no-events"),
        "--strategy", "heldfirst", "--set", "routing.heldfirst.least_tokens=16",
    )  # fmt: skip
    answer = await gateway.until_held(LONG)
    assert answer.headers["x-kvroute-strategy"] == "heldfirst"
    assert int(answer.headers["x-kvroute-hit-tokens"]) >= 16


async def drive_history(package: Package, folder: Path) -> None:
    gateway = await package.serve(
        "--worker", await package.sim("--no-events"), "--worker", await package.sim("--no-events"),
        "--set", "routing.prefixaware.index=listed",
    )  # fmt: skip
    first = await gateway.chat(LONG)
    second = await gateway.chat(LONG)
    assert second.headers["x-kvroute-reason"] == "prefix_hit"
    assert second.headers["x-kvroute-worker"] == first.headers["x-kvroute-worker"]


async def drive_discovery(package: Package, folder: Path) -> None:
    (folder / "urls.txt").write_text(await package.sim("--no-events") + "\n")
    gateway = await package.serve("--set", f"fleet.url_list={folder / 'urls.txt'}")
    assert (await gateway.chat("Hello")).status_code == 200


async def drive_dialect(package: Package, folder: Path) -> None:
    events = ("--event-endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0")
    worker = await package.sim(*events, "--event-dialect", "toy")
    gateway = await package.serve(
        "--worker", worker, "--worker", await package.sim("--no-events"), "--strategy", "kvaware"
    )
    assert int((await gateway.until_held(LONG)).headers["x-kvroute-hit-tokens"]) >= 16


async def drive_endpoint(package: Package, folder: Path) -> None:
    gateway = await package.serve("--worker", await package.sim("--no-events"))
    answer = await gateway.chat("Hello", "/v1/toy")
    assert answer.headers["x-kvroute-strategy"] == "prefixaware"


@dataclass(frozen=True)
class Seam:
    """One row of the page. `drive` fails unless the toy was used."""

    title: str
    drive: Callable[[Package, Path], Awaitable[None]]
    steps: tuple[Step, ...]


SEAMS = (
    Seam(
        "A strategy",
        drive_strategy,
        (
            NewFile("routing/strategies/heldfirst.py", "held_first.py"),
            NewLine(
                "routing/registry.py",
                "import CostOptions",
                "from kvroute.routing.strategies.heldfirst import HeldFirst",
            ),
            NewLine("routing/registry.py", "STRATEGIES: Final", '    "heldfirst": HeldFirst,'),
        ),
    ),
    Seam(
        "A route history",
        drive_history,
        (
            NewFile("index/listed_history.py", "listed_history.py"),
            NewLine(
                "index/registry.py",
                "import RouteHistory",
                "from kvroute.index.listed_history import ListedHistory",
            ),
            NewLine("index/registry.py", "HISTORIES: Final", '    "listed": ListedHistory,'),
        ),
    ),
    Seam(
        "A discovery source",
        drive_discovery,
        (
            NewFile("fleet/discovery/url_list.py", "url_list.py"),
            NewLine(
                "fleet/discovery/registry.py",
                "import KubernetesDiscovery",
                "from kvroute.fleet.discovery.url_list import UrlListDiscovery",
            ),
            NewLine(
                "fleet/discovery/registry.py",
                "DISCOVERY: Final",
                '    "url_list": UrlListDiscovery.configured,',
            ),
            NewLine(
                "fleet/options.py",
                "class FleetOptions",
                '    url_list: Path | None = option(None, "A file with one URL per line.")',
            ),
        ),
    ),
    Seam(
        "An event dialect",
        drive_dialect,
        (
            NewLine(
                "wire/vllm.py",
                'Dialect("array-0.10"',
                '        Dialect("toy", "none", True, False, 8, 2, True),',
            ),
        ),
    ),
    Seam(
        "An API endpoint",
        drive_endpoint,
        (NewLine("openai/endpoints.py", "_ROWS = (", '    Endpoint("/v1/toy", "A toy"),'),),
    ),
)

by_title = pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.title)


@by_title
async def test_a_request_uses_the_parts_that_the_steps_add(seam: Seam, tmp_path: Path) -> None:
    async with changed_package(tmp_path, seam.steps) as package:
        await seam.drive(package, tmp_path)


@pytest.mark.parametrize(
    ("seam", "left_out"),
    [pytest.param(seam, step, id=f"{seam.title} without {step}") for seam in SEAMS for step in seam.steps],
)
async def test_no_request_reaches_it_when_a_step_is_left_out(
    seam: Seam, left_out: Step, tmp_path: Path
) -> None:
    steps = [step for step in seam.steps if step is not left_out]
    async with changed_package(tmp_path, steps) as package:
        with pytest.raises(AssertionError):
            await seam.drive(package, tmp_path)


@by_title
def test_the_page_names_the_file_of_each_step(seam: Seam) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, rest = page.partition(f"\n### {seam.title}\n")
    section = re.split(r"\n##", rest)[0]
    for step in seam.steps:
        place = f"{Path(step.path).parent}/" if isinstance(step, NewFile) else step.path
        assert place in section, f"{seam.title}: {place}"
