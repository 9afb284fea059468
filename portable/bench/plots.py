"""A run of `portable bench` as pictures: the roofline, latency by context and batch, the share of peak. SVG files."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from portable.bench.ceilings import bandwidth
from portable.bench.kernels import PAGE, share

Result = dict[str, Any]
Point = tuple[float, float]


# (colour, marker) of contestants, told apart by both: a run beside all peers has more than a palette has colours
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7a5195")
MARKERS = "os^Dv*Pp"


def draw(result: Result, folder: Path) -> list[Path]:
    """Write the pictures into a folder, which is made; those for which the run has no numbers are left out.

    Raises ValueError where matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    titled = (("roofline", "", roofline), ("latency", " of decodes", latency), ("share", " of peak", shares))
    for name, rest, paint in titled:
        figure = figures().Figure(figsize=(9, 5.5), layout="constrained")
        if paint(result, figure):
            figure.suptitle(f"{result['machine']['device']}: {name}{rest}")
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            made.append(path)
    return made


def figures() -> Any:
    """The module that draws."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ValueError("plots need matplotlib; install portable-attention[bench]") from None


def times(result: Result) -> Iterator[tuple[str, Result, str, float]]:
    """(workload, row, contestant, us) of every right result."""
    for name, row in result.get("kernels", {}).items():
        for who, each in row["contestants"].items():
            if each["ok"]:
                yield name, row, who, each["us"]


def styles(result: Result) -> dict[str, dict[str, Any]]:
    """How each contestant is drawn, in every picture of a run."""
    names = list(dict.fromkeys(who for _, _, who, _ in times(result)))
    return {
        who: {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % (len(MARKERS) - 1)], "label": who}
        for number, who in enumerate(names)
    }


def roofline(result: Result, figure: Any) -> bool:
    """TFLOP/s by operations a byte, beside what memory and the matrix units allow."""
    ceilings = result.get("ceilings", {})
    points: dict[str, list[Point]] = {}
    for _, row, who, us in times(result):
        points.setdefault(who, []).append((row["flops"] / row["bytes"], row["flops"] * 1e-6 / us))
    if not ceilings or not points:
        return False
    axes, style = figure.subplots(), styles(result)
    memory, peak = bandwidth(ceilings), ceilings["matmul TFLOP/s"]
    every = [x for pairs in points.values() for x, _ in pairs]
    edge = peak / memory
    xs = sorted((min(every) / 2, edge, max(*every, edge) * 2))
    axes.plot(xs, [min(memory * x, peak) for x in xs], color="grey", zorder=1)
    middle = math.sqrt(xs[0] * edge)
    said = {"textcoords": "offset points", "ha": "right", "fontsize": 8}
    axes.annotate(f"memory, {memory:.3g} TB/s", (middle, memory * middle), (-6, 4), **said)
    axes.annotate(f"matrix products, {peak:.3g} TFLOP/s", (xs[-1], peak), (-4, 5), **said)
    for who, pairs in points.items():
        axes.scatter(*zip(*pairs, strict=True), s=26, alpha=0.7, linewidths=0, zorder=2, **style[who])
    axes.set(xscale="log", yscale="log", xlabel="operations a byte: decodes left, prompts right", ylabel="TFLOP/s")
    axes.grid(True, which="major", alpha=0.3)
    plain(axes.xaxis)
    plain(axes.yaxis)
    legend(figure, axes)
    return True


def latency(result: Result, figure: Any) -> bool:
    """us of decodes by context, a picture for each batch, a line for each contestant."""
    batches: dict[int, dict[str, list[Point]]] = {}
    for name, row, who, us in times(result):
        if name.startswith("decode"):
            batches.setdefault(row["batch"], {}).setdefault(who, []).append((row["context"], us))
    if not batches:
        return False
    style, known = styles(result), {}
    pictures = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axes, (batch, lines) in zip(pictures, sorted(batches.items()), strict=True):
        for who, points in lines.items():
            (known[who],) = axes.plot(*zip(*sorted(points), strict=True), markersize=4, linewidth=1, **style[who])
        contexts = sorted({context for points in lines.values() for context, _ in points})
        axes.set(xscale="log", yscale="log", title=f"batch {batch}", xlabel="context, tokens")
        plain(axes.yaxis)
        axes.set_xticks(contexts, [f"{context:,.0f}" for context in contexts], minor=False, fontsize=8)
        axes.set_xticks([], minor=True)
        axes.grid(True, which="major", alpha=0.3)
    pictures[0].set_ylabel("us")
    legend(figure, known)
    return True


def shares(result: Result, figure: Any) -> bool:
    """The share of the device's own speed that each contestant reaches, by workload; the selected one has a ring."""
    ceilings, style = result.get("ceilings", {}), styles(result)
    found: dict[str, list[tuple[str, float, bool]]] = {}
    for name, row, who, us in times(result):
        if not math.isnan(part := share(row, ceilings, us)):
            found.setdefault(name, []).append((who, part, who == row["selected"]))
    if not found:
        return False
    figure.set_figheight(max(5.5, 2 + 0.3 * len(found)))
    axes, known = figure.subplots(), {}
    for place, each in enumerate(found.values()):
        for who, part, selected in each:
            known[who] = axes.scatter(100 * part, place, s=30, alpha=0.8, linewidths=0, zorder=3, **style[who])
            if selected:
                known["selected"] = axes.scatter(100 * part, place, s=110, facecolors="none", edgecolors="grey")
    axes.set_yticks(range(len(found)), [name.replace(f" page {PAGE}", "") for name in found], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(100, color="grey", linewidth=0.8)
    axes.grid(True, axis="both", alpha=0.3)
    axes.set(xlabel="% of what memory or the matrix units give, whichever binds", xlim=(0, None))
    legend(figure, known)
    return True


def plain(axis: Any) -> None:
    """Numbers on a logarithmic axis as people write them; between powers of ten only where those are too few."""
    ticker = importlib.import_module("matplotlib.ticker")
    low, high = axis.get_view_interval()
    few = math.log10(high / low) < 2
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def legend(figure: Any, drawn: Any) -> None:
    """Below the picture, where it covers nothing. `drawn`: axes, or what to show by name."""
    if isinstance(drawn, dict):
        handles, labels = list(drawn.values()), list(drawn)
    else:
        handles, labels = drawn.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
