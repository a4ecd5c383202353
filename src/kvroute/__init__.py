"""kvroute: a KV-cache-aware, OpenAI-compatible gateway for fleets of vLLM + LMCache workers."""

__version__ = "0.1.0"
