"""Run the black-box tests against any `kvroute` executable, for example the one of an older checkout.

    python scripts/blackbox.py /path/to/.venv/bin/kvroute [pytest arguments]

The exit code is pytest's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests" / "blackbox"


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    executable = shutil.which(sys.argv[1])
    if executable is None:
        print(f"{sys.argv[1]} cannot be run", file=sys.stderr)
        return 2
    tests = [argument for argument in sys.argv[2:] if argument.startswith("tests/")] or [str(TESTS)]
    others = [argument for argument in sys.argv[2:] if not argument.startswith("tests/")]
    environment = {**os.environ, "KVROUTE_EXECUTABLE": str(Path(executable).absolute())}
    return subprocess.run([sys.executable, "-m", "pytest", *tests, *others], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
