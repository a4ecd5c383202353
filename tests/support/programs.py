"""Programs of the system."""

from __future__ import annotations

import os
import shutil

import pytest


def program(*names: str) -> str:
    """The path of the first of these programs that exists.

    Without one the test is skipped, and fails in CI.
    """
    where = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/usr/bin"
    found = [path for name in names if (path := shutil.which(name, path=where)) is not None]
    if not found:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {' or '.join(names)} (see .ci/run)")
    return found[0]
