"""Grafana dashboards, alert rules and their provisioning, for compose, manifests and configs/.

A panel is a title, a unit and PromQL queries. The JSON has only what differs from Grafana's defaults.
docs/operations.md has a section for each alert.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

import yaml

ALERTS_FILE: Final = "configs/alerts/kvroute.yaml"
DASHBOARDS: Final = "configs/grafana"
PROVISIONING: Final = "configs/grafana-provisioning"
RUNBOOK: Final = "docs/operations.md"
_RATE: Final = "[$__rate_interval]"


class Query(NamedTuple):
    """A PromQL query of a panel, and the legend of its series (`{{label}}`)."""

    expr: str
    legend: str = ""
    needs: str = ""
    """Why the query may return nothing in a healthy gateway; "" if it always returns data."""


class Panel(NamedTuple):
    """One graph. `unit` is Grafana's name of a unit."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""


class Dashboard(NamedTuple):
    """A page of panels, three in a row."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def _rate(name: str, by: str = "", where: str = "") -> str:
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({name}{where}{_RATE}))"


def _quantile(share: float, name: str, by: str = "", where: str = "") -> str:
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {_rate(f'{name}_bucket', labels, where)})"


_STREAMED: Final = '{streamed="true"}'
_NO_QUEUE: Final = "admission limits, and a request that waited"
_NO_KEYS: Final = "named keys (server.client_keys)"
_NO_FAILURE: Final = "no failure of this kind has happened"
_NO_EVENTS: Final = "a strategy with a cache map, and workers with KV events"
_NO_LMCACHE: Final = "LMCache servers"
_NO_VLLM: Final = "real vLLM workers"
_NO_USAGE: Final = "workers that report cached tokens (--enable-prompt-tokens-details)"

OVERVIEW: Final = Dashboard(
    "kvroute-overview",
    "kvroute: Overview",
    (
        Panel(
            "Requests",
            "reqps",
            (Query(_rate("kvroute_requests_total", "model"), "{{model}}"),),
            "HyperPod: model_invocations_total.",
        ),
        Panel(
            "Errors",
            "reqps",
            (
                Query(
                    _rate("kvroute_requests_total", "status", '{status=~"4..|5.."}'),
                    "{{status}}",
                    _NO_FAILURE,
                ),
            ),
            "Answers with a 4xx or 5xx status. HyperPod: model_errors_total.",
        ),
        Panel(
            "Requests in flight",
            "short",
            (Query("sum(kvroute_requests_in_flight)", "all"),),
            "HyperPod: model_concurrent_requests.",
        ),
        Panel(
            "Time to first token",
            "s",
            tuple(
                Query(
                    _quantile(share, "kvroute_time_to_first_byte_seconds", "", _STREAMED), f"p{share * 100:g}"
                )
                for share in (0.5, 0.95, 0.99)
            ),
            "Streamed answers only. HyperPod: model_ttfb_milliseconds.",
        ),
        Panel(
            "Latency",
            "s",
            tuple(
                Query(_quantile(share, "kvroute_request_duration_seconds"), f"p{share * 100:g}")
                for share in (0.5, 0.95, 0.99)
            ),
            "To the last byte. HyperPod: model_latency_milliseconds.",
        ),
        Panel(
            "Time between tokens",
            "s",
            (Query(_quantile(0.95, "kvroute_inter_token_seconds", "worker"), "{{worker}} p95"),),
        ),
        Panel(
            "Cached prompt tokens",
            "percentunit",
            (
                Query(
                    f"{_rate('kvroute_predicted_hit_tokens_total')} / {_rate('kvroute_prompt_tokens_total')}",
                    "predicted",
                ),
                Query(
                    f"{_rate('kvroute_reported_cached_tokens_total')} / "
                    f"{_rate('kvroute_reported_prompt_tokens_total')}",
                    "reported",
                    _NO_USAGE,
                ),
            ),
            "The share that routing predicted, and the share that the workers counted. HyperPod: cache hits.",
        ),
        Panel(
            "Healthy workers",
            "short",
            (Query("sum by (state) (kvroute_worker_state)", "{{state}}"),),
        ),
        Panel(
            "Retries and ejections",
            "ops",
            (
                Query(_rate("kvroute_retries_total", "cause"), "retry: {{cause}}", _NO_FAILURE),
                Query(_rate("kvroute_worker_ejections_total", "worker"), "ejected: {{worker}}", _NO_FAILURE),
            ),
        ),
        Panel(
            "Waiting in the queue",
            "short",
            (Query("sum by (key) (kvroute_queue_waiting)", "{{key}}", _NO_QUEUE),),
            "Requests that wait for a worker with a free permit, by the name of their key (admission).",
        ),
        Panel(
            "Wait in the queue",
            "s",
            (Query(_quantile(0.95, "kvroute_queue_wait_seconds", "key"), "p95: {{key}}", _NO_QUEUE),),
        ),
        Panel(
            "Clients",
            "ops",
            (
                Query(_rate("kvroute_key_requests_total", "key"), "admitted: {{key}}", _NO_KEYS),
                Query(_rate("kvroute_key_limited_total", "key"), "limited: {{key}}", _NO_KEYS),
                Query(_rate("kvroute_queue_shed_total", "key"), "refused by the queue: {{key}}", _NO_QUEUE),
            ),
            "Requests of named keys (server.client_keys): admitted, and refused by a limit or by the queue.",
        ),
    ),
)

CACHE: Final = Dashboard(
    "kvroute-cache",
    "kvroute: Cache and routing",
    (
        Panel(
            "Predicted hits by tier",
            "tokens/s",
            (Query(_rate("kvroute_predicted_hit_tokens_total", "tier"), "{{tier}}"),),
        ),
        Panel(
            "Predictions",
            "ops",
            (Query(_rate("kvroute_predictions_total", "outcome"), "{{outcome}}", _NO_USAGE),),
            "`over`: the worker had less than predicted.",
        ),
        Panel(
            "Error of predictions",
            "tokens",
            (
                Query(
                    _quantile(0.95, "kvroute_prediction_error_tokens", "worker"), "{{worker}} p95", _NO_USAGE
                ),
            ),
        ),
        Panel(
            "Length of matches",
            "tokens",
            tuple(
                Query(_quantile(share, "kvroute_matched_tokens"), f"p{share * 100:g}")
                for share in (0.5, 0.95)
            ),
        ),
        Panel(
            "Reasons",
            "reqps",
            (Query(_rate("kvroute_requests_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Duration of routing",
            "s",
            (Query(_quantile(0.99, "kvroute_routing_duration_seconds"), "p99"),),
        ),
        Panel(
            "Blocks tracked",
            "short",
            (
                Query("kvroute_index_blocks", "prefix index"),
                Query("kvroute_map_blocks", "cache map", _NO_EVENTS),
                Query("kvroute_lmcache_chunks", "chunks of LMCache", _NO_EVENTS),
            ),
        ),
        Panel(
            "Evictions",
            "blocks/s",
            (
                Query(_rate("kvroute_index_evicted_blocks_total", "worker"), "{{worker}} (index)"),
                Query(_rate("kvroute_map_removed_blocks_total", "worker"), "{{worker}} (worker)", _NO_EVENTS),
            ),
        ),
        Panel(
            "KV events",
            "ops",
            (
                Query(_rate("kvroute_kv_events_messages_total", "worker"), "{{worker}} batches", _NO_EVENTS),
                Query(_rate("kvroute_kv_events_gaps_total", "worker"), "{{worker}} gaps", _NO_EVENTS),
                Query(_rate("kvroute_kv_events_losses_total", "worker"), "{{worker}} losses", _NO_EVENTS),
            ),
        ),
        Panel(
            "Trust in the map",
            "short",
            (Query("sum by (worker, trust) (kvroute_map_trust)", "{{worker}} {{trust}}", _NO_EVENTS),),
        ),
        Panel(
            "Latency of the tokenizer",
            "s",
            (Query(_quantile(0.95, "kvroute_token_wait_seconds"), "p95"),),
            "Prompts whose tokens were not cached.",
        ),
        Panel(
            "Prompts without exact tokens",
            "reqps",
            (Query(_rate("kvroute_inexact_prompts_total", "cause"), "{{cause}}", _NO_FAILURE),),
        ),
    ),
)

WORKERS: Final = Dashboard(
    "kvroute-workers",
    "kvroute: Workers and tiers",
    (
        Panel(
            "Requests in flight",
            "short",
            (Query("kvroute_worker_requests_in_flight", "{{worker}}"),),
        ),
        Panel(
            "Queued prefill",
            "s",
            (Query("kvroute_worker_queued_prefill_seconds", "{{worker}}"),),
            "The estimated wait of a new request.",
        ),
        Panel(
            "Workers needed",
            "none",
            (Query("sum by (model) (kvroute_workers_needed)", "{{model}}"),),
        ),
        Panel(
            "Active tokens",
            "tokens",
            (Query("kvroute_worker_active_tokens", "{{worker}}"),),
        ),
        Panel(
            "Time to first token",
            "s",
            (
                Query(
                    _quantile(0.95, "kvroute_time_to_first_byte_seconds", "worker", _STREAMED),
                    "{{worker}} p95",
                ),
            ),
        ),
        Panel(
            "Imbalance",
            "none",
            (Query("kvroute_load_imbalance_ratio", "{{model}}"),),
            "Active tokens of the busiest worker relative to the mean; 1 is even.",
        ),
        Panel(
            "Slowness",
            "none",
            (Query("kvroute_worker_slowness_ratio", "{{worker}} {{model}}"),),
            "Learned prefill time relative to the mean of the workers.",
        ),
        Panel(
            "Blocks held by tier",
            "short",
            (
                Query("kvroute_worker_index_blocks", "{{worker}} (index)"),
                Query("sum by (worker, tier) (kvroute_map_held_blocks)", "{{worker}} {{tier}}", _NO_EVENTS),
            ),
        ),
        Panel(
            "Chunks of LMCache by tier",
            "short",
            (Query("kvroute_lmcache_held_chunks", "{{tier}}", _NO_LMCACHE),),
        ),
        Panel(
            "Bandwidth of tiers",
            "Bps",
            (Query("kvroute_tier_bandwidth_bytes_per_second", "{{worker}} {{tier}}", _NO_EVENTS),),
        ),
        Panel(
            "vLLM: requests",
            "short",
            (
                Query("vllm:num_requests_running", "{{instance}} running", _NO_VLLM),
                Query("vllm:num_requests_waiting", "{{instance}} waiting", _NO_VLLM),
            ),
        ),
        Panel(
            "vLLM: KV cache in use",
            "percentunit",
            (Query("vllm:kv_cache_usage_perc", "{{instance}}", _NO_VLLM),),
        ),
        Panel(
            "vLLM: prefix cache hits",
            "percentunit",
            (
                Query(
                    f"{_rate('vllm:prefix_cache_hits_total', 'instance')} / "
                    f"{_rate('vllm:prefix_cache_queries_total', 'instance')}",
                    "{{instance}}",
                    _NO_VLLM,
                ),
            ),
        ),
        Panel(
            "LMCache: L1 in use",
            "bytes",
            (Query("lmcache_mp_l1_memory_usage_bytes", "{{instance}}", _NO_LMCACHE),),
        ),
        Panel(
            "LMCache: hit tokens by tier",
            "tokens/s",
            (
                Query(_rate("lmcache_mp_lookup_hit_l1_tokens_total"), "L1", _NO_LMCACHE),
                Query(_rate("lmcache_mp_lookup_hit_l2_tokens_total"), "L2", _NO_LMCACHE),
            ),
        ),
        Panel(
            "LMCache: chunks evicted from L1",
            "ops",
            (Query(_rate("lmcache_mp_l1_evicted_chunks_total", "instance"), "{{instance}}", _NO_LMCACHE),),
        ),
    ),
)

ALL: Final = (OVERVIEW, CACHE, WORKERS)


class Alert(NamedTuple):
    """An alert rule. It fires after `expr` has returned something for `wait`."""

    name: str
    expr: str
    wait: str
    severity: str
    summary: str


ALERTS: Final = (
    Alert(
        "KvrouteDown", 'up{job=~".*kvroute.*"} == 0', "1m", "critical", "The gateway does not answer scrapes."
    ),
    Alert(
        "KvrouteNoHealthyWorker",
        'sum by (job) (kvroute_worker_state{state="healthy"}) == 0',
        "30s",
        "critical",
        "No worker gets requests.",
    ),
    Alert(
        "KvrouteWorkerUnhealthy",
        'kvroute_worker_state{state="unhealthy"} == 1',
        "5m",
        "warning",
        "Worker {{ $labels.worker }} gets no requests.",
    ),
    Alert(
        "KvrouteErrors",
        'sum by (job) (rate(kvroute_requests_total{status=~"5.."}[5m])) '
        "/ sum by (job) (rate(kvroute_requests_total[5m])) > 0.05",
        "5m",
        "critical",
        "More than 5% of the requests end with a 5xx status.",
    ),
    Alert(
        "KvrouteSlowFirstToken",
        "histogram_quantile(0.95, sum by (worker, le) "
        '(rate(kvroute_time_to_first_byte_seconds_bucket{streamed="true"}[5m]))) > 10',
        "10m",
        "warning",
        "On worker {{ $labels.worker }} 5% of the first tokens take longer than 10 s.",
    ),
    Alert(
        "KvrouteRetryBudgetSpent",
        "sum by (job) (rate(kvroute_retries_denied_total[5m])) > 0",
        "5m",
        "warning",
        "Failed attempts are not repeated, because the retry budget is spent.",
    ),
    Alert(
        "KvrouteImbalance",
        "kvroute_load_imbalance_ratio > 3",
        "15m",
        "warning",
        "One worker of {{ $labels.model }} has more than three times the mean load.",
    ),
    Alert(
        "KvroutePredictionsWrong",
        'sum by (worker) (rate(kvroute_predictions_total{outcome="over"}[15m])) '
        "/ sum by (worker) (rate(kvroute_predictions_total[15m])) > 0.2",
        "15m",
        "warning",
        "Worker {{ $labels.worker }} has less in its cache than predicted in more than 20% of the requests.",
    ),
    Alert(
        "KvrouteMapNotTrusted",
        'kvroute_map_trust{trust!="whole"} == 1',
        "10m",
        "warning",
        "The map of worker {{ $labels.worker }} is {{ $labels.trust }}: {{ $labels.cause }}.",
    ),
    Alert(
        "KvrouteEventsLost",
        "sum by (worker) (increase(kvroute_kv_events_losses_total[15m])) > 0",
        "0s",
        "warning",
        "KV events of worker {{ $labels.worker }} were lost, and a part of its map with them.",
    ),
    Alert(
        "KvrouteMapFull",
        "sum by (job) (increase(kvroute_map_dropped_blocks_total[15m])) > 0",
        "0s",
        "warning",
        "Blocks are not stored in the map, because it is full.",
    ),
    Alert(
        "KvrouteProcessRestarts",
        "sum by (job) (increase(kvroute_process_restarts_total[15m])) > 0",
        "0s",
        "warning",
        "A process of the gateway died and was replaced.",
    ),
)


def dashboard_json(dashboard: Dashboard, *, indent: int | None = 1) -> str:
    """The dashboard as Grafana imports it. The data source is the variable `datasource`."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["kvroute"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }
    return json.dumps(document, indent=indent) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    optional = sorted({query.needs for query in panel.queries if query.needs})
    notes = [panel.text, *(f"Empty without: {reason}." for reason in optional if reason != _NO_FAILURE)]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": " ".join(note for note in notes if note),
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": number % 3 * 8, "y": number // 3 * 8, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query.expr, "legendFormat": query.legend or "__auto"}
            for index, query in enumerate(panel.queries)
        ],
    }


