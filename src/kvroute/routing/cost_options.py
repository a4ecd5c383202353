"""What a model's work costs on one worker: as configured, and in seconds."""

from __future__ import annotations

from typing import NamedTuple

from kvroute.options import Options, option


class CostOptions(Options):
    """What a model's work costs on one worker. The defaults are meant to be too high for most models: work
    that is taken for cheaper than it is leaves its cache too easily, which costs more than the opposite."""

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
        higher="long prompts count for more",
        lower="long prompts count like many short ones",
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
        "Most seconds of other requests' delay that one second of own work is charged.",
        higher="more affinity near saturation",
        lower="more spreading near saturation; 0 looks at the request's own wait only",
        ge=0,
    )
    memory_limit: float = option(
        0.95,
        "Share of a worker's KV capacity that running requests may fill before sending more costs extra.",
        higher="packs workers tighter, at the risk of preemption",
        lower="spreads memory sooner",
        gt=0,
    )
    eviction_weight: float = option(
        1.0,
        "How much of the time to recompute the tracked blocks that a request pushes out it is charged.",
        higher="protects what a full worker holds",
        lower="0 lets any request push out anything",
        ge=0,
    )
    active_share: float = option(
        0.03,
        "What each prompt token of the requests in flight costs, as a share of `token_us`: about what "
        "reading it in every iteration adds to an answer. A prefix in use is computed again elsewhere "
        "once its worker has about 1 / `active_share` more requests of its size in flight.",
        higher="evens out running requests, copies hot prefixes sooner",
        lower="looks at the time to first token only; 0.001 merely breaks ties",
        ge=0,
    )
    balance_weight: float = option(
        8.0,
        "Seconds charged per second of own work, for each unit by which the worker's utilisation by prefill "
        "is above the fleet's mean: what a conversation begins on a worker, it goes on with there.",
        higher="new conversations leave a common prefix sooner for a worker that has done less",
        lower="0: a common prefix is followed as long as its holder looks idle",
        ge=0,
    )
    tie_share: float = option(
        0.02,
        "Scores within this share of the best, plus `tie_ms`, are equal: fewest active tokens goes first, "
        "then least prefill done lately.",
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

    def prefill_s(self, miss: int, held: int, prompts: int = 1) -> float:
        """Seconds to compute `miss` tokens after `held` ones, both summed over `prompts` equal prompts."""
        chunks = max(1, -(-miss // self.max_batched_tokens))
        context = (held + miss / 2) / prompts
        return miss * (self.token_s + self.context_token_s * context) + self.iteration_s * chunks
