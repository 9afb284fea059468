"""Compiled objects on disk: found by what they were made from, verified, made once whoever asks at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("portable")
WAIT = 600.0  # seconds for another process that builds the same object
SILENT = 60.0  # seconds of waiting of which nothing is said
DIGEST = 32  # bytes of sha256 in front of an object


class Store:
    """A folder of objects, by key.

    The folder is this user's alone: what lies in it runs on the device. One that others could have written, or that
    cannot be made, is not used, with a warning; objects are then made anew in each process.
    """

    def __init__(self, folder: Path, wait: float = WAIT) -> None:
        self.folder, self.wait = folder, wait

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The object of a key, made and kept if it is not there or does not match its digest.

        Raises:
            TimeoutError: another process holds the key's lock for longer than `wait` seconds.
        """
        file = self.folder / key
        if (reason := self._why_not()) is not None:
            return self._unkept(reason, make)
        if (found := _read(file)) is not None:
            return found
        try:
            lock = self._lock(key)
        except TimeoutError:
            raise
        except OSError as error:  # a folder or a file system that can only be read
            return self._unkept(str(error), make)
        try:
            if (found := _read(file)) is None:  # another process may have made it meanwhile
                found = make()
                try:
                    _write(file, found)
                except OSError as error:  # a full disk
                    log.warning("a compiled kernel is not kept in %s: %s", self.folder, error)
            return found
        finally:
            os.close(lock)

    def _unkept(self, reason: str, make: Callable[[], bytes]) -> bytes:
        log.warning("compiled kernels are not kept in %s: %s", self.folder, reason)
        return make()

    def _why_not(self) -> str | None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.folder.stat()
        except OSError as error:
            return str(error)
        if facts.st_uid != os.getuid():
            return f"it belongs to user {facts.st_uid}, not to {os.getuid()}"
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others can write to it (mode {stat.S_IMODE(facts.st_mode):o}); 700 is right"
        return None

    def _lock(self, key: str) -> int:
        """An operating system's lock, which dies with its owner: a file that a killed process left locks nothing."""
        path = self.folder / f"{key}.lock"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            begun, told = time.monotonic(), False
            while not _locked(descriptor, path):
                waited = time.monotonic() - begun
                if waited > self.wait:
                    raise TimeoutError(f"another process has held {path} for {self.wait:g} s while it builds {key}")
                if waited > SILENT and not told:
                    log.warning("waiting for another process that builds %s (lock %s)", key, path)
                    told = True
                time.sleep(0.05)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _locked(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks: two processes may build the same
        log.warning("no lock on %s: %s", path, error)
    return True


def _read(file: Path) -> bytes | None:
    """An object whose digest is right."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    return data[DIGEST:] if hashlib.sha256(data[DIGEST:]).digest() == data[:DIGEST] else None


def _write(file: Path, data: bytes) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.name, suffix=".part", delete=False) as part:
        try:
            part.write(hashlib.sha256(data).digest() + data)
            part.close()
            os.replace(part.name, file)
        except BaseException:
            os.unlink(part.name)
            raise
