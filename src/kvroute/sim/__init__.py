"""A simulated vLLM worker: its HTTP surface, prefix cache, batching times and KV events; no model."""
