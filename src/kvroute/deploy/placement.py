"""Finds the GPUs of this host and assigns GPUs and cores to workers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from kvroute.errors import ConfigError

NVIDIA_SMI_TIMEOUT_S = 20.0
# "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-...)" (nvidia-smi -L; MIG slices are indented and not used)
_GPU_LINE = re.compile(r"^GPU (\d+): ", re.MULTILINE)


async def find_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The usable GPUs, as names for CUDA_VISIBLE_DEVICES, in order.

    These are the GPUs that CUDA_VISIBLE_DEVICES already allows, else all that `nvidia-smi -L` lists. Empty
    without a driver, or when the driver does not answer in time.
    """
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return parse_visible_devices(allowed)
    try:
        process = await asyncio.create_subprocess_exec(
            "nvidia-smi",
            "-L",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(environ),
        )
    except OSError:
        return ()
    try:
        async with asyncio.timeout(NVIDIA_SMI_TIMEOUT_S):
            listing, _ = await process.communicate()
    except TimeoutError:
        return ()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return parse_gpu_listing(listing.decode(errors="replace"))


def parse_visible_devices(value: str) -> tuple[str, ...]:
    """Parse CUDA_VISIBLE_DEVICES as CUDA does: the list ends before the first invalid entry (-1)."""
    devices: list[str] = []
    for entry in value.split(","):
        name = entry.strip()
        if not name or name.startswith("-"):
            break
        devices.append(name)
    return tuple(devices)


def parse_gpu_listing(listing: str) -> tuple[str, ...]:
    """The GPU indexes in the output of `nvidia-smi -L`."""
    return tuple(_GPU_LINE.findall(listing))


def assign_gpus(
    gpus: tuple[str, ...], *, workers: int | None, tensor_parallel_size: int
) -> tuple[tuple[str, ...], ...]:
    """Assign `tensor_parallel_size` neighbouring GPUs to each worker.

    If `workers` is None, there are as many workers as fit. Raises `ConfigError` when the host has too few
    GPUs.
    """
    wanted = workers if workers is not None else max(1, len(gpus) // tensor_parallel_size)
    needed = wanted * tensor_parallel_size
    if needed > len(gpus):
        raise ConfigError(
            "workers" if workers is not None else "tensor-parallel-size",
            f"{wanted} worker(s) with {tensor_parallel_size} GPU(s) each need {needed} GPUs, "
            f"and {len(gpus)} are visible",
        )
    return tuple(gpus[i : i + tensor_parallel_size] for i in range(0, needed, tensor_parallel_size))


def assign_cores(cores: tuple[int, ...], *, workers: int) -> tuple[tuple[int, ...], ...]:
    """Assign an equal share of neighbouring cores to each worker; with too few cores, workers share cores."""
    share = len(cores) // workers
    if share == 0:
        return tuple((cores[i % len(cores)],) for i in range(workers))
    return tuple(cores[i * share : (i + 1) * share] for i in range(workers))
