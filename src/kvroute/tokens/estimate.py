"""How many tokens a prompt's bytes are, learned from the `usage` that workers report."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.blocks.keys import BLOCK_BYTES, BYTES_PER_TOKEN, CacheSpace, PromptKeys, block_keys
from kvroute.openai.prompt import Prompt

_WEIGHT = 0.05
"""Share of a new observation in the moving average: about the last 20 prompts count."""
_MIN_BYTES = 256
"""Shorter prompts say more about the template around them than about the text."""
_TOKEN_ID_BYTES = 4.0


class TokenEstimator:
    """Bytes per token, per model. Mutable: `observe` moves a model's average; touched from the loop only."""

    def __init__(self, initial: float = BYTES_PER_TOKEN) -> None:
        self._initial = initial
        self._ratio: dict[str, float] = {}

    def bytes_per_token(self, model: str) -> float:
        return self._ratio.get(model, self._initial)

    def observe(self, model: str, prompts: Sequence[Prompt], prompt_tokens: int) -> None:
        """Learn from one answer's `usage.prompt_tokens`. Token-id prompts and short ones teach nothing."""
        size = 0
        for prompt in prompts:
            if prompt.is_token_ids:
                return
            size += len(prompt.data)
        if size < _MIN_BYTES or prompt_tokens <= 0:
            return
        seen = min(max(size / prompt_tokens, 0.5), 16.0)
        known = self._ratio.get(model)
        # The first answer replaces the default at once: a wrong ratio mis-sizes every worker's part.
        self._ratio[model] = seen if known is None else known + _WEIGHT * (seen - known)

    def prompt_keys(self, prompt: Prompt, space: CacheSpace) -> PromptKeys:
        """The prompt's chained keys with its estimated length. Those of a long one are
        made as they are asked for."""
        data, is_token_ids = prompt
        ratio = _TOKEN_ID_BYTES if is_token_ids else self._ratio.get(space.model, self._initial)
        # As `PromptKeys(...)`, without its Python-level constructor.
        return tuple.__new__(
            PromptKeys,
            (
                block_keys(data, seed=space.seed),
                round(len(data) / ratio) or 1,
                BLOCK_BYTES / ratio,
            ),
        )
