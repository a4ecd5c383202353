"""Load of a worker that comes from elsewhere: requests that its engine reports and no gateway accounts for.

Pure. Own requests are those of this gateway and of all that share with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PAGES = 3
"""What this many successive pages show lasts, and does not go with the age of the last one."""
MOST_AGE_S = 60.0
"""Older figures count no more."""
_MOST_REQUESTS = 1_000_000
RESIDENCE_S = 5.0
"""Assumed time of a request on a worker, while none has ended."""


class EngineFigures(NamedTuple):
    """Requests and KV memory of a worker's engine, summed over its data-parallel ranks, as a page says."""

    waiting: int
    running: int
    usage: float
    """The used part of the KV memory, 0 to 1."""
    ended: int | None
    """Requests that have ended since the engine's start (`vllm:request_success_total`); None if unknown."""
    at: float
    """`Clock.now()` before the metrics were asked for."""


class OwnRequests(NamedTuple):
    """The most own requests that a worker had at once in the time in which a page was made."""

    in_flight: int
    unanswered: int
    """Those without a first token, which the engine may report as waiting."""
    tokens: int
    """Prompt tokens of those in flight."""


class Others(NamedTuple):
    """Requests from elsewhere on one page."""

    waiting: int
    running: int
    tokens: float
    """Tokens of KV that they use."""


def others_of(page: EngineFigures, own_requests: OwnRequests, capacity_tokens: int) -> Others:
    """What a page shows beyond the own requests.

    Each own request is subtracted where the engine may have counted it, so none is counted twice. Requests
    that were sent or have ended while the page was made are in `own_requests` (the most at once), and so can
    hide others for one page.
    """
    reported_waiting = min(max(page.waiting, 0), _MOST_REQUESTS)
    reported_running = min(max(page.running, 0), _MOST_REQUESTS)
    others = max(0, reported_waiting + reported_running - own_requests.in_flight)
    waiting = min(others, max(0, reported_waiting - own_requests.unanswered))
    running = others - waiting
    used = min(max(page.usage, 0.0), 1.0) * capacity_tokens
    share = running / reported_running if reported_running else 0.0
    return Others(waiting, running, max(0.0, min(used - own_requests.tokens, used * min(share, 1.0))))


class SeenPage(NamedTuple):
    """A page, and what it shows of others."""

    figures: EngineFigures
    others: Others


class ForeignLoad(NamedTuple):
    """The load of a worker from elsewhere, as its last pages show it."""

    waiting: int
    running: int
    wait_s: float
    """How long the waiting requests delay a new one, at `at`."""
    lasting_wait_s: float
    """The part of it that all of the last `PAGES` pages show."""
    tokens: float
    lasting_tokens: float
    residence_s: float
    at: float
    """When the last page was asked for."""

    def wait_at(self, now: float) -> float:
        """The delay of a request that is sent `now`.

        The worker has worked for the figure's age meanwhile. What only the last page shows is gone with
        that; gateways that see the same page therefore do not avoid a worker together until the next one.
        """
        age_s = now - self.at
        if age_s > MOST_AGE_S:
            return 0.0
        return max(self.wait_s - age_s, self.lasting_wait_s)

    def tokens_at(self, now: float) -> float:
        """Tokens of their KV that are in use `now`: requests end within a residence."""
        age_s = now - self.at
        if age_s > MOST_AGE_S:
            return 0.0
        return max(self.tokens * max(0.0, 1.0 - age_s / self.residence_s), self.lasting_tokens)


def foreign_load(
    pages: Sequence[SeenPage], *, ranks: int, prefill_s: float, residence_s: float | None
) -> ForeignLoad | None:
    """The load by the last pages, the newest last; None if that one shows no request of others.

    `prefill_s` is the mean prefill of own requests, `residence_s` their mean time on the worker.
    """
    page, last = pages[-1]
    if not last.waiting and not last.running:
        return None
    stay_s = residence_s or RESIDENCE_S
    each_s = max(prefill_s / ranks, _turn_s(pages, stay_s))
    waiting, tokens = 0, 0.0
    if len(pages) >= PAGES:
        waiting = min(seen.others.waiting for seen in pages[-PAGES:])
        tokens = min(seen.others.tokens for seen in pages[-PAGES:])
    return ForeignLoad(
        last.waiting,
        last.running,
        last.waiting * each_s,
        waiting * each_s,
        last.tokens,
        tokens,
        stay_s,
        page.at,
    )


def _turn_s(pages: Sequence[SeenPage], stay_s: float) -> float:
    """Seconds until the next of the waiting requests is taken.

    By Little's law, requests leave at the rate of those inside by their mean stay. As long as requests wait
    on successive pages, the rate at which they end between these pages is that at which they start: others
    may have much longer answers than own ones. If none has ended, the next one may end now, at the earliest.
    """
    page = since = pages[-1].figures
    inside = min(max(1, page.waiting + page.running), _MOST_REQUESTS)
    little_s = stay_s / inside
    for seen in reversed(pages):
        if not seen.figures.waiting or seen.figures.ended is None:
            break
        since = seen.figures
    if page.ended is None or since.ended is None or page.at <= since.at:
        return little_s
    return max(little_s, (page.at - since.at) / max(1, page.ended - since.ended))
