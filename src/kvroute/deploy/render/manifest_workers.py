"""Kubernetes objects of the workers: their StatefulSet or Deployment, and the model's volume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kvroute.deploy.render.manifest import (
    WORKER,
    Manifest,
    cache_variables,
    disruption_budget,
    has_sidecar,
    http_get,
    lmcache_container,
    manifest,
    matching,
    needs_host_ipc,
    placement,
    plain_variables,
    pod_template,
    selector,
    service_port,
    tier_mounts,
    tier_volumes,
)
from kvroute.deploy.render.plan import GPU, GPU_PARTITION, EndpointPlan, Model, pre_stop, worker_grace_s
from kvroute.deploy.render.reach import event_ports
from kvroute.deploy.render.site import LMCACHE_HTTP_PORT, TRANSFER_PORT, DeploymentSite, WorkerSite
from kvroute.deploy.render.worker_args import container_environment, worker_argv
from kvroute.deploy.spec.worker import FsxStorage, Probe, S3Storage

HUB_CACHE = "/root/.cache/huggingface"
STARTUP_PERIOD_S = 10


def worker_manifests(plan: EndpointPlan, site: DeploymentSite) -> Iterator[Manifest]:
    """The workers' StatefulSet, its headless Service, and the model's volume if it needs one."""
    name = f"{plan.name}-workers"
    ports = [service_port(plan.port_name, plan.port)]
    if has_sidecar(plan):
        ports.append(service_port("lmcache-http", LMCACHE_HTTP_PORT))
    yield from _model_storage(plan)
    yield manifest(
        "v1",
        "Service",
        plan,
        name,
        WORKER,
        spec={
            "clusterIP": "None",
            # The gateway itself probes workers that are not ready, so their names must resolve.
            "publishNotReadyAddresses": True,
            "selector": selector(plan, WORKER),
            "ports": ports,
        },
    )
    for role_plan in plan.by_role:
        yield _workload(role_plan, site, name)
    yield disruption_budget(plan, WORKER)


def workload_name(plan: EndpointPlan) -> str:
    """The name of the workers' StatefulSet or Deployment, which begins the names of its pods."""
    return f"{plan.name}-{plan.group.role if plan.group is not None else 'worker'}"


def _workload(plan: EndpointPlan, site: DeploymentSite, name: str) -> Manifest:
    """The StatefulSet or Deployment of the workers, or of those of one role."""
    settings = plan.extension.kubernetes
    kind = settings.workload
    scaling = plan.spec.auto_scaling_spec if plan.group is None else plan.group.scaling
    # Without surge, whole nodes are free for the new worker only after the old one has ended.
    surge = {"maxSurge": settings.max_surge, "maxUnavailable": 0 if settings.max_surge else 1}
    of_kind: dict[str, dict[str, Any]] = {
        "StatefulSet": {"serviceName": name, "podManagementPolicy": "Parallel"},
        "Deployment": {"strategy": {"type": "RollingUpdate", "rollingUpdate": surge}},
    }
    return manifest(
        "apps/v1",
        kind,
        plan,
        workload_name(plan),
        WORKER,
        spec={
            # With an autoscaler, `replicas` would undo its decision at each `kubectl apply`.
            **({} if scaling is not None else {"replicas": plan.replicas}),
            **of_kind[kind],
            "selector": matching(plan, WORKER),
            "template": pod_template(plan, WORKER, _pod(plan, site), on_worker_nodes=True),
        },
    )


def _first_worker(plan: EndpointPlan, site: DeploymentSite) -> WorkerSite:
    """The first worker that the plan is for. All workers of a workload have one template."""
    role = plan.group.role if plan.group is not None else None
    return next(worker for worker in site.workers if worker.role == role)


