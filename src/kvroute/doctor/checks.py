"""Judges what the doctor saw: findings with reason and fix, and what could not be checked. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvroute.doctor.observations import (
    Deployment,
    Finding,
    Findings,
    GatewaySeen,
    Observations,
    Severity,
    Stream,
    WorkerSeen,
    error,
    running,
    unchecked,
    warning,
)
from kvroute.doctor.service_checks import check_gateway, check_lmcache, check_store
from kvroute.errors import ConfigError
from kvroute.fleet.options import SAME_WORKER
from kvroute.fleet.worker import SALTED_SINCE, release_shown


@dataclass(frozen=True, slots=True)
class Release:
    """A row of the matrix of vLLM releases: from this release on, this works."""

    since: tuple[int, ...]
    gives: str


MATRIX = (
    Release((0, 10, 2), "KV events that kvroute can read"),
    Release((0, 19, 1), "the oldest release whose requests and answers kvroute is written for"),
    Release((0, 27, 0), "`/kv_event_sources`, so that addresses need no configuration"),
    Release((0, 32, 0), "repairs by probes; the release that kvroute is tested with"),
)
"""docs/troubleshooting.md has the same rows."""
_EVENTS, _OLDEST, _SOURCES, _TESTED = (row.since for row in MATRIX)

_MAX_SKEW_S = 5.0
_EVENTS_FLAG = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657", "topic": "kv"}\''
)
_OWN_ID = (
    "Give each worker its own `id` (with LMCache, its --instance-id is the same), or remove one of the two."
)


def refused(problems: Sequence[ConfigError], source: str, flag: str = "-c") -> list[Finding]:
    """A configuration that cannot be loaded, one finding for each problem.

    `source` is its file, or empty; `flag` is the flag of `kvroute check` for such a file.
    """
    findings = []
    for problem in problems:
        if SAME_WORKER in str(problem):
            consequence = (
                "The gateway does not start: it could not tell the two apart in loads, metrics and caches."
            )
            findings.append(error("same-name", source or "configuration", str(problem), consequence, _OWN_ID))
        else:
            check = f"kvroute check {flag} {source}" if source else "kvroute check"
            findings.append(
                error(
                    "configuration",
                    source or "configuration",
                    str(problem),
                    "The gateway does not start with this configuration.",
                    f"Correct this line; `{check}` prints each value with its source.",
                )
            )
    return findings


def diagnose(deployment: Deployment, seen: Observations) -> list[Finding]:
    """All findings: errors first, then warnings, then what was not checked; each group in order of checks.

    A finding that only follows from another one of the same worker is left out.
    """
    findings: list[Finding] = []
    for check in _CHECKS:
        findings += check(deployment, seen)
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


# --- workers ----------------------------------------------------------------------------------------------


def _reachable(deployment: Deployment, seen: Observations) -> Findings:
    if deployment.unknown_workers:
        yield unchecked("workers", "fleet", deployment.unknown_workers)
    for worker in seen.workers:
        if not worker.answers:
            yield error(
                "worker-unreachable",
                worker.name,
                f"/health {worker.health.problem}",
                "The gateway sends no requests to a worker that fails its probes.",
                "Start the worker, or correct its `url` in fleet.workers: the address of `vllm serve`, as "
                "seen from the gateway's machine.",
            )


def _worker_key(deployment: Deployment, seen: Observations) -> Findings:
    for worker in running(seen):
        reply = worker.models_reply
        if reply.status in (401, 403):
            complaint = "refuses the key of fleet.worker_api_key" if deployment.worker_key else "wants a key"
            yield error(
                "worker-key",
                worker.name,
                f"/v1/models answered {reply.status}: the worker {complaint}",
                "The gateway cannot read the worker's models, so no request for them is routed there.",
                "Set fleet.worker_api_key_file to a file with the value of the worker's `--api-key` "
                "(or KVROUTE__FLEET__WORKER_API_KEY), on the gateway and for this command.",
            )
        elif worker.models is None or not worker.models.models:
            yield error(
                "no-models",
                worker.name,
                f"/v1/models {reply.problem or 'lists no model'}",
                "The gateway learns from this list which requests the worker can serve.",
                "Set the worker's `url` to the address of `vllm serve`; a proxy in between must pass "
                "/v1/models.",
            )


def _version(deployment: Deployment, seen: Observations) -> Findings:
    for worker in running(seen):
        release = worker.release
        if release is None:
            yield unchecked(
                "vllm-version",
                worker.name,
                f"the release of vLLM: /version {worker.version.problem or 'has none'}",
            )
        elif deployment.reads_caches and release < _EVENTS:
            yield error(
                "vllm-version",
                worker.name,
                f"vLLM {release_shown(release)} has no KV events that kvroute can read "
                f"(needs {release_shown(_EVENTS)})",
                "Without events `kvaware` does not know what the worker holds.",
                f"Upgrade vLLM to {release_shown(_TESTED)}, or set routing.strategy to prefixaware.",
            )
        elif release < _OLDEST:
            yield warning(
                "vllm-version",
                worker.name,
                f"vLLM {release_shown(release)} is older than {release_shown(_OLDEST)}",
                "kvroute is not tested with this release.",
                f"Upgrade vLLM to {release_shown(_TESTED)}.",
            )


def _tenants(deployment: Deployment, seen: Observations) -> Findings:
    if not deployment.isolates_tenants:
        return
    for worker in running(seen):
        release = worker.release
        if release is None or release < SALTED_SINCE:
            shown = "a worker of an unknown release" if release is None else f"vLLM {release_shown(release)}"
            yield error(
                "tenants-not-isolated",
                worker.name,
                f"{shown} may ignore `cache_salt`",
                "server.isolation needs it: without it tenants share this worker's KV, and can measure what "
                "others have sent. vLLM ignores a member that it does not know.",
                f"Upgrade vLLM to {release_shown(_TESTED)}, or remove the worker.",
            )


def _metrics(deployment: Deployment, seen: Observations) -> Findings:
    if not deployment.uses_caches:
        return
    for worker in running(seen):
        reply = worker.metrics_reply
        if not reply.is_ok:
            what = f"/metrics {reply.problem}"
        elif worker.cache.block_size is None:
            what = "/metrics has no `vllm:cache_config_info`, so it is not the page of a vLLM server"
        else:
            continue
        yield error(
            "metrics-port",
            worker.name,
            what,
            "The gateway reads the size of the KV cache, the block size and restarts from /metrics at the "
            "worker's own URL. Without the page it assumes 500,000 tokens and does not notice a restart.",
            "Set the worker's `url` to the port of `vllm serve`, which also serves /metrics; do not start "
            "vLLM with `--disable-log-stats`, and let a proxy in between pass /metrics.",
        )


def _prefix_caching(deployment: Deployment, seen: Observations) -> Findings:
    if not deployment.uses_caches:
        return
    for worker in running(seen):
        if worker.cache.prefix_caching is False:
            yield error(
                "prefix-caching-off",
                worker.name,
                "prefix caching is off (`enable_prefix_caching=False` in /metrics)",
                "The worker computes every prompt from its beginning, so nothing is gained by routing on "
                "caches.",
                "Start vLLM without `--no-enable-prefix-caching`.",
            )


def _hybrid_model(deployment: Deployment, seen: Observations) -> Findings:
    for worker in running(seen):
        if worker.has_lmcache_inside and worker.hybrid_model:
            yield warning(
                "connector-not-hybrid",
                worker.name,
                f"LMCacheConnectorV1 with a hybrid model: {worker.hybrid_model}",
                "This connector turns vLLM's hybrid KV cache manager off, so every layer keeps the KV of "
                "every token: up to 10 times the memory, and fewer requests at the same time.",
                "Use LMCache's server (LMCacheMPConnector; in an endpoint spec x-kvroute.lmcache.mode: mp), "
                "or no connector.",
            )


def _agreement(deployment: Deployment, seen: Observations) -> Findings:
    """Block sizes and tokenizers: workers of one model must agree."""
    if not deployment.reads_caches:
        return
    models: dict[str, list[WorkerSeen]] = defaultdict(list)
    for worker in running(seen):
        for model in worker.base_models[:1]:
            models[model].append(worker)
    for model, workers in models.items():
        with_blocks = next((candidate for candidate in workers if candidate.cache.block_size), None)
        for worker in workers:
            size = worker.cache.block_size
            if with_blocks is not None and size and size != with_blocks.cache.block_size:
                yield warning(
                    "block-sizes-differ",
                    worker.name,
                    f"blocks of {size} tokens; {with_blocks.name} has blocks of "
                    f"{with_blocks.cache.block_size} ({model})",
                    "One prompt has different full blocks on the two workers, so one of them is preferred "
                    "although both hold the same beginning; LMCache's chunks must fit both sizes.",
                    "Start both with the same `--block-size`, for example `--block-size "
                    f"{with_blocks.cache.block_size}`.",
                )
        reference = next((candidate for candidate in workers if candidate.samples), None)
        for worker in workers:
            if worker.tokenizer_trouble:
                yield error(
                    "tokenizer-differs",
                    worker.name,
                    f"the gateway's tokenizer files for {model} give other token ids: "
                    f"{worker.tokenizer_trouble}",
                    "The map is keyed by token ids: prompts never match the worker's blocks. (The gateway "
                    "then asks a worker for each prompt's ids, which is slower.)",
                    f"Set tokens.models to `{{{model}: FOLDER}}` with the tokenizer files that the worker "
                    "was started "
                    "with, or remove the entry.",
                )
            elif reference is not None and worker.samples and _differs(reference, worker):
                yield error(
                    "tokenizer-differs",
                    worker.name,
                    f"/tokenize gives other token ids than {reference.name} for the same text ({model})",
                    "The workers serve different models under one name: prompts match no blocks of one of "
                    "them, and answers depend on the worker.",
                    "Start both workers with the same model and tokenizer (`--model`, `--tokenizer`, "
                    "`--revision`), or give the models different names (`--served-model-name`).",
                )
            elif not worker.samples:
                yield unchecked("tokenizer-differs", worker.name, "token ids: /tokenize gave no answer")


def _differs(one: WorkerSeen, other: WorkerSeen) -> bool:
    return any(ids != one.samples[text] for text, ids in other.samples.items() if text in one.samples)


def _same_name(deployment: Deployment, seen: Observations) -> Findings:
    """Two sources list one id; within one source the configuration is refused."""
    del seen
    for spec, kept in deployment.ignored:
        yield error(
            "same-name",
            f"worker {spec.id} ({spec.url})",
            f"has the same id as {kept.url}, which is listed before it",
            "The gateway ignores the second one: it gets no requests.",
            _OWN_ID,
        )


def _one_process_twice(deployment: Deployment, seen: Observations) -> Findings:
    """Two ids for one process."""
    by_process: dict[object, WorkerSeen] = {}
    for worker in running(seen):
        if worker.start_time is None:
            continue
        # The start time alone has steps of 10 ms: a launcher can start two engines within one.
        key = (worker.start_time, frozenset(worker.base_models), _ports(worker))
        twin = by_process.setdefault(key, worker)
        if twin is not worker:
            yield error(
                "same-worker",
                worker.name,
                f"is the same process as {twin.name}: both started at {worker.start_time:.2f}",
                "The gateway charges load to each name separately and sends one engine twice its share.",
                "Remove one of the two entries from fleet.workers, or correct its `url`.",
            )


def _ports(worker: WorkerSeen) -> tuple[int | str, ...]:
    """The ports of a worker's event streams, which two processes of a host cannot share; else its own."""
    # Not parsed: the worker announces its endpoints itself, and `urlsplit` refuses a port like 555565.
    ports = tuple(stream.endpoint.rpartition(":")[2] for stream in worker.streams)
    return ports or (urlsplit(worker.spec.url).port or worker.spec.url,)


