"""Which pair of vLLM and LMCache an image has, and what a spec may ask of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import yaml

from kvroute.deploy.engine_install import Recipe
from kvroute.deploy.l2.registry import BACKENDS
from kvroute.deploy.render.plan import plan_endpoint
from kvroute.deploy.spec.extension import DEFAULT_IMAGE, Extension
from kvroute.deploy.spec.loading import read_spec
from kvroute.deploy.spec.source import FieldVerdict, dotted
from kvroute.deploy.spec.versions import (
    DIGESTS,
    LMCACHE,
    PAIRS,
    parse_version,
    versions_of_image,
    with_versions,
)
from kvroute.wire.vllm import DIALECTS

STRATEGIES = frozenset({"roundrobin", "session", "prefixaware", "kvaware"})
DLC = "public.ecr.aws/deep-learning-containers/vllm"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.33.0", (0, 33, 0, 0)),
        ("v0.19.1-cu130", (0, 19, 1, 0)),
        ("0.15-gpu-py312", (0, 15, 0, 0)),
        ("0.3.9.post2", (0, 3, 9, 2)),
        ("v0.3.9post2", (0, 3, 9, 2)),
        ("latest", None),
        ("server-hyperpod-cuda-v1.1", None),
        ("", None),
    ],
)
def test_a_version_is_what_a_tag_starts_with(text: str, version: object) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("image", "pair"),
    [
        ("vllm/vllm-openai:v0.33.0", "vLLM 0.33.0 + LMCache 0.5.6"),
        ("docker.io/vllm/vllm-openai:v0.19.1-cu130", "vLLM 0.19.1 + LMCache 0.4.3"),
        (f"{DLC}:0.11.1-gpu-py312-cu129-ubuntu22.04-ec2-v1.0", "vLLM 0.11.1 + LMCache 0.3.9.post2"),
        (f"{DLC}:server-hyperpod-cuda-v1.1", "vLLM 0.19.1 + LMCache 0.4.3"),
        ("lmcache/vllm-openai:v0.4.3", "vLLM 0.19.1 + LMCache 0.4.3"),
        ("registry:5000/team/vllm-openai:v0.26.0@sha256:0123", "vLLM 0.26.0 + LMCache 0.5.2"),
        (DEFAULT_IMAGE, "vLLM 0.32.0 + LMCache 0.5.6"),
    ],
)
def test_an_image_in_the_table_is_planned_as_its_own_pair(image: str, pair: str) -> None:
    versions = versions_of_image(image)

    assert str(versions.pair) == pair
    assert versions.note == ""


@pytest.mark.parametrize(
    ("image", "pair", "says"),
    [
        ("vllm/vllm-openai:v0.31.0", "vLLM 0.30.0 + LMCache 0.5.5", "vLLM 0.31.0 is planned as"),
        ("vllm/vllm-openai:v0.40.1", "vLLM 0.33.0 + LMCache 0.5.6", "vLLM 0.40.1 is planned as"),
        ("vllm/vllm-openai:v0.19.0", "vLLM 0.19.1 + LMCache 0.4.3", "vLLM 0.19.0 is planned as"),
        ("vllm/vllm-openai:v0.18.1", "vLLM 0.11.1 + LMCache 0.3.9.post2", "vLLM 0.18.1 is planned as"),
        ("vllm/vllm-openai:v0.10.2", "vLLM 0.11.1 + LMCache 0.3.9.post2", "older than all releases"),
        # The tag is LMCache's version. The oldest vLLM with that LMCache has no option too many.
        ("lmcache/vllm-openai:v0.5.6", "vLLM 0.32.0 + LMCache 0.5.6", "LMCache 0.5.6 is planned as"),
        ("lmcache/vllm-openai:v0.5.5-cu129", "vLLM 0.26.0 + LMCache 0.5.2", "vLLM 0.29.0 + LMCache 0.5.5"),
        (f"mirror/any@{next(iter(DIGESTS))}", "vLLM 0.26.0 + LMCache 0.5.2", "vLLM 0.29.0 + LMCache 0.5.5"),
        ("mirror.example/team/vllm-openai:v0.5.6", "vLLM 0.32.0 + LMCache 0.5.6", "LMCache 0.5.6 is planned"),
        ("vllm/vllm-openai:latest", "vLLM 0.33.0 + LMCache 0.5.6", "its tag moves"),
        ("lmcache/vllm-openai:latest-nightly", "vLLM 0.33.0 + LMCache 0.5.6", "its tag moves"),
        ("example/engine:v1.2", "vLLM 0.33.0 + LMCache 0.5.6", "set x-kvroute.versions"),
        ("vllm/vllm-openai@sha256:abc", "vLLM 0.33.0 + LMCache 0.5.6", "set x-kvroute.versions"),
    ],
)
def test_an_image_outside_the_table_is_planned_as_the_nearest_older_pair(
    image: str, pair: str, says: str
) -> None:
    versions = versions_of_image(image)

    assert str(versions.pair) == pair
    assert says in versions.note


def test_stated_versions_override_the_images_name() -> None:
    both = versions_of_image("example/engine:v1.2", vllm="0.19.1", lmcache="0.4.3")
    one = versions_of_image("vllm/vllm-openai:v0.33.0", lmcache="0.4.3")

    assert (str(both.pair), both.note) == ("vLLM 0.19.1 + LMCache 0.4.3", "")
    assert (str(one.pair), one.is_known) == ("vLLM 0.19.1 + LMCache 0.4.3", True)
    assert "vLLM 0.33.0 + LMCache 0.4.3 is planned as" in one.note


def test_an_option_that_may_be_unknown_is_left_out_of_an_unknown_engine() -> None:
    assert not versions_of_image("example/engine:v1.2").is_known
    assert versions_of_image("lmcache/vllm-openai:v0.5.6").is_known


def test_each_pair_is_newer_than_the_one_before_and_has_a_dialect() -> None:
    for older, newer in itertools.pairwise(PAIRS):
        assert older.vllm.version < newer.vllm.version
        assert older.lmcache.version <= newer.lmcache.version
    assert [each.version for each in LMCACHE.values()] == sorted(each.version for each in LMCACHE.values())
    assert {pair.vllm.dialect for pair in PAIRS} <= set(DIALECTS)


def test_the_newest_server_has_all_adapters_that_kvroute_renders() -> None:
    assert {backend.adapter_type for backend in BACKENDS.values()} <= PAIRS[-1].lmcache.l2_adapters


def test_no_default_image_has_a_tag_that_moves() -> None:
    images = Extension().images.model_dump(exclude_none=True)

    assert not [
        image for image in images.values() if image.endswith((":latest", "-latest")) or ":" not in image
    ]


def test_the_tiers_that_kvaware_sees_follow_from_the_pair() -> None:
    seen = {str(pair): (pair.tiers(classic=False), pair.tiers(classic=True)) for pair in PAIRS}

    assert seen["vLLM 0.33.0 + LMCache 0.5.6"] == (("gpu", "l1", "l2"), ("gpu", "l1"))
    assert seen["vLLM 0.26.0 + LMCache 0.5.2"] == (("gpu",), ("gpu", "l1"))
    assert seen["vLLM 0.11.1 + LMCache 0.3.9.post2"] == (("gpu",), ("gpu", "l1"))


IMAGE_043, IMAGE_052 = "vllm/vllm-openai:v0.19.1", "vllm/vllm-openai:v0.26.0"


def test_the_mode_follows_from_what_the_images_lmcache_can_do(own: Any, plan: Any) -> None:
    tiered = {"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage"}

    assert not plan(own()).cache.classic
    assert plan(own({"spec.worker.image": f"{DLC}:0.11.1-gpu"})).cache.classic
    assert not plan(own({"spec.worker.image": IMAGE_043})).cache.classic
    # Only LMCache's connector inside the engine reaches HyperPod's daemon in this release.
    assert plan(own({"spec.worker.image": IMAGE_043, **tiered})).cache.classic
    assert not plan(own({"spec.worker.image": IMAGE_052, **tiered})).cache.classic


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        (
            {"spec.worker.image": f"{DLC}:0.11.1-gpu", "x-kvroute.lmcache.mode": "mp"},
            "x-kvroute.lmcache.mode",
            "LMCache 0.3.9.post2 has no server",
        ),
        (
            {
                "spec.worker.image": IMAGE_043,
                "x-kvroute.lmcache.mode": "mp",
                "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage",
            },
            "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend",
            "has no adapter sagemaker-hyperpod: use vLLM 0.26.0 + LMCache 0.5.2, or set",
        ),
        (
            {"spec.worker.image": IMAGE_052, "x-kvroute.l1.evictionPolicy": "ARC"},
            "x-kvroute.l1.evictionPolicy",
            "LMCache 0.5.2 has LRU, IsolatedLRU, noop only",
        ),
        (
            {"spec.worker.image": IMAGE_043, "x-kvroute.l2.prefetchPolicy": "retain"},
            "x-kvroute.l2.prefetchPolicy",
            "LMCache 0.4.3 has default only",
        ),
        (
            {"spec.worker.image": IMAGE_043, "spec.worker.args": ["--enable-lora"]},
            "spec.worker.args[0]",
            "set x-kvroute.lmcache.mode: classic, or use vLLM 0.23.0 + LMCache 0.4.7",
        ),
        ({"x-kvroute.versions": {"vllm": "newest"}}, "x-kvroute.versions.vllm", "match pattern"),
    ],
)
def test_what_a_release_cannot_do_is_wrong_with_what_to_do(
    own: Any, read: Any, changes: dict[str, Any], field: str, says: str
) -> None:
    assert says in wrong(read(own(changes)))[field]


def test_kvaware_on_a_server_that_does_not_report_is_noted(own: Any, read: Any) -> None:
    changes = {"spec.worker.image": IMAGE_052, "spec.intelligentRoutingSpec.routingStrategy": "kvaware"}
    texts = {finding.path[-1]: finding.text for finding in read(own(changes)).findings}

    assert "kvaware sees the GPU tier only" in texts["routingStrategy"]
    assert "vLLM 0.30.0 + LMCache 0.5.5 does" in texts["routingStrategy"]


def test_a_server_image_with_another_lmcache_is_noted(own: Any, read: Any) -> None:
    changes = {"spec.worker.image": IMAGE_052, "x-kvroute.images.lmcache": "lmcache/standalone:v0.5.6"}
    texts = {finding.path[-1]: finding.text for finding in read(own(changes)).findings}

    assert "planned as 0.5.6 and the engines' as 0.5.2" in texts["lmcache"]


def wrong(reading: Any) -> dict[str, str]:
    return {dotted(each.path): each.text for each in reading.findings if each.verdict is FieldVerdict.WRONG}


def test_on_a_host_the_engines_own_versions_count_and_the_images_mode_stays(own: Any, read: Any) -> None:
    newest = read(own()).require("spec")
    tiered = {"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage"}
    classic = read(own({"spec.worker.image": IMAGE_043, **tiered})).require("spec")

    for document, mode in ((newest, False), (classic, True)):
        planned = plan_endpoint(with_versions(document, *Recipe.bundled().versions))
        assert str(planned.versions.pair) == "vLLM 0.32.0 + LMCache 0.5.6"
        assert planned.cache is not None
        assert planned.cache.classic is mode


def test_the_engine_of_a_host_may_have_a_version_with_a_suffix(own: Any, read: Any) -> None:
    document = with_versions(read(own()).require("spec"), "0.32.0+cu129", "0.5.6")

    assert str(plan_endpoint(document).versions.pair) == "vLLM 0.32.0 + LMCache 0.5.6"


@pytest.mark.parametrize("extension", [None, {"versions": None}])
def test_the_flag_states_versions_also_beside_an_empty_section(extension: object, own: Any) -> None:
    text = yaml.safe_dump(own() | {"x-kvroute": extension})

    reading = read_spec(text, strategies=STRATEGIES, versions={"vllm": "0.19.1"})

    assert reading.require("spec").x_kvroute.versions.vllm == "0.19.1"


@pytest.mark.parametrize("extension", ["text", {"versions": "text"}])
def test_with_the_flag_a_wrong_section_is_still_reported(extension: object, own: Any) -> None:
    text = yaml.safe_dump(own() | {"x-kvroute": extension})

    reading = read_spec(text, strategies=STRATEGIES, versions={"vllm": "0.19.1"})

    assert {dotted(each.path).split(".")[0] for each in reading.wrong} == {"x-kvroute"}
