"""An S3 bucket: LMCache's adapter `s3`. Credentials come from the environment, as for every AWS client."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.deploy.l2.backend import Setting, Tier
from kvroute.deploy.spec.extension import Extension
from kvroute.deploy.spec.fields import Path


class S3:
    """A bucket, or what speaks like one."""

    name = "s3"
    says = "an S3 bucket"
    takes_url = False
    takes_password = False
    has_classic = True
    service_name = ""

    def url_problem(self, url: str) -> str:
        return ""

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        if extension.l2.s3 is None:
            return ((("x-kvroute", "l2", "s3"), "is required for l2CacheBackend: s3 (endpoint and region)"),)
        return ()

    def what_runs(self, extension: Extension, url: str | None) -> str:
        return f"the bucket {extension.l2.s3.endpoint}" if extension.l2.s3 else self.says

    def tier(self, setting: Setting) -> Tier:
        store = setting.extension.l2.s3
        if store is None:
            raise ValueError("x-kvroute.l2.s3 is not given")
        return Tier(
            adapter={
                "type": "s3",
                "s3_endpoint": store.endpoint,
                "s3_region": store.region,
                "shared": True,
            },
            remote_url=store.endpoint if "://" in store.endpoint else f"s3://{store.endpoint}",
            extra_config={"s3_region": store.region},
        )
