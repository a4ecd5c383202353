"""What the workers say about their caches: their event streams, read into the prefix index."""
