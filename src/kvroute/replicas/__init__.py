"""Several gateway processes on one port: they share their routing state and appear as one gateway."""
