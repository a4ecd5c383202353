"""LMCache's benchmark of a controller (0.5.6), which sends all that it has counted.

Runs with the engine's Python. The benchmark itself drops at its end what its sockets have not sent, where the
controller is behind (`close_zmq_socket`). Here it waits.
"""

import runpy

from lmcache.v1 import rpc_utils

rpc_utils.close_zmq_socket.__defaults__ = (60_000,)
try:
    runpy.run_module("lmcache.tools.controller_benchmark", run_name="__main__")
finally:
    rpc_utils.get_zmq_context(use_asyncio=True).term()
