"""Who else may have written a file with keys, passwords or trusted certificates."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

log = logging.getLogger(__name__)


def writers_problem(file: Path) -> str:
    """Why `file` must not be used: every user may have written it. "" otherwise, also if it cannot be found.

    What is doubtful only is logged as a warning: another owner than root and this user, a group of others
    that may write it, a folder in which every user may replace it. Pipes and devices are not checked. Blocks.
    """
    try:
        facts, folder = file.stat(), file.absolute().parent.stat()
    except OSError:
        return ""  # reading it reports why
    if not stat.S_ISREG(facts.st_mode):
        return ""
    mode = stat.S_IMODE(facts.st_mode)
    if mode & stat.S_IWOTH:
        return f"{file} has mode {mode:04o}: every user may have written it. Check it, then: chmod o-w {file}"
    if doubt := _doubt(facts, mode, folder.st_mode):
        log.warning("the file %s may have been written by others: %s", file, doubt)
    return ""


def _doubt(facts: os.stat_result, mode: int, folder_mode: int) -> str:
    if facts.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {facts.st_uid}, the gateway runs as {os.geteuid()}"
    # A user's own group has no other members on most systems, and its umask lets the group write.
    if mode & stat.S_IWGRP and facts.st_gid not in (0, os.getegid()):
        return f"it has mode {mode:04o}, and group {facts.st_gid} is not that of the gateway"
    if folder_mode & stat.S_IWOTH and not folder_mode & stat.S_ISVTX:
        return f"every user may replace it, because its folder has mode {stat.S_IMODE(folder_mode):04o}"
    return ""
