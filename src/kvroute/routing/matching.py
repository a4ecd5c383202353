"""The approximate view: what each worker holds of a prompt, judged by what it was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.fleet.worker import ASSUMED_BLOCK_TOKENS, Worker
from kvroute.index.history import RouteHistory
from kvroute.routing.decision import RouteQuery


def matched_tokens(
    history: RouteHistory,
    query: RouteQuery,
    workers: Sequence[Worker],
    places: Mapping[int, int] | None = None,
) -> list[int]:
    """Tokens of the query's prompts per worker, summed over the prompts, in the order of `workers`.

    Per prompt at most all but its last token, which is always computed, in whole blocks of the worker's
    own size. Blocks of unfinished requests count: they are there, or will be before this request runs.
    `places` says where in `workers` the one of an index is, where that is at hand (`FleetView.places`):
    then only workers that hold something are looked at.
    """
    totals = [0] * len(workers)
    for prompt in query.prompts:
        held = history.match(prompt.keys)
        if not held:
            continue
        if places is None:
            places = {worker.index: place for place, worker in enumerate(workers)}
        length, block_tokens = prompt.tokens, prompt.block_tokens
        tokens = known = 0
        for index, blocks in held.items():
            try:
                place = places[index]
            except KeyError:  # a holder that is not asked about
                continue
            if blocks != known:  # else as for the worker before
                known, tokens = blocks, int(blocks * block_tokens)
                if tokens >= length:
                    tokens = length - 1
            totals[place] += tokens - tokens % (workers[place].facts.block_size or ASSUMED_BLOCK_TOKENS)
    return totals
