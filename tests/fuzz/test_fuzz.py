"""The short form of `make fuzz`, and every input that once showed a defect."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz import worker
from tests.fuzz.cases import Case
from tests.fuzz.control import fuzz_control
from tests.fuzz.documents import fuzz_documents
from tests.fuzz.envelopes import fuzz_envelopes
from tests.fuzz.frames import fuzz_frames
from tests.fuzz.lanes import PROFILES, Report, fuzz_requests, lanes
from tests.fuzz.probes import fuzz_probes
from tests.fuzz.served import fuzz_served

SAVED = sorted((Path(__file__).parent.parent / "data" / "fuzz").glob("*.json"))
SEED = 20

pytestmark = pytest.mark.heavy


def clean(report: Report, inputs: int) -> None:
    assert not report.findings, "what was found is in the output"
    assert report.inputs >= inputs


@pytest.mark.parametrize("profile", PROFILES)
async def test_mutated_requests_over_both_lanes(profile: str, tmp_path: Path) -> None:
    report = await fuzz_requests(448, SEED, profile, tmp_path)

    clean(report, 448)
    assert min(report.outcomes[status] for status in ("200", "400", "404", "502")) > 0


@pytest.mark.parametrize("file", SAVED, ids=[file.stem for file in SAVED])
async def test_saved_inputs_show_no_defect_again(file: Path) -> None:
    case, saved = Case.load(file)
    async with lanes(str(saved["profile"])) as target:
        each, common, _ = await target.run([case, case])

    assert [*each[0], *each[1], *common] == []


@pytest.mark.parametrize("profile", ["keys", "limits"])
async def test_mutated_requests_to_a_served_gateway(profile: str, tmp_path: Path) -> None:
    clean(await fuzz_served(256, SEED, profile, folder=tmp_path), 256)


async def test_mutated_frames(tmp_path: Path) -> None:
    report = await fuzz_frames(10_000, SEED, folder=tmp_path)

    clean(report, 10_000)
    assert report.outcomes["stream: taken in"] > 1000
    assert report.outcomes["stream: refused"] > 1000


def test_mutated_documents(tmp_path: Path) -> None:
    clean(fuzz_documents(300, SEED, folder=tmp_path), 300)


async def test_mutated_envelopes(tmp_path: Path) -> None:
    report = await fuzz_envelopes(1500, SEED, folder=tmp_path)

    clean(report, 1500)
    assert min(report.outcomes[outcome] for outcome in ("read", "refused", "answers read")) > 50


async def test_mutated_answers_to_probes_and_files(tmp_path: Path) -> None:
    report = await fuzz_probes(1500, SEED, folder=tmp_path)

    clean(report, 1500)
    assert min(report.outcomes[outcome] for outcome in ("worker: passed", "kubernetes: read")) > 30


async def test_the_control_plane_matches_its_openapi_description() -> None:
    clean(await fuzz_control(2, SEED, phases="fuzzing"), 20)


async def test_another_clients_bytes_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer itself: a worker that repeats what it got first to everybody."""
    first: list[bytes] = []

    def stale(marks: list[bytes]) -> list[bytes]:
        first.extend(marks[:1] if not first else ())
        return first or marks

    answer_of = worker.answer_of
    monkeypatch.setattr(worker, "answer_of", lambda marks, *rest: answer_of(stale(marks), *rest))
    report = await fuzz_requests(64, SEED, "open")

    assert report.findings["another's bytes"] > 0
