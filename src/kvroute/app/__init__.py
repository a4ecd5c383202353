"""Construction: configuration, the runtime that owns every task, the server."""
