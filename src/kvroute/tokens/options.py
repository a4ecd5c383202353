"""The options of exact token ids, and the reasons why a prompt has none."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from kvroute.errors import KvrouteError
from kvroute.options import Options, Switch, option

ContentFormat = Literal["string", "openai"]
"""The form of a message's content in a chat template: one string, or a list of parts ("openai")."""


class TokensOptions(Options):
    """Exact token ids, for strategies that need them.

    The model's files are used if they are available and give the workers' ids for sample requests; otherwise
    a worker tokenizes.
    """

    models: dict[str, Path] = option(
        description="Folder with `tokenizer.json` and `tokenizer_config.json` by model name. For other "
        "models the worker's folder (`root` in `/v1/models`) and the Hugging Face cache are searched.",
        default_factory=dict,
    )
    threads: int = option(
        2, "Threads that tokenize.", ge=1, le=64, higher="more long prompts at once", lower="fewer cores used"
    )
    timeout_ms: float = option(
        50.0,
        "Longest wait of a request for its prompt's token ids; after that the request is routed by the route "
        "history. Long prompts may wait longer: see `timeout_share`.",
        unit="ms",
        gt=0,
        higher="more prompts are routed exactly on a busy machine",
        lower="tokenizing delays first tokens of short prompts less",
    )
    max_timeout_ms: float = option(
        1000.0,
        "Longest wait for the token ids of a very long prompt; at least `timeout_ms`.",
        unit="ms",
        gt=0,
        higher="very long new prompts are routed exactly",
        lower="a stuck tokenizer delays long prompts less",
    )
    timeout_share: float = option(
        0.25,
        "A request may wait for its token ids for this share of its prompt's prefill time (`routing.costs`): "
        "the average cost of a decision without them. 0: every request waits for `timeout_ms`.",
        ge=0,
        le=1,
        higher="long prompts wait longer before the route history decides",
        lower="long prompts are routed by the route history sooner",
    )
    cache_mib: int = option(
        64,
        "Cache of tokenized texts per model, so that only the new part of a conversation is tokenized.",
        unit="MiB",
        ge=1,
        higher="more conversations stay cheap",
        lower="less memory",
    )
    fastokens: Annotated[bool, Switch] = option(
        True, "Use fastokens, if it is installed and gives the ids of the model's own tokenizer."
    )
    harmony_vocabulary: Path | None = option(
        None,
        "Folder with `o200k_base.tiktoken`, for chats of gpt-oss, if `openai-harmony` is installed. "
        "`oss-harmony` (`kvroute[harmony]`) needs no folder. kvroute fetches nothing.",
    )
    computed_samples: Annotated[bool, Switch] = option(
        True,
        "Compare token ids with those that a worker computes with: it is sent up to 17 short requests of one "
        "token for each model, if it has no `/render` endpoints.",
        higher="on: also models whose chats are rendered otherwise than by `/tokenize` are compared rightly",
        lower="off: workers compute nothing for the comparison, which is with `/tokenize` then",
    )
    media_keys: Annotated[bool, Switch] = option(
        True,
        "Ask a worker's render endpoint for the identifiers of images, audio and video. The worker loads and "
        "processes them for that, and once more for the answer.",
        higher="on: exact predictions for prompts with images, on workers with `--enable-scale-out`",
        lower="off: workers process each image once",
    )
    chat_template_kwargs: dict[str, Any] = option(
        description="The workers' `--default-chat-template-kwargs`.", default_factory=dict
    )
    content_format: ContentFormat | None = option(
        None, "The workers' `--chat-template-content-format`; unset: detected by vLLM's rules."
    )
    tools_dropped_for_none: Annotated[bool, Switch] = option(
        False, "Whether the workers run with `--exclude-tools-when-tool-choice-none`."
    )
    recheck_s: float = option(
        30.0,
        "Pause before a retry for a model that could not be tokenized.",
        unit="s",
        gt=0,
        higher="fewer attempts",
        lower="exact routing starts sooner",
    )


class TokensReason(StrEnum):
    """Why a prompt has no exact token ids. A metric label, so the set of values is fixed."""

    LATE = "late"
    """The deadline has passed."""
    BUSY = "busy"
    """Too many prompts wait for the tokenizer's threads."""
    NO_SOURCE = "no_source"
    """The model has no token source: no files, and no worker that answers."""
    WORKER_FAILED = "worker_failed"
    """The worker refused to tokenize, or its answer was incomplete."""
    WORKER_LOST = "worker_lost"
    """The worker broke off while it tokenized: the prompt may have killed it."""
    UNREADABLE = "unreadable"
    """The body is invalid for its endpoint."""
    STRUCTURE = "structure"
    """A large body with too many JSON values besides its texts to be decoded in one step."""
    MEDIA = "media"
    """Images, audio, video or embeddings, of which the worker shows no identifiers: the token ids are
    placeholders."""
    MEDIA_LATE = "media_late"
    """The worker did not render images, audio or video before the deadline."""
    REQUEST_TEMPLATE = "request_template"
    """The request contains its own chat template."""
    NO_TEMPLATE = "no_template"
    TEMPLATE_REFUSED = "template_refused"
    """The chat template cannot render this conversation; the worker will answer with an error."""
    TRUNCATION = "truncation"
    """The truncated prompt depends on something that only the worker knows, such as its context length."""
    HARMONY = "harmony"
    """The engine renders the model's chats with Harmony, and kvroute cannot: no library, or no vocabulary."""
    DIFFERS = "differs"
    """For samples of such requests the engine computed other token ids."""
    STORED_RESPONSE = "stored_response"
    """The conversation continues a response that only its worker has stored."""
    FAILED = "failed"
    """Tokenizing failed because of a defect in kvroute; the log has the error."""
    UNSUPPORTED = "unsupported"
    """A field or an endpoint changes the prompt in a way that kvroute does not render."""


class Inexact(KvrouteError):
    """A prompt has no exact token ids, for this `reason`. Raised and caught inside `tokens` only."""

    def __init__(self, reason: TokensReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class UnusableModel(KvrouteError):
    """A model's folder lacks something that tokenizing needs; the text names it."""
