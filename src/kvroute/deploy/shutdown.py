"""How long gateway and workers may take to end, so that updates and scale-downs lose no request. Pure.

worker:   preStop (gateways notice) -> SIGTERM -> running requests finish -> exit
gateway:  SIGTERM -> server.shutdown_delay_s -> server.drain_timeout_s -> exit
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from kvroute.deploy.render.plan import EndpointPlan, option_value
from kvroute.gateway.options import ServerOptions

GATEWAY_DELAY_S = 5
"""`server.shutdown_delay_s` in Kubernetes: endpoints and kube-proxy's rules follow within seconds."""
DRAIN_S = 120
"""In Kubernetes, how long running answers may take to finish, in the gateway and in workers."""
NOTICE_S = 5
"""A worker that terminates serves on for so long, until each gateway has seen it. Their watch takes less than
a second; one that is just listing anew, some seconds."""
SHUTDOWN_TIMEOUT = "--shutdown-timeout"
SHUTDOWN_TIMEOUT_SINCE = (0, 18)
"""vLLM 0.18 (vllm-project/vllm#34730): without it, SIGTERM aborts running requests."""
_MARGIN_S = 5

_IMAGE = re.compile(r"(?:.*/)?(?P<name>[^/:@]+):(?P<tag>[^/:@]+)")
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
_CURRENT = re.compile(r"(?:docker\.io/)?(?:vllm|lmcache)/vllm-openai[^/:@]*:(?:latest|nightly)[^/:@]*")


def gateway_stop_s(server: Mapping[str, Any]) -> int:
    """From SIGTERM to SIGKILL for a gateway whose configuration has this `server` section."""
    names = ("processes", "shutdown_delay_s", "drain_timeout_s")
    known = {name: server[name] for name in names if name in server}
    return math.ceil(ServerOptions.model_validate(known).longest_shutdown_s) + _MARGIN_S


def drains_itself(plan: EndpointPlan) -> bool:
    """Whether the engine finishes running requests after SIGTERM."""
    return not plan.is_simulated and (_own_timeout_s(plan) is not None or _takes_timeout(plan))


def shutdown_arguments(plan: EndpointPlan) -> tuple[str, ...]:
    """What an engine of known version is given beside the user's own arguments."""
    return (SHUTDOWN_TIMEOUT, str(DRAIN_S)) if _takes_timeout(plan) else ()


def worker_drain_s(plan: EndpointPlan) -> int:
    """How long a worker's running requests may take to finish."""
    own = _own_timeout_s(plan)
    return DRAIN_S if own is None else own


def worker_grace_s(plan: EndpointPlan) -> int:
    """From the worker's termination to SIGKILL, `pre_stop` included. Engines need seconds to end."""
    return NOTICE_S + worker_drain_s(plan) + 2 * _MARGIN_S


def pre_stop(plan: EndpointPlan) -> dict[str, Any]:
    """A pod's preStop hook: SIGTERM comes after it. The worker serves on until gateways send it no more;
    where the engine would abort what runs, also until that has finished."""
    if drains_itself(plan):
        return {"exec": {"command": ["sleep", str(NOTICE_S)]}}
    return {"exec": {"command": ["python3", "-c", _WAIT % (NOTICE_S, worker_drain_s(plan), plan.port)]}}


_WAIT = """\
import time, urllib.request
time.sleep(%d)
end = time.monotonic() + %d
counts = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
while time.monotonic() < end:
    page = urllib.request.urlopen("http://127.0.0.1:%d/metrics", timeout=5).read().decode()
    if not any(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(counts)):
        break
    time.sleep(1)
"""


def _own_timeout_s(plan: EndpointPlan) -> int | None:
    value = option_value(list(plan.args), SHUTDOWN_TIMEOUT)
    return int(value) if value is not None and value.isdigit() else None


def _takes_timeout(plan: EndpointPlan) -> bool:
    """The image's tag says so. An engine that does not know the option does not start, so no guesses."""
    if plan.is_simulated or plan.command is not None:
        return False
    if _CURRENT.fullmatch(plan.image):
        return True
    image = _IMAGE.fullmatch(plan.image)
    version = _VERSION.match(image["tag"]) if image is not None and image["name"].startswith("vllm") else None
    return version is not None and (int(version[1]), int(version[2])) >= SHUTDOWN_TIMEOUT_SINCE
