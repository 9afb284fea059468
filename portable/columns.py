"""Text in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A line for each row, its cells as wide as their columns.

    >>> print(*table([["a", "b"], ["one", "2"]]), sep="|")
    a    b|one  2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
