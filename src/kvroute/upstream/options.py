"""Options of the connections to workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from kvroute.options import Options, Switch, option
from kvroute.tls import ClientTlsOptions


class UpstreamOptions(Options):
    """Opening, keeping and closing connections to workers."""

    connect_timeout_s: float = option(
        2.0,
        "Time for a connection to open, name lookup and TLS handshake included.",
        unit="s",
        higher="slow networks are tolerated; a dead host delays a request for longer",
        lower="failover is quicker; a worker whose accept queue is full looks dead",
        gt=0,
        reload=True,
    )
    first_byte_timeout_s: float = option(
        600.0,
        "Time from sending a request to the head of its answer; 0 sets no limit. An answer that is not "
        "streamed starts only when it is complete.",
        unit="s",
        higher="long answers that are not streamed survive; a hung worker holds its requests longer",
        lower="a hung worker is noticed sooner; long answers are cut",
        ge=0,
        reload=True,
    )
    idle_timeout_s: float = option(
        3600.0,
        "Longest silence within an answer that has started; 0 sets no limit.",
        unit="s",
        higher="streams that pause for long survive",
        lower="a stream of a hung worker ends sooner",
        ge=0,
        reload=True,
    )
    keepalive_s: float = option(
        4.0,
        "Time that an unused connection is kept open.",
        unit="s",
        higher="fewer new connections; more idle sockets",
        lower="more new connections; below the worker's own limit (uvicorn's default: 5 s) no request is "
        "sent on a connection that the worker is closing",
        gt=0,
        reload=True,
    )
    max_connections: int = option(
        0,
        "Most concurrent requests to one worker, each on its own connection; 0 is unlimited. Further "
        "requests wait, at most for the connect timeout.",
        unit="connections",
        higher="less waiting in the gateway; the worker's own queue holds the load",
        lower="the worker has fewer concurrent requests; more waiting and refusals in the gateway",
        ge=0,
        reload=True,
    )
    max_idle: int = option(
        512,
        "Most unused connections kept per worker.",
        unit="connections",
        higher="bursts find open connections; more idle sockets on both sides",
        lower="fewer idle sockets; bursts open new connections",
        ge=0,
        reload=True,
    )
    spare_connections: int = option(
        16,
        "Most connections per worker that are opened before a request needs them: for five minutes after "
        "the last request on it, an expired connection is replaced. None with `max_connections`.",
        unit="connections",
        higher="larger bursts after a pause find open connections",
        lower="fewer idle sockets and no connections without requests; the first requests after a pause "
        "wait for connects",
        ge=0,
        reload=True,
    )
    read_buffer_bytes: int = option(
        262_144,
        "Unread answer bytes per request above which the gateway stops reading from the worker until the "
        "client has received them. At most one socket read (256 KiB) more is kept.",
        unit="bytes",
        higher="slow clients hold the worker back less; more memory",
        lower="less memory per slow client",
        gt=0,
        reload=True,
    )
    verify_tls: Annotated[bool, Switch] = option(
        True,
        "Check certificates of https workers against `tls.ca_file`, or else SSL_CERT_FILE or SSL_CERT_DIR, "
        "or else certifi's list.",
        higher="on: requests go to trusted workers only",
        lower="off: any certificate is accepted",
    )
    tls: ClientTlsOptions = option(default_factory=ClientTlsOptions)

    @model_validator(mode="after")
    def _checks_what_it_reads(self) -> UpstreamOptions:
        if self.tls.ca_file is not None and not self.verify_tls:
            raise ValueError("tls.ca_file: has no effect if verify_tls is off")
        return self


class RetryOptions(Options):
    """Retries before the first byte of an answer. Each retry goes to the next worker of the ranking."""

    statuses: tuple[Annotated[int, Field(ge=400, le=599)], ...] = option(
        (),
        "Statuses of an answer for which the request is retried on another worker, such as [429, 503].",
    )
    busy_workers: int = option(
        4,
        "Most workers that one request asks while they answer that they are full: 429, 503 with Retry-After, "
        "and 503 of a full queue of vLLM. Such answers spend no budget and eject no worker.",
        unit="workers",
        higher="a fleet whose workers are nearly all full finds the last free one",
        lower="fewer refused requests for a fleet that is full",
        ge=1,
    )
    lost_workers: int = option(
        2,
        "Most workers that begin to compute one request: after this many broke off without an answer, no "
        "further one gets it. Workers that cannot be reached, and full ones, do not count.",
        unit="workers",
        higher="a request survives more workers that die at the same time; one that kills its workers takes "
        "more of them",
        lower="a request that kills its worker takes fewer of them; 1: such failures are never retried",
        ge=1,
    )
    refuse_s: float = option(
        300.0,
        "A body that has lost two workers is refused for this long (502 `request_lost_workers`), for its key "
        "and endpoint, by all processes and gateways. 0: never.",
        unit="s",
        higher="clients that repeat the request for long kill no further workers",
        lower="a body that was refused because of other requests on the same workers is served again sooner",
        ge=0,
    )
    budget_percent: float = option(
        20.0,
        "Retries allowed, as a share of recent requests. Refused connections do not spend it.",
        unit="%",
        higher="more requests survive a partial outage",
        lower="less extra load on the remaining workers",
        ge=0,
        le=100,
    )
    budget_min_per_s: float = option(
        20.0,
        "Retries allowed every second at any request rate.",
        unit="retries/s",
        higher="small gateways retry freely",
        lower="the percentage alone decides",
        ge=0,
    )
