"""Where portable keeps what is costly to make again."""

from __future__ import annotations

import importlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_dir() -> Path:
    """`PORTABLE_CACHE_DIR`, or the user's cache folder; nothing says that it exists or can be written."""
    if chosen := os.environ.get("PORTABLE_CACHE_DIR"):
        return Path(chosen)
    try:
        platformdirs = importlib.import_module("platformdirs")
    except ModuleNotFoundError:
        found = Path(os.path.expanduser("~")) / ".cache" / "portable"
    else:
        try:
            found = Path(platformdirs.user_cache_dir("portable"))
        except RuntimeError:  # of later releases, where there is no home
            return _without_home()
    return found if found.is_absolute() else _without_home()  # a "~" stays where nothing says what it is


def _without_home() -> Path:
    """A folder of the user among the temporary files; compiled code is read from it, so it must be nobody else's."""
    user = getattr(os, "getuid", lambda: 0)()
    with suppress(OSError):  # FileExistsError too: a file of that name
        folder = Path(tempfile.gettempdir()) / f"portable-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
            return folder
    return Path(os.devnull) / "portable"  # where nothing can be read or written
