"""Grace periods for stopping gateway and workers, so that updates and scale-downs lose no request. Pure.

worker:   preStop (gateways notice) -> SIGTERM -> running requests finish -> exit
gateway:  SIGTERM -> server.shutdown_delay_s -> server.drain_timeout_s -> exit
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvroute.deploy.render.plan import EndpointPlan, option_value
from kvroute.gateway.options import ServerOptions

GATEWAY_DELAY_S = 5
"""`server.shutdown_delay_s` in Kubernetes: endpoints and kube-proxy's rules are updated within seconds."""
DRAIN_S = 120
"""In Kubernetes, how long running answers may take to finish, in the gateway and in workers."""
NOTICE_S = 5
"""How long a terminating worker continues to serve, until every gateway knows that it terminates."""
# A gateway's watch takes less than a second; a gateway that is just listing all pods again takes some
# seconds.
SHUTDOWN_TIMEOUT = "--shutdown-timeout"
"""vLLM's option (`deploy/spec/versions.py` has the releases). Without it, SIGTERM aborts running requests."""
_MARGIN_S = 5


def gateway_stop_s(server: Mapping[str, Any]) -> int:
    """Seconds from SIGTERM to SIGKILL for a gateway with this `server` section in its configuration."""
    names = ("processes", "shutdown_delay_s", "drain_timeout_s")
    known = {name: server[name] for name in names if name in server}
    return math.ceil(ServerOptions.model_validate(known).longest_shutdown_s) + _MARGIN_S


def engine_drains(plan: EndpointPlan) -> bool:
    """Whether the engine itself finishes running requests after SIGTERM."""
    return not plan.is_simulated and (_own_timeout_s(plan) is not None or _accepts_timeout(plan))


def shutdown_arguments(plan: EndpointPlan) -> tuple[str, ...]:
    """The arguments that make an engine drain at shutdown; empty if its image may not accept them."""
    return (SHUTDOWN_TIMEOUT, str(DRAIN_S)) if _accepts_timeout(plan) else ()


def worker_drain_s(plan: EndpointPlan) -> int:
    """Seconds that a worker's running requests may take to finish."""
    own = _own_timeout_s(plan)
    return DRAIN_S if own is None else own


def worker_grace_s(plan: EndpointPlan) -> int:
    """Seconds from a worker's termination to SIGKILL, `pre_stop` included. Engines need seconds to end."""
    return NOTICE_S + worker_drain_s(plan) + 2 * _MARGIN_S


def pre_stop(plan: EndpointPlan) -> dict[str, Any]:
    """A worker pod's preStop hook, which delays SIGTERM until gateways send the worker no more requests.

    If the engine would abort running requests at SIGTERM, the hook also waits until they have finished.
    """
    if engine_drains(plan):
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


def _accepts_timeout(plan: EndpointPlan) -> bool:
    """Whether the engine certainly accepts `--shutdown-timeout`."""
    # An engine that does not know the option does not start, so an unknown version means no.
    if plan.is_simulated or plan.command is not None:
        return False
    return plan.versions.is_known and plan.versions.pair.vllm.has_shutdown_timeout
