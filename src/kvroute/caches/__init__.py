"""What the workers hold: KV events, LMCache and exact tokens put together."""