def alert_rules(job: str = ".*kvroute.*") -> str:
    """The alert rules as a file for Prometheus. `job` matches its label `job` of gateways."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr.replace('".*kvroute.*"', f'"{job}"'),
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook": f"{RUNBOOK}#{alert.name.lower()}"},
        }
        for alert in ALERTS
    ]
    head = f"# Alerts of kvroute, generated by `make compose`; {RUNBOOK} says what to do about each one.\n"
    return head + _yaml({"groups": [{"name": "kvroute", "rules": rules}]})


def monitoring_files() -> dict[str, str]:
    """Alert rules and dashboards: file name -> text."""
    files = {ALERTS_FILE: alert_rules()}
    for dashboard in ALL:
        name = dashboard.uid.removeprefix("kvroute-")
        files[f"{DASHBOARDS}/{name}.json"] = dashboard_json(dashboard)
    return files


def provisioning_files() -> dict[str, str]:
    """Grafana's provisioning in compose: the data source and the folder of the dashboards."""
    source = {"name": "Prometheus", "type": "prometheus", "url": "http://prometheus:9090", "isDefault": True}
    provider = {"name": "kvroute", "type": "file", "options": {"path": "/var/lib/grafana/dashboards"}}
    return {
        f"{PROVISIONING}/datasources/prometheus.yaml": _yaml({"apiVersion": 1, "datasources": [source]}),
        f"{PROVISIONING}/dashboards/kvroute.yaml": _yaml({"apiVersion": 1, "providers": [provider]}),
    }


def _yaml(document: object) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False, width=10**6)
    return text
