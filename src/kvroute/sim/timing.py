"""How long one iteration of continuous batching takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimingModel:
    """Constants of an engine; the defaults stand for Llama-3.1-70B in bf16 on 8 H100 (TP8).

    Times are seconds. `token_s` is compute per token (2 x 70.6e9 FLOP over 8 x 989 TFLOP/s at 45%),
    `attention_s` per pair of computed token and context token, `weights_s` reading the weights once
    (141 GB / 8 at 60% of 3.35 TB/s), `fixed_s` launches, all-reduces and the scheduler, `kv_s` reading one
    token of context while decoding. Checked against TensorRT-LLM's published throughput of Llama-3.3-70B:
    within 11% at four input/output lengths.

    `scale` multiplies every duration: 0.01 is a hundred times faster, 0 takes no time at all.
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
        """Seconds of one iteration that computes `tokens`.

        `attention` is the sum of chunk x context over the prefill chunks, `decode_context` the sum of the
        decoding sequences' contexts.
        """
        return self.scale * (
            self.fixed_s
            + max(self.weights_s, self.token_s * tokens)
            + self.attention_s * attention
            + self.kv_s * decode_context
        )
