"""Which requests read the engine's prefix cache. Pure.

The engine computes the whole prompt of a request that asks for a result of each prompt token, so no cached
block is a hit for it, although the request fills the cache as others do. Source: vLLM 0.32,
`skip_reading_prefix_cache` in sampling_params.py and pooling_params.py, and the `to_sampling_params` of both
completion protocols.

| endpoint | does not read the cache |
|---|---|
| completions, chats | `prompt_logprobs` that is not null, 0 too |
| completions | `echo` with `logprobs` that is not null, 0 too |
| chats | `echo`, unless `top_logprobs` is null: its default is 0 |
| /pooling | the `task` is `token_embed`, `token_classify` or `plugin` |

Beam search (`use_beam_search`) counts as one of them: each beam and each token is an engine request of its
own, and the answer reports no cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import UNSET, Raw, UnsetType

_CHATS: Final = frozenset({"/v1/chat/completions"})
_COMPLETIONS: Final = frozenset({"/v1/completions"})
_EITHER: Final = "/invocations"
_POOLING: Final = frozenset({"/pooling", _EITHER})
_FALSE: Final = (b"false", b"null", b"0", b'"false"')
_TOKEN_TASKS: Final = (b'"token_embed"', b'"token_classify"', b'"plugin"')


def reads_cache(path: str, values: Sequence[Raw | UnsetType], *, is_chat: bool) -> bool:
    """Whether an engine that caches prefixes reads its cache for a body of the endpoint `path`.

    `values` are the members `CACHE_FIELDS` of the body; `is_chat` says whether it has messages, which
    decides for /invocations.
    """
    prompt_logprobs, echo, logprobs, top_logprobs, use_beam_search, task = values
    if path in _CHATS or path in _COMPLETIONS or path == _EITHER:
        if _is_set(prompt_logprobs) or _is_true(use_beam_search):
            return False
        if _is_true(echo):
            if path in _CHATS or (path == _EITHER and is_chat):
                if top_logprobs is UNSET or _is_set(top_logprobs):
                    return False
            elif _is_set(logprobs):
                return False
    return not (path in _POOLING and task is not UNSET and bytes(memoryview(task)[:32]) in _TOKEN_TASKS)


def _is_set(value: Raw | UnsetType) -> bool:
    return value is not UNSET and bytes(memoryview(value)[:4]) != b"null"


def _is_true(value: Raw | UnsetType) -> bool:
    # vLLM's models accept other spellings of a truth value; a value that they refuse needs no prediction.
    return value is not UNSET and bytes(memoryview(value)[:8]) not in _FALSE
