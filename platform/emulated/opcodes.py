"""The whole table of opcodes: importing this enters the handlers of every family."""

from __future__ import annotations

from portable.platform.emulated import (  # noqa: F401  (entering is what they are imported for)
    buffer,
    compares,
    control,
    convert,
    crosslane,
    division,
    floating,
    global_,
    indexed,
    integer,
    lds,
    matrix,
    packed,
    scalar,
    scaled,
    scratch,
)
from portable.platform.emulated.waves import HANDLERS, missing

__all__ = ["HANDLERS", "missing"]
