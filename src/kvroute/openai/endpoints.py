"""The inference endpoints that kvroute relays. A new endpoint needs one new row.

Paths are vLLM's (0.32, entrypoints/openai and entrypoints/serve); `/invocations` is SageMaker's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BodyKind(Enum):
    JSON = "application/json"
    MULTIPART = "multipart/form-data"


class ErrorShape(Enum):
    """The shape of an error inside an event stream that the endpoint's clients expect."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


class Isolation(Enum):
    """How requests for a LoRA adapter can get their own key space in LMCache (`openai.rewriting`)."""

    SALT_AND_TAG = "salt and tag"
    SALT = "salt"
    """Pooling requests have no `kv_transfer_params`."""
    NOT_NEEDED = "not needed"
    """The engine computes nothing."""
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One relayed POST endpoint.

    `fills_kv_cache`: the engine computes KV for the prompt, so routing reads the prompt.
    `stores_response`: the worker stores the answer under its ID, and requests that continue it must go there.
    `preamble`: the types of the events of a stream that engines may send before the first token.
    `limits`: the members that limit the length of an answer. Only prompts of endpoints with such members are
    computed by another worker (`openai.kv_transfer`).
    `takes_rank`: the engine computes a request on the data-parallel rank of its header
    `X-data-parallel-rank`. For the other endpoints vLLM 0.32 does not read the header: its own balancer
    chooses the rank.
    `is_sagemaker`: SageMaker's headers name the model and the session (`gateway.sagemaker`).
    """

    path: str
    summary: str
    fills_kv_cache: bool = True
    stores_response: bool = False
    body: BodyKind = BodyKind.JSON
    errors: ErrorShape = ErrorShape.OPENAI
    isolation: Isolation = Isolation.SALT_AND_TAG
    limits: tuple[str, ...] = ()
    is_anthropic: bool = False
    """The body is that of Anthropic's Messages API."""
    preamble: frozenset[str] = frozenset()
    takes_rank: bool = False
    is_sagemaker: bool = False
    salted_since: tuple[int, int, int] | None = None
    """The first release of vLLM that is known to honour `cache_salt` here; None: every supported one."""

    @property
    def is_pooling(self) -> bool:
        """Whether the engine computes prompts for this endpoint, but generates nothing."""
        return self.fills_kv_cache and not self.limits


SALTED_LATE = (0, 32, 0)
"""`/v1/messages` has `cache_salt` since vllm-project/vllm #49498 (2026-07). Long embeddings, which vLLM
computes in chunks, lost the salt (#47696, #55886). The source of 0.32.0 was read: both are right there."""

_SALT, _NOT_NEEDED = Isolation.SALT, Isolation.NOT_NEEDED

_ROWS = (
    Endpoint(
        "/v1/chat/completions",
        "Chat completion",
        limits=("max_tokens", "max_completion_tokens"),
        takes_rank=True,
    ),
    Endpoint(
        "/v1/completions",
        "Completion of one or several texts or token-id prompts",
        limits=("max_tokens",),
        takes_rank=True,
    ),
    Endpoint("/v1/embeddings", "Embeddings", isolation=_SALT, salted_since=SALTED_LATE),
    Endpoint(
        "/v1/responses",
        "Responses API",
        stores_response=True,
        errors=ErrorShape.RESPONSES,
        limits=("max_output_tokens",),
        preamble=frozenset({"response.created", "response.in_progress", "response.queued"}),
    ),
    Endpoint(
        "/v1/messages",
        "Anthropic Messages API",
        errors=ErrorShape.ANTHROPIC,
        limits=("max_tokens",),
        preamble=frozenset({"message_start", "ping"}),
        is_anthropic=True,
        takes_rank=True,
        salted_since=SALTED_LATE,
    ),
    Endpoint(
        "/v1/messages/count_tokens",
        "Token count of an Anthropic message list",
        fills_kv_cache=False,
        errors=ErrorShape.ANTHROPIC,
        isolation=_NOT_NEEDED,
        is_anthropic=True,
    ),
    Endpoint("/tokenize", "Token ids of a prompt or chat", fills_kv_cache=False, isolation=_NOT_NEEDED),
    Endpoint("/detokenize", "Text of token ids", fills_kv_cache=False, isolation=_NOT_NEEDED),
    Endpoint("/v1/rerank", "Rerank documents", isolation=_SALT, salted_since=SALTED_LATE),
    Endpoint("/rerank", "Rerank documents", isolation=_SALT, salted_since=SALTED_LATE),
    Endpoint("/v2/rerank", "Rerank documents", isolation=_SALT, salted_since=SALTED_LATE),
    Endpoint("/score", "Score text pairs", isolation=_SALT, salted_since=SALTED_LATE),
    Endpoint("/v1/score", "Score text pairs", isolation=_SALT, salted_since=SALTED_LATE),
    Endpoint("/classify", "Classify texts", isolation=_SALT, salted_since=SALTED_LATE),
    Endpoint("/pooling", "Pooling model outputs", isolation=_SALT, salted_since=SALTED_LATE),
    Endpoint(
        "/v1/audio/transcriptions",
        "Transcribe audio",
        fills_kv_cache=False,
        body=BodyKind.MULTIPART,
        isolation=Isolation.IMPOSSIBLE,
    ),
    Endpoint(
        "/v1/audio/translations",
        "Translate audio",
        fills_kv_cache=False,
        body=BodyKind.MULTIPART,
        isolation=Isolation.IMPOSSIBLE,
    ),
    Endpoint(
        "/invocations",
        "SageMaker invocation: any of the JSON bodies above",
        limits=("max_tokens",),
        takes_rank=True,
        is_sagemaker=True,
    ),
)

ENDPOINTS: dict[str, Endpoint] = {row.path: row for row in _ROWS}
