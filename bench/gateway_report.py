"""The results of the gateway benchmark as JSON and as text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gateway_goals import THEIRS, Measurement, Results, Verdict

COLUMNS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "closed": (
        ("us/request", "cpu_us_request", ".1f"),
        ("main thread", "main_us_request", ".1f"),
        ("without tokens", "untokenized_us_request", ".1f"),
        ("requests/s", "requests_s", ".0f"),
        ("p50 us", "p50_us", ".0f"),
        ("p99 us", "p99_us", ".0f"),
        ("RSS MiB", "peak_rss_mib", ".0f"),
        ("sticky", "sticky", ".2f"),
    ),
    "streams": (
        ("us/chunk", "cpu_us_chunk", ".2f"),
        ("chunks/s", "chunks_s", ".0f"),
        ("chunks a read", "chunks_a_read", ".2f"),
        ("transit p50 us", "transit_p50_us", ".0f"),
        ("p99 us", "transit_p99_us", ".0f"),
        ("RSS MiB", "peak_rss_mib", ".0f"),
    ),
    "latency": (
        ("a p50 us", "a_p50_us", ".0f"),
        ("a p99 us", "a_p99_us", ".0f"),
        ("b p50 us", "b_p50_us", ".0f"),
        ("first byte p50 us", "first_byte_p50_us", ".0f"),
        ("p99 us", "first_byte_p99_us", ".0f"),
        ("transit p50 us", "transit_p50_us", ".0f"),
    ),
    "tokens": (
        ("us/request", "cpu_us_request", ".0f"),
        ("main thread", "main_us_request", ".0f"),
        ("p50 us", "p50_us", ".0f"),
        ("prompt tokens", "prompt_tokens", ".0f"),
        ("idle us/s", "idle_us_s", ".0f"),
        ("RSS MiB", "peak_rss_mib", ".0f"),
    ),
}
"""By kind of scenario: heading, figure, format. The table also has the first one's ratio to sglang-router."""


def table(results: Results, name: str, title: str, kind: str) -> list[str]:
    """The table of one scenario: medians by router, and the median of the paired ratios to sglang-router."""
    columns = COLUMNS[kind]
    runs = [one for one in results.measurements if one.scenario == name]
    routers = list(dict.fromkeys(one.router for one in runs))
    width = max([len(router) for router in routers], default=6) + 1
    lines = [
        f"{name}: {title}",
        f"  {'':{width}}{'runs':>5}"
        + "".join(f"{head:>{len(head) + 2}}" for head, _, _ in columns)
        + "   / sglang",
    ]
    for router in routers:
        row = f"  {router:{width}}{sum(one.router == router and not one.errors for one in runs):>5}"
        for head, figure, form in columns:
            value = results.median(router, name, figure)
            row += f"{'-' if value is None else format(value, form):>{len(head) + 2}}"
        ratio = results.ratio(router, THEIRS, name, columns[0][1])
        row += f"{'-' if ratio is None else format(ratio, '.2f'):>11}"
        failed = sum(one.router == router and one.errors > 0 for one in runs)
        lines.append(row + (f"   {failed} runs with errors, not counted" if failed else ""))
    return lines


def verdict_lines(verdicts: Iterable[Verdict]) -> list[str]:
    lines = [f"{'goal':34}{'figure':>10}{'goal':>12}{'stretch':>12}  verdict"]
    for one in verdicts:
        sign = ">=" if one.is_least else "<="
        value = "-" if one.value is None else f"{one.value:.2f} {one.unit}"
        goal, stretch = (f"{sign} {limit:g}" for limit in (one.goal, one.stretch))
        lines.append(f"{one.name:34}{value:>10}{goal:>12}{stretch:>12}  {one.verdict}")
    return lines


def document(
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    *,
    machine: Mapping[str, object],
    versions: Mapping[str, str],
    missing: Mapping[str, str],
    settings: Mapping[str, object],
    began: str,
) -> dict[str, Any]:
    """The whole run as a JSON document: all that a later report needs."""
    return {
        "began": began,
        "machine": dict(machine),
        "versions": dict(versions),
        "missing": dict(missing),
        "settings": dict(settings),
        "verdicts": [asdict(one) for one in verdicts],
        "measurements": [
            asdict(one) | {"figures": {name: round(value, 3) for name, value in one.figures.items()}}
            for one in measurements
        ],
    }


def from_document(saved: Mapping[str, Any]) -> Results:
    """The measurements of a saved run."""
    return Results(Measurement(**one) for one in saved["measurements"])
