"""Releases of vLLM and LMCache: which pairs kvroute knows, what each can do, and which pair an image has.

The facts were read in the wheels of these releases (`scripts/record_options.py` records the options). The
pairs 0.11.1 + 0.3.9.post2 and 0.19.1 + 0.4.3 are those of HyperPod's images. In the other pairs LMCache is
the newest release at the time of vLLM's: vLLM's images contain LMCache without a pin
(`requirements/kv_connectors.txt`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvroute.blocks.chunks import BUILTIN, BUILTIN_NONE
from kvroute.deploy.l2.backend import Backend
from kvroute.deploy.l2.registry import backend_named, is_backend
from kvroute.deploy.spec.endpoint import Document, WorkerDocument, resolved
from kvroute.deploy.spec.extension import StatedVersions
from kvroute.deploy.spec.source import FieldVerdict, Path
from kvroute.routing.registry import needs_of
from kvroute.routing.strategy import Needs

Version: TypeAlias = tuple[int, int, int, int]
"""Major, minor, patch and post release: (0, 3, 9, 2) is 0.3.9.post2."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?post(\d+))?(?![\d.])")


def parse_version(text: str) -> Version | None:
    """The version with which `text` starts, such as `v0.19.1-cu130`; None if it starts with none."""
    match = _VERSION.match(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0), int(match[4] or 0))


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """One release of vLLM."""

    name: str
    dialect: str
    """How it encodes KV events: a name of `wire.vllm.DIALECTS`."""
    has_shutdown_timeout: bool
    """It accepts `--shutdown-timeout` (since 0.18, vllm-project/vllm#34730)."""
    loads_lmcache_connector: bool
    """`LMCacheMPConnector` is the class of the LMCache package, if that has one; before, vLLM's own."""
    prefill_decode: tuple[str, ...]
    """Connectors that pass KV from a prefill worker to a decode worker."""

    @property
    def version(self) -> Version:
        return _parsed(self.name)


@dataclass(frozen=True, slots=True)
class LmcacheRelease:
    """One release of LMCache. The fields from `l2_adapters` on are about `lmcache server` (mode: mp)."""

    name: str
    chunk_hash: str
    """Algorithm of the classic connector's chunk keys with `pre_caching_hash_algorithm: builtin`, as the
    gateway's `lmcache.controller.hash_algorithm` names it."""
    has_kv_events: bool
    """The classic connector has the setting `enable_kv_events`."""
    l2_adapters: frozenset[str] = frozenset()
    """Types that `--l2-adapter` accepts; empty: the release has no server."""
    eviction_policies: tuple[str, ...] = ()
    prefetch_policies: tuple[str, ...] = ()
    names_instances: bool = False
    """It accepts `--instance-id`."""
    reports_chunks: bool = False
    """It reports chunks in L1 and L2 to a coordinator (`POST /events`), if `--supported-transfer-mode` is
    `lmcache_driven`. Earlier releases report only L2, in other forms (`/l2/events`, `/quota/events`)."""
    separates_salts: bool = False
    """A request's `cache_salt` is part of a chunk's key."""

    @property
    def version(self) -> Version:
        return _parsed(self.name)

    @property
    def has_server(self) -> bool:
        return bool(self.l2_adapters)


def _parsed(name: str) -> Version:
    version = parse_version(name)
    assert version is not None  # the names are in this file
    return version


_P2P, _NIXL, _PUSH, _MOONCAKE = "P2pNcclConnector", "NixlConnector", "NixlPushConnector", "MooncakeConnector"
_ADAPTERS_043 = frozenset({"resp", "fs", "fs_native", "mooncake_store", "nixl_store", "mock", "plugin"})
_ADAPTERS_047 = _ADAPTERS_043 | {"s3", "dax", "hfbucket", "raw_block", "nixl_store_dynamic"}
_ADAPTERS_052 = _ADAPTERS_047 | {"valkey", "sagemaker-hyperpod", "aerospike", "bigtable", "p2p"}
_POLICIES = ("LRU", "IsolatedLRU", "noop")
_PREFETCH = ("default", "retain")

