"""What can be set about knowing a prompt's token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

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
        "Longest wait for a prompt's tokens; after it the request is routed on the approximate view.",
        unit="ms",
        gt=0,
        higher="long new prompts are routed exactly",
        lower="first tokens are never late for it",
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
