"""What can be set about knowing a prompt's token ids."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from kvroute.errors import KvrouteError
from kvroute.options import Options, Switch, option

ContentFormat = Literal["string", "openai"]
"""What a chat template gets as the content of a message: one string, or a list of parts."""


class TokensOptions(Options):
    """Exact token ids, for strategies that want them (`kvaware`). Model files are read where they are at
    hand and give the workers' own ids on sample requests; else the workers are asked."""

    models: dict[str, Path] = option(
        description="Folder with `tokenizer.json` and `tokenizer_config.json` by model name. A model that is "
        "not named is looked for where its worker has it (`root` in `/v1/models`) and in the Hugging Face "
        "cache.",
        default_factory=dict,
    )
    threads: int = option(
        2, "Threads that tokenize.", ge=1, le=64, higher="more long prompts at once", lower="fewer cores used"
    )
    deadline_ms: float = option(
        50.0,
        "How long every request may wait for its prompt's tokens; after its deadline a request is routed on "
        "the approximate view. Long prompts may wait longer: see `deadline_share`.",
        unit="ms",
        gt=0,
        higher="more prompts are routed exactly on a busy machine",
        lower="first tokens of short prompts are never late because of tokenizing",
    )
    max_deadline_ms: float = option(
        1000.0,
        "Longest wait for a prompt's tokens, however long the prompt is; `deadline_ms` where that is longer.",
        unit="ms",
        gt=0,
        higher="very long new prompts are routed exactly",
        lower="a stuck tokenizer delays long prompts less",
    )
    deadline_share: float = option(
        0.25,
        "A request may wait for its tokens for this share of its prompt's prefill time (`routing.costs`), "
        "which is what routing it without them is taken to cost on average. 0: all wait for `deadline_ms`.",
        ge=0,
        le=1,
        higher="long prompts wait longer before the approximate view decides",
        lower="long prompts are routed on the approximate view sooner",
    )
    cache_mib: int = option(
        64,
        "Texts whose tokens are remembered, per model: a conversation's next turn tokenizes what is new.",
        unit="MiB",
        ge=1,
        higher="more conversations stay cheap",
        lower="less memory",
    )
    fastokens: Annotated[bool, Switch] = option(
        True, "Use fastokens, where it is installed and gives the ids of the model's own tokenizer."
    )
    chat_template_kwargs: dict[str, Any] = option(
        description="What the workers got as `--default-chat-template-kwargs`.", default_factory=dict
    )
    content_format: ContentFormat | None = option(
        None, "What the workers got as `--chat-template-content-format`; unset: found out as vLLM does."
    )
    tools_dropped_for_none: Annotated[bool, Switch] = option(
        False, "Whether the workers run with `--exclude-tools-when-tool-choice-none`."
    )
    recheck_s: float = option(
        30.0,
        "Pause before a model that could not be tokenized is tried again.",
        unit="s",
        gt=0,
        higher="fewer attempts",
        lower="exact routing begins sooner",
    )


class TokensReason(StrEnum):
    LATE = "late"
    """The deadline passed."""
    BUSY = "busy"
    """Too much waits for the tokenizer's threads already."""
    NO_SOURCE = "no_source"
    """Nothing can tokenize for this model: no files of it, and no worker that answers."""
    WORKER_FAILED = "worker_failed"
    """The worker that was asked refused or broke off."""
    UNREADABLE = "unreadable"
    """The body is not what its endpoint takes."""
    STRUCTURE = "structure"
    """A large body of too many JSON values, beside its texts, to be decoded as a whole."""
    MEDIA = "media"
    """Images, audio, video or embeddings: their token ids are placeholders that say nothing."""
    REQUEST_TEMPLATE = "request_template"
    """The request brings a chat template of its own."""
    NO_TEMPLATE = "no_template"
    TEMPLATE_REFUSED = "template_refused"
    """The chat template cannot render this conversation; the worker will say so."""
    TRUNCATION = "truncation"
    """What remains depends on something only the worker knows, such as its context length."""
    STORED_RESPONSE = "stored_response"
    """The conversation continues a response that only its worker keeps."""
    FAILED = "failed"
    """Tokenizing failed on our side, which is a defect: the log has it."""
    UNSUPPORTED = "unsupported"
    """A field or an endpoint that changes the prompt in a way not rendered here."""


class Inexact(KvrouteError):
    """The token ids of a prompt cannot be told exactly. Raised and caught inside `tokens` only."""

    def __init__(self, reason: TokensReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class UnusableModel(KvrouteError):
    """A model's folder does not hold what tokenizing needs; the text says what is wrong."""
