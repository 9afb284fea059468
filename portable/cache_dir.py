"""Where portable keeps what is costly to make again."""

from __future__ import annotations

import importlib
import os
from pathlib import Path


def cache_dir() -> Path:
    """`PORTABLE_CACHE_DIR`, or the user's cache folder; nothing says that it exists or can be written."""
    if chosen := os.environ.get("PORTABLE_CACHE_DIR"):
        return Path(chosen)
    try:
        platformdirs = importlib.import_module("platformdirs")
    except ModuleNotFoundError:
        return Path.home() / ".cache" / "portable"
    return Path(platformdirs.user_cache_dir("portable"))
