"""Helpers of the tests: clocks, waiting, sockets and scripted workers.

`waiting`, `sockets` and `workers` import nothing of kvroute: tests/blackbox uses them and runs against any
installation.
"""
