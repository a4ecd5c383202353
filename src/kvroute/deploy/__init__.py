"""From a description of an endpoint to running local processes. Imported by `cli` only."""
