"""`python -m launch watch runs/NAME`: one run in a terminal, live, from its directory; works over ssh."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launch.progress import Progress, read_progress, slow_words
from launch.status import amount, duration, headline_scores, queue
from train.config import ConfigError
from train.run_dir import RunDir

REFRESH_SECONDS = 5.0
STATE_COLOURS = {"new": "white", "queued": "yellow", "running": "green", "stopped": "yellow", "done": "green"}
DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # braille dots of a cell's two columns, bottom up


def watch(path: Path, once: bool) -> int:
    """Draw the run until it is done or interrupted; with `once`, one frame."""
    run = RunDir(path)
    if not run.resolved.exists():
        raise ConfigError([f"{path} is no run directory: it has no resolved.yaml"])
    if once:
        Console(width=None if sys.stdout.isatty() else 110).print(frame(read_progress(run, queue()), 110))
        return 0
    console = Console()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                progress = read_progress(run, queue())
                live.update(frame(progress, console.width), refresh=True)
                time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt:
        return 0


def frame(progress: Progress, width: int) -> RenderableType:
    """Everything on one screen of `width` columns."""
    left = max(30, width // 2 - 5)
    curves = Table.grid(expand=True)
    curves.add_row(
        Panel(curve_with_scale(series(progress.rows, "loss"), left, 8), title="training loss"),
        Panel(curve_with_scale(series(progress.rows, "tokens_per_second"), left, 8), title="tokens/s"),
    )
    lower = Table.grid(expand=True)
    lower.add_row(
        Panel(mixture(progress), title="mixture: planned, consumed"),
        Panel(attempts(progress), title="attempts"),
    )
    parts: list[RenderableType] = [Panel(headline(progress), title=progress.config.name), curves, lower]
    if headline_scores(progress):
        parts.append(Panel(scores(progress), title="scores"))
    return Group(*parts)


def headline(progress: Progress) -> Text:
    steps, share = progress.config.steps, progress.step / progress.config.steps
    bar = "█" * round(40 * share) + "░" * (40 - round(40 * share))
    text = Text()
    text.append(progress.state, style=f"bold {STATE_COLOURS.get(progress.state, 'red')}")
    text.append(f"  {progress.note}\n" if progress.note else "\n")
    text.append(
        f"{bar} {100 * share:.1f} %  step {progress.step:,} of {steps:,}  {amount(progress.tokens)} tokens"
    )
    facts = []
    if progress.tokens_per_second_per_rank is not None:
        facts.append(f"{progress.tokens_per_second_per_rank:,.0f} tokens/s a rank")
    if progress.seconds_left is not None and progress.state != "done":
        facts.append(f"{duration(progress.seconds_left)} left")
    if progress.goodput is not None:
        facts.append(f"goodput {100 * progress.goodput:.0f} %")
    if progress.checkpoint:
        step, written = progress.checkpoint
        facts.append(f"checkpoint step {step:,}, {duration(progress.now - written)} ago")
    text.append("\n" + "   ".join(facts))
    if progress.slow_ranks:
        text.append(f"\nslow: {slow_words(progress.slow_ranks)}", style="yellow")
    if progress.failed_saves:
        text.append(f"\n{progress.failed_saves} SAVES FAILED since that checkpoint", style="bold red")
    return text


def series(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if key in row and math.isfinite(row[key])]


def curve_with_scale(values: Sequence[float], width: int, height: int) -> Text:
    """The curve with its highest and lowest value at the left."""
    if not values:
        return Text("no step logged yet")
    high, low = (f"{value:,.4g}" for value in (max(values), min(values)))
    margin = max(len(high), len(low))
    lines = curve(values, max(4, width - margin - 1), height)
    labels = [high, *[""] * (height - 2), low]
    text = Text()
    for label, line in zip(labels, lines, strict=True):
        text.append(f"{label:>{margin}} ").append(line + "\n", style="cyan")
    text.rstrip()
    return text


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """`height` lines of `width` braille characters, 2 x 4 dots each; a column reaches from its neighbour's level."""
    levels = 4 * height
    cells = [[0] * width for _ in range(height)]
    low, high = min(values), max(values)
    before: int | None = None
    for x, value in enumerate(resampled(values, 2 * width)):
        level = 0 if high == low else round((value - low) / (high - low) * (levels - 1))
        way = 1 if before is None or level > before else -1
        first = level if before in (None, level) else before + way
        for dot in range(first, level + way, way):
            cells[height - 1 - dot // 4][x // 2] |= DOTS[x % 2][dot % 4]
        before = level
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def resampled(values: Sequence[float], count: int) -> list[float]:
    """`count` values: means of neighbours where there are more; where fewer, straight lines."""
    if len(values) >= count:
        bounds = [n * len(values) // count for n in range(count + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    found = []
    for n in range(count):
        place = n * (len(values) - 1) / (count - 1)
        before = min(int(place), len(values) - 2) if len(values) > 1 else 0
        after = min(before + 1, len(values) - 1)
        found.append(values[before] + (place - before) * (values[after] - values[before]))
    return found


def mixture(progress: Progress) -> Table:
    """Each source's planned share up to here, the share of the sequences read, and its last loss."""
    table = Table.grid(padding=(0, 2, 0, 0))
    last = progress.rows[-1] if progress.rows else {}
    weights = progress.config.data.weights
    read = {source: last.get(f"data/{source}/sequences", 0) for source in weights}
    total = sum(read.values())
    for source, weight in weights.items():
        share = read[source] / total if total else 0.0
        losses = series(progress.rows, f"loss/{source}")
        loss = f"loss {losses[-1]:.3f}" if losses else ""
        planned = last.get(f"data/{source}/planned", weight)  # a ramp's weights are not those of the recipe
        table.add_row(source, f"{100 * planned:.1f} %", f"{100 * share:.1f} %", "▇" * round(20 * share), loss)
    return table


def attempts(progress: Progress) -> Table:
    """The last attempts: how long, from which checkpoint, how they ended."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for attempt in progress.attempts[-6:]:
        lasted = duration((attempt.ended or progress.now) - attempt.begun)
        outcome = attempt.outcome or ("running" if attempt is progress.attempts[-1] else "killed")
        start = f"from {attempt.checkpoint:,}" if attempt.checkpoint is not None else ""
        table.add_row(f"#{attempt.number}", lasted, start, outcome, (attempt.reason or "")[:60])
    return table


def scores(progress: Progress) -> Table:
    """Means only; single tasks and held-out losses are in evals/ and in `python -m eval report`."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, (step, value) in sorted(headline_scores(progress).items()):
        table.add_row(name, f"{value:.4f}", f"step {step:,}")
    return table
