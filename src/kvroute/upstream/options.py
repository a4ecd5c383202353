"""Options of the connections to workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvroute.options import Options, Switch, option


class UpstreamOptions(Options):
    """How connections to a worker are opened, kept and given up."""

    connect_timeout_s: float = option(
        2.0,
        "Time for a connection to open, name lookup and TLS handshake included.",
        unit="s",
        higher="slow networks are tolerated; a dead host delays a request for longer",
        lower="failover is quicker; a worker whose accept queue is full looks dead",
        gt=0,
    )
    first_byte_timeout_s: float = option(
        600.0,
        "Time from sending a request to the head of its answer; 0 waits for ever. An answer that is not "
        "streamed starts only when it is complete.",
        unit="s",
        higher="long answers that are not streamed survive; a hung worker holds its requests longer",
        lower="a hung worker is noticed sooner; long answers are cut",
        ge=0,
    )
    idle_timeout_s: float = option(
        3600.0,
        "Longest silence within an answer that has begun; 0 waits for ever.",
        unit="s",
        higher="streams that pause for long survive",
        lower="a stream of a hung worker ends sooner",
        ge=0,
    )
    keepalive_s: float = option(
        4.0,
        "Time that an unused connection is kept open.",
        unit="s",
        higher="fewer new connections; more idle sockets",
        lower="more new connections; below the worker's own limit (uvicorn's default: 5 s) no request meets "
        "a connection that the worker is just closing",
        gt=0,
    )
    max_connections: int = option(
        0,
        "Most requests at a time on one worker, each on its own connection; 0 is unlimited. Above it a "
        "request waits, at most the connect timeout.",
        unit="connections",
        higher="less waiting in the gateway; the worker's own queue holds the load",
        lower="the worker sees fewer requests at once; more waiting and refusals here",
        ge=0,
    )
    max_idle: int = option(
        512,
        "Most unused connections kept per worker.",
        unit="connections",
        higher="bursts find open connections; more sockets at rest on both sides",
        lower="fewer sockets at rest; bursts open new connections",
        ge=0,
    )
    spare_connections: int = option(
        16,
        "Most connections per worker that are kept open ahead of need: one that expires unused is replaced "
        "by a fresh one for the five minutes after it was needed. None are with `max_connections`.",
        unit="connections",
        higher="larger bursts after a pause find open connections",
        lower="fewer sockets at rest and no connections without requests; the first requests after a pause "
        "wait for connects",
        ge=0,
    )
    read_buffer_bytes: int = option(
        262_144,
        "Unread answer bytes per request above which reading from the worker pauses until the client has "
        "taken them. At most one socket read (256 KiB) more is held.",
        unit="bytes",
        higher="slow clients hold the worker back less; more memory",
        lower="less memory per slow client",
        gt=0,
    )
    verify_tls: Annotated[bool, Switch] = option(
        True,
        "Check certificates of https workers: against SSL_CERT_FILE or SSL_CERT_DIR, else certifi's list.",
        higher="on: only trusted workers are spoken to",
        lower="off: any certificate is accepted",
    )


class RetryOptions(Options):
    """Retries while no byte of the answer has come. The next worker is the next best by cost."""

    statuses: tuple[Annotated[int, Field(ge=400, le=599)], ...] = option(
        (), "Statuses of a worker's answer that are retried on another worker, such as [429, 503]."
    )
    budget_percent: float = option(
        20.0,
        "Retries allowed, as a share of recent requests. Refused connections do not spend it.",
        unit="%",
        higher="more requests survive a partial outage",
        lower="less extra load on the workers that are left",
        ge=0,
        le=100,
    )
    budget_min_per_s: float = option(
        20.0,
        "Retries allowed every second whatever the request rate.",
        unit="retries/s",
        higher="small gateways retry freely",
        lower="the percentage alone decides",
        ge=0,
    )
