"""What can be set about `/metrics`."""

from __future__ import annotations

from typing import Literal

from kvroute.options import Options, option


class MetricsOptions(Options):
    """What `/metrics` says beside kvroute's own figures."""

    compat: Literal["none", "vllm-router"] = option(
        "none", "Also export the metric names of this router: `vllm-router` is production-stack's."
    )
    compat_window_s: float = option(
        60.0,
        "What its rates and averages are taken over, from one scrape to another.",
        unit="s",
        gt=0,
        higher="smoother",
        lower="more current",
    )