def _pod(plan: EndpointPlan, site: DeploymentSite) -> dict[str, Any]:
    settings = plan.spec.kubernetes
    extra = settings.model_dump(by_alias=True, exclude_none=True) if settings is not None else {}
    pod: dict[str, Any] = {
        "enableServiceLinks": False,
        "automountServiceAccountToken": "serviceAccountName" in extra,
        "terminationGracePeriodSeconds": worker_grace_s(plan),
    }
    for key in ("schedulerName", "serviceAccountName"):
        if key in extra:
            pod[key] = extra[key]
    pod |= placement(plan)
    if plan.resources.claims:
        pod["resourceClaims"] = [{"name": claim.name} for claim in plan.resources.claims]
    host_ipc = needs_host_ipc(plan)
    if host_ipc:
        pod["hostIPC"] = True
    init_containers = list(extra.get("initContainers", []))
    volumes = [*extra.get("volumes", []), *_volumes(plan, host_ipc)]
    if plan.cache is not None and has_sidecar(plan):
        # As a sidecar, the server starts before the engine, which waits for it, and ends after the engine.
        init_containers.append(lmcache_container(plan, plan.cache, site) | {"restartPolicy": "Always"})
        volumes += tier_volumes(plan, site)
    elif plan.cache is not None and plan.cache.classic:
        volumes += tier_volumes(plan, site)
    if init_containers:
        pod["initContainers"] = init_containers
    pod["containers"] = [_container(plan, site, host_ipc)]
    if volumes:
        pod["volumes"] = volumes
    return pod


def _container(plan: EndpointPlan, site: DeploymentSite, host_ipc: bool) -> dict[str, Any]:
    worker = _first_worker(plan, site)
    argv = worker_argv(plan, worker, site)
    if plan.is_simulated:
        command, args = None, list(argv[1:])
    elif plan.command is not None:
        command, args = list(plan.command), list(argv[len(plan.command) :])
    else:
        command, args = list(argv[:2]), list(argv[2:])
    ports = [(plan.port_name, plan.port)]
    ports += event_ports(plan).items()
    if plan.group is not None and not plan.is_simulated:
        ports.append(("transfer", TRANSFER_PORT))
    container: dict[str, Any] = {
        "name": "worker",
        "image": plan.extension.images.gateway if plan.is_simulated else plan.image,
        **({"command": command} if command is not None else {}),
        "args": args,
        **({"workingDir": plan.worker.working_dir} if plan.worker.working_dir is not None else {}),
        "env": _environment(plan, site),
        "ports": [{"name": name, "containerPort": number} for name, number in ports],
        **_probes(plan),
        "lifecycle": {"preStop": pre_stop(plan)},
        "resources": _resources(plan),
    }
    mounts = _mounts(plan, host_ipc)
    if plan.cache is not None and plan.cache.classic:
        mounts += tier_mounts(plan, site)
    if mounts:
        container["volumeMounts"] = mounts
    return container


def _environment(plan: EndpointPlan, site: DeploymentSite) -> list[dict[str, Any]]:
    worker = _first_worker(plan, site)
    values = container_environment(plan, worker, site)
    if "LMCACHE_LMCACHE_INSTANCE_ID" in values:
        values["LMCACHE_LMCACHE_INSTANCE_ID"] = "$(POD_NAME)"
    by_reference = [
        variable.model_dump(by_alias=True, exclude_none=True)
        for variable in plan.environment
        if variable.value_from is not None
    ]
    hub = plan.model.hub
    if hub is not None and hub.token_secret_ref is not None:
        reference = hub.token_secret_ref.model_dump(by_alias=True, exclude_none=True)
        by_reference.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    return [*cache_variables(plan, site.tier), *by_reference, *plain_variables(values)]


def _probes(plan: EndpointPlan) -> dict[str, Any]:
    """The user's probes, and default probes for those that the user does not set."""
    user_probes = plan.worker.probes
    answer = http_get("/health", plan.port_name)
    patience = math.ceil(plan.spec.max_deploy_time_in_seconds / STARTUP_PERIOD_S)
    ours = {
        "startupProbe": answer | {"periodSeconds": STARTUP_PERIOD_S, "failureThreshold": patience},
        "livenessProbe": answer | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": answer | {"periodSeconds": 5, "timeoutSeconds": 5},
    }
    given: dict[str, Probe | None] = {}
    if user_probes is not None:
        given = {
            "startupProbe": user_probes.startup_probe,
            "livenessProbe": user_probes.liveness_probe,
            "readinessProbe": user_probes.readiness_probe,
        }
    for name, probe in given.items():
        if probe is not None:
            ours[name] = probe.model_dump(by_alias=True, exclude_none=True)
    return ours


