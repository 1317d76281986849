"""`python -m launch dashboard runs/NAME`: one run as one HTML file, drawn from its directory.

The views are those of the metrics' tags in W&B and TensorBoard: progress, loss, data mixture, system, stability,
evaluation. The page reloads itself; --follow draws it again every minute until the run is done.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from launch.progress import Progress, read_progress
from launch.report import (
    Phase,
    draw,
    html_page,
    load_phases,
    mark_phases,
    plot_loss,
    plot_mixture,
    plot_speed,
    plot_validation,
    table,
)
from launch.status import COLUMNS, cells, duration, queue
from train.config import ConfigError
from train.run_dir import RunDir, read_lines, write_atomic

FOLLOW_SECONDS = 60
PARTS = ("data", "forward_backward", "optimizer", "checkpoint", "validation")


def dashboard(path: Path, follow: bool) -> int:
    """Write dashboard.html into the run directory."""
    run = RunDir(path)
    if not run.resolved.exists():
        raise ConfigError([f"{path} is no run directory: it has no resolved.yaml"])
    while True:
        file = write_dashboard(run)
        print(file)
        if not follow or run.done:
            return 0
        time.sleep(FOLLOW_SECONDS)


def write_dashboard(run: RunDir) -> Path:
    progress = read_progress(run, queue())
    sections: list[tuple[str, str, bytes | None]] = [("Progress", progress_table(progress), None)]
    phases = load_phases([(progress.config.name, run.path)])
    if phases:
        sections += [
            ("Loss", "", draw(plot_loss, phases)),
            *([("Held out", "", draw(plot_validation, phases))] if phases[0].validation else []),
            ("Data mixture", "", draw(plot_mixture, phases)),
            ("Speed", "", draw(plot_speed, phases)),
            ("Where a step's time goes", "", draw(plot_time, phases)),
            ("Gradient norm and learning rate", "", draw(plot_stability, phases)),
        ]
    sections.append(("Attempts", attempt_table(progress), None))
    troubles = trouble_table(run)
    if troubles:
        sections.append(("Troubles", troubles, None))
    rows = [row for row in read_lines(run.metrics) if row["kind"] == "eval"]
    if rows:
        sections.append(("Evaluation", "", draw(lambda axes, _: plot_scores(axes, rows), phases)))
    page = html_page(progress.config.name, sections, refresh=None if run.done else FOLLOW_SECONDS)
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


# --- pictures


def plot_time(axes: Axes, phases: list[Phase]) -> None:
    """The logged steps' seconds, by what the process waited for."""
    for phase in phases:
        x = [(phase.offset + row["tokens"]) / 1e6 for row in phase.train]
        parts = [[row.get(f"seconds/{part}", 0.0) for row in phase.train] for part in PARTS]
        axes.stackplot(x, parts, labels=[part.replace("_", " + ") for part in PARTS], alpha=0.85)
    axes.set_ylabel("seconds of a step")
    axes.legend(fontsize=8, frameon=False)
    mark_phases(axes, phases)


def plot_stability(axes: Axes, phases: list[Phase]) -> None:
    rate = axes.twinx()
    for phase in phases:
        x = [(phase.offset + row["tokens"]) / 1e6 for row in phase.train]
        axes.plot(x, [row["grad_norm"] for row in phase.train], color="#444444", linewidth=1)
        rate.plot(x, [row["lr"] for row in phase.train], color="#d1603d", linewidth=1.2)
    axes.set_ylabel("gradient norm before clipping")
    axes.set_yscale("log")
    rate.set_ylabel("learning rate", color="#d1603d")
    rate.set_ylim(bottom=0)
    mark_phases(axes, phases)
    rate.spines[["top"]].set_visible(False)


def plot_scores(axes: Axes, rows: list[dict[str, Any]]) -> None:
    names = dict.fromkeys(key for row in rows for key in row if key.startswith("eval/"))
    for name in names:
        points = sorted((row["step"], row[name]) for row in rows if name in row)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name.removeprefix("eval/"))
    axes.set_xlabel("step")
    axes.set_ylabel("score")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
