"""A pytest plugin, `-p emulated_record`, that writes the opcodes that a run executes into the file $EXECUTED names."""

import json
import os
from pathlib import Path

from portable.platform.emulated.opcodes import HANDLERS

executed: set[str] = set()


def _recording(name, handler):
    def record(group, instruction):
        try:
            handler(group, instruction)
        except NotImplementedError:  # a refusal is no execution
            raise
        except Exception:
            executed.add(name)
            raise
        executed.add(name)

    return record


def pytest_configure(config):
    for name, handler in list(HANDLERS.items()):
        HANDLERS[name] = _recording(name, handler)


def pytest_unconfigure(config):
    Path(os.environ["EXECUTED"]).write_text(json.dumps(sorted(executed)))
