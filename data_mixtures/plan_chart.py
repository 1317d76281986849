"""The shift between phases as a picture: shares by category and by source, and the ramp where there is one."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from data_mixtures.plan import Plan
from data_mixtures.plan_view import LABELS, tokens_text
from data_mixtures.shards import write_atomically

_COLOURS = {
    "general": "#4C78A8",
    "code": "#E4572E",
    "math_reasoning": "#2E9E6B",
    "chat": "#9C6ADE",
    "identity": "#C9A227",
    "uncatalogued": "#7F7F7F",
}
_EARLIER = 0.38  # opacity of the earlier phase
_BAR = 0.38  # thickness of one of a source's two bars, in rows
_GAP = 0.6  # between categories, in rows
_ROW, _PHASE, _RAMP, _FRAME = (
    0.27,
    0.5,
    2.6,
    0.55,
)  # inches: a source, a phase, the ramp, a panel's title and axis


def draw_plan(plan: Plan, out: Path) -> None:
    """Write the chart as a PNG to `out`, atomically. Sources are compared over the last two phases."""
    shown = list(range(len(plan.phases)))[-2:]
    groups = _source_groups(plan, shown)
    rows = sum(len(group) for group in groups.values()) + _GAP * (len(groups) - 1)
    heights = [_PHASE * len(plan.phases) + _FRAME, *([_RAMP] if plan.ramp else []), _ROW * rows + _FRAME]
    figure = Figure(figsize=(11, sum(heights) + 0.6), dpi=120, layout="constrained")
    panels = figure.subplots(len(heights), 1, height_ratios=heights)
    figure.suptitle(f"Data plan of {plan.name}", fontsize=15, fontweight="bold", x=0.01, ha="left")
    _draw_categories(panels[0], plan)
    if plan.ramp:
        _draw_ramp(panels[1], plan)
    _draw_sources(panels[-1], plan, groups, shown)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    write_atomically(out, [image.getvalue()])


def _source_groups(plan: Plan, shown: list[int]) -> dict[str, list[tuple[str, list[float]]]]:
    """Per category: the sources that the shown phases use with their shares, the largest first."""
    groups = {
        category: [
            (row.name, [row.weights[i] for i in shown])
            for row in plan.rows
            if row.category == category and any(row.weights[i] for i in shown)
        ]
        for category in plan.categories
    }
    return {
        category: sorted(group, key=lambda row: -max(row[1])) for category, group in groups.items() if group
    }


def _draw_categories(axes: Axes, plan: Plan) -> None:
    """One bar of 100 % per phase, divided by category."""
    for phase in range(len(plan.phases)):
        left = 0.0
        for category, shares in plan.categories.items():
            share = 100 * shares[phase]
            axes.barh(phase, share, 0.72, left=left, color=_COLOURS[category], edgecolor="white")
            if share >= 3:
                text = f"{LABELS[category]}\n{share:.1f} %" if share >= 12 else f"{share:.1f} %"
                axes.text(left + share / 2, phase, text, ha="center", va="center", color="white", fontsize=9)
            left += share
    names = [f"{n}\n{tokens_text(t)}" for n, t in zip(plan.phases, plan.phase_tokens, strict=True)]
    if plan.ramp:
        names[-1] += ", ramp included"
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_title("Share of tokens by category", loc="left", fontsize=11)
    handles = [Patch(color=_COLOURS[category], label=LABELS[category]) for category in plan.categories]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks([])


def _draw_sources(
    axes: Axes, plan: Plan, groups: dict[str, list[tuple[str, list[float]]]], shown: list[int]
) -> None:
    """Two bars per source: light for the earlier phase, full for the last."""
    widest = max(share for group in groups.values() for _, shares in group for share in shares)
    ticks: dict[float, str] = {}
    place = 0.0
    for category, group in groups.items():
        for name, shares in group:
            ticks[place] = name
            for phase, share in enumerate(shares):
                last = phase == len(shares) - 1
                y = place + (phase - (len(shares) - 1) / 2) * _BAR
                axes.barh(y, 100 * share, _BAR, color=_COLOURS[category], alpha=1 if last else _EARLIER)
                text = f" {100 * share:.3g}" if share else " –"
                axes.text(100 * share, y, text, va="center", fontsize=7, color="black" if last else "0.4")
            place += 1
        place += _GAP
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8.5)
    axes.set_ylim(place - _GAP - 0.4, -0.6)
    axes.set_xlim(0, 100 * widest * 1.08)
    axes.set_title("Share of tokens by source, %", loc="left", fontsize=11)
    if len(shown) > 1:
        handles = [
            Patch(color="0.3", alpha=shade, label=plan.phases[i])
            for i, shade in zip(shown, (_EARLIER, 1.0), strict=True)
        ]
        axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


def _draw_ramp(axes: Axes, plan: Plan) -> None:
    """The categories' shares over the ramp and a little beyond, stacked."""
    tokens = [row.tokens for row in plan.ramp]
    end = min(plan.phase_tokens[-1], int(tokens[-1] * 1.25))
    shares = [
        [100 * row.categories.get(category, 0.0) for row in [*plan.ramp, plan.ramp[-1]]]
        for category in plan.categories
    ]
    axes.stackplot([*tokens, end], *shares, colors=[_COLOURS[category] for category in plan.categories])
    axes.axvline(tokens[-1], color="white", linewidth=1.2, linestyle="--")
    axes.set_xlim(0, end)
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_formatter(lambda value, _: tokens_text(value))
    title = f"Ramp from {plan.ramp_from} over {tokens_text(tokens[-1])} tokens: share by category, %"
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
