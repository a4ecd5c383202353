"""The timing model of a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass


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
