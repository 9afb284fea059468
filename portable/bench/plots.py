"""A run of `portable bench` as pictures: the roofline, latency by context and batch, the share of peak. SVG files."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from portable.bench.ceilings import bandwidth
from portable.bench.kernels import share

Result = dict[str, Any]
Point = tuple[float, float]


def draw(result: Result, folder: Path) -> list[Path]:
    """Write the pictures into a folder, which is made; those for which the run has no numbers are left out.

    Raises ValueError where matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ValueError("plots need matplotlib; install portable-attention[bench]") from None
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, paint in (("roofline", roofline), ("latency", latency), ("share", shares)):
        figure = figures.Figure(figsize=(9, 5.5), layout="constrained")
        if paint(result, figure):
            figure.suptitle(f"{result['machine']['device']}: {name}")
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            made.append(path)
    return made


def times(result: Result) -> Iterator[tuple[str, Result, str, float]]:
    """(workload, row, contestant, us) of every right result."""
    for name, row in result.get("kernels", {}).items():
        for who, each in row["contestants"].items():
            if each["ok"]:
                yield name, row, who, each["us"]


def roofline(result: Result, figure: Any) -> bool:
    """TFLOP/s by operations a byte, beside what memory and the matrix units allow."""
    ceilings = result.get("ceilings", {})
    points: dict[str, list[Point]] = {}
    for _, row, who, us in times(result):
        points.setdefault(who, []).append((row["flops"] / row["bytes"], row["flops"] * 1e-6 / us))
    if not ceilings or not points:
        return False
    axes = figure.subplots()
    memory, peak = bandwidth(ceilings), ceilings["matmul TFLOP/s"]
    every = [x for pairs in points.values() for x, _ in pairs]
    edge = peak / memory
    xs = sorted((min(every) / 2, edge, max(*every, edge) * 2))
    axes.plot(xs, [min(memory * x, peak) for x in xs], color="black", label=f"{memory:.3g} TB/s, {peak:.3g} TFLOP/s")
    for who, pairs in points.items():
        axes.scatter(*zip(*pairs, strict=True), label=who, s=18)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
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
    pictures = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axes, (batch, lines) in zip(pictures, sorted(batches.items()), strict=True):
        for who, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=who)
        axes.set(xscale="log", yscale="log", title=f"batch {batch}", xlabel="context, tokens")
    pictures[0].set_ylabel("us")
    legend(figure, pictures[-1])
    return True


def shares(result: Result, figure: Any) -> bool:
    """The share of the device's own speed that each contestant reaches, by workload."""
    ceilings = result.get("ceilings", {})
    bars: dict[str, dict[str, float]] = {}
    for name, row, who, us in times(result):
        if not math.isnan(part := share(row, ceilings, us)):
            bars.setdefault(name, {})[who] = part
    if not bars:
        return False
    axes, names = figure.subplots(), list(dict.fromkeys(who for each in bars.values() for who in each))
    height = 0.8 / len(names)
    for number, who in enumerate(names):
        places = [(row + number * height, each[who]) for row, each in enumerate(bars.values()) if who in each]
        axes.barh(*zip(*places, strict=True), height=height, label=who)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(bars))], list(bars), fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="share of peak", xlim=(0, None))
    legend(figure, axes)
    return True


def legend(figure: Any, axes: Any) -> None:
    """Below the picture, where it covers nothing."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
