"""Files that others read: whole, or as they were."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a run that is ended meanwhile leaves it as it was.

    What is no regular file, such as /dev/null or a pipe, is written to: a new file in its place would put an end to it.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
