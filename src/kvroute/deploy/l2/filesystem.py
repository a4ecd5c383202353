"""A folder that every LMCache server sees: adapter `fs`."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.deploy.l2.backend import Setting, Tier
from kvroute.deploy.spec.extension import Extension, FileStore
from kvroute.deploy.spec.fields import Path


class FileSystem:
    """Local disk of one node, or a mounted file system of many."""

    name = "fs"
    says = "a folder"
    takes_url = False
    takes_password = False
    has_classic = True
    service_name = ""

    def url_problem(self, url: str) -> str:
        return ""

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        store = extension.l2.fs or FileStore()
        if not store.path.startswith("/"):
            return ((("x-kvroute", "l2", "fs", "path"), "must be an absolute path"),)
        return ()

    def what_runs(self, extension: Extension, url: str | None) -> str:
        store = extension.l2.fs or FileStore()
        return f"the folder {store.path}" + (
            f" of the claim {store.claim}" if store.claim else " of the node"
        )

    def tier(self, setting: Setting) -> Tier:
        store = setting.extension.l2.fs or FileStore()
        return Tier(
            adapter={"type": "fs", "base_path": store.path, "shared": store.claim is not None},
            remote_url=f"fs://localhost:0{store.path}",
            host_paths=(store.path,),
            claim=store.claim,
        )
