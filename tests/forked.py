"""A script in a process that was forked from one with torch, as if a fresh interpreter had been given it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def run(script: str, site: Path, root: Path) -> None:
    """Run it with `site` first on its path and that of its children; what it writes goes to site/stdout and stderr."""
    os.environ |= {
        "PYTHONPATH": f"{site}{os.pathsep}{root}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "PORTABLE_CACHE_DIR": str(site / "cache"),
    }
    sys.path[:0] = [str(site), str(root)]
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        stream.flush()
        with (site / name).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = ["-c"]
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
