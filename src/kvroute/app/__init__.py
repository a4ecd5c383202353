"""Constructs the gateway: configuration, the runtime that owns every task, and the server."""