LMCACHE: Final[Mapping[str, LmcacheRelease]] = {
    release.name: release
    for release in (
        LmcacheRelease("0.3.9.post2", BUILTIN_NONE, False),
        LmcacheRelease("0.4.3", BUILTIN, True, _ADAPTERS_043, ("LRU", "noop"), ("default",)),
        LmcacheRelease(
            "0.4.7", BUILTIN, True, _ADAPTERS_047, _POLICIES, _PREFETCH, True, separates_salts=True
        ),
        LmcacheRelease(
            "0.5.2", BUILTIN, True, _ADAPTERS_052, _POLICIES, _PREFETCH, True, separates_salts=True
        ),
        LmcacheRelease("0.5.5", BUILTIN, True, _ADAPTERS_052, _POLICIES, _PREFETCH, True, True, True),
        LmcacheRelease(
            "0.5.6",
            BUILTIN,
            True,
            _ADAPTERS_052 - {"bigtable"} | {"hf3fs", "nixl_native"},
            ("LRU", "ARC", "IsolatedLRU", "noop"),
            _PREFETCH,
            True,
            True,
            True,
        ),
    )
}
"""Releases of LMCache by name, oldest first."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A release of vLLM with the release of LMCache in its image."""

    vllm: VllmRelease
    lmcache: LmcacheRelease

    def __str__(self) -> str:
        return f"vLLM {self.vllm.name} + LMCache {self.lmcache.name}"

    def tiers(self, *, classic: bool) -> tuple[str, ...]:
        """The tiers whose content `kvaware` sees. In classic mode LMCache reports L1 only."""
        if classic:
            return ("gpu", "l1")
        return ("gpu", "l1", "l2") if self.lmcache.reports_chunks else ("gpu",)

    def separates_adapters(self, *, classic: bool) -> bool:
        """Whether the gateway can keep the KV of LoRA adapters and tenants apart in LMCache.

        In classic mode it uses tags (`kv_transfer_params`, all releases), with a server salts.
        """
        return classic or self.lmcache.separates_salts


PAIRS: Final = (
    Pair(
        VllmRelease("0.11.1", "array-0.10", False, False, (_NIXL, _P2P)),
        LMCACHE["0.3.9.post2"],
    ),
    Pair(
        VllmRelease("0.19.1", "array-0.19", True, False, (_NIXL, _MOONCAKE, _P2P)),
        LMCACHE["0.4.3"],
    ),
    Pair(
        VllmRelease("0.23.0", "array-0.22", True, True, (_NIXL, _MOONCAKE, _P2P)),
        LMCACHE["0.4.7"],
    ),
    Pair(
        VllmRelease("0.26.0", "map-0.26", True, True, (_NIXL, _PUSH, _MOONCAKE)),
        LMCACHE["0.5.2"],
    ),
    Pair(
        VllmRelease("0.30.0", "map-0.30", True, True, (_NIXL, _PUSH, _MOONCAKE)),
        LMCACHE["0.5.5"],
    ),
    Pair(
        VllmRelease("0.32.0", "map-0.30", True, True, (_NIXL, _PUSH, _MOONCAKE)),
        LMCACHE["0.5.6"],
    ),
    Pair(
        VllmRelease("0.33.0", "map-0.33", True, True, (_NIXL, _PUSH, _MOONCAKE)),
        LMCACHE["0.5.6"],
    ),
)
"""The known pairs, oldest first."""

DIGESTS: Final[Mapping[str, tuple[str, str]]] = {
    # lmcache/vllm-openai:v0.5.5, as others have published its digest; not pulled here.
    "sha256:59b350753673f7bac0b55c4d6d8325d91bd0d1a47d101579f37d57d66a6a951d": ("0.29.0", "0.5.5"),
}
"""Digest of an image -> vLLM's and LMCache's versions; an empty one is not known."""

TAGS: Final[Mapping[str, tuple[str, str]]] = {
    # docs.aws.amazon.com, "Disaggregated prefill and decode": both images have LMCache 0.4.3 and vLLM 0.19.
    "server-hyperpod-cuda-v1.1": ("0.19.1", "0.4.3"),
}
"""Tag without a version -> vLLM's and LMCache's versions."""

