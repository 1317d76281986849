"""The report of a chain of runs: losses, the mixture, validation per source, speed, samples, time.

Reads run directories only. Writes report.md and report.html side by side; the HTML holds its pictures, so that
it can be mailed as one file.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from markdown import markdown
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from launch.progress import eval_scores
from train.config import RunConfig, load_resolved
from train.run_dir import RunDir, read_lines, write_atomic

SOURCE_COLOURS = {"prose": "#3b6fb6", "code": "#d1603d", "reasoning": "#4a9a62", "chat": "#8a5fb0"}
OTHER_COLOURS = ["#b08a2e", "#5aa5b5", "#8c8c8c", "#c25b8e"]


@dataclass
class Phase:
    """One run of the chain, with the tokens that came before it."""

    title: str
    config: RunConfig
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    offset: int  # tokens trained on in the phases before

    @property
    def sources(self) -> list[str]:
        return list(self.config.data.weights)

    @property
    def tokens(self) -> int:
        return self.train[-1]["tokens"] if self.train else 0

    def validation_tokens(self) -> list[float]:
        return [self.offset + row["step"] * self.config.tokens_per_step for row in self.validation]


def load_phases(runs: list[tuple[str, Path]]) -> list[Phase]:
    """Phases in order from (title, run directory); runs that have logged nothing yet are left out."""
    phases: list[Phase] = []
    offset = 0
    for title, path in runs:
        run = RunDir(path)
        if not run.resolved.exists() or not run.metric_rows("train"):
            continue
        rows = run.metric_rows("train"), run.metric_rows("validation")
        phases.append(Phase(title, load_resolved(run.resolved), *rows, offset))
        offset += phases[-1].tokens
    return phases


# --- pictures


def colour(source: str, sources: list[str]) -> str:
    others = [s for s in sources if s not in SOURCE_COLOURS]
    return SOURCE_COLOURS.get(source) or OTHER_COLOURS[others.index(source) % len(OTHER_COLOURS)]


def all_sources(phases: list[Phase]) -> list[str]:
    return list(dict.fromkeys(source for phase in phases for source in phase.sources))


def mark_phases(axes: Axes, phases: list[Phase]) -> None:
    for phase in phases:
        if phase.offset:
            axes.axvline(phase.offset / 1e6, color="#999999", linewidth=0.8, linestyle="--")
        middle = (phase.offset + phase.tokens / 2) / 1e6
        axes.text(middle, 1.01, phase.title, transform=axes.get_xaxis_transform(), ha="center", fontsize=9)
    axes.set_xlabel("tokens trained on (millions)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def plot_loss(axes: Axes, phases: list[Phase]) -> None:
    sources = all_sources(phases)
    for phase in phases:
        x = [(phase.offset + row["tokens"]) / 1e6 for row in phase.train]
        for source in phase.sources:
            points = [
                (a, row[f"loss/{source}"])
                for a, row in zip(x, phase.train, strict=True)
                if f"loss/{source}" in row
            ]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour(source, sources), alpha=0.45, linewidth=1)
        axes.plot(x, [row["loss"] for row in phase.train], color="black", linewidth=1.6)
    handles = [plt.Line2D([], [], color="black", label="all")]
    handles += [plt.Line2D([], [], color=colour(s, sources), label=s) for s in sources]
    axes.legend(handles=handles, fontsize=8, frameon=False)
    axes.set_ylabel("training loss (nats per token)")
    mark_phases(axes, phases)


def plot_validation(axes: Axes, phases: list[Phase]) -> None:
    sources = all_sources(phases)
    for source in sources:
        points = [
            (tokens / 1e6, row[f"validation/{source}/bits_per_byte"])
            for phase in phases
            for tokens, row in zip(phase.validation_tokens(), phase.validation, strict=True)
            if f"validation/{source}/bits_per_byte" in row
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=3,
                color=colour(source, sources),
                label=source,
            )
    axes.set_ylabel("held-out bits per byte")
    axes.legend(fontsize=8, frameon=False)
    mark_phases(axes, phases)


def plot_mixture(axes: Axes, phases: list[Phase]) -> None:
    """Planned share (outline) and consumed share (filled) of each source, phase by phase."""
    sources = all_sources(phases)
    position, ticks = 0.0, []
    for phase in phases:
        last = phase.train[-1]
        consumed = [last[f"data/{source}/sequences"] for source in phase.sources]
        for source, count in zip(phase.sources, consumed, strict=True):
            share = count / sum(consumed)
            axes.bar(position, 100 * share, width=0.8, color=colour(source, sources))
            axes.bar(
                position, 100 * phase.config.data.weights[source], width=0.8, fill=False, edgecolor="black"
            )
            axes.text(position, 100 * share + 1.5, f"{100 * share:.1f}", ha="center", fontsize=8)
            ticks.append((position, f"{source}\n{phase.title}"))
            position += 1
        position += 0.6
    axes.set_xticks([t[0] for t in ticks], [t[1] for t in ticks], fontsize=8)
    axes.set_ylabel("share of sequences (%)")
    axes.set_ylim(0, 112)
    axes.set_title("consumed (filled) against planned (outline)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def plot_speed(axes: Axes, phases: list[Phase]) -> None:
    for phase in phases:
        x = [(phase.offset + row["tokens"]) / 1e6 for row in phase.train]
        axes.plot(x, [row["tokens_per_second"] for row in phase.train], color="#444444", linewidth=1)
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    mark_phases(axes, phases)


def draw(plot: Callable[[Axes], None], size: tuple[float, float] = (8.4, 3.6)) -> bytes:
    """A PNG of `size` inches."""
    figure = Figure(figsize=size, layout="constrained")
    plot(figure.subplots())
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


# --- tables


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def phase_table(phases: list[Phase]) -> str:
    rows = []
    for phase in phases:
        speed = sorted(row["tokens_per_second"] for row in phase.train)[len(phase.train) // 2]
        rows.append(
            [
                phase.title,
                f"{phase.train[-1]['step']} of {phase.config.steps}",
                f"{phase.tokens:,}",
                f"{phase.train[0]['loss']:.3f} → {smoothed_end(phase):.3f}",
                f"{speed:,.0f}",
            ]
        )
    return table(["phase", "steps", "tokens", "training loss, first → last", "tokens/s (median)"], rows)


def smoothed_end(phase: Phase) -> float:
    """Mean training loss of the last tenth of the logged steps: one step's loss is mostly its batch."""
    tail = phase.train[-max(1, len(phase.train) // 10) :]
    return sum(row["loss"] for row in tail) / len(tail)


def shift_table(before: Phase, after: Phase) -> str:
    """How fast each source's held-out loss fell just before the shift, and from the shift to the phase's end."""
    rows = []
    for source in after.sources:
        key = f"validation/{source}/loss"
        points = [
            (tokens, row[key])
            for phase in (before, after)
            for tokens, row in zip(phase.validation_tokens(), phase.validation, strict=True)
            if key in row
        ]
        earlier = [point for point in points if point[0] <= after.offset]
        if len(earlier) < 2 or len(points) == len(earlier):
            continue
        (tokens_0, loss_0), (tokens_1, loss_1), (tokens_2, loss_2) = earlier[-2], earlier[-1], points[-1]
        rows.append(
            [
                source,
                " → ".join(f"{100 * p.config.data.weights.get(source, 0):.0f} %" for p in (before, after)),
                f"{loss_0:.3f} → {loss_1:.3f} → {loss_2:.3f}",
                f"{(loss_0 - loss_1) / (tokens_1 - tokens_0) * 1e6:.2f}",
                f"{(loss_1 - loss_2) / (tokens_2 - tokens_1) * 1e6:.2f}",
            ]
        )
    header = ["source", "share", "held-out loss: one validation before the shift → at it → at the end"]
    return table([*header, "fall per million tokens before", "fall per million tokens after"], rows)


def score_rows(runs: list[tuple[str, Path]]) -> list[list[str]]:
    """The newest value of each headline score of each run; single tasks are left to `python -m eval report`."""
    return [
        [title, str(step), name, f"{value:.4f}"]
        for title, path in runs
        for name, (step, value) in eval_scores(list(read_lines(RunDir(path).metrics))).items()
        if "_task/" not in name
    ]


def write_report(
    folder: Path,
    runs: list[tuple[str, Path]],
    samples: list[dict[str, Any]],
    stages: list[dict[str, Any]],
    notes: list[str],
) -> Path:
    """Write report.md and report.html into `folder`; returns the HTML's path.

    `samples` hold title, prompt, text and end_reason; `stages` hold name and seconds; `notes` say what was not run.
    """
    phases = load_phases(runs)
    sections: list[tuple[str, str, bytes | None]] = [("Phases", phase_table(phases), None)]
    sections.append(("Training loss", "", draw(lambda axes: plot_loss(axes, phases))))
    sections.append(("Mixture", "", draw(lambda axes: plot_mixture(axes, phases))))
    sections.append(("Validation", "", draw(lambda axes: plot_validation(axes, phases))))
    if len(phases) > 1:
        sections.append(("The shift", shift_table(phases[0], phases[1]), None))
    sections.append(("Speed", "", draw(lambda axes: plot_speed(axes, phases))))
    scores = [table(["run", "step", "score", "value"], score_rows(runs)), *notes]
    sections.append(("Evaluation", "\n\n".join(scores), None))
    told = [f"**{s['title']}** ({s['end_reason']})\n\n```\n{s['prompt']}▸{s['text']}\n```" for s in samples]
    sections.append(("Samples", "\n\n".join(told) or "none", None))
    rows = [[stage["name"], f"{stage['seconds']:.1f}"] for stage in stages]
    rows.append(["all", f"{sum(stage['seconds'] for stage in stages):.1f}"])
    sections.append(("Time", table(["stage", "seconds"], rows), None))

    lines = ["# Report"]
    for title, text, picture in sections:
        lines.append(f"## {title}\n\n{text}")
        if picture:
            name = f"report-{title.lower().replace(' ', '-')}.png"
            (folder / name).write_bytes(picture)
            lines[-1] += f"![{title}]({name})"
    write_atomic(folder / "report.md", "\n\n".join(lines) + "\n")
    shown = [(title, text, [picture] if picture else []) for title, text, picture in sections]
    write_atomic(folder / "report.html", html_page("Report", shown))
    return folder / "report.html"


def html_page(
    title: str,
    sections: Sequence[tuple[str, str, Sequence[bytes]]],
    refresh: int | None = None,
    columns: int = 1,
) -> str:
    """One HTML file of (heading, Markdown text, pictures) sections; reloads every `refresh` seconds, if given.

    Where there is room, pictures stand in `columns` beside each other.
    """
    body = []
    for heading, text, pictures in sections:
        body.append(f"<h2>{heading}</h2>{markdown(text, extensions=EXTENSIONS)}")
        data = [base64.b64encode(picture).decode() for picture in pictures]
        images = "".join(f'<img alt="{heading}" src="data:image/png;base64,{image}">' for image in data)
        body.append(f'<div class="pictures">{images}</div>' if images else "")
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    width, least = (920, 100) if columns == 1 else (500 * columns, 380)
    return PAGE.format(title=title, refresh=again, width=width, least=least, body="\n".join(body))


EXTENSIONS = ["tables", "fenced_code"]
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}<title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:{width}px;margin:2em auto;padding:0 1em;color:#222}}
table{{border-collapse:collapse;margin-bottom:1em}}
td,th{{border-bottom:1px solid #ddd;padding:.3em .8em;text-align:left}}
.pictures{{display:grid;grid-template-columns:repeat(auto-fill,minmax({least}px,1fr));gap:.5em 1.5em}}
img{{max-width:100%}}pre{{background:#f5f5f5;padding:.8em;overflow-x:auto;white-space:pre-wrap}}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""