def _adapters(deployment: Deployment, seen: Observations) -> Findings:
    lmcache = deployment.lmcache
    if lmcache.isolate_adapters or not (lmcache.coordinator.enabled or lmcache.controller.enabled):
        return
    for worker in running(seen):
        if worker.models is not None and worker.models.adapters:
            names = ", ".join(name for name, _ in worker.models.adapters)
            yield error(
                "adapters-share-keys",
                worker.name,
                f"serves the adapters {names} with LMCache, and lmcache.isolate_adapters is off",
                "LMCache (0.5.6) does not tell an adapter's KV from its base model's: answers of both "
                "become wrong.",
                "Set lmcache.isolate_adapters to true, clear LMCache's caches once (L2 included) and "
                "restart the engines.",
            )


def _clock(deployment: Deployment, seen: Observations) -> Findings:
    del deployment
    for worker in running(seen):
        skew = worker.health.clock_skew_s
        if skew is None:
            yield unchecked("clock", worker.name, "its clock: its answers have no Date header")
        elif abs(skew) > _MAX_SKEW_S:
            yield warning(
                "clock",
                worker.name,
                f"its clock differs by {skew:+.0f} s from this machine's",
                "Logs, traces and restarts of different machines are compared by time.",
                "Run a time service (chrony, systemd-timesyncd) on both machines.",
            )


