"""The pictures of an evaluation report, each a PNG that the page holds in itself."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
COLOURS = ("#3b6fb6", "#d1603d", "#4a9a62", "#8a5fb0", "#b08a2e", "#5aa5b5")
Boundaries = Sequence[tuple[float, str]]
"""Where each run begins on the x-axis, and its name."""


def lines(series: Mapping[str, Points], boundaries: Boundaries, x_label: str, y_label: str) -> bytes:
    """Every series over training, with the begin of each run drawn."""
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for colour, (name, points) in zip(cycle(COLOURS), series.items(), strict=False):
        axes.plot(*_columns(points), marker="o", markersize=4, color=colour, label=name)
    _finish(axes, boundaries, named=True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(fontsize=8, frameon=False)
    return _png(figure)


def panels(series: Mapping[str, Points], boundaries: Boundaries, x_label: str) -> bytes:
    """One small chart for each task, all on one scale: 0 is guessing, 1 is perfect."""
    columns = 4
    rows = -(-len(series) // columns)
    figure = Figure(figsize=(8.4, 1.5 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, points) in zip(grid.flat, series.items(), strict=False):
        axes.axhline(0, color="#999999", linewidth=0.7)
        axes.plot(*_columns(points), marker="o", markersize=3, linewidth=1, color=COLOURS[0])
        axes.set_title(name.replace("bigbench_", "bb: ").replace("_", " "), fontsize=7.5)
        axes.tick_params(labelsize=7)
        _finish(axes, boundaries, named=False)
    for axes in list(grid.flat)[len(series) :]:
        axes.set_axis_off()
    figure.supxlabel(x_label, fontsize=8)
    return _png(figure)


def bars(values: Mapping[str, tuple[float, bool]], x_label: str) -> bytes:
    """Horizontal bars from the largest down; the ones marked True are ours."""
    ranked = sorted(values.items(), key=lambda entry: entry[1][0])
    figure = Figure(figsize=(8.4, 0.28 * len(ranked) + 0.7), layout="constrained")
    axes = figure.subplots()
    heights = [value for _, (value, _) in ranked]
    colours = [COLOURS[1] if own else "#b9c6d8" for _, (_, own) in ranked]
    axes.barh([name for name, _ in ranked], heights, color=colours)
    for y, value in enumerate(heights):
        axes.text(max(value, 0) + 0.004, y, f"{value:.3f}", va="center", fontsize=8)
    axes.axvline(0, color="#555555", linewidth=0.7)
    axes.tick_params(labelsize=8)
    axes.set_xlabel(x_label, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return _png(figure)


def _columns(points: Points) -> tuple[list[float], list[float]]:
    ordered = sorted(points)
    return [x for x, _ in ordered], [y for _, y in ordered]


def _finish(axes: Axes, boundaries: Boundaries, named: bool) -> None:
    for x, name in boundaries:
        if x:
            axes.axvline(x, color="#999999", linewidth=0.8, linestyle="--")
        if named:
            axes.text(x, 1.01, f" {name}", transform=axes.get_xaxis_transform(), fontsize=8, ha="left")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
