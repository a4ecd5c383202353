"""The approximate view: what each worker holds of a prompt, judged by what it was sent."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.fleet.worker import ASSUMED_BLOCK_TOKENS, Worker
from kvroute.index.history import RouteHistory
from kvroute.routing.decision import RouteQuery


def matched_tokens(history: RouteHistory, query: RouteQuery, workers: Sequence[Worker]) -> list[int]:
    """Tokens of the query's prompts per worker, summed over the prompts, in the order of `workers`.

    Per prompt at most all but its last token, which is always computed, in whole blocks of the worker's
    own size. Blocks of unfinished requests count: they are there, or will be before this request runs.
    """
    totals = [0] * len(workers)
    for keys, length, block_tokens in query.prompts:
        held = history.match(keys)
        if not held:
            continue
        for place, worker in enumerate(workers):
            blocks = held.get(worker.index)
            if blocks:
                tokens = int(blocks * block_tokens)
                if tokens >= length:
                    tokens = length - 1
                totals[place] += tokens - tokens % (worker.facts.block_size or ASSUMED_BLOCK_TOKENS)
    return totals
