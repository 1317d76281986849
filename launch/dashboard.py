"""`python -m launch dashboard runs/NAME`: one run's views, in W&B where a key is set, and as one HTML file.

Both draw train/views.py, and so does TensorBoard. The HTML adds what only the run directory knows: attempts, troubles,
each rank's own time. It reloads itself; --follow draws it again every minute until the run is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from launch.progress import SLOW, Progress, read_progress
from launch.report import draw, html_page, table
from launch.status import COLUMNS, cells, duration, queue
from train.config import ConfigError, load_resolved
from train.run_dir import RunDir, read_lines, write_atomic
from train.views import VIEWS, Chart
from train.wandb_mode import wandb_mode

FOLLOW_SECONDS = 60
SLOWEST = 8  # ranks in the table
UNITS = (("billions", 1e9), ("millions", 1e6), ("thousands", 1e3))
WHOLE = "all"  # what the loss over all sources is called
COLOURS = ["#3b6fb6", "#d1603d", "#4a9a62", "#8a5fb0", "#b08a2e", "#5aa5b5", "#8c8c8c", "#c25b8e"]


def dashboard(path: Path, follow: bool) -> int:
    """Write the workspace where there is a key, and dashboard.html into the run directory."""
    run = RunDir(path)
    if not run.resolved.exists():
        raise ConfigError([f"{path} is no run directory: it has no resolved.yaml"])
    metrics = load_resolved(run.resolved).metrics
    if metrics.wandb and wandb_mode() == "shared":
        from launch.workspace import save_workspace  # imports wandb, which takes a second

        print(save_workspace(metrics.wandb_project))
    while True:
        file = write_dashboard(run)
        print(file)
        if not follow or run.done:
            return 0
        time.sleep(FOLLOW_SECONDS)


def write_dashboard(run: RunDir) -> Path:
    progress = read_progress(run, queue())
    sections: list[tuple[str, str, list[bytes]]] = [("Progress", progress_table(progress), [])]
    rows = chart_rows(progress)
    marks = [a.checkpoint * progress.config.tokens_per_step for a in progress.attempts[1:] if a.checkpoint]
    for title, charts in VIEWS.items():
        shown = [chart for chart in charts if chart.of(tags(rows))]
        pictures = [draw_chart(chart, rows, marks, list(progress.config.data.weights)) for chart in shown]
        text = rank_table(progress) if title == "System" else ""
        if pictures or text:
            sections.append((title, text, pictures))
    sections.append(("Attempts", attempt_table(progress), []))
    troubles = trouble_table(run)
    if troubles:
        sections.append(("Troubles", troubles, []))
    page = html_page(progress.config.name, sections, refresh=None if run.done else FOLLOW_SECONDS, columns=3)
    write_atomic(run.path / "dashboard.html", page)
    return run.path / "dashboard.html"


def progress_table(progress: Progress) -> str:
    rows = [[name, value] for name, value in zip(COLUMNS[1:], cells(progress), strict=True) if value]
    if progress.note:
        rows.insert(1, ["why", progress.note])
    return table(["", ""], rows)


def attempt_table(progress: Progress) -> str:
    rows = [
        [
            str(a.number),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(a.begun)),
            duration((a.ended or progress.now) - a.begun) if a.ended or a is progress.attempts[-1] else "?",
            str(a.facts.get("job", "")),
            str(a.facts.get("nodes", a.facts.get("node", ""))),
            "" if a.checkpoint is None else f"{a.checkpoint:,}",
            a.outcome or ("running" if a is progress.attempts[-1] else "killed"),
            (a.reason or "").replace("|", "\\|"),
        ]
        for a in progress.attempts
    ]
    return table(["#", "begun", "lasted", "job", "nodes", "from step", "outcome", "reason"], rows)


def trouble_table(run: RunDir) -> str:
    """Bad steps, steps passed over, saves that failed; empty when there were none."""
    rows = [[f"{line['step']:,}", "bad step", line["reason"]] for line in read_lines(run.bad_steps)]
    for row in read_lines(run.metrics):
        if row["kind"] == "failed_save":
            rows.append([f"{row['step']:,}", "save failed", row["reason"]])
        elif row["kind"] == "passed_over":
            rows.append([f"{row['step']:,}", "passed over", "bad in two attempts"])
    return table(["step", "what", "why"], rows) if rows else ""


def rank_table(progress: Progress) -> str:
    """The ranks with the longest own time; empty where there is one rank."""
    rows = [
        [
            str(rank.rank),
            rank.node,
            *(f"{1e3 * seconds:,.1f}" for seconds in (rank.p50, rank.p95, rank.p99)),
            f"{rank.factor:.2f}" + (" slow" if rank.factor > SLOW else ""),
        ]
        for rank in progress.ranks[:SLOWEST]
    ]
    head = ["rank", "node", "own ms in a step: p50", "p95", "p99", "times the median rank"]
    return table(head, rows) if rows else ""


# --- pictures


def chart_rows(progress: Progress) -> list[dict[str, Any]]:
    """All rows of numbers, each with the tokens behind its step; of a repeated step the last row counts."""
    run = progress.run
    rows = [*progress.rows, *run.metric_rows("validation"), *eval_rows(run)]
    return [{**row, "x": row["step"] * progress.config.tokens_per_step} for row in rows]


def eval_rows(run: RunDir) -> list[dict[str, Any]]:
    return sorted((r for r in read_lines(run.metrics) if r["kind"] == "eval"), key=lambda row: row["step"])


def tags(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(tag for row in rows for tag in row))


def draw_chart(chart: Chart, rows: list[dict[str, Any]], marks: list[int], sources: list[str]) -> bytes:
    """One picture. `marks` are where attempts after the first resumed, in tokens; a source has one colour in all."""
    found = chart.of(tags(rows))
    names = [name for name in map(short, found) if name not in [*sources, WHOLE]]
    colours = dict(zip(dict.fromkeys([*sources, *names]), cycle(COLOURS), strict=False)) | {WHOLE: "black"}
    if len(found) == 1:
        colours[short(found[0])] = "#444444"
    most = max(row["x"] for row in rows)
    unit, size = next((u for u in UNITS if most >= u[1]), ("", 1))

    def plot(axes: Axes) -> None:
        lines = {tag: [(row["x"] / size, row[tag]) for row in rows if tag in row] for tag in found}
        if chart.stacked:
            x = [place for place, _ in lines[found[0]]]
            values = [[value for _, value in lines[tag]] for tag in found]
            axes.stackplot(x, values, labels=[short(tag) for tag in found], colors=COLOURS, alpha=0.85)
        for tag, points in {} if chart.stacked else lines.items():
            dashed = bool(chart.dashed) and tag.endswith(chart.dashed)
            axes.plot(
                *zip(*points, strict=True),
                color="black" if dashed else colours[short(tag)],
                linestyle="--" if dashed else "-",
                linewidth=1.0 if dashed else 1.5,
                marker="o" if len(points) < 12 else None,
                markersize=3,
                label=None if dashed else short(tag),
            )
        for mark in marks:
            axes.axvline(mark / size, color="#999999", linewidth=0.9, linestyle=":")
        axes.set_yscale("log" if chart.log else "linear")
        if chart.from_zero:
            axes.set_ylim(bottom=0)
        axes.set_title(chart.title, fontsize=10, loc="left")
        axes.set_ylabel(chart.unit)
        axes.set_xlabel(f"tokens trained on{unit and f' ({unit})'}")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(found) > 1:
            axes.legend(fontsize=7, framealpha=0.7, edgecolor="none")

    return draw(plot, size=(5.0, 3.0))


def short(tag: str) -> str:
    """The words of a tag that tell it from the others of its chart: data/code/share → code."""
    words = tag.removeprefix("eval/").split("/")
    if tag == "loss":
        return WHOLE
    if words[0] in ("data", "validation") and len(words) == 3:
        return words[1]
    return words[-1] if words[0] in ("loss", "seconds", "ranks") or "_task" in words[0] else "/".join(words)
