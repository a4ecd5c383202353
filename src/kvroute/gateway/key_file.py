"""The file that holds the admin key which the gateway makes where none is configured."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvroute.errors import ConfigError

OPTION: Final = "admin.api_key_file"
"""The option that errors name: the way out where no key file can be kept."""

_MOST_BYTES: Final = 64 * 1024


def key_lines(text: str) -> tuple[str, ...]:
    """The keys in `text`, one a line; blank lines and lines that begin with `#` do not count."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def user_state_folder(environ: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/kvroute`, by default `~/.local/state/kvroute`. Raises ConfigError without a home."""
    base = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: a relative path is invalid and does not count
        return Path(base) / "kvroute"
    try:
        return Path.home() / ".local" / "state" / "kvroute"
    except RuntimeError:
        raise ConfigError(
            OPTION, "is not set, and this user has no home folder to keep a key in; set it, or --state-dir"
        ) from None


def key_path(folder: Path, port: int) -> Path:
    """Where the gateway that listens on `port` keeps its admin key."""
    return folder / f"admin-key-{port}"


def kept_key(path: Path) -> str:
    """The content of the key file, which is created with a random key (mode 0600) if it does not exist.

    Processes that start at the same time get the same key. Raises ConfigError if the file cannot be
    created, or if somebody else may have read or written it. Blocks.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own_folder(path.parent)
        try:
            return _read(path)
        except FileNotFoundError:
            _create(path, secrets.token_urlsafe(32) + "\n")
            return _read(path)
    except OSError as exc:
        raise ConfigError(
            OPTION,
            f"is not set, and the gateway cannot keep a key of its own in {path}: {exc.strerror}; "
            "set it, or --state-dir to a folder that can be written",
        ) from exc


def _create(path: Path, text: str) -> None:
    """Create a complete file at `path`, unless another process has created it. Raises OSError."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        # Not a rename: of two gateways that start together, the second must not replace the first one's key.
        os.link(new, path)
    except FileExistsError:
        pass  # another process was first; its key counts
    finally:
        new.unlink()


def _read(path: Path) -> str:
    """Raises OSError, or ConfigError if the file is not this user's alone."""
    try:
        # O_NONBLOCK: opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise ConfigError(
                OPTION, f"{path} is a symbolic link; remove it, or name the file here"
            ) from None
        raise
    try:
        _require_own_file(path, os.fstat(descriptor))
        text = os.read(descriptor, _MOST_BYTES).decode("utf-8", "replace")
    finally:
        os.close(descriptor)
    if not key_lines(text):
        raise ConfigError(OPTION, f"{path} holds no key; remove it, and the gateway makes one")
    return text


def _require_own_file(path: Path, facts: os.stat_result) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(OPTION, f"{path} is not a regular file; remove it")
    if facts.st_uid != os.geteuid():
        raise ConfigError(
            OPTION, f"{path} belongs to user {facts.st_uid}, the gateway runs as {os.geteuid()}; remove it"
        )
    if mode & 0o077:
        raise ConfigError(
            OPTION,
            f"{path} has mode {mode:04o}: others may know the key, or have written it. "
            "Remove the file, and the gateway makes a new key",
        )


def _require_own_folder(folder: Path) -> None:
    """Raises ConfigError if any user could replace a file in `folder`, and OSError."""
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            OPTION, f"is not set, and every user may replace a key in {folder} (mode {mode & 0o7777:04o})"
        )
