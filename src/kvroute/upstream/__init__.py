"""Connections to workers: transport, pool, headers, the retry rule."""
