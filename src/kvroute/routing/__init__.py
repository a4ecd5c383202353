"""Choosing a worker. Pure and synchronous: no I/O, no clock, no event loop."""
