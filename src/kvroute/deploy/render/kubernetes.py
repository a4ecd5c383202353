"""Kubernetes manifests, one file for each part of the endpoint."""

from __future__ import annotations

import secrets
from typing import Final

import yaml

from kvroute.deploy.render.manifest import Manifest
from kvroute.deploy.render.manifest_cache import cache_manifests, tier_manifests
from kvroute.deploy.render.manifest_gateway import admin_secret, gateway_manifests
from kvroute.deploy.render.manifest_policy import monitoring_manifests, network_manifests, scaling_manifests
from kvroute.deploy.render.manifest_workers import worker_manifests
from kvroute.deploy.render.plan import EndpointPlan
from kvroute.deploy.render.site import kubernetes_site

SECRET_FILE: Final = "gateway-secret.yaml"
"""The manifest that contains the admin key."""


def kubernetes_objects(plan: EndpointPlan) -> dict[str, list[Manifest]]:
    """Every object but the Secret with the admin key, by the file that it goes to; no file is empty."""
    scaling = plan.spec.auto_scaling_spec
    most = max(plan.replicas, scaling.max_replica_count if scaling is not None else 0, 1)
    site = kubernetes_site(plan, most)
    files = {
        "workers.yaml": list(worker_manifests(plan, site)),
        "lmcache.yaml": list(cache_manifests(plan, site)),
        "l2.yaml": list(tier_manifests(plan, site)),
        "gateway.yaml": list(gateway_manifests(plan, site)),
        "network.yaml": list(network_manifests(plan, site)),
        "scaling.yaml": list(scaling_manifests(plan)),
        "monitoring.yaml": list(monitoring_manifests(plan)),
    }
    return {name: objects for name, objects in files.items() if objects}


def render_kubernetes(plan: EndpointPlan) -> dict[str, str]:
    """The manifests as text. The admin key in SECRET_FILE is made anew each time: see `with_its_key`."""
    head = f"# {plan.name}, made by `kvroute render --to kubernetes`: change the spec, not this file.\n"
    files = {name: head + _text(objects) for name, objects in kubernetes_objects(plan).items()}
    secret = admin_secret(plan, secrets.token_urlsafe(32))
    if secret is not None:
        files[SECRET_FILE] = head + _SECRET_NOTE + _text([secret])
    return files


_SECRET_NOTE: Final = (
    "# The admin key is random; another `render -o` into this folder keeps it. Keep this file out of\n"
    "# version control, or name a Secret of your own in x-kvroute.gateway.adminKeySecret.\n"
)


def with_its_key(text: str, earlier: str) -> str:
    """SECRET_FILE's new `text` with the key of an `earlier` one, so that rendering again changes no key.

    Raises ValueError if `earlier` is not such a file.
    """
    comments = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#"))
    try:
        kept = yaml.safe_load(earlier)["stringData"]
    except (yaml.YAMLError, KeyError, TypeError) as exc:
        raise ValueError("it is not a Secret with stringData") from exc
    return comments + _text([yaml.safe_load(text) | {"stringData": kept}])


def _text(objects: list[Manifest]) -> str:
    text: str = yaml.safe_dump_all(
        objects, sort_keys=False, allow_unicode=True, width=10**6, explicit_start=True
    )
    return text
