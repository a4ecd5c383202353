from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvroute.deploy.prepare import find_gpus, parse_gpu_listing, parse_visible_devices

LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5a1c0c2e-0000-1111-2222-333344445555)
  MIG 1g.10gb     Device  0: (UUID: MIG-0f0f0f0f-0000-1111-2222-333344445555)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-6b1c0c2e-0000-1111-2222-333344445555)
"""


def fake_nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_the_listing_names_gpus_not_their_slices() -> None:
    assert parse_gpu_listing(LISTING) == ("0", "1")
    assert parse_gpu_listing("No devices found.") == ()


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("3, 1", ("3", "1")),
        ("2,-1,4", ("2",)),
        ("GPU-5a1c", ("GPU-5a1c",)),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(value: str, devices: tuple[str, ...]) -> None:
    assert parse_visible_devices(value) == devices


async def test_the_driver_reports_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = fake_nvidia_smi(tmp_path, f"[ \"$1\" = -L ] && cat <<'END'\n{LISTING}END")
    monkeypatch.setenv("PATH", environ["PATH"])

    assert await find_gpus(environ) == ("0", "1")


async def test_the_environment_decides_before_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = fake_nvidia_smi(tmp_path, "exit 9")
    monkeypatch.setenv("PATH", environ["PATH"])

    assert await find_gpus(environ | {"CUDA_VISIBLE_DEVICES": "1,2"}) == ("1", "2")
    assert await find_gpus(environ | {"CUDA_VISIBLE_DEVICES": ""}) == ()


async def test_no_driver_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert await find_gpus({"PATH": str(tmp_path)}) == ()


async def test_a_driver_that_hangs_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = fake_nvidia_smi(tmp_path, "exec sleep 600")
    monkeypatch.setenv("PATH", environ["PATH"])
    monkeypatch.setattr("kvroute.deploy.prepare.NVIDIA_SMI_TIMEOUT_S", 0.05)

    assert await find_gpus(environ) == ()