def _resources(plan: EndpointPlan) -> dict[str, Any]:
    resources: dict[str, Any] = plan.resources.model_dump(by_alias=True, exclude_none=True)
    if any(
        name.startswith(GPU_PARTITION)
        for section in ("requests", "limits")
        for name in resources.get(section, {})
    ):
        # A node whose GPUs are divided has partitions, and no whole GPU.
        return resources
    if plan.gpus:
        for section in ("requests", "limits"):
            if section == "limits" or GPU in resources.get(section, {}):
                resources[section] = {**resources.get(section, {}), GPU: str(plan.gpus)}
    else:
        for section in ("requests", "limits"):
            if section in resources:
                resources[section] = {key: value for key, value in resources[section].items() if key != GPU}
    return resources


def _volumes(plan: EndpointPlan, host_ipc: bool) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = []
    if plan.is_simulated:
        return volumes
    if not host_ipc:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    model = plan.model
    if model.volume is None:
        volumes.append({"name": "models", **_downloads(plan)})
    elif model.store is not None:
        claim = {"claimName": f"{plan.name}-model", "readOnly": True}
        volumes.append({"name": model.volume.name, "persistentVolumeClaim": claim})
    elif not model.is_own_volume:
        volumes.append(
            {"name": model.volume.name, "hostPath": {"path": _node_path(model.location), "type": "Directory"}}
        )
    return volumes


def _downloads(plan: EndpointPlan) -> dict[str, Any]:
    """The kind of volume for downloaded models."""
    cache = plan.extension.kubernetes.model_cache
    if cache is not None and cache.claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim}}
    if cache is not None and cache.host_path is not None:
        return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {}}


def _node_path(folder: str) -> str:
    """The path of a model's folder on a node. A relative path is below /var/lib/kvroute."""
    return folder if folder.startswith("/") else f"/var/lib/kvroute/{folder.removeprefix('./')}"


def _mounts(plan: EndpointPlan, host_ipc: bool) -> list[dict[str, Any]]:
    if plan.is_simulated:
        return []
    mounts: list[dict[str, Any]] = [] if host_ipc else [{"name": "shm", "mountPath": "/dev/shm"}]
    volume = plan.model.volume
    if volume is None:
        return [*mounts, {"name": "models", "mountPath": HUB_CACHE}]
    return [*mounts, {"name": volume.name, "mountPath": volume.mount_path, "readOnly": True}]


def _model_storage(plan: EndpointPlan) -> Iterator[Manifest]:
    """PersistentVolume and claim for the model's bucket or file system, through AWS's CSI drivers."""
    model = plan.model
    if model.store is None or plan.is_simulated:
        return
    name = f"{plan.name}-model"
    volume = manifest(
        "v1",
        "PersistentVolume",
        plan,
        f"{plan.namespace}-{name}",
        WORKER,
        spec={
            # These drivers ignore the size.
            "capacity": {"storage": "1200Gi"},
            "accessModes": ["ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"namespace": plan.namespace, "name": name},
            **_driver(model, f"{plan.namespace}-{name}"),
        },
    )
    del volume["metadata"]["namespace"]
    yield volume
    yield manifest(
        "v1",
        "PersistentVolumeClaim",
        plan,
        name,
        WORKER,
        spec={
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "volumeName": f"{plan.namespace}-{name}",
            "resources": {"requests": {"storage": "1200Gi"}},
        },
    )


def _driver(model: Model, handle: str) -> dict[str, Any]:
    match model.store:
        case S3Storage(bucket_name=bucket, region=region):
            prefix = [f"prefix {model.location}/"] if model.location else []
            return {
                "mountOptions": ["read-only", f"region {region}", *prefix],
                "csi": {
                    "driver": "s3.csi.aws.com",
                    "volumeHandle": handle,
                    "volumeAttributes": {"bucketName": bucket},
                },
            }
        case FsxStorage(file_system_id=system, dns_name=dns, mount_name=mount):
            attributes = {"dnsname": dns, "mountname": mount}
            return {
                "mountOptions": ["flock"],
                "csi": {
                    "driver": "fsx.csi.aws.com",
                    "volumeHandle": system,
                    "volumeAttributes": {key: value for key, value in attributes.items() if value},
                },
            }
        case None:
            return {}
