"""Options of a simulated worker, and the timing model of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import field_validator

from kvroute.options import Options, option
from kvroute.wire.vllm import DIALECTS


@dataclass(frozen=True, slots=True)
class TimingModel:
    """Constants that give the time of an engine iteration; defaults: Llama-3.1-70B in bf16 on 8 H100 (TP8).

    All times are in seconds:

    - `token_s`: compute per token (2 x 70.6e9 FLOP over 8 x 989 TFLOP/s at 45%)
    - `attention_s`: compute per pair of computed token and context token
    - `weights_s`: reading the weights once (141 GB / 8 at 60% of 3.35 TB/s)
    - `fixed_s`: kernel launches, all-reduces and the scheduler
    - `kv_s`: reading one token of context while decoding
    - `scale`: factor on every duration; 0.01 makes the engine a hundred times faster, with 0 no time passes

    The model is within 11% of TensorRT-LLM's published throughput of Llama-3.3-70B at four input/output
    lengths.
    """

    fixed_s: float = 5e-3
    weights_s: float = 9e-3
    token_s: float = 40e-6
    attention_s: float = 0.75e-9
    kv_s: float = 20e-9
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    scale: float = 1.0

    def iteration_s(self, tokens: int, attention: float, decode_context: int) -> float:
        """Duration in seconds of an iteration that computes `tokens`.

        `attention` is the sum of chunk x context over the prefill chunks, `decode_context` the sum of the
        decoding sequences' contexts.
        """
        return self.scale * (
            self.fixed_s
            + max(self.weights_s, self.token_s * tokens)
            + self.attention_s * attention
            + self.kv_s * decode_context
        )


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

    @field_validator("event_dialect")
    @classmethod
    def _known_dialect(cls, value: str) -> str:
        if value not in DIALECTS:
            raise ValueError(f"unknown dialect {value!r}; one of {', '.join(DIALECTS)}")
        return value

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
