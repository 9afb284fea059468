"""Files that others read: whole, or as they were."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a run that is ended meanwhile leaves it as it was, and its permissions with it.

    What is no regular file, such as /dev/null or a pipe, is written to: a new file in its place would put an end to it.
    So is a file in a folder that takes no new ones.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    mode = path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask()
    try:
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    except (PermissionError, FileNotFoundError):  # the latter names the file that was asked for
        path.write_text(text, encoding="utf-8")
        return
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def _umask() -> int:
    """Of the process: it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
