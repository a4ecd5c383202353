"""`python -m kvroute` is the `kvroute` command."""

from __future__ import annotations

from kvroute.cli import main

if __name__ == "__main__":
    main(prog_name="kvroute")
