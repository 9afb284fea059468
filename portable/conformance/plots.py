"""Errors beside tolerances, as SVG text."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

LEAST, MOST = 1e-5, 1e3  # errors in tolerances; below is drawn as exact, above and what is not finite as the last place
GOOD, BAD = "#1a7f45", "#c62828"


def names(kernel: Mapping[str, Any], kernels: Sequence[Mapping[str, Any]]) -> str:
    """A kernel's name, and where it ran where another row has the same name."""
    alone = sum(other["name"] == kernel["name"] for other in kernels) == 1
    return str(kernel["name"]) if alone else f"{kernel['name']}, {kernel['place']}"


def ratio(error: float | None, tolerance: float) -> float:
    """An error, None where it is not finite, in units of its tolerance, which may be 0.

    >>> ratio(None, 0.1), ratio(0.05, 0.1), ratio(0, 0), ratio(1e-9, 0)
    (1000.0, 0.5, 1e-05, 1000.0)
    """
    if error is None or (error and not tolerance):
        return MOST
    return min(max(error / tolerance, LEAST), MOST) if error else LEAST


def errors(kernels: Sequence[Mapping[str, Any]]) -> str:
    """Each comparison of each kernel, its error in units of its tolerance; empty where nothing was compared."""
    shown = [kernel for kernel in kernels if any(cell["figures"] for cell in kernel["cells"])]
    if not shown:
        return ""
    importlib.import_module("matplotlib").use("Agg")  # no display is looked for
    pyplot = importlib.import_module("matplotlib.pyplot")
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "portable", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.24 * len(shown)), layout="constrained")
        for row, kernel in enumerate(shown):
            figures = [figure for cell in kernel["cells"] for figure in cell["figures"]]
            ratios = [ratio(error, most) for _, error, most in figures]
            for colour, shown_here in ((GOOD, [r for r in ratios if r <= 1]), (BAD, [r for r in ratios if r > 1])):
                axes.plot(shown_here, [row] * len(shown_here), "|", color=colour, markersize=9, markeredgewidth=1)
        axes.axvline(1, color="#444", linewidth=1, linestyle="--")
        axes.set_xscale("log")
        axes.set_xlim(LEAST / 2, MOST * 2)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xticks([LEAST, 1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100, MOST])
        axes.set_xticklabels(["exact", "1e-4", "1e-3", "0.01", "0.1", "tolerance", "10", "100", "1000 +"])
        axes.set_yticks(range(len(shown)))
        axes.set_yticklabels([names(kernel, kernels) for kernel in shown], parse_math=False)
        axes.minorticks_off()
        axes.grid(axis="x", color="#ddd", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        pyplot.close(figure)
    made = text.getvalue()
    return made[made.index("<svg") :]
