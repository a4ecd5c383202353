"""A parsed spec as compose, Kubernetes, LMCache, vLLM and kvroute settings. Pure functions."""
