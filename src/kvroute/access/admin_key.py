"""The admin key: from a file, or made at the first start and kept in a file of the user."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from kvroute.errors import (
    ConfigError,
)

MIN_KEY_CHARS: Final = 16
"""Shortest admin key. With `KeyGuesses` even the keys of 8 random letters could not be guessed in years; the
rest is for keys that are not random."""
OPTION: Final = "admin.api_key_file"
"""The option that error messages name: it helps if the key file cannot be kept."""
_MAX_FILE_BYTES: Final = 64 * 1024


def key_lines(text: str) -> tuple[str, ...]:
    """The keys in `text`, one a line; blank lines and lines that begin with `#` do not count."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def check_keys(keys: Collection[str]) -> None:
    """Raise ValueError if a key is so short that it may be guessed."""
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_CHARS:
            which = "the key" if len(keys) == 1 else f"key {number} of {len(keys)}"
            raise ValueError(
                f"{which} has {len(key)} characters; an admin key needs {MIN_KEY_CHARS} or more, and should "
                "be random: `openssl rand -base64 32`"
            )


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
    """The file of the admin key of the gateway that listens on `port`."""
    return folder / f"admin-key-{port}"


def read_or_create_key(path: Path) -> str:
    """Return the content of the key file; if the file does not exist, create it with a random key (mode
    0600).

    Processes that start at the same time get the same key. Raises ConfigError if the file cannot be created,
    or if another user may have read or written it. Blocks.
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
            os.fchmod(descriptor, 0o600)  # independent of the umask
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
    """Read the file. Raises OSError, or ConfigError if other users have access to it."""
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
        text = os.read(descriptor, _MAX_FILE_BYTES).decode("utf-8", "replace")
    finally:
        os.close(descriptor)
    if not key_lines(text):
        raise ConfigError(OPTION, f"{path} holds no key; remove it, and the gateway makes one")
    try:
        check_keys(key_lines(text))
    except ValueError as exc:
        raise ConfigError(OPTION, f"{path}: {exc}") from None
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
    """Raise ConfigError if every user could replace a file in `folder`. Raises OSError."""
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            OPTION, f"is not set, and every user may replace a key in {folder} (mode {mode & 0o7777:04o})"
        )
