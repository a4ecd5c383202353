"""The parameters of the cost model: the options, and the same in seconds."""
# A prefill that waited is batched with others. If such prefills counted, a busy worker would look fast and
# attract more work.

from __future__ import annotations

from typing import NamedTuple

from kvroute.options import Options, option

# If the times did not depend on missed tokens, the fit would find a cost of zero per token, and conversations
# would leave their cache.


class CostOptions(Options):
    """The cost of a model's work on one worker.

    The defaults are higher than the real costs of most models: with costs that are too low, requests leave
    their cache too easily, which costs more than the opposite.
    """

    token_us: float = option(
        160.0,
        "Prefill time of one token.",
        unit="us",
        higher="keeps conversations where their cache is",
        lower="spreads requests sooner",
        gt=0,
    )
    context_token_ns: float = option(
        3.0,
        "Prefill time of one token per token of context before it (attention).",
        unit="ns",
        higher="long prompts cost more",
        lower="long prompts cost as much as many short ones",
        ge=0,
    )
    iteration_ms: float = option(
        20.0,
        "Fixed time of one engine iteration; a prefill takes at least one.",
        unit="ms",
        higher="counts requests rather than tokens",
        lower="counts tokens rather than requests",
        ge=0,
    )
    max_batched_tokens: int = option(
        8192,
        "Tokens that the engine computes in one iteration (vLLM's --max-num-batched-tokens).",
        unit="tokens",
        higher="fewer iterations in a long prefill",
        lower="more iterations in a long prefill",
        ge=1,
    )
    lambda_cap: float = option(
        64.0,
        "Largest charge for the delay of later requests, in seconds per second of own work.",
        higher="more affinity near saturation",
        lower="more spreading near saturation; 0: only the request's own wait counts",
        ge=0,
    )
    memory_limit: float = option(
        0.95,
        "Share of a worker's KV capacity that running requests may use; more costs extra.",
        higher="fills workers further, at the risk of preemption",
        lower="spreads memory sooner",
        gt=0,
    )
    eviction_weight: float = option(
        1.0,
        "Charge for the tracked blocks that a request evicts, as a share of the time to recompute them.",
        higher="protects the cache of a full worker",
        lower="0: eviction costs nothing",
        ge=0,
    )
    active_share: float = option(
        0.03,
        "Charge per prompt token of the requests in flight, as a share of `token_us`: about the time that an "
        "answer loses because the token is read in every iteration. A prefix is computed on a second worker "
        "once the first has about 1 / `active_share` more requests of its size in flight.",
        higher="evens out running requests, copies hot prefixes sooner",
        lower="only the time to first token counts; 0.001 merely breaks ties",
        ge=0,
    )
    balance_weight: float = option(
        8.0,
        "Charge in seconds per second of own work, for each unit by which the worker's utilisation by "
        "prefill exceeds the fleet's mean: a conversation usually stays on the worker where it starts.",
        higher="new conversations leave a common prefix sooner for a worker that has done less",
        lower="0: new conversations follow a common prefix while its holder looks idle",
        ge=0,
    )
    tie_share: float = option(
        0.02,
        "Scores within this share of the best, plus `tie_ms`, are equal: the worker with the fewest active "
        "tokens is first, then the one with the least recent prefill.",
        higher="evens out load where costs differ little",
        lower="follows small differences in cost",
        ge=0,
    )
    tie_ms: float = option(
        1.0,
        "See `tie_share`.",
        unit="ms",
        higher="evens out load where costs differ little",
        lower="follows small differences in cost",
        ge=0,
    )


class Costs(NamedTuple):
    """`CostOptions` in seconds and tokens."""

    token_s: float
    context_token_s: float
    iteration_s: float
    max_batched_tokens: int
    lambda_cap: float
    memory_limit: float
    eviction_weight: float
    active_token_s: float
    balance_weight: float
    tie_share: float
    tie_s: float

    @classmethod
    def of(cls, options: CostOptions) -> Costs:
        """The costs of these options, in seconds."""
        return cls(
            options.token_us * 1e-6,
            options.context_token_ns * 1e-9,
            options.iteration_ms * 1e-3,
            options.max_batched_tokens,
            options.lambda_cap,
            options.memory_limit,
            options.eviction_weight,
            options.active_share * options.token_us * 1e-6,
            options.balance_weight,
            options.tie_share,
            options.tie_ms * 1e-3,
        )

    def prefill_s(self, miss: int, matched: int, prompts: int = 1) -> float:
        """Seconds to compute `miss` tokens after `matched` ones, both summed over `prompts` equal prompts."""
        chunks = max(1, -(-miss // self.max_batched_tokens))
        context = (matched + miss / 2) / prompts
        return miss * (self.token_s + self.context_token_s * context) + self.iteration_s * chunks
