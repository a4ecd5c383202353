"""Several gateway processes on one port: supervised, sharing what they route by, seen as one."""
