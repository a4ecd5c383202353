"""Estimates the tokens in a prompt from its bytes, with a ratio learned from the workers' `usage`."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.blocks.keys import (
    ANCHOR_BYTES,
    BLOCK_BYTES,
    BYTES_PER_TOKEN,
    LONG_BYTES,
    BlockKey,
    BlockKeys,
    CacheSpace,
    ContinuedKeys,
    PrefixKeys,
    PromptKeys,
    block_keys,
)
from kvroute.openai.prompt import AnyPrompt, PromptPrefix, SeenPrompt

_WEIGHT = 0.05
"""Share of a new observation in the moving average, so that about the last 20 prompts count."""
_MIN_BYTES = 256
"""Smaller prompts are ignored: their token count depends on the chat template more than on the text."""
_TOKEN_ID_BYTES = 4.0
_KEYED_BYTES = 4_194_304
"""Only this first part of a prompt has block keys, about a million tokens."""
# To record the blocks of a 64 MB prompt in the history takes half a second.
_MOST_SEEDS = 2
"""Number of seeds (models and cache salts) for which the keys of one prefix are cached."""


class TokenEstimator:
    """The bytes per token of each model.

    Mutable: `observe` moves a model's average. Used from the event loop only.
    """

    def __init__(self, initial: float = BYTES_PER_TOKEN) -> None:
        self._initial = initial
        self._ratio: dict[str, float] = {}

    def bytes_per_token(self, model: str) -> float:
        return self._ratio.get(model, self._initial)

    def observe(self, model: str, prompts: Sequence[AnyPrompt], prompt_tokens: int) -> None:
        """Learn from one answer's `usage.prompt_tokens`.

        Prompts of token ids, those with media, whose tokens do not depend on their bytes, and short ones are
        ignored.
        """
        size = 0
        for prompt in prompts:
            size += prompt.size
        if size < _MIN_BYTES or prompt_tokens <= 0:
            return
        for prompt in prompts:
            if prompt.is_token_ids or prompt.has_media:
                return
        seen = size / prompt_tokens
        seen = 0.5 if seen < 0.5 else 16.0 if seen > 16.0 else seen
        ratio = self._ratio.get(model)
        # The first answer replaces the default: with a wrong ratio every worker's part of the history has a
        # wrong size.
        self._ratio[model] = seen if ratio is None else ratio + _WEIGHT * (seen - ratio)

    def prompt_keys(self, prompt: AnyPrompt, space: CacheSpace) -> PromptKeys:
        """The prompt's chained keys and estimated length. Keys of a long prompt are computed on access."""
        if type(prompt) is SeenPrompt:
            size, is_token_ids = prompt.size, False
            keys: Sequence[BlockKey] = _seen_keys(prompt, space.seed)
        else:
            data, is_token_ids = prompt  # type: ignore[misc]  # a `Prompt`; `cast` is a call
            size = len(data)
            if size > _KEYED_BYTES:
                data = memoryview(data)[:_KEYED_BYTES]
            # `block_keys` inlined: every request would call it.
            keys = (BlockKeys if size >= LONG_BYTES else block_keys)(data, BLOCK_BYTES, space.seed)
        ratio = _TOKEN_ID_BYTES if is_token_ids else self._ratio.get(space.model, self._initial)
        return PromptKeys(keys, round(size / ratio) or 1, BLOCK_BYTES / ratio)


def _seen_keys(prompt: SeenPrompt, seed: int) -> Sequence[BlockKey]:
    """The keys of a prompt with a recognised prefix.

    The prefix's keys are cached in its `notes`; keys of a longer prefix, if this prompt has one, in that
    one's.
    """
    prefix, grown = prompt.prefix, prompt.longer_prefix
    cached: PrefixKeys | None = prefix.notes.get(seed)
    if cached is None:
        if prompt.size < ANCHOR_BYTES:
            return block_keys(prompt.data, seed=seed)
        cached = PrefixKeys([seed], {})
        if prefix.whole_bytes:
            cached = ContinuedKeys(cached, prompt.data, lambda: b"").prefix(prefix.whole_bytes // BLOCK_BYTES)
            _store(prefix, seed, cached)
    keys = ContinuedKeys(cached, prompt.tail, lambda: prompt.data, grown is not None)
    if grown is not None:
        _store(grown, seed, keys.prefix(grown.whole_bytes // BLOCK_BYTES))
    return keys


def _store(prefix: PromptPrefix, seed: int, keys: PrefixKeys) -> None:
    if len(prefix.notes) >= _MOST_SEEDS:
        prefix.notes.clear()
    prefix.notes[seed] = keys
