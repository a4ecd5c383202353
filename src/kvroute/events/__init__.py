"""The workers' event streams (vLLM's KV events), applied to the prefix index."""
