"""When a request may be given to another worker."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvroute.options import Options, option


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