LMCACHE_IMAGES: Final[Mapping[str, str]] = {
    "0.4.3": "0.19.1",  # see TAGS
    "0.5.4": "0.27.1",  # LMCache/LMCache#5101
    "0.5.5": "0.29.0",
}
"""LMCache's version in the tag of `lmcache/vllm-openai` -> vLLM's version in the image, where it is known."""

VersionFinding: TypeAlias = tuple[Path, FieldVerdict, str]
WORKER_IMAGE: Final[Path] = ("spec", "worker", "image")
_IMAGE = re.compile(r"(?P<path>.*?)(?::(?P<tag>[^/:@]+))?(?:@(?P<digest>sha256:[0-9a-f]+))?")
_MOVING = ("latest", "nightly")
# The first release whose engine is vLLM's V1. Tags below are versions of LMCache, in a mirror of its images.
_FIRST_V1: Final[Version] = (0, 8, 0, 0)


@dataclass(frozen=True, slots=True)
class Versions:
    """The pair as which a deployment is planned, and how far it is known."""

    pair: Pair
    vllm: Version | None
    """vLLM's version as far as it is known. May differ from the pair's."""
    lmcache: Version | None
    note: str = ""
    """Why the pair may differ from the versions in the image; empty if it does not."""

    @property
    def is_known(self) -> bool:
        """Whether at least one version is known. Otherwise options that may be unknown are left out."""
        return self.vllm is not None or self.lmcache is not None


def versions_of_image(image: str, *, vllm: str | None = None, lmcache: str | None = None) -> Versions:
    """The pair of an image. Stated versions override what the image's name says. Pure.

    A pair outside the table becomes the nearest older one, with a note. Patch releases of one minor release
    of vLLM count as equal.
    """
    in_vllm, in_lmcache, moving = _versions_in(image)
    known_vllm = parse_version(vllm) if vllm is not None else in_vllm
    known_lmcache = parse_version(lmcache) if lmcache is not None else in_lmcache
    if known_vllm is None and known_lmcache is None:
        reason = "its tag moves" if moving else "its name does not say its versions"
        hint = "name a release" if moving else "set x-kvroute.versions"
        note = f"applied, but {reason}: planned as {PAIRS[-1]}; {hint}"
        newest = PAIRS[-1]
        return Versions(newest, newest.vllm.version if moving else None, None, note)
    older = [
        pair
        for pair in PAIRS
        if (known_vllm is None or pair.vllm.version[:2] <= known_vllm[:2])
        and (known_lmcache is None or pair.lmcache.version[:3] <= known_lmcache[:3])
    ]
    if not older:
        note = (
            f"applied, but {_named(known_vllm, known_lmcache)} is older than all releases that kvroute knows"
        )
        return Versions(PAIRS[0], known_vllm, known_lmcache, f"{note}: planned as {PAIRS[0]}")
    pair = older[-1]
    if known_vllm is None:
        # The oldest vLLM with this LMCache: options that only a newer one has are left out.
        pair = next(older_pair for older_pair in older if older_pair.lmcache == pair.lmcache)
    is_exact = known_vllm == pair.vllm.version and known_lmcache in (None, pair.lmcache.version)
    if is_exact:
        return Versions(pair, known_vllm, known_lmcache)
    said = _named(known_vllm, known_lmcache)
    return Versions(pair, known_vllm, known_lmcache, f"applied, but {said} is planned as {pair}")


def _named(vllm: Version | None, lmcache: Version | None) -> str:
    names = (("vLLM", vllm), ("LMCache", lmcache))
    return " + ".join(f"{name} {_text(version)}" for name, version in names if version is not None)


def _text(version: Version) -> str:
    *numbers, post = version
    return ".".join(map(str, numbers)) + (f".post{post}" if post else "")


