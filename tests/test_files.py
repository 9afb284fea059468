"""Files are whole, or as they were; devices and pipes are written to."""

import os
import stat
import subprocess
import sys
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


def test_a_pipe_of_the_shell_is_written_to():
    """`/dev/stdout | cat` and `>(cat)`: a link to what has no path."""
    code = "from pathlib import Path; from portable.files import write_whole; write_whole(Path('/dev/stdout'), 'text')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("text", "", 0)


def test_permissions_stay_and_a_new_file_has_those_of_the_process(tmp_path: Path):
    file = tmp_path / "file"
    write_whole(file, "old")
    (tmp_path / "usual").write_text("")
    assert file.stat().st_mode == (tmp_path / "usual").stat().st_mode
    file.chmod(0o600)
    write_whole(file, "new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_writers_at_once_leave_what_one_of_them_wrote_and_nothing_beside(tmp_path: Path):
    file, failed = tmp_path / ("n" * 250), []

    def write(text: str) -> None:
        try:
            for _ in range(100):
                write_whole(file, text)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(text * 1000,)) for text in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and file.read_text() in ("a" * 1000, "b" * 1000) and list(tmp_path.iterdir()) == [file]