# --- event streams ----------------------------------------------------------------------------------------


def _events(deployment: Deployment, seen: Observations) -> Findings:
    if not deployment.reads_caches:
        return
    for worker in running(seen):
        if worker.release is not None and worker.release < _EVENTS:
            continue
        if worker.publishes:
            for stream in worker.streams:
                yield from _stream(worker, stream)
            continue
        reply = worker.sources_reply
        if reply is not None and reply.status in (404, 405):
            yield error(
                "events-address",
                worker.name,
                "has no /kv_event_sources (vLLM before 0.27), and kv_events.endpoint is not set",
                "The gateway does not know where the worker publishes its KV events.",
                f"Start vLLM with {_EVENTS_FLAG}, and set kv_events.endpoint to `tcp://{{host}}:5557` and "
                "kv_events.replay_endpoint to `tcp://{host}:5657`.",
            )
        elif reply is not None and not reply.is_ok:
            yield unchecked("events-off", worker.name, f"event streams: /kv_event_sources {reply.problem}")
        else:
            yield error(
                "events-off",
                worker.name,
                "publishes no KV events (/kv_event_sources names no stream)",
                "`kvaware` does not know what the worker holds, and routes to it by the route history.",
                f"Start vLLM with {_EVENTS_FLAG}.",
            )


