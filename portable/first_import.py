"""The first import of a vendor's package on this machine, in another process: what ends that one ends no engine.

Once for each version of the package and of torch, and each machine: that it went well is kept on disk, and from then on
the package is imported without. One whose import fails, ends its process or hangs is tried again by each process that
needs it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

from portable.cache_dir import cache_dir
from portable.child import START, Child, EndedError, saying

log = logging.getLogger("portable")
CODE = "from portable.packages import first_import; first_import()"


def fault(module: str, symbols: Sequence[str], facts: Sequence[object], warns: float, ends: float) -> str | None:
    """Why a module is not to be imported here, or None; what it raises is left for the import itself to say.

    Args:
        symbols: what is looked up in it, which may import more.
        facts: what the answer depends on.
        warns, ends: seconds after which a long import is reported, and given up.
    """
    text = json.dumps([module, *symbols, *facts, platform.node(), platform.machine()], default=str)
    note = cache_dir() / "imports" / f"{module}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    with suppress(OSError, ValueError):
        if note.read_text(encoding="utf-8") == text:
            return None
    try:
        child = Child(CODE, [module, *symbols])
    except OSError as error:
        log.info("no process for the import of %s: %s", module, error)
        return None
    said = "importing %s has taken %g s; does it wait for a lock?"
    long = threading.Timer(warns, log.warning, (said, module, warns))
    with closing(child):
        try:
            child.hear(START)
        except EndedError as error:
            log.info("no process for the import of %s: %s", module, error)
            return None
        try:
            long.start()
            problem = child.hear(ends)["over"]
        except EndedError as error:
            return f"importing {module} {str(error).removeprefix('it ')}"
        finally:
            long.cancel()
    if problem is not None:
        return None
    with suppress(OSError):  # a file appears whole or not at all
        note.parent.mkdir(parents=True, exist_ok=True)
        part = note.with_suffix(f".{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(note)
    return None


def answer(work: Callable[[str, Sequence[str]], str | None]) -> None:
    """The other side: a line when it begins, and one with the problem, or None, when the import is over."""
    module, *symbols = sys.argv[1:]
    with saying() as say:
        say("ready")
        try:
            problem = work(module, symbols)
        except BaseException as error:
            problem = repr(error)
        say({"over": problem})
    os._exit(0)  # what a library does at the end of its process is not about its import
