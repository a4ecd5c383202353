"""A Python process that has imported vLLM and LMCache once, and becomes any program of theirs by a fork.

    python forge.py serve SOCKET MODULE ...          with the engine's Python: the forge
    python forge.py run SOCKET PYTHON ARG ...        with any Python: `PYTHON ARG ...`, in a fork of the forge

In the second form ARG is a script and its arguments. It has its command line, environment, working directory
and standard streams; signals and the exit code are passed on; when it is killed, all processes of the script
are. vLLM's imports take 10 to 20 s of CPU time, a fork of them a few milliseconds.

What differs from a program that was started by itself (the tests that need it start the real one):

* The hash seed is the forge's, 0. For a script that has another one, the second form starts PYTHON itself,
  and also where ARG begins with an option of Python's, such as `-c`.
* vLLM's own processes are forked, too. On a CPU vLLM would start new interpreters for them.
* Modules that were imported have read their environment before: that of the forge, with `FIXED`.

Standard library only.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FIXED = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_DISABLE_BANNER": "1",
}
"""Of the forge's environment: what modules read while they are imported."""
READY = "ready"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MOST_BYTES = 1 << 17
CLEAN_UP_S = 2.0
POLL_S = 0.02


def run(address: str, python: str, argv: list[str]) -> int:
    """Run the script `argv` in a fork of the forge at `address`. Returns its exit code, or ends by the signal
    that ended it."""
    if argv[0].startswith("-") or os.environ.get("PYTHONHASHSEED", "0") != FIXED["PYTHONHASHSEED"]:
        os.execv(python, [python, *argv])
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(address)
    wish = json.dumps({"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    assert len(wish) < MOST_BYTES
    socket.send_fds(channel, [wish], [0, 1, 2])
    pid = int(channel.recv(64))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    answer = channel.recv(64)
    if not answer:
        print("the forge has ended", file=sys.stderr)
        return 1
    code = os.waitstatus_to_exitcode(int(answer))
    if code >= 0:
        return code
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    raise AssertionError("alive after a deadly signal")


@dataclass(slots=True)
class Forged:
    """A running script. Its process id is that of its process group, too."""

    pid: int
    channel: socket.socket
    status: int | None = None
    """Its wait status, once it has ended."""
    ended_at: float = 0.0

    def signal(self, number: int) -> bool:
        """Send all its processes a signal. False if none is left."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True


class Forge:
    """Forks a process for each connection. Mutable: what runs."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._wakeup, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._running: dict[int, Forged] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def until_forked(self) -> list[str]:
        """Fork for whoever asks. Never returns in the forge; in a fork it returns the script's arguments."""
        while True:
            is_ending = any(each.status is not None for each in self._running.values())
            for key, _ in self._selector.select(POLL_S if is_ending else None):
                if key.fileobj is self._listener:
                    channel, _ = self._listener.accept()
                    argv = self._fork(channel)
                    if argv is not None:
                        return argv
                elif key.fd == self._wakeup:
                    os.read(self._wakeup, 4096)
                elif not key.data.channel.recv(64):
                    key.data.signal(signal.SIGKILL)  # nobody waits for it any more
                    self._selector.unregister(key.data.channel)
            self._reap()
            self._clean_up()

    def _fork(self, channel: socket.socket) -> list[str] | None:
        wish, streams, _, _ = socket.recv_fds(channel, MOST_BYTES, 3)
        if not wish:
            channel.close()
            return None
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            self._leave()
            channel.close()
            return _become(json.loads(wish), streams, parent)
        for stream in streams:
            os.close(stream)
        self._running[pid] = forged = Forged(pid, channel)
        channel.send(str(pid).encode())
        self._selector.register(channel, selectors.EVENT_READ, forged)
        return None

    def _leave(self) -> None:
        """Close in a fork what is the forge's."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._listener.close()
        for each in self._running.values():
            each.channel.close()
        os.close(self._wakeup)
        os.close(self._wakeup_write)

    def _reap(self) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._running:
                    forged = self._running[pid]
                    forged.status, forged.ended_at = status, time.monotonic()
                    forged.signal(signal.SIGTERM)
        except ChildProcessError:
            return

    def _clean_up(self) -> None:
        """Tell of what has ended, once none of its processes is left."""
        for forged in [each for each in self._running.values() if each.status is not None]:
            if forged.signal(0):
                if time.monotonic() - forged.ended_at > CLEAN_UP_S:
                    forged.signal(signal.SIGKILL)
                continue
            del self._running[forged.pid]
            try:
                self._selector.unregister(forged.channel)
                forged.channel.send(str(forged.status).encode())
            except (KeyError, OSError):
                pass  # who asked for it is gone
            forged.channel.close()


def _become(wish: dict[str, object], streams: list[int], parent: int) -> list[str]:
    """Turn this fork into the process that the script expects."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(137)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream, number in zip(streams, (0, 1, 2), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(str(wish["cwd"]))
    env, argv = wish["env"], wish["argv"]
    assert isinstance(env, dict)
    assert isinstance(argv, list)
    os.environ.clear()
    os.environ.update(env)
    folders = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.argv = argv
    sys.path[:1] = [str(Path(argv[0]).parent), *folders]
    for folder in folders:
        if (Path(folder) / "sitecustomize.py").exists():
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
            break
    return argv


class _Forking:
    """The module `multiprocessing`, whose processes are all forked."""

    def __init__(self, module: object) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

    def get_context(self, method: str | None = None) -> object:
        return self._module.get_context("fork")  # type: ignore[attr-defined]


def _fork_engine_processes() -> None:
    """Fork the engine's core and workers: vLLM 0.32 starts new interpreters for them on a CPU."""
    utils = sys.modules.get("vllm.utils.system_utils")
    if utils is not None:
        utils.multiprocessing = _Forking(utils.multiprocessing)  # type: ignore[attr-defined]


def _let_kernels_be_looked_for() -> None:
    """As its core starts, vLLM 0.32 looks at the attributes of all modules. In an interpreter of its own
    LMCache is not imported by then, in a fork it may be. It imports llvmlite, whose library object cannot be
    looked at: it invents every attribute, `__dict__` too."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None:
        invent = ffi._lib_wrapper.__getattr__

        def known(library: object, name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return invent(library, name)

        ffi._lib_wrapper.__getattr__ = known


def serve(address: str, modules: list[str]) -> None:
    os.environ.update(FIXED)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.monotonic()
    for name in modules:
        importlib.import_module(name)
    _fork_engine_processes()
    _let_kernels_be_looked_for()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"the imports have started {threads - 1} threads: a fork could hang"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)  # it accepts connections as soon as it is there
    print(f"{READY}: {len(modules)} modules in {time.monotonic() - began:.1f} s", flush=True)
    argv = Forge(listener).until_forked()
    runpy.run_path(argv[0], run_name="__main__")


def main(argv: list[str]) -> int:
    match argv:
        case ["serve", address, *modules]:
            serve(address, modules)
        case ["run", address, python, *arguments] if arguments:
            return run(address, python, arguments)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