def _stream(worker: WorkerSeen, stream: Stream) -> Findings:
    where = f"rank {stream.rank}, {stream.endpoint}"
    if stream.trouble:
        host = stream.endpoint.rpartition("://")[2].rpartition(":")[0].strip("[]")
        local = host in ("127.0.0.1", "localhost", "::1") and host != (
            urlsplit(worker.spec.url).hostname or ""
        )
        note = " That address is the worker's own machine only." if local else ""
        yield error(
            "events-bound",
            worker.name,
            f"the event endpoint ({where}) {stream.trouble}",
            "vLLM binds its publisher only if `endpoint` contains `*`; with a host name it connects to "
            f"that address instead, and the gateway finds nothing there.{note}",
            'Set `"endpoint": "tcp://*:PORT"` in --kv-events-config and open the port towards the gateway; '
            "or let the worker connect to the gateway, with kv_events.bind.",
        )
    elif worker.cache.prefix_caching is False:
        return  # it publishes nothing, and `_prefix_caching` says so
    elif stream.messages == 0 and not any(other.messages for other in worker.streams):
        yield error(
            "events-silent",
            worker.name,
            f"no event arrived ({where}) although a prompt was computed",
            "The map of this worker stays empty, and `kvaware` routes to it by the route history.",
            f"Check that the port belongs to this engine, and start vLLM with {_EVENTS_FLAG}.",
        )
    elif stream.connects_to_gateway:
        yield unchecked(
            "events-silent", worker.name, f"events ({where}): the worker connects to the gateway itself"
        )
    if stream.replay_endpoint is None:
        yield warning(
            "replay-off",
            worker.name,
            f"has no replay endpoint (rank {stream.rank})",
            "After a lost message, a lost connection or a restart of the gateway, the worker's whole map "
            "is lost.",
            'Add `"replay_endpoint": "tcp://*:5657"` to --kv-events-config, and if kv_events.endpoint is '
            "set, kv_events.replay_endpoint.",
        )
    elif stream.replay_trouble:
        yield warning(
            "replay-silent",
            worker.name,
            f"the replay endpoint (rank {stream.rank}, {stream.replay_endpoint}) {stream.replay_trouble}",
            "After a lost message the worker's whole map is lost.",
            "Open the port towards the gateway; behind port mapping set kv_events.replay_endpoint.",
        )


