"""Log lines in the words that HyperPod's documentation tells people to look for."""

from __future__ import annotations

import logging

from kvroute.routing.decision import Reason, RouteDecision

log = logging.getLogger("kvroute.hyperpod")

_KVAWARE = "kvaware"


def worker_registered(instance: str) -> None:
    """An LMCache instance, or a worker that publishes events, has made itself known."""
    log.info("Worker registered: %s", instance)


def routed(decision: RouteDecision) -> None:
    """A request is about to be sent. Says nothing of other strategies than kvaware."""
    if decision.strategy != _KVAWARE:
        return
    if decision.reason is Reason.KV_HIT or decision.ranking[0].matched_tokens:
        log.info("Routing request to %s found by kvaware router", decision.ranking[0].worker.id)
    else:
        log.info("Matched instance url None")
