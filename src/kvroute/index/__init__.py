"""Which worker holds which prefix. Pure: no I/O and no clock; use it from one thread only."""