# --- probes -----------------------------------------------------------------------------------------------


def _probes(deployment: Deployment, seen: Observations) -> Findings:
    if not deployment.uses_caches:
        return
    for worker in running(seen):
        pair = worker.pair
        if pair is None or pair.trouble:
            reason = pair.trouble if pair is not None else "no probes were sent"
            yield unchecked("probe-missed", worker.name, f"cached tokens of a repeated prompt: {reason}")
            continue
        cached, block = pair.cached, worker.cache.block_size or 1
        if worker.cache.prefix_caching is False:
            continue  # is reported, and nothing can be cached
        if cached is None:
            yield unchecked(
                "probe-missed",
                worker.name,
                "cached tokens of a repeated prompt: the worker reports none (vLLM's "
                "--enable-prompt-tokens-details, or /metrics)",
            )
            continue
        if cached < min(block, pair.prompt_tokens // 2) or cached == 0:
            yield error(
                "probe-missed",
                worker.name,
                f"a prompt of {pair.prompt_tokens} tokens, sent twice, had {cached} cached tokens the "
                "second time",
                "The worker does not reuse what it computed.",
                "Check that prefix caching is on, and that the KV cache (`num_gpu_blocks` in the engine's "
                "log) is not full with running requests.",
            )
            continue
        if pair.reported is None:
            yield warning(
                "cached-tokens-unreported",
                worker.name,
                "answers do not report cached tokens",
                "The gateway cannot compare its predictions with what the engine found.",
                "Start vLLM with --enable-prompt-tokens-details.",
            )
        yield from _prediction(worker, cached, seen.gateway)


def _prediction(worker: WorkerSeen, cached: int, gateway: GatewaySeen | None) -> Findings:
    pair = worker.pair
    assert pair is not None
    broken = not worker.publishes and worker.sources_reply is not None
    silent = worker.streams and not any(
        stream.messages or stream.connects_to_gateway for stream in worker.streams
    )
    if broken or silent:
        return  # the cause is reported
    if pair.predicted is None:
        cause = (
            "no gateway answers" if gateway is None or not gateway.ready.status else "it made no prediction"
        )
        yield unchecked("prediction-missed", worker.name, f"the gateway's prediction: {cause}")
    elif pair.predicted == 0:
        reason = gateway.trust_notes.get(worker.spec.id) if gateway is not None else ""
        yield error(
            "prediction-missed",
            worker.name,
            f"the engine found {cached} cached tokens, the gateway predicted none"
            + (f" ({reason})" if reason else ""),
            "The gateway does not see this worker's cache, so it routes to it as if it were empty.",
            "See `notes` in the gateway's /ready and its log lines about this worker.",
        )


_explained_note = re.compile(r"kvaware: worker (['\"])(.*)\1: (\w+) \((.*)\)", re.DOTALL).fullmatch
"""A note of /ready about a worker's map with its likely cause and fix: worker, reason, cause and fix."""


def _map_use(deployment: Deployment, seen: Observations) -> Findings:
    for note in () if seen.gateway is None else seen.gateway.notes:
        match = _explained_note(note)
        if match is not None:
            _, worker, reason, text = match.groups()
            yield warning(
                "map-not-used",
                worker,
                f"the gateway does not use its cache map, or not as a whole: {reason}",
                "What was sent to the worker decides where the map does not, as in `prefixaware`.",
                f"{text[:1].upper()}{text[1:]}.",
            )


_CHECKS: tuple[Callable[[Deployment, Observations], Findings], ...] = (
    _reachable,
    _worker_key,
    _version,
    _tenants,
    _metrics,
    _prefix_caching,
    _hybrid_model,
    _agreement,
    _same_name,
    _one_process_twice,
    _adapters,
    _events,
    _probes,
    _map_use,
    check_lmcache,
    check_store,
    check_gateway,
    _clock,
)
