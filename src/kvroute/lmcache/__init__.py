"""LMCache: what a coordinator, a controller, an MP server and Redis report about stored chunks."""
