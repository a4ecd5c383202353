"""Registry of render targets by the names that `kvroute render --to` accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvroute import plugins
from kvroute.deploy.render.compose import render_compose
from kvroute.deploy.render.config import render_config
from kvroute.deploy.render.envoy import GatewayRef, picker_findings, render_envoy
from kvroute.deploy.render.kubernetes import render_kubernetes
from kvroute.deploy.render.lmcache import render_lmcache
from kvroute.deploy.render.plan import EndpointPlan, plan_endpoint
from kvroute.deploy.render.reach import ENVOY, findings_for
from kvroute.deploy.render.worker_args import render_worker_args
from kvroute.deploy.spec.endpoint import Document
from kvroute.deploy.spec.loading import Finding


class RenderTarget(NamedTuple):
    """A render function, and what `kvroute render` prints without `-o`."""

    render: Callable[[EndpointPlan], dict[str, str]]
    """Returns file name -> text."""
    first_only: bool
    """Whether only the first file is printed."""


TARGETS: Final[dict[str, RenderTarget]] = {
    "compose": RenderTarget(render_compose, True),
    "kubernetes": RenderTarget(render_kubernetes, False),
    "lmcache": RenderTarget(render_lmcache, True),
    "worker-args": RenderTarget(render_worker_args, True),
    "config": RenderTarget(render_config, True),
    "envoy": RenderTarget(render_envoy, False),
}


def render_target(name: str) -> RenderTarget | None:
    """The target called `name`: built in, or an entry point `kvroute.render_targets`; None without one.

    Raises ConfigError if the other distribution cannot be imported.
    """
    if name in TARGETS or plugins.find(plugins.RENDER_TARGETS, name) is None:
        return TARGETS.get(name)
    plugin: RenderTarget = plugins.load(plugins.RENDER_TARGETS, name)
    return plugin


def rendered(target: str, plan: EndpointPlan, door: GatewayRef | None) -> dict[str, str]:
    """The files of a target. `door`, which only kubernetes can have, puts a Gateway before the workers."""
    if door is not None:
        return render_kubernetes(plan, door)
    made = render_target(target)
    assert made is not None, "the command has checked the name"
    return made.render(plan)


def target_findings(
    target: str, document: Document, findings: Sequence[Finding], door: GatewayRef | None
) -> list[Finding]:
    """`findings` for a target, and what the target cannot render. See `rendered`."""
    of_target = list(findings_for(target, document, findings, shares=door is not None))
    if door is None and target != ENVOY:
        return of_target
    lines = {finding.path: finding.line for finding in findings}
    of_picker = []
    for path, verdict, text in picker_findings(plan_endpoint(document), door):
        above = [path[:length] for length in range(len(path), 0, -1)]
        line = next((lines[prefix] for prefix in above if prefix in lines), None)
        of_picker.append(Finding(path, line, verdict, text))
    replaced = {finding.path for finding in of_picker if finding.path}
    return [finding for finding in of_target if finding.path not in replaced] + of_picker