def _versions_in(image: str) -> tuple[Version | None, Version | None, bool]:
    """vLLM's and LMCache's versions that an image's name says, and whether its tag moves."""
    match = _IMAGE.fullmatch(image)
    if match is None:
        return None, None, False
    path, tag, digest = match["path"], match["tag"] or "", match["digest"]
    stated = DIGESTS.get(digest or "") or TAGS.get(tag)
    if stated is not None:
        return parse_version(stated[0]), parse_version(stated[1]), False
    *owners, name = path.split("/")
    is_theirs = "lmcache" in owners or name.startswith("lmcache")
    if not is_theirs and not name.startswith("vllm"):
        return None, None, False
    version = parse_version(tag)
    if version is None:
        moving = digest is None and tag.startswith(_MOVING) and owners[-1:] in (["vllm"], ["lmcache"])
        return None, None, moving
    if is_theirs or version < _FIRST_V1:
        return parse_version(LMCACHE_IMAGES.get(_text(version), "")), version, False
    return version, None, False


def version_rules(document: WorkerDocument) -> Iterator[VersionFinding]:
    """Yield notes about releases outside the table, and what the planned release of LMCache cannot do."""
    extension = document.x_kvroute
    if extension.engine == "sim":
        return
    versions = versions_of(document)
    pair, classic = versions.pair, is_classic(document)
    worker = document.spec.worker
    at: Path = ("x-kvroute", "images", "worker")
    if worker is not None and worker.image is not None:
        at = WORKER_IMAGE
        if not versions.note:
            inside = ", LMCache inside the engines" if classic and uses_lmcache(document) else ""
            yield at, FieldVerdict.APPLIED, f"the workers' image: {pair}{inside}"
    if versions.note:
        yield (at, FieldVerdict.NOTED, versions.note)
    if not uses_lmcache(document) or classic:
        return
    yield from _server(document, pair.lmcache)
    if extension.images.lmcache is not None:
        server = versions_of_image(extension.images.lmcache)
        if server.lmcache is not None and server.pair.lmcache != pair.lmcache:
            text = (
                f"applied, but its LMCache is planned as {server.pair.lmcache.name} and the engines' as"
                f" {pair.lmcache.name}: their protocol differs between releases"
            )
            yield (("x-kvroute", "images", "lmcache"), FieldVerdict.NOTED, text)
    routing = document.spec.intelligent_routing_spec
    follows = routing is not None and routing.enabled and needs_of(routing.routing_strategy) is Needs.TOKENS
    if routing is not None and follows and not pair.lmcache.reports_chunks:
        text = (
            f"applied, but {routing.routing_strategy} sees the GPU tier only: the server of LMCache"
            f" {pair.lmcache.name} does not report its chunks; that of {_oldest_pair(_has_reports)} does"
        )
        yield (("spec", "intelligentRoutingSpec", "routingStrategy"), FieldVerdict.NOTED, text)


def _server(document: WorkerDocument, release: LmcacheRelease) -> Iterator[VersionFinding]:
    """Yield errors for settings that the server of this release of LMCache does not have."""
    extension = document.x_kvroute
    if not release.has_server:
        hint = f"omit mode, or set classic, or use {_oldest_pair(_has_server)}"
        text = f"LMCache {release.name} has no server: {hint}"
        yield ("x-kvroute", "lmcache", "mode"), FieldVerdict.WRONG, text
        return
    backend = _l2_backend(document)
    if backend is not None and backend.adapter_type not in release.l2_adapters:
        kind = backend.adapter_type
        text = f"the server of LMCache {release.name} has no adapter {kind}: use "
        text += _oldest_pair(lambda candidate: kind in candidate.l2_adapters)
        text += ", or set x-kvroute.lmcache.mode: classic" if backend.has_classic else ""
        yield ("spec", "kvCacheSpec", "l2CacheSpec", "l2CacheBackend"), FieldVerdict.WRONG, text
    cache = document.spec.kv_cache_spec
    if cache is None or not cache.enable_l1_cache:
        return  # both policies need the first tier
    policy = extension.l1.eviction_policy
    if policy not in release.eviction_policies:
        policies = ", ".join(release.eviction_policies)
        text = f"the server of LMCache {release.name} has {policies} only"
        yield ("x-kvroute", "l1", "evictionPolicy"), FieldVerdict.WRONG, text
    prefetch = extension.l2.prefetch_policy
    if "prefetch_policy" in extension.l2.model_fields_set and prefetch not in release.prefetch_policies:
        text = f"the server of LMCache {release.name} has {', '.join(release.prefetch_policies)} only"
        yield ("x-kvroute", "l2", "prefetchPolicy"), FieldVerdict.WRONG, text


