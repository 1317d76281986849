"""`python -m launch status`: one table of runs, from their directories and the queue."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.progress import Progress, find_runs, read_progress, slow_words

COLUMNS = (
    "run",
    "state",
    "attempts",
    "step",
    "tokens",
    "tokens/s/rank",
    "time left",
    "goodput",
    "last checkpoint",
    "scores",
)
# Scores worth a column when there are many; others are in evals/.
HEADLINE = ("core", "humaneval_plus/pass@1", "mbpp_plus/pass@1")


def status(folder: Path, names: Sequence[str]) -> int:
    """Print the table of the runs below `folder`, or of those named."""
    runs = [
        run for run in find_runs(folder) if not names or str(run.path.relative_to(folder.resolve())) in names
    ]
    jobs = queue()
    console = Console(width=None if sys.stdout.isatty() else 240)  # in a file or a pipe nothing is cut
    table = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0), header_style="bold")
    notes = []
    for run in runs:
        name = str(run.path.relative_to(folder.resolve()))
        try:
            progress = read_progress(run, jobs)
        except (OSError, ValueError) as error:  # one damaged run does not hide the others
            table.add_row(name, "unreadable")
            notes.append(f"{name}: unreadable: {error}")
            continue
        table.add_row(name, *cells(progress))
        if progress.note:
            notes.append(f"{name}: {progress.state}: {progress.note}")
        if progress.slow_ranks and progress.state == "running":
            notes.append(f"{name}: slow: {slow_words(progress.slow_ranks)}")
        if progress.failed_saves:
            notes.append(
                f"{name}: {progress.failed_saves} SAVES FAILED since the last checkpoint: see its log"
            )
    asked = f" named {', '.join(names)}" if names else ""
    console.print(table if runs else f"no runs{asked} in {folder}")
    for note in notes:
        console.print(note, markup=False, highlight=False)
    return 0


def cells(progress: Progress) -> list[str]:
    """The row of one run, after its name."""
    steps = progress.config.steps
    speed, left, goodput = progress.tokens_per_second_per_rank, progress.seconds_left, progress.goodput
    checkpoint = "none"
    if progress.checkpoint:
        step, written = progress.checkpoint
        checkpoint = f"step {step:,}, {duration(progress.now - written)} ago"
    return [
        progress.state,
        str(len(progress.attempts)),
        f"{progress.step:,} of {steps:,} ({100 * progress.step / steps:.1f} %)",
        amount(progress.tokens),
        "" if speed is None else f"{speed:,.0f}",
        "" if left is None or progress.state == "done" else duration(left),
        "" if goodput is None else f"{100 * goodput:.0f} %",
        checkpoint,
        scores(progress),
    ]


def scores(progress: Progress) -> str:
    """The headline scores, or all means where they are few."""
    found = headline_scores(progress)
    if len(found) > len(HEADLINE):
        found = {key: value for key, value in found.items() if key.startswith(HEADLINE)} or found
    shown = [f"{key} {value:.3f} @{step:,}" for key, (step, value) in list(found.items())[:4]]
    return ", ".join(shown)


def headline_scores(progress: Progress) -> dict[str, tuple[int, float]]:
    """Without those of single tasks and of held-out text."""
    return {k: v for k, v in progress.evals.items() if "_task/" not in k and not k.startswith("validation/")}


def queue() -> dict[str, tuple[str, str, str]]:
    """Jobs that wait or run, by the run directory in their comment: (id, state, reason). {} without a Slurm."""
    if shutil.which("squeue") is None:
        return {}
    command = ["squeue", "--noheader", "--format=%A|%T|%r|%k"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line.split("|", 3) for line in result.stdout.splitlines()] if result.returncode == 0 else []
    return {row[3]: (row[0], row[1], row[2]) for row in rows if len(row) == 4}


def duration(seconds: float) -> str:
    """The two largest units: 12 d 4 h, 3 h 20 min, 5 min 2 s, 8 s."""
    parts, rest = [], round(max(seconds, 0))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def amount(count: float) -> str:
    """1.5T, 20B, 3.1M: three digits and a unit."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
