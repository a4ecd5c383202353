"""Each check on observations made by hand: what the simulated set-ups cannot show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvroute.doctor.checks import diagnose
from kvroute.doctor.event_probe import why_closed
from kvroute.doctor.observations import (
    CacheConfig,
    CacheServerSeen,
    Deployment,
    Finding,
    GatewaySeen,
    Observations,
    ProbePair,
    Reply,
    Severity,
    Stream,
    WorkerSeen,
    cache_config,
    counted_hits,
)
from kvroute.events.options import KvEventsOptions
from kvroute.fleet.worker import ModelsPage, WorkerId, WorkerSpec
from kvroute.index.map_trust import cause_and_fix
from kvroute.lmcache.options import LMCacheOptions

OK = Reply(200)
DEPLOYMENT = Deployment(
    workers=(),
    strategies=frozenset({"kvaware"}),
    reads_caches=True,
    uses_caches=True,
    kv_events=KvEventsOptions(),
    lmcache=LMCacheOptions.model_validate({"controller": {"enabled": True}}),
)
WORKER = WorkerSeen(
    spec=WorkerSpec(WorkerId("w0"), "http://10.0.0.1:8000"),
    health=Reply(200, clock_skew_s=0.2),
    version=Reply(200, b'{"version":"0.32.0"}'),
    models_reply=OK,
    models=ModelsPage(frozenset({"m"}), (), ({"id": "m"},)),
    metrics_reply=OK,
    cache=CacheConfig(16, True, "sha256"),
    publishes=True,
    streams=(Stream(0, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657", False, messages=2, replay_trouble=""),),
    samples={"a": (1, 2)},
    tokenizer_trouble="",
    pair=ProbePair(prompt_tokens=60, reported=48, counted=48, predicted=48),
)
GATEWAY = GatewaySeen(
    "http://gw:8080",
    OK,
    models=OK,
    admin=True,
    lmcache_known=True,
    instances=("w0",),
    max_fds=1_000_000,
)


def judged(worker: WorkerSeen = WORKER, gateway: GatewaySeen | None = GATEWAY) -> dict[str, Finding]:
    return {each.code: each for each in diagnose(DEPLOYMENT, Observations((worker,), gateway))}


def test_nothing_is_wrong_with_the_worker_and_gateway_of_these_tests():
    assert judged() == {}


def test_a_wrong_hash_seed_is_named_with_the_values_that_must_agree():
    problem = "LMCache instance 'w0' computes other chunk hashes than the gateway"

    found = judged(gateway=replace(GATEWAY, problems=(problem,)))

    assert found["hashes-differ"].severity is Severity.ERROR
    assert "PYTHONHASHSEED=0" in found["hashes-differ"].fix
    assert judged(gateway=GATEWAY) == {}


def test_a_controller_without_instances_is_named():
    assert "lmcache-registered" in judged(gateway=replace(GATEWAY, instances=()))


def test_a_prediction_that_sees_nothing_of_a_full_cache_is_an_error():
    pair = replace(WORKER.pair, predicted=0)

    found = judged(replace(WORKER, pair=pair), replace(GATEWAY, trust_notes={"w0": "the stream is silent"}))

    assert "(the stream is silent)" in found["prediction-missed"].what


@pytest.mark.parametrize("reason", ["audit", "silent", "gap", "unknown_parent", "full", "kinds"])
def test_a_map_that_is_not_used_is_a_warning_with_the_words_of_the_note(reason):
    text = cause_and_fix(reason, "windows only")
    gateway = replace(GATEWAY, notes=(f"kvaware: worker {'w0'!r}: {reason}{text}", "something else"))

    found = judged(gateway=gateway)["map-not-used"]

    assert (found.severity, found.subject) == (Severity.WARNING, "w0")
    assert reason in found.what
    assert text.strip(" ()")[1:] in found.fix


@pytest.mark.parametrize("reason", ["replaying", "no_events"])
def test_a_map_that_is_being_read_is_no_finding(reason):
    assert judged(gateway=replace(GATEWAY, notes=(f"kvaware: worker 'w0': {reason}",))) == {}


@pytest.mark.parametrize(
    ("inside", "hybrid"), [(True, "a/config.json has layers of several kinds"), (True, ""), (False, "x")]
)
def test_the_connector_within_the_engine_is_a_warning_for_hybrid_models(inside, hybrid):
    found = judged(replace(WORKER, has_lmcache_inside=inside, hybrid_model=hybrid))

    assert ("connector-not-hybrid" in found) is bool(inside and hybrid)
    if inside and hybrid:
        assert found["connector-not-hybrid"].severity is Severity.WARNING
        assert hybrid in found["connector-not-hybrid"].what


def test_a_repeated_prompt_that_is_not_cached_is_an_error():
    assert "probe-missed" in judged(replace(WORKER, pair=replace(WORKER.pair, reported=0, counted=0)))


def test_a_worker_that_reports_no_cached_tokens_is_judged_by_its_counters():
    found = judged(replace(WORKER, pair=replace(WORKER.pair, reported=None)))

    assert set(found) == {"cached-tokens-unreported"}
    found = judged(replace(WORKER, pair=replace(WORKER.pair, reported=None, counted=None)))
    assert found["probe-missed"].severity is Severity.NOT_CHECKED


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(200, b'{"version":"0.8.4"}'), "vLLM 0.8.4 may ignore `cache_salt`"),
        (Reply(404), "unknown release may ignore `cache_salt`"),
        (Reply(200, b'{"version":"0.19.1"}'), ""),
    ],
)
def test_a_worker_that_may_not_separate_tenants_is_an_error_with_isolation_only(reply, words):
    isolating, worker = replace(DEPLOYMENT, isolates_tenants=True), replace(WORKER, version=reply)

    found = {each.code: each for each in diagnose(isolating, Observations((worker,), GATEWAY))}

    assert "tenants-not-isolated" not in judged(worker)
    assert ("tenants-not-isolated" in found) is bool(words)
    if words:
        assert words in found["tenants-not-isolated"].what
        assert found["tenants-not-isolated"].severity is Severity.ERROR


@pytest.mark.parametrize(
    ("url", "endpoint", "is_same"),
    [
        ("http://engine.example:8000", "tcp://engine.example:5557", True),
        ("http://service.example:80", "tcp://10.0.0.1:5557", True),
        ("http://10.0.0.1:8001", "tcp://10.0.0.1:5558", False),
        ("http://engine.example:8000", None, True),
        ("http://10.0.0.1:8001", None, False),
    ],
)
def test_two_engines_that_started_at_one_moment_are_two_workers(url, endpoint, is_same):
    """Their start times have steps of 10 ms, and a launcher starts several engines at one moment."""
    streams = WORKER.streams if endpoint else ()
    one = replace(WORKER, start_time=1.5, streams=streams)
    spec = WorkerSpec(WorkerId("w1"), url)
    other = replace(one, spec=spec, streams=tuple(replace(each, endpoint=endpoint) for each in streams))

    found = diagnose(DEPLOYMENT, Observations((one, other), GATEWAY))

    assert ("same-worker" in {each.code for each in found}) is is_same


def test_of_several_ranks_one_stream_with_events_is_enough():
    """A probe is answered by one rank."""
    [one] = WORKER.streams
    other = replace(one, rank=1, endpoint="tcp://10.0.0.1:5558", messages=0)

    assert judged(replace(WORKER, streams=(one, other))) == {}
    silent = replace(one, messages=0)
    assert set(judged(replace(WORKER, streams=(silent, other)))) == {"events-silent"}


def test_an_event_address_of_the_workers_own_machine_is_explained():
    [one] = WORKER.streams
    local = replace(one, endpoint="tcp://127.0.0.1:5557", trouble="refuses connections")

    assert "own machine only" in judged(replace(WORKER, streams=(local,)))["events-bound"].why


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.1:555565", "tcp://10.0.0.1:port", "tcp://[::1:5557"])
async def test_an_event_address_that_is_no_address_is_reported_with_the_reason(endpoint):
    [one] = WORKER.streams
    trouble = await why_closed(endpoint)
    broken = replace(one, endpoint=endpoint, trouble=trouble)

    found = judged(replace(WORKER, streams=(broken,)))["events-bound"]

    assert endpoint in found.what
    assert trouble.startswith("cannot be reached (")


def test_an_old_worker_without_event_addresses_needs_them_configured():
    worker = replace(WORKER, publishes=False, streams=(), sources_reply=Reply(404))

    assert "kv_events.endpoint" in judged(worker)["events-address"].fix


def test_a_clock_that_differs_is_a_warning():
    found = judged(replace(WORKER, health=Reply(200, clock_skew_s=-90.0)))

    assert "-90 s" in found["clock"].what
    assert found["clock"].severity is Severity.WARNING


def test_a_limit_of_open_files_below_the_requests_in_flight_is_a_warning():
    deployment = replace(DEPLOYMENT, open_files=4096)

    found = diagnose(deployment, Observations((WORKER,), replace(GATEWAY, max_fds=1024)))

    assert [each.code for each in found] == ["descriptors"]


def test_foreign_hashes_of_a_server_are_named():
    deployment = replace(
        DEPLOYMENT, lmcache=LMCacheOptions.model_validate({"coordinator": {"enabled": True}})
    )
    server = CacheServerSeen("w0", "http://10.0.0.1:9000", ("w0",), "foreign_hashes", healthy=True)

    found = diagnose(deployment, Observations((WORKER,), replace(GATEWAY, servers=(server,))))

    assert [each.code for each in found] == ["hashes-differ"]


def test_what_is_read_from_vllms_metrics():
    page = (
        'vllm:cache_config_info{block_size="128",enable_prefix_caching="False",'
        'prefix_caching_hash_algo="xxhash"} 1.0\n'
        'vllm:prefix_cache_hits_total{engine="0"} 48.0\nvllm:external_prefix_cache_hits_total{} 16.0\n'
    )

    assert cache_config(page) == CacheConfig(128, False, "xxhash")
    assert counted_hits(page) == 64
    assert cache_config("") == CacheConfig()
    assert counted_hits("") is None
