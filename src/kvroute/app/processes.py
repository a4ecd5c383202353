"""Several gateway processes on one port: the parent, and what each of them is started with."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import tempfile
from pathlib import Path

from kvroute.app.admin_access import AdminAccess
from kvroute.app.config import Config
from kvroute.app.replica import Replica
from kvroute.app.server import Part, run_one
from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.replicas.mesh import folder_of_links
from kvroute.replicas.ports import SharedPort
from kvroute.replicas.supervisor import Birth, Supervisor

log = logging.getLogger("kvroute.server")


def run_processes(config: Config, access: AdminAccess) -> int:
    """Serve with `server.processes` processes until SIGTERM or SIGINT. Exit code as `server.run`.

    Raises ConfigError if the address cannot be had. Call it with one thread running and no event loop.
    """
    options = config.server
    port = SharedPort(options.host, options.port)
    try:
        access.listens_on(port.port)  # before the processes are forked, which all take the same key
    except ConfigError:
        port.close()
        raise
    try:
        folder = folder_of_links(Path(tempfile.gettempdir()))
    except OSError as error:
        port.close()
        raise ConfigError("server.processes", f"no place for their sockets: {error.strerror}") from error
    parent = os.getpid()

    def work(birth: Birth) -> int:
        log.info("process %d of %d has the id %d", birth.number, options.processes, os.getpid())

        def part() -> Part:
            replica = Replica(birth.number, options.processes, folder, generation=birth.generation)
            return Part(replica, port.sockets(), birth.ready)

        try:
            code = run_one(config, access, part)
        except ConfigError as error:
            log.error("process %d cannot start: %s", birth.number, error)
            code = 2
        if os.getppid() != parent:  # it was killed, and cannot tidy up
            shutil.rmtree(folder, ignore_errors=True)
        return code

    supervisor = Supervisor(options.processes, work, SystemClock(), grace_s=options.longest_shutdown_s)
    gc.freeze()  # what all of them share stays untouched, and so shared
    try:
        return supervisor.run()
    finally:
        port.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
