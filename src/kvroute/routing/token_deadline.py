"""How long a request may wait for its exact token ids, weighed against what routing without them may cost."""

from __future__ import annotations

from typing import NamedTuple

from kvroute.routing.cost_options import Costs


class TokenPatience(NamedTuple):
    """`loss_share` is the part of a prompt's prefill time that routing it without its tokens costs on
    average: how often the approximate choice misses a cache, times how much of the prompt that cache has."""

    least_s: float
    most_s: float
    loss_share: float


def token_deadline_s(tokens: int, workers: int, costs: Costs, patience: TokenPatience) -> float:
    """Seconds that a prompt of about `tokens` tokens waits at most, when `workers` could take it.

    A second of waiting delays the first token by a second, so waiting is worth at most the expected loss of
    not waiting: a share of the prefill. A choice among fewer than two workers loses nothing.
    """
    least, most, loss_share = patience
    if workers < 2:
        return least
    loss_s = loss_share * costs.prefill_s(tokens, 0)
    return max(least, min(loss_s, most))
