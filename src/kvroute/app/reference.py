"""Generates the documentation of all options from the option classes, and that of the metrics.

`python -m kvroute.app.reference [FOLDER]` rewrites `configs/reference.yaml`, the tables in
`docs/configuration.md`, and `docs/metrics.md`, which follows from the declared families and the question that
each one answers. With `--check` it changes nothing and exits with 1 if a file is stale.
"""

from __future__ import annotations

import inspect
import pathlib
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final

import annotated_types
from prometheus_client.core import Metric
from pydantic.fields import FieldInfo

from kvroute.app.runtime import Runtime
from kvroute.config import paths as config_loading
from kvroute.config.config import Config
from kvroute.config.paths import Path, dotted
from kvroute.config.yaml_output import INDENT, LINE_CHARS, flow, section_of, yaml_lines
from kvroute.options import Options, may_change

PREFIX: Final = "kvroute_"

GROUPS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "Requests": {
            "requests": "How many requests end how, where, and why there?",
            "request_duration_seconds": "How long do whole answers take?",
            "time_to_first_byte_seconds": 'How long is the time to the first token (`streamed="true"`)?',
            "inter_token_seconds": "How evenly do tokens arrive?",
            "requests_in_flight": "How busy is the gateway now?",
            "requests_rejected": "Which requests does the gateway refuse itself?",
            "trace_spans": "Do all spans reach the collector?",
            "streams_aborted": "Who ends answers early?",
            "streams_moved": "Do workers die after the head of a stream and before its first event?",
            "retries": "How often does a second worker have to help, and why?",
            "requests_lost": "Which workers break off, and how many requests do they take with them?",
            "lost_requests_refused": "Do clients repeat a request that kills its workers?",
            "busy_answers": "Which workers refuse requests because they are full?",
            "retries_denied": "Is the retry budget too small for the failures?",
            "handovers": "Which workers compute prompts for which others?",
            "handover_fallbacks": "How often and why did handing over fail?",
            "handover_tokens": "How many prompt tokens move between workers?",
            "handover_computed_tokens": "How many prompt tokens do prefill workers compute?",
            "handover_prefill_seconds": "How long do prefill workers take, their queues included?",
            "handover_transfer_seconds": "How long after that does a stream begin?",
            "handover_blocks_kept": "Do prefill workers keep blocks that nobody will take?",
            "request_body_bytes": "How large are the requests?",
            "bodies_over_limit": "Which bodies are too large to be read?",
            "client_timeouts": "Do clients or attackers hold connections open?",
            "config_reloads": "Was a changed configuration applied?",
            "tasks": "Do tasks of the gateway never end?",
            "out_of_descriptors": "Is the limit of open files too low?",
            "log_lines_failed": "Is the log complete?",
            "memory_used_ratio": "How far is the gateway from its memory limit?",
            "build_info": "Which version runs?",
        },
        "Routing": {
            "routing_duration_seconds": "What does a routing decision cost?",
            "prompt_tokens": "How many prompt tokens does each worker get?",
            "predicted_hit_tokens": "How many of them are expected in which tier of which worker?",
            "matched_tokens": "How long are the matched prefixes?",
            "predictions": "Are the predictions right?",
            "prediction_error_tokens": "How far are they off?",
            "reported_prompt_tokens": "How many prompt tokens do the workers count?",
            "reported_cached_tokens": "How many of them were really cached?",
            "match_share": "Which worker finds less than predicted, so that its matches count less?",
            "load_imbalance_ratio": "Is the load even, or does one worker carry too much?",
            "cost_seconds": "Which prefill and decoding costs does routing assume?",
            "prefill_rate": "How fast does routing think that a worker prefills?",
            "costs_learned": "Are the costs measured or configured?",
            "worker_slowness_ratio": "Is one worker slower than the others?",
        },
        "Workers and discovery": {
            "worker_state": "Which workers get requests?",
            "workers_not_isolated": "Which workers get none, because tenants would share their KV?",
            "worker_capacity_tokens": "How large is each worker's KV cache?",
            "worker_fetched_tokens": "Do transfers bring as many tokens as predicted (handover_tokens)?",
            "worker_requests_in_flight": "Which worker is busy?",
            "worker_requests_queued": "On which worker do requests wait for their first token?",
            "worker_active_tokens": "Which worker holds how many tokens of running prompts?",
            "worker_queued_prefill_seconds": "How long would a new request wait on each worker?",
            "worker_foreign_requests": "How much load does each worker get from elsewhere?",
            "workers_needed": "How many workers does the load need (for an autoscaler)?",
            "workers_surplus": "How many workers get less traffic because scaling down would remove them?",
            "worker_deletion_cost": "Which worker would Kubernetes remove first?",
            "deletion_cost_patches": "Are deletion costs written?",
            "worker_probe_failures": "Which worker fails its health probes?",
            "worker_ejections": "Which worker was taken out of routing, and why?",
            "worker_ejections_held_back": "Do so many workers fail that ejections are prevented?",
            "discovery_errors": "Can the list of workers be read?",
            "discovery_shrinks_held_back": "Did a source suddenly list far fewer workers?",
            "discovery_kept_workers": "Which workers are kept although a source no longer lists them?",
        },
        "Prefix index (what was sent where)": {
            "index_blocks": "How many different blocks are tracked?",
            "index_bytes": "How much memory do they need?",
            "worker_index_blocks": "How much does each worker hold?",
            "index_evicted_blocks": "Which worker's cache is too small for its traffic?",
        },
        "Endpoint picker": {
            "epp_streams": "Do Envoy's filters show how requests end?",
            "epp_response_bodies": "Do tokens pass the picker, because Envoy's configuration sends them?",
            "epp_not_served": "Which worker could Envoy not reach?",
        },
        "Cache map (what workers announce)": {
            "map_blocks": "How many different blocks are on the map?",
            "map_bytes": "How much memory do they need?",
            "map_held_blocks": "Which worker holds how much in which tier?",
            "map_stored_blocks": "How fast do the caches fill?",
            "map_removed_blocks": "How fast do the workers evict?",
            "map_passed_over_blocks": "Does a worker have KV cache groups that this version does not know?",
            "map_dropped_blocks": "Is the map full?",
            "map_orphan_blocks": "Do blocks wait for parents that never came?",
            "map_trust": "Which worker's part of the map may be used, and why not?",
            "map_demotions": "How often did a worker's part lose its trust?",
            "following_failures": "Do tasks of the cache tracker fail?",
        },
        "KV events": {
            "kv_events_messages": "Does each worker send events?",
            "kv_events_duplicates": "Are batches received twice?",
            "kv_events_unreadable": "Does a worker send something else than events?",
            "kv_events_unknown_events": "Does a newer vLLM send events that this version does not know?",
            "kv_events_undivided": "Do large events block the event loop?",
            "kv_events_gaps": "Are events lost on the way?",
            "kv_events_replays": "How often are lost events requested again?",
            "kv_events_replay_failures": "Is the replay socket reachable?",
            "kv_events_restarts": "Did an engine restart, or overrun its buffer?",
            "kv_events_losses": "How often is a part of the map lost?",
            "kv_events_rereads": "How often is a part of the map read again?",
            "kv_events_failures": "Does the gateway itself fail to apply events?",
        },
        "LMCache and L2": {
            "lmcache_chunks": "How many different chunks are on the map?",
            "lmcache_held_chunks": "How many chunks are in which tier?",
            "lmcache_map_bytes": "How much memory do they need?",
            "lmcache_dropped_chunks": "Is the map of chunks full?",
            "lmcache_servers": "Which LMCache servers report, and which are doubted?",
            "lmcache_shared_reports": "Do LMCache's reports reach all gateways?",
            "lmcache_batches": "Do their batches arrive in order?",
            "lmcache_servers_expired": "Do LMCache servers die?",
            "lmcache_gaps": "Are batches lost?",
            "lmcache_rate_failures": "Do the servers report their bandwidth?",
            "lmcache_malformed": "Does something else connect to the coordinator?",
            "lmcache_refused": "Does somebody register servers that are not his?",
            "lmcache_prefetches": "Are prefetches worth their requests?",
            "l2_lookups": "How often is the shared store asked?",
            "l2_failures": "Does the shared store answer?",
            "lmcache_tierd_parts": "How much does each tierd hold?",
            "lmcache_tierd_failures": "Do the followed tierd daemons answer?",
            "tier_bandwidth_bytes_per_second": "How fast do slower tiers load?",
        },
        "Tokens": {
            "exact_prompts": "How many requests are routed with exact tokens?",
            "inexact_prompts": "Why are the others routed without?",
            "next_turns": "Are next turns tokenized from memory, and is that right?",
            "token_wait_seconds": "What is the latency of the tokenizer?",
            "tokenizing_cpu_seconds": "How much CPU time does tokenizing need?",
            "isolated_requests": "How many requests get a key space of their own?",
        },
        "Keys, queue and TLS": {
            "key_requests": "Which client sends how many requests?",
            "key_tokens": "Which client uses how many tokens?",
            "key_limited": "Which client reaches which limit?",
            "key_overshoot": "How far was a limit exceeded by requests to several processes at once?",
            "key_reloads": "Was a change of the file of keys loaded?",
            "jwks_reads": "Can the signing keys of tokens be read?",
            "answers_refused": "Which answers to the gateway's own requests were too long or compressed?",
            "tokens_checked": "How many tokens are checked, and how many are refused?",
            "queue_waiting": "How many requests wait for a free worker?",
            "queue_wait_seconds": "How long do they wait?",
            "queue_shed": "How many are refused, and why?",
            "queue_heads": "What becomes of streams that got their head in the queue?",
            "certificate_expiry_timestamp_seconds": "When must a certificate be renewed?",
            "tls_handshakes": "Why do TLS connections fail?",
            "tls_reloads": "Was a new certificate loaded?",
        },
        "Processes of one gateway": {
            "process_links": "Are all processes linked to each other?",
            "process_restarts": "Do processes die?",
            "process_link_breaks": "Do links break?",
            "process_messages": "How much do the processes exchange?",
            "processes_missing": "Do processes answer a scrape too late?",
        },
        "Several gateways": {
            "sharing_up": "Is Redis used, or does a gateway decide alone?",
            "sharing_members": "How many processes of other gateways are known?",
            "sharing_member_info": "Which member of the fleet is this process?",
            "sharing_lag_seconds": "How late do the others learn of a request?",
            "sharing_messages": "How much do the gateways exchange?",
            "sharing_bytes": "How many bytes?",
            "sharing_missed_batches": "Are messages lost?",
            "sharing_dropped": "Is Redis too slow?",
            "sharing_outages": "Is Redis away at times?",
            "sharing_deaths": "Do gateways die?",
            "sharing_refused": "Are messages refused, and why?",
        },
    }
)
"""The question of each family, by its name without `kvroute_`, in the order of the page."""

