"""How contestants are timed: what `portable bench` does."""

from portable.bench.timing import (
    Broken,
    Job,
    Measure,
    Replay,
    contest,
    finish,
    host_microseconds,
    poison,
    reason,
    relative_error,
    worse,
)

__all__ = [
    "Broken",
    "Job",
    "Measure",
    "Replay",
    "contest",
    "finish",
    "host_microseconds",
    "poison",
    "reason",
    "relative_error",
    "worse",
]
