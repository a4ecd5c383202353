"""Log lines of other products: HyperPod's documentation and production-stack's tests look for their words."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias
from urllib.parse import quote

from kvroute.clock import Clock
from kvroute.fleet.worker import Worker
from kvroute.logs import LoggingOptions
from kvroute.request.plan import RequestPlan
from kvroute.request.record import Record
from kvroute.routing.registry import STRATEGIES
from kvroute.routing.strategy import Needs, RouteReason

log = logging.getLogger("kvroute.hyperpod")
routing_log = logging.getLogger("kvroute.routing")

_CREDENTIALS = frozenset(
    f"header:{name}" for name in ("authorization", "proxy-authorization", "x-api-key", "cookie")
)
_PRINTABLE = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_READS_CACHES = frozenset(name for name, strategy in STRATEGIES.items() if strategy.needs is Needs.TOKENS)
Announce: TypeAlias = Callable[[RequestPlan, Record, Worker | None], None]
"""Called with each plan before its request is sent. If one worker computes the prompt and another one
answers: once more, with that worker, before the second leg is sent."""


def worker_registered(instance: str) -> None:
    """Log that an LMCache instance registered, or that a worker's event stream started."""
    log.info("Worker registered: %s", instance)


def routed(plan: RequestPlan, _record: Record, second: Worker | None = None) -> None:
    """Log that a request is about to be sent, for strategies that read the workers' caches."""
    decision = plan.decision
    if second is not None or decision.strategy not in _READS_CACHES:
        return
    if decision.reason is RouteReason.KV_HIT or decision.ranking[0].matched_tokens:
        log.info("Routing request to %s found by kvaware router", decision.ranking[0].worker.id)
    else:
        log.info("Matched instance url None")


def routing_lines(clock: Clock, session_keys: Sequence[str]) -> Announce:
    """The function that logs each plan as production-stack's router does (a6c01db, `request.py`).

    It has a line for each leg of `disaggregated_prefill`: the first one names the prefill worker, and the
    process time of the second one begins when the first leg has ended.

    `session_keys` are the sources of `routing.session.keys`. A session key that may be a credential is shown
    as a hash.
    """
    is_secret = any(text.lower() in _CREDENTIALS for text in session_keys)

    def routed(plan: RequestPlan, record: Record, second: Worker | None = None) -> None:
        decision, began = plan.decision, record.started
        if second is not None:
            worker = second
            if record.handover is not None:
                began = record.handover.prefilled or began
        elif decision.handover is not None:
            worker = decision.handover.prefill.worker
        else:
            worker = decision.ranking[0].worker
        session = plan.query.session_key
        if session is None:
            shown = "None"
        else:
            session = session.rpartition("\0")[2]  # without the tenant
            if is_secret:
                session = hashlib.sha256(b"kvroute session\0" + session.encode()).hexdigest()[:12]
            shown = quote(session, safe=_PRINTABLE)  # no space and no line break
        routing_log.info(
            "Routing request %s with session id %s to %s at %s, process time = %.4f",
            record.request_id.decode(),
            shown,
            worker.spec.url,
            clock.wall(),
            clock.now() - began,
        )

    return routed


def announcer(options: LoggingOptions, clock: Clock, session_keys: Sequence[str]) -> Announce | None:
    """What logs the lines that `options` select; None if they select none."""
    theirs = routing_lines(clock, session_keys) if options.routing_lines else None
    if not options.hyperpod_lines:
        return theirs
    if theirs is None:
        return routed

    def both(plan: RequestPlan, record: Record, second: Worker | None) -> None:
        routed(plan, record, second)
        theirs(plan, record, second)

    return both
