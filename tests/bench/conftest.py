"""The benchmarks are scripts beside one another, no package: their folder is put on the path, as Python does
for a script that it runs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
