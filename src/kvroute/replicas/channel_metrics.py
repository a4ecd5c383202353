"""The metrics of the fleet's channel."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from kvroute.replicas.channel import Channel
from kvroute.tallies import counter, gauge


def channel_metrics(channel: Channel | None) -> Iterable[Metric]:
    """Metrics of the sharing with other gateways; without samples for a gateway that shares with none."""
    counts = None if channel is None else channel.counts
    process = "" if channel is None else str(channel.process)
    yield gauge(
        "kvroute_sharing_up",
        "1 while the process exchanges messages with other gateways through Redis, 0 while it decides alone.",
        ("process",),
        [] if channel is None else [((process,), float(channel.is_up))],
    )
    yield gauge(
        "kvroute_sharing_member_info",
        "1 for the process, with its name among the members of the fleet and its epoch there.",
        ("process", "member", "epoch"),
        [] if channel is None else [((process, channel.name, channel.id.hex()), 1.0)],
    )
    yield gauge(
        "kvroute_sharing_members",
        "Processes of other gateways by state; joining: what it has told this process is not complete yet.",
        ("process", "state"),
        [] if channel is None else [((process, s), float(n)) for s, n in channel.states().items()],
    )
    lag_s = None if channel is None else channel.lag_s
    yield gauge(
        "kvroute_sharing_lag_seconds",
        "How long the process's own last message took through Redis; no sample while none comes back.",
        ("process",),
        [] if lag_s is None else [((process,), lag_s)],
    )
    yield counter(
        "kvroute_sharing_messages",
        "Messages exchanged with other gateways.",
        ("direction",),
        []
        if counts is None
        else [(("sent",), float(counts.messages_sent)), (("received",), float(counts.messages_received))],
    )
    yield counter(
        "kvroute_sharing_bytes",
        "Bytes of envelopes exchanged with other gateways.",
        ("direction",),
        []
        if counts is None
        else [(("sent",), float(counts.sent_bytes)), (("received",), float(counts.received_bytes))],
    )
    yield counter(
        "kvroute_sharing_missed_batches",
        "Batches of other gateways that did not arrive; the sender's state is asked for.",
        (),
        [] if counts is None else [((), float(counts.missed))],
    )
    yield counter(
        "kvroute_sharing_dropped",
        "Own envelopes that were dropped because sharing.max_queued_bytes waited for Redis.",
        (),
        [] if counts is None else [((), float(counts.dropped))],
    )
    yield counter(
        "kvroute_sharing_outages",
        "Times that Redis could no longer be used.",
        (),
        [] if counts is None else [((), float(counts.outages))],
    )
    yield counter(
        "kvroute_sharing_deaths",
        "Processes of other gateways that fell silent without having left.",
        (),
        [] if counts is None else [((), float(counts.deaths))],
    )
    yield counter(
        "kvroute_sharing_refused",
        "Envelopes and messages of other gateways that were not believed, by reason.",
        ("reason",),
        [] if counts is None else [((r.value,), float(n)) for r, n in counts.refused.items()],
    )
