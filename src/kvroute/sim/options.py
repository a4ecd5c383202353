"""Options of a simulated worker."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from kvroute.options import Options, option
from kvroute.sim.groups import Group, GroupKind, GroupLayout
from kvroute.sim.timing import TimingModel
from kvroute.wire.vllm import DIALECTS


class SimOptions(Options):
    """One simulated worker. The defaults behave like Llama-3.1-70B on eight H100."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(0, "Port to listen on; with 0 the system chooses a free port.", ge=0, le=65535)
    models: tuple[str, ...] = option(
        ("sim-model",), "Served names of the model; the first is its main name.", min_length=1
    )
    root: str = option(
        "", "The model that the names stand for, a path or a hub name; the main name if empty."
    )
    loras: dict[str, str] = option(description="LoRA adapters: name to parent model.", default_factory=dict)
    capacity_tokens: int = option(
        1_200_000, "Size of the KV cache.", unit="tokens", higher="evicts later", lower="evicts sooner", ge=1
    )
    block_size: int = option(
        16, "Tokens per cache block (vLLM on CUDA: 16, on CPU: 128).", unit="tokens", ge=1
    )
    kv_groups: tuple[str, ...] = option(
        description="KV cache groups of a model whose layers cache different things, each as KIND:BLOCK or "
        "KIND:BLOCK:SPAN, for example `full_attention:16` and `sliding_window:16:128`. KIND is "
        + ", ".join(kind.value for kind in GroupKind)
        + "; BLOCK tokens are one block; SPAN are the tokens of a window or chunk. Empty: full attention "
        "in blocks of `block_size`.",
        default_factory=tuple,
    )
    prefix_match_unit: int = option(
        0,
        "Hits end at multiples of so many tokens, which must divide all blocks (vLLM: --prefix-match-unit). "
        "0: the greatest number that divides all blocks.",
        unit="tokens",
        ge=0,
    )
    prefix_cache_retention: int = option(
        0,
        "Windows and states are kept at the end of each prompt and where prompts parted, and once per so "
        "many tokens (vLLM: --prefix-cache-retention-interval). -1: everywhere, as in older releases.",
        unit="tokens",
        ge=-1,
    )
    drafted_tokens: int = option(
        0,
        "Tokens that an EAGLE-style drafter proposes. With more than 0 the engine drops the last block of "
        "each hit, as vLLM does up to 0.32.",
        unit="tokens",
        ge=0,
    )
    state_checkpoints: bool = option(
        False, "A prefill writes the reusable state of Mamba layers inside its last chunk (vLLM on Mamba 2)."
    )
    keeps_junctions: bool = option(
        True, "Windows and states are kept where prompts parted, too (vLLM since 0.31)."
    )
    harmony: bool = option(
        False,
        "Render the chats of /v1/chat/completions otherwise than /tokenize does, as vLLM does for gpt-oss.",
    )
    scale_out: bool = option(
        False, "Have render endpoints, which show a request's token ids and media (vLLM: --enable-scale-out)."
    )
    max_model_len: int = option(131_072, "Longest sum of prompt and answer.", unit="tokens", ge=2)
    answer_tokens: int = option(
        32, "Length of an answer whose request sets no limit.", unit="tokens", ge=1, higher="longer answers"
    )
    time_scale: float = option(
        1.0,
        "Factor on every simulated duration.",
        higher="slower worker",
        lower="faster worker; 0: no time passes",
        ge=0,
    )
    fixed_s: float = option(5e-3, "Fixed time of an iteration.", unit="s", ge=0)
    weights_s: float = option(9e-3, "Shortest compute time of an iteration.", unit="s", ge=0)
    token_s: float = option(40e-6, "Compute time per token.", unit="s", ge=0)
    attention_s: float = option(
        0.75e-9, "Compute time per pair of computed token and context token.", unit="s", ge=0
    )
    kv_s: float = option(20e-9, "Time per token of context while decoding.", unit="s", ge=0)
    max_batched_tokens: int = option(8192, "Most tokens that one iteration computes.", unit="tokens", ge=1)
    max_sequences: int = option(256, "Most requests that run at the same time; further ones wait.", ge=1)
    max_queued_requests: int = option(
        0,
        "Most unfinished requests, running ones included; one more is answered 503 (vLLM: "
        "--max-num-queued-reqs). 0: any number.",
        unit="requests",
        ge=0,
    )
    max_queued_tokens: int = option(
        0,
        "While the prompts that are not computed have this many tokens, requests are answered 503 (vLLM: "
        "--max-num-queued-tokens). 0: any number.",
        unit="tokens",
        ge=0,
    )
    report_cached_tokens: bool = option(
        True, "Fill usage.prompt_tokens_details (vLLM: --enable-prompt-tokens-details)."
    )
    kv_events: bool = option(True, "Publish KV events over ZMQ.")
    event_endpoint: str = option(
        "tcp://127.0.0.1:0", "Address of the PUB socket; with port 0 the system chooses a free port."
    )
    event_connects: bool = option(
        False,
        "Connect the PUB socket to `event_endpoint` instead of binding it. vLLM does so without `*` in it.",
    )
    replay_endpoint: str = option(
        "tcp://127.0.0.1:0", "Address of the ROUTER socket for replays; empty: no replays."
    )
    event_topic: str = option("kv", "Topic of the events.")
    event_buffer_steps: int = option(
        10_000, "Batches kept for replay.", ge=1, higher="longer gaps can be repaired"
    )
    event_dialect: str = option("map-0.30", "Encoding of the events: " + ", ".join(DIALECTS) + ".")
    lookahead_tokens: int = option(
        0,
        "Tokens after each block that its hash covers too, as in vLLM 0.33 with EAGLE-style speculation. "
        "Needs `event_dialect: map-0.33`.",
        ge=0,
    )
    byte_hashes: bool = option(False, "Write block hashes as 32 bytes instead of 64-bit numbers.")
    version: str = option("0.32.0", "The vLLM release that /version reports.")
    stateful_sessions: bool = option(
        False, "Open and close SageMaker's sessions (vLLM: SAGEMAKER_ENABLE_STATEFUL_SESSIONS)."
    )
    api_key: str = option("", "Key that requests under /v1 must have (vLLM: --api-key); empty: none.")
    prefix_caching: bool = option(True, "Reuse cached blocks (vLLM: --enable-prefix-caching).")
    data_parallel_size: int = option(
        1,
        "Data-parallel ranks: engines with a cache of `capacity_tokens` each. Ports of events count up.",
        ge=1,
        le=64,
    )
    nixl: bool = option(
        False,
        "Exchange KV with other workers as vLLM's NixlConnector does, when `kv_transfer_params` ask for it.",
    )
    kv_load_failure_policy: Literal["fail", "recompute"] = option(
        "fail", "What happens if KV cannot be read from another worker (vLLM's default: fail)."
    )
    kv_lease_s: float = option(
        30.0, "How long blocks stay for another worker that does not read them.", unit="s", gt=0
    )
    transfer_token_s: float = option(
        13e-6, "Time to move one token from another worker (100 Gbit/s, 160 KB).", unit="s", ge=0
    )
    token_shift: int = option(
        0,
        "Added to every id of /tokenize, as if another tokenizer were used; 0 agrees with the engine.",
        ge=0,
    )
    recorded_requests: int = option(
        1000, "Number of received requests that GET /sim/requests lists; 0 records none.", ge=0
    )

    @field_validator("kv_groups")
    @classmethod
    def _known_groups(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            group_of(text)
        return value

    @field_validator("event_dialect")
    @classmethod
    def _known_dialect(cls, value: str) -> str:
        if value not in DIALECTS:
            raise ValueError(f"unknown dialect {value!r}; one of {', '.join(DIALECTS)}")
        return value

    @model_validator(mode="after")
    def _groups_fit(self) -> SimOptions:
        layout = self.layout
        if layout is None:
            return self
        if self.lookahead_tokens:
            raise ValueError("lookahead_tokens is for one group with full attention, without kv_groups")
        if any(group.block_size % layout.hash_size for group in layout.groups):
            raise ValueError("prefix_match_unit must divide the blocks of all kv_groups")
        interval = self.prefix_cache_retention
        if interval > 0 and interval % layout.unit:
            raise ValueError(
                f"prefix_cache_retention must be a multiple of {layout.unit}, which fits all groups"
            )
        return self

    @property
    def layout(self) -> GroupLayout | None:
        """The KV cache groups; None for a model with full attention only and no drafter."""
        if not self.kv_groups and not self.drafted_tokens:
            return None
        return GroupLayout(
            tuple(group_of(text) for text in self.kv_groups or (f"full_attention:{self.block_size}",)),
            retention=None if self.prefix_cache_retention < 0 else self.prefix_cache_retention,
            match_unit=self.prefix_match_unit,
            drops_last=self.drafted_tokens > 0,
            drafted_tokens=self.drafted_tokens,
            checkpoints=self.state_checkpoints,
            junctions=self.keeps_junctions,
        )

    @property
    def key_tokens(self) -> int:
        """Tokens that one chained key covers."""
        layout = self.layout
        return self.block_size if layout is None else layout.hash_size

    def pool_blocks(self, capacity_tokens: int) -> int:
        """Blocks of a cache in which each group has room for `capacity_tokens`."""
        layout = self.layout
        if layout is None:
            return max(1, capacity_tokens // self.block_size)
        return max(1, sum(capacity_tokens // group.block_size for group in layout.groups))

    @property
    def timing(self) -> TimingModel:
        """The engine's timing model with these options."""
        return TimingModel(
            fixed_s=self.fixed_s,
            weights_s=self.weights_s,
            token_s=self.token_s,
            attention_s=self.attention_s,
            kv_s=self.kv_s,
            max_batched_tokens=self.max_batched_tokens,
            max_sequences=self.max_sequences,
            scale=self.time_scale,
        )


def group_of(text: str) -> Group:
    """A group from KIND:BLOCK or KIND:BLOCK:SPAN. Raises ValueError."""
    name, *numbers = text.split(":")
    kinds = {kind.value: kind for kind in GroupKind}
    if name not in kinds:
        raise ValueError(f"{text!r}: unknown kind {name!r}; one of {', '.join(kinds)}")
    kind, wanted = kinds[name], 1 + (kinds[name] in (GroupKind.WINDOW, GroupKind.CHUNK))
    if len(numbers) != wanted or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        shape = "KIND:BLOCK:SPAN" if wanted == 2 else "KIND:BLOCK"
        raise ValueError(f"{text!r}: expected {shape} with positive numbers of tokens")
    block, span = int(numbers[0]), int(numbers[1]) if wanted == 2 else 0
    if kind is GroupKind.CHUNK and span % block:
        raise ValueError(f"{text!r}: the chunk must be a multiple of the block")
    return Group(kind, block, span)
