"""Renders the command line and environment of each worker."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from kvroute.deploy.plan import TINY_BLOCK_SIZE, TINY_BLOCKS, TINY_KV_CACHE_GIB, TINY_MAX_MODEL_LEN
from kvroute.deploy.render.lmcache import compact, connector, worker_environment
from kvroute.deploy.render.plan import EndpointPlan, shutdown_arguments
from kvroute.deploy.render.site import DeploymentSite, WorkerSite, local_site
from kvroute.deploy.vllm_command import (
    CpuPlacement,
    GpuPlacement,
    KvEventsEndpoint,
    KvTransfer,
    VllmSpec,
    vllm_argv,
    vllm_environment,
)

PER_CONTAINER = ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND")
"""Variables that place an engine. In a container, the container runtime decides the placement."""


def vllm_spec(plan: EndpointPlan, worker: WorkerSite, site: DeploymentSite, *, core: int = 0) -> VllmSpec:
    """The `VllmSpec` of one worker. `core` is its core on a CPU."""
    plan = plan.of_role(worker.role)
    extra: list[str] = []
    if plan.model.hub is not None and plan.model.hub.commit_sha is not None:
        extra += ["--revision", plan.model.hub.commit_sha]
    lmcache = connector(plan, worker)
    if lmcache is not None:
        extra += ["--kv-transfer-config", compact(lmcache)]
    transfer = None
    if worker.role is not None:
        device = None if plan.gpus else "cpu"
        transfer = KvTransfer(
            worker.role, worker.transfer_host, worker.transfer_port, device, on_one_host=site.is_local
        )
    if not site.is_local:  # a local engine has no image tag, so its version is not known
        extra += shutdown_arguments(plan)
    user_environment = {
        variable.name: variable.value
        for variable in plan.environment
        if variable.value is not None and variable.value_from is None
    }
    tiny = plan.model.tiny is not None
    on_core = CpuPlacement((core,), TINY_KV_CACHE_GIB if tiny else None)
    return VllmSpec(
        model=plan.model.local_source if site.is_local else plan.model.source,
        served_name=plan.model.served_name,
        host=worker.bind,
        port=worker.port,
        placement=GpuPlacement(worker.gpus) if plan.gpus else on_core,
        block_size=TINY_BLOCK_SIZE if tiny else None,
        num_gpu_blocks=TINY_BLOCKS if tiny else None,
        max_model_len=TINY_MAX_MODEL_LEN if tiny else None,
        random_weights=tiny,
        offline=tiny,
        eager=tiny,
        tool_call_parser="hermes" if tiny else None,
        kv_events=KvEventsEndpoint(f"tcp://*:{worker.events_port}", f"tcp://*:{worker.replay_port}")
        if plan.has_events
        else None,
        transfer=transfer,
        extra_args=(*extra, *plan.args),
        extra_env=user_environment | worker_environment(plan, worker, site),
    )


def worker_argv(plan: EndpointPlan, worker: WorkerSite, site: DeploymentSite) -> tuple[str, ...]:
    """The command line of one worker. The user's options replace the rendered ones."""
    plan = plan.of_role(worker.role)
    if plan.is_simulated:
        return (
            *("kvroute", "sim", "--host", worker.bind, "--port", str(worker.port)),
            *("--model", plan.model.served_name, *_sim_events(plan, worker, site)),
            *(("--nixl",) if worker.role is not None else ()),
        )
    spec = vllm_spec(plan, worker, site)
    argv = vllm_argv(spec)
    ours = _without(
        argv[: len(argv) - len(plan.args)],
        {argument.split("=", 1)[0] for argument in plan.args if argument.startswith("-")},
    )
    if plan.command is not None:
        # `ours` starts with `vllm serve MODEL`, which the user's command replaces.
        return (*plan.command, *ours[3:], "--model", spec.model, *plan.args)
    return (*ours, *plan.args)


def container_environment(plan: EndpointPlan, worker: WorkerSite, site: DeploymentSite) -> dict[str, str]:
    """The part of a worker's environment that does not depend on where its container runs."""
    if plan.is_simulated:
        return {}
    env = vllm_environment(vllm_spec(plan, worker, site), {})
    return {name: value for name, value in env.items() if name not in PER_CONTAINER}


def render_worker_args(plan: EndpointPlan) -> dict[str, str]:
    """A file with one shell command for each worker on this host."""
    site = local_site(plan)
    lines = []
    for number, worker in enumerate(site.workers):
        environment = (
            {} if plan.is_simulated else vllm_environment(vllm_spec(plan, worker, site, core=number), {})
        )
        words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        lines.append(" ".join([*words, shlex.join(worker_argv(plan, worker, site))]))
    return {"worker-args.sh": "".join(f"{line}\n" for line in lines)}


def _sim_events(plan: EndpointPlan, worker: WorkerSite, site: DeploymentSite) -> tuple[str, ...]:
    if not plan.has_events or site.is_local:
        # On one host a simulated worker selects free ports itself and reports them to the gateway.
        return ()
    events, replay = (f"tcp://{worker.bind}:{port}" for port in (worker.events_port, worker.replay_port))
    return ("--event-endpoint", events, "--replay-endpoint", replay)


def _without(argv: Iterable[str], options: set[str]) -> list[str]:
    """`argv` without the options `options` and their values."""
    same = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size"}
    dropped = options | {same[option] for option in options if option in same}
    kept: list[str] = []
    skipping = False
    for argument in argv:
        if argument.startswith("-"):
            skipping = argument.split("=", 1)[0] in dropped
        if not skipping:
            kept.append(argument)
    return kept
