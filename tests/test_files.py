"""Files are whole, or as they were; devices and pipes are written to."""

import os
import threading
from pathlib import Path

from portable.files import write_whole


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path):
    """A file in the place of /dev/null, which root may put there, breaks the machine."""
    pipe, heard = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    write_whole(pipe, "text")
    reader.join(10)
    assert heard == ["text"] and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_file_is_replaced_whole_and_a_link_stays_one(tmp_path: Path):
    file, link = tmp_path / "file", tmp_path / "link"
    write_whole(file, "old")
    link.symlink_to(file)
    write_whole(link, "new")
    assert file.read_text(encoding="utf-8") == "new" and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [file, link]