def adapter_problem(document: WorkerDocument) -> str:
    """Why LMCache gives LoRA adapters wrong answers whatever the gateway does; empty if it does not."""
    pair = versions_of(document).pair
    if pair.separates_adapters(classic=is_classic(document)):
        return ""
    return (
        f"the server of LMCache {pair.lmcache.name} gives a LoRA adapter KV that another model computed, and"
        f" has no salts against it: set x-kvroute.lmcache.mode: classic, or use {_oldest_pair(_has_salts)}"
    )


def server_with(document: WorkerDocument, backend: Backend) -> str:
    """A clause that names the LMCache server with an adapter for `backend`.

    That is the server in the document's image, or else in the oldest known pair with this adapter.
    """
    kind = backend.adapter_type
    if kind in versions_of(document).pair.lmcache.l2_adapters:
        return "its server has one (mode: mp)"
    return f"the server of {_oldest_pair(lambda candidate: kind in candidate.l2_adapters)} has one (mode: mp)"


def _has_server(release: LmcacheRelease) -> bool:
    return release.has_server


def _has_salts(release: LmcacheRelease) -> bool:
    return release.separates_salts


def _has_reports(release: LmcacheRelease) -> bool:
    return release.reports_chunks


def _oldest_pair(able: Callable[[LmcacheRelease], bool]) -> str:
    """The oldest known pair whose LMCache is `able`, as text."""
    return next((str(pair) for pair in PAIRS if able(pair.lmcache)), "a newer release")


def versions_of(document: WorkerDocument) -> Versions:
    """The pair of vLLM and LMCache as which the document is planned."""
    worker, extension = document.spec.worker, document.x_kvroute
    image = worker.image if worker is not None and worker.image is not None else extension.images.worker
    return versions_of_image(image, vllm=extension.versions.vllm, lmcache=extension.versions.lmcache)


def stated_versions(text: str) -> dict[str, str]:
    """`VLLM`, `VLLM+LMCACHE` or `+LMCACHE` as the fields of `x-kvroute.versions`. Raises ValueError."""
    stated = {
        name: version
        for name, version in zip(("vllm", "lmcache"), text.split("+", 1), strict=False)
        if version
    }
    for name, version in stated.items():
        if parse_version(version) is None:
            raise ValueError(f"{version!r} is not a version of {name}, such as 0.19.1")
    if not stated:
        raise ValueError("expected VLLM+LMCACHE, such as 0.19.1+0.4.3")
    return stated


def with_versions(document: Document, vllm: str, lmcache: str) -> Document:
    """The document for an engine with these versions, in the mode that its own image has. Pure."""
    extension = document.x_kvroute
    mode = "classic" if is_classic(resolved(document)) else "mp"
    update = {
        # Not validated: an installed version may have a suffix (`+cu130`), which a spec may not have.
        "versions": StatedVersions.model_construct(vllm=vllm, lmcache=lmcache),
        "lmcache": extension.lmcache.model_copy(update={"mode": mode}),
    }
    return document.model_copy(update={"x_kvroute": extension.model_copy(update=update)})


def is_classic(document: WorkerDocument) -> bool:
    """Whether LMCache runs inside the engines: `lmcache.mode`, or else what the image's LMCache can do."""
    mode = document.x_kvroute.lmcache.mode
    if mode is not None:
        return mode == "classic"
    release, backend = versions_of(document).pair.lmcache, _l2_backend(document)
    if backend is None or not backend.has_classic:
        return not release.has_server
    return backend.adapter_type not in release.l2_adapters


def _l2_backend(document: WorkerDocument) -> Backend | None:
    cache = document.spec.kv_cache_spec
    l2 = cache.l2_cache_spec if cache is not None and cache.enable_l2_cache else None
    name = (l2.l2_cache_backend or "").lower() if l2 is not None else ""
    return backend_named(name) if is_backend(name) else None


def uses_lmcache(document: WorkerDocument) -> bool:
    """Whether LMCache runs."""
    cache = document.spec.kv_cache_spec
    return cache is not None and (
        cache.enable_l1_cache or cache.enable_l2_cache or cache.cache_config_file is not None
    )