OTHER_GROUP: Final = "Other"

_METRICS_HEADER: Final = """\
# Metrics

Generated by `make docs` from the declarations: change those and `app/reference.py`, not this page.

`GET /metrics` has these families. Each one is declared from the start, whatever is configured: a family
without values has HELP and TYPE only. A counter's samples end in `_total`; a histogram's in `_bucket`, `_sum`
and `_count`. With several processes the page has the figures of all of them ([scaling.md](scaling.md)).

The number of series is bounded. `model` is a model of the fleet; names that the fleet does not have become
`other`, and requests refused before their model is known have `-`. `worker` is a worker's id, or `-` if no
worker got the request. `strategy`, `reason`, `cause` and `outcome` are fixed sets; `key` is a name from the
file of keys. The series of a worker that left are removed after five minutes.

The first byte of an answer that is not streamed arrives with the whole answer, so percentiles of first tokens
need `streamed="true"`:

    histogram_quantile(0.95, sum by (worker, le) (
      rate(kvroute_time_to_first_byte_seconds_bucket{streamed="true"}[5m])))

"""

_UNITS: Final = (
    ("_bytes_per_second", "bytes/s"),
    ("_seconds", "s"),
    ("_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("_blocks", "blocks"),
    ("_chunks", "chunks"),
    ("_ratio", "ratio"),
    ("_rate", "tokens/s"),
)


def questions() -> dict[str, str]:
    """The question of each family, by its full name."""
    return {PREFIX + name: text for group in GROUPS.values() for name, text in group.items()}


def families() -> list[Metric]:
    """All families of a gateway with the default configuration, without samples' values."""
    found = Runtime(Config()).metrics.registry.collect()
    return [family for family in found if family.name.startswith(PREFIX)]


def metrics_page(declared: Iterable[Metric]) -> str:
    """The page with one table per group. A family without a question is in the group `Other`."""
    by_name = {family.name: family for family in declared}
    text = _METRICS_HEADER
    for group, names in GROUPS.items():
        rows = [_metrics_row(by_name.pop(PREFIX + name), text) for name, text in names.items()]
        text += _metrics_table(group, rows)
    if by_name:
        text += _metrics_table(OTHER_GROUP, [_metrics_row(family, "") for family in by_name.values()])
    return text.rstrip("\n") + "\n"


def unit_of(family: Metric) -> str:
    """The unit by the name's end; a plain number has none."""
    return next((unit for ending, unit in _UNITS if family.name.endswith(ending)), "")


def label_names(family: Metric) -> tuple[str, ...]:
    # `prometheus_client` keeps the label names of a family without samples in this attribute only (0.21).
    return tuple(getattr(family, "_labelnames", ()))


def _metrics_table(group: str, rows: Iterable[str]) -> str:
    head = (
        "| family | type | unit | labels | question, and what it counts |\n| --- | --- | --- | --- | --- |\n"
    )
    return f"## {group}\n\n{head}{''.join(rows)}\n"


def _metrics_row(family: Metric, question: str) -> str:
    labels = ", ".join(f"`{name}`" for name in label_names(family))
    text = f"{question} {family.documentation}".strip().replace("|", "\\|")
    return f"| `{family.name}` | {family.type} | {unit_of(family)} | {labels} | {text} |\n"


REFERENCE = pathlib.PurePath("configs/reference.yaml")
TABLES = pathlib.PurePath("docs/configuration.md")
METRICS = pathlib.PurePath("docs/metrics.md")
BEGIN, END = "<!-- options: begin (generated, make docs) -->", "<!-- options: end -->"

_HEADER = """\
# All options of kvroute with their defaults. Generated: edit the option classes, then run `make docs`.
# A configuration file needs only the options that differ. docs/configuration.md has the same as tables.
"""


def reference_yaml() -> str:
    """A configuration file with every option, its default and its description."""
    return _HEADER + "\n".join(yaml_lines(Config, Config().model_dump(mode="json"), above=_notes)) + "\n"


def _notes(path: Path, field: FieldInfo, is_section: bool) -> Sequence[str]:
    width = LINE_CHARS - len(INDENT) * (len(path) - 1) - len("# ")
    lines = _wrap(_summary(field), width)
    if is_section:
        return lines
    if may_change(Config, [str(key) for key in path]):
        lines += _wrap("Reload: yes", width)
    for label, text in _facts(field):
        lines += _wrap(f"{label}: {text}", width, subsequent_indent=INDENT)
    for entry in _entries(field):
        lines.append("Each one:")
        lines += _entry_lines(entry, width)
    return lines


def _wrap(text: str, width: int, *, initial_indent: str = "", subsequent_indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=initial_indent,
        subsequent_indent=subsequent_indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _entry_lines(entry: type[Options], width: int, depth: int = 1) -> Iterator[str]:
    """One `name (default): description` for each field of a list's or mapping's items."""
    for name, field in entry.model_fields.items():
        text = " ".join([field.description or "", *(f"{label}: {what}." for label, what in _facts(field))])
        yield from _wrap(
            f"{name} ({_default(field)}): {text}",
            width,
            initial_indent=INDENT * depth,
            subsequent_indent=INDENT * (depth + 1),
        )
        for inner in config_loading.options_of(config_loading.shape_of(field.annotation)):
            if _section_of(inner) is None:
                yield from _entry_lines(inner, width, depth + 1)


def tables() -> str:
    """The options as Markdown, one table per section."""
    return "\n".join(_section((), Config, Config().model_dump(mode="json")))


def _section(path: Path, owner: type[Options], values: Mapping[str, typing.Any]) -> Iterator[str]:
    below: list[tuple[Path, type[Options], Mapping[str, typing.Any]]] = []
    rows: list[str] = []
    entries: list[tuple[Path, type[Options]]] = []
    for name, field in owner.model_fields.items():
        here = (*path, name)
        section = section_of(field, values[name])
        if section is not None:
            below.append((here, section, values[name]))
            continue
        if config_loading.options_of(config_loading.shape_of(field.annotation)):
            continue  # a section without options
        note = " Applies at a reload." if may_change(Config, [str(key) for key in here]) else ""
        rows.append(_row(name, field, flow(values[name]), note))
        entries += [(here, entry) for entry in _entries(field)]
    if path:
        yield f"### `{dotted(path)}`\n\n{_doc(owner)}\n"
    if rows:
        yield from _table(rows)
    for here, entry in entries:
        yield f"#### Each of `{dotted(here)}`\n\n{_doc(entry)}\n"
        yield from _table([_row(name, field, _default(field)) for name, field in _fields_below(entry)])
    for here, section, inner in below:
        yield from _section(here, section, inner)


def _fields_below(entry: type[Options], prefix: Path = ()) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in entry.model_fields.items():
        inner = [
            cls
            for cls in config_loading.options_of(config_loading.shape_of(field.annotation))
            if _section_of(cls) is None
        ]
        if not inner:
            yield dotted((*prefix, name)), field
        for cls in inner:
            yield from _fields_below(cls, (*prefix, name))


def _section_of(cls: type[Options]) -> str | None:
    """The section whose keys this class has, so that they are not listed twice; None if there is none."""
    for path, field in config_loading.walk(Config):
        if cls in config_loading.options_of(config_loading.shape_of(field.annotation)):
            return dotted(path)
    return None


def _table(rows: Sequence[str]) -> list[str]:
    return ["| option | default | unit | what it does |", "| --- | --- | --- | --- |", *rows, ""]


def _row(name: str, field: FieldInfo, default: str, note: str = "") -> str:
    facts = "".join(f" {label}: {text}." for label, text in _facts(field) if label != "Unit")
    unit = _extra(field, "unit")
    cells = (f"`{name}`", f"`{default}`", unit, (field.description or "") + facts + note)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _facts(field: FieldInfo) -> Iterator[tuple[str, str]]:
    """Unit, allowed values, and the effects of a higher and a lower value."""
    shape = config_loading.shape_of(field.annotation)
    if unit := _extra(field, "unit"):
        yield "Unit", unit
    if allowed := _allowed(field, shape):
        yield "Allowed", allowed
    is_switch = bool in shape
    if higher := _extra(field, "higher"):
        yield "On" if is_switch else "Higher", higher.removeprefix("on: ")
    if lower := _extra(field, "lower"):
        yield "Off" if is_switch else "Lower", lower.removeprefix("off: ")
    for cls in config_loading.options_of(shape):
        if cls.model_fields and (section := _section_of(cls)):
            yield "Keys", f"as in `{section}`"


def _allowed(field: FieldInfo, shape: config_loading.Shape) -> str:
    words = [str(word) for plain in shape for word in _words(plain)]
    if words:
        return ", ".join(words)
    bounds = []
    for constraint in field.metadata:
        for kind, attribute, sign in (
            (annotated_types.Gt, "gt", ">"),
            (annotated_types.Ge, "ge", ">="),
            (annotated_types.Lt, "lt", "<"),
            (annotated_types.Le, "le", "<="),
        ):
            if isinstance(constraint, kind):
                bounds.append(f"{sign} {getattr(constraint, attribute)}")
    return ", ".join(bounds)


def _words(plain: object) -> tuple[object, ...]:
    if typing.get_origin(plain) is typing.Literal:
        return typing.get_args(plain)
    if isinstance(plain, type) and issubclass(plain, Enum):
        return tuple(member.value for member in plain)
    return ()


def _entries(field: FieldInfo) -> tuple[type[Options], ...]:
    return config_loading.item_options(config_loading.shape_of(field.annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, tuple):
        default = list(default)
    return flow(default)


def _extra(field: FieldInfo, key: str) -> str:
    extra = field.json_schema_extra
    return str(extra.get(key, "")) if isinstance(extra, dict) else ""


def _summary(field: FieldInfo) -> str:
    """The description of a section or an option."""
    classes = config_loading.options_of(config_loading.shape_of(field.annotation))
    return field.description or (" ".join(_doc(classes[0]).split()) if classes else "")


def _doc(owner: type[Options]) -> str:
    return inspect.cleandoc(owner.__doc__ or "")


def documents(folder: pathlib.Path) -> dict[pathlib.Path, str]:
    """The expected text of each generated file below `folder`."""
    page = (folder / TABLES).read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{TABLES} has lost its markers {BEGIN!r} and {END!r}")
    return {
        folder / REFERENCE: reference_yaml(),
        folder / TABLES: f"{before}{BEGIN}\n\n{tables()}\n{END}{after}",
        folder / METRICS: metrics_page(families()),
    }


def main(arguments: Sequence[str]) -> int:
    check = "--check" in arguments
    folders = [argument for argument in arguments if argument != "--check"]
    stale = 0
    for file, text in documents(pathlib.Path(folders[0] if folders else ".")).items():
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if not check:
            file.write_text(text, encoding="utf-8")
        print(f"{file} {'is stale: run `make docs`' if check else 'written'}")  # noqa: T201
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
