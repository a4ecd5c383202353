"""Who holds which prefix. Pure: no I/O, no clock; touched from one thread only."""
