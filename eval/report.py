"""The evaluation report of a run, or of runs that continue one another: markdown, and HTML in one file.

It reads evals/step-N.json and, for the tokens behind a step, resolved.yaml. Where the runs do not know their
tokens, the x-axis is the step.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from markdown import markdown

from eval import report_charts as charts
from eval.results import RunFiles, write_atomic

# Core v1 and v2 of other models, as published: DCLM's repository, and nanochat's own implementation (v1 only).
PUBLISHED: dict[str, tuple[float, float | None]] = {
    "GPT-2 124M (nanochat)": (0.1139, None),
    "GPT-2 Medium (nanochat)": (0.1849, None),
    "GPT-2 Large (nanochat)": (0.2146, None),
    "GPT-2 XL (nanochat)": (0.2565, None),
    "OLMo-1B": (0.297, 0.272),
    "Gemma-2B": (0.434, 0.415),
    "Falcon-7B": (0.441, 0.416),
    "MPT-7B": (0.443, 0.417),
    "Llama2-7B": (0.492, 0.475),
    "Mistral-7B-v0.3": (0.570, 0.557),
    "Llama3-8B": (0.576, 0.565),
}
# pass@1 of the public reference recipe after its fine-tuning.
REFERENCE_CODE = {"humaneval_plus": 0.451, "mbpp_plus": 0.516}
CODE = {"humaneval_plus": "HumanEval+", "mbpp_plus": "MBPP+", "builtin_code": "built-in problems"}
GREEDY = "pass@1"  # with several samples it is called sampled_pass@1


@dataclass
class Point:
    """One scored checkpoint, on the x-axis of the whole chain of runs."""

    run: str
    step: int
    x: float
    suites: list[dict[str, Any]]

    def value(self, key: str) -> float | None:
        """A score by its key; where several settings gave it, the last."""
        found = [entry["scores"][key] for entry in self.suites if key in entry["scores"]]
        return found[-1] if found else None

    def score_keys(self) -> Iterator[str]:
        for entry in self.suites:
            yield from entry["scores"]


@dataclass
class Chain:
    points: list[Point]
    boundaries: list[tuple[float, str]]
    unit: str

    def series(self, key: str) -> list[tuple[float, float]]:
        return [(point.x, value) for point in self.points if (value := point.value(key)) is not None]


def load_chain(paths: Sequence[Path]) -> Chain:
    """Results of runs in the order given, each beginning where the one before ended.

    Raises ValueError when a path is not a folder, or nothing has been scored.
    """
    runs = [RunFiles(path) for path in paths]
    absent = [str(run.path) for run in runs if not run.path.is_dir()]
    if absent:
        raise ValueError(f"{', '.join(absent)} is not a run directory")
    per_step = [_tokens_per_step(run) for run in runs]
    in_tokens = all(per_step)
    points: list[Point] = []
    boundaries, offset = [], 0.0
    for run, tokens in zip(runs, per_step, strict=True):
        scale = tokens / 1e9 if in_tokens and tokens else 1.0
        boundaries.append((offset, run.path.name))
        results = run.results()
        for result in results:
            x = offset + result["step"] * scale
            points.append(Point(run.path.name, result["step"], x, result["suites"]))
        steps = [step for step, _ in run.complete_checkpoints()] + [result["step"] for result in results]
        offset += max(steps, default=0) * scale
    if not points:
        raise ValueError(f"nothing has been scored in {', '.join(str(run.path) for run in runs)}")
    return Chain(points, boundaries, "tokens trained on (billions)" if in_tokens else "step")


def _tokens_per_step(run: RunFiles) -> int | None:
    if not run.resolved.exists():
        return None
    train = yaml.safe_load(run.resolved.read_text(encoding="utf-8")).get("train", {})
    return train.get("global_batch_size", 0) * train.get("seq_len", 0) or None


def means(chain: Chain) -> list[str]:
    """The labels under which means were recorded ("core_21", …): CORE's first, then by frequency."""
    labels = Counter(
        key.removesuffix("/v2") for p in chain.points for key in set(p.score_keys()) if key.endswith("/v2")
    )
    return sorted(labels, key=lambda label: (not label.startswith("core"), -labels[label], label))


# --- sections: (title, markdown text, pictures)

Section = tuple[str, str, list[bytes]]


def mean_section(chain: Chain, label: str) -> Section:
    last = next(point for point in reversed(chain.points) if point.value(f"{label}/v2") is not None)
    series = {f"{label} {v}": chain.series(f"{label}/{v}") for v in ("v1", "v2")}
    text = f"Step {last.step} of {last.run}: " + ", ".join(
        f"**{label} {v} {last.value(f'{label}/{v}'):.4f}**" for v in ("v1", "v2")
    )
    if label != "core" and label.startswith("core"):
        text += f"\n\n{label} is not CORE and not comparable with it: {_why(label)}."
    return label, text, [charts.lines(series, chain.boundaries, chain.unit, "centred accuracy")]


def _why(label: str) -> str:
    reasons = []
    if label.startswith("core_21"):
        reasons.append("the full SQuAD is missing, so it is the mean of the other 21 tasks")
    if label.startswith("core_part"):
        reasons.append("it is the mean of some tasks only")
    if "_nanochat" in label:
        reasons.append("prompts follow nanochat's rules")
    if "_max" in label:
        reasons.append(f"each task is capped at {label.rpartition('_max')[2]} items")
    return "; ".join(reasons)


def task_section(chain: Chain, suite: str) -> Section | None:
    """Every task over training, and the last checkpoint's numbers."""
    keys = sorted({k for point in chain.points for k in point.score_keys() if k.startswith(f"{suite}_task/")})
    if not keys:
        return None
    series = {key.partition("/")[2]: chain.series(key) for key in keys}
    last = next(p for p in reversed(chain.points) if any(e["suite"] == suite for e in p.suites))
    entry = next(e for e in reversed(last.suites) if e["suite"] == suite)
    rows = [
        [name, str(t["shots"]), f"{t['n']:,}", f"{t['accuracy']:.4f}"]
        + [f"{t[f'centred_{v}']:+.4f} ({100 * t[f'baseline_{v}']:.1f} %)" for v in ("v1", "v2")]
        for name, t in entry["tasks"].items()
    ]
    head = ["task", "shots", "items", "accuracy", "centred v1 (baseline)", "centred v2 (baseline)"]
    notes = "".join(f"\n- {note}" for note in entry["notes"])
    text = f"Step {last.step} of {last.run}.\n\n{table(head, rows)}\n{notes}"
    return f"Tasks of {suite}", text, [charts.panels(series, chain.boundaries, chain.unit)]


def code_section(chain: Chain) -> Section | None:
    """The benchmarks of code over training, and pass@N of the last checkpoint that has each."""
    found = {key for point in chain.points for key in point.score_keys() if key.partition("/")[0] in CODE}
    if not found:
        return None
    names = [name for name in CODE if any(key.startswith(f"{name}/") for key in found)]
    kinds = sorted(
        {key.partition("/")[2] for key in found}, key=lambda kind: (int(kind.rpartition("@")[2]), kind)
    )
    series = {
        f"{CODE[name]} {kind}": chain.series(f"{name}/{kind}")
        for name in names
        for kind in (GREEDY, f"sampled_{GREEDY}")
        if f"{name}/{kind}" in found
    }
    rows = []
    for name in names:
        values = [next((v for _, v in reversed(chain.series(f"{name}/{kind}"))), None) for kind in kinds]
        cells = [_percent(value) for value in [*values, REFERENCE_CODE.get(name)]]
        rows.append([CODE[name], *cells])
    last = next(p for p in reversed(chain.points) if any(e["suite"] == "code" for e in p.suites))
    notes = [note for entry in last.suites if entry["suite"] == "code" for note in entry["notes"]]
    head = ["last checkpoint", *(kind.replace("_", " ") for kind in kinds), "reference recipe, pass@1"]
    text = table(head, rows) + "\n\n" + "".join(f"- {note}\n" for note in notes)
    return "Code", text, [charts.lines(series, chain.boundaries, chain.unit, "share of problems solved")]


def held_out_section(chain: Chain) -> Section | None:
    """Losses of each source on held-out text over training, and the last checkpoint's numbers."""
    last = next(
        (p for p in reversed(chain.points) if any(e["suite"] == "validation" for e in p.suites)), None
    )
    if last is None:
        return None
    entry = next(e for e in reversed(last.suites) if e["suite"] == "validation")
    rows = [
        [name, f"{t['n']:,}", f"{t['tokens']:,}", f"{t['loss']:.4f}", f"{t['bits_per_byte']:.4f}"]
        for name, t in entry["tasks"].items()
    ]
    head = ["source", "sequences", "predicted tokens", "nats per token", "bits per byte"]
    series = {name: chain.series(f"validation/{name}/bits_per_byte") for name in entry["tasks"]}
    text = f"Step {last.step} of {last.run}.\n\n{table(head, rows)}"
    return "Held-out text", text, [charts.lines(series, chain.boundaries, chain.unit, "bits per byte")]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def published_section(chain: Chain, label: str) -> Section | None:
    """The last checkpoint among published models; only for CORE itself, for nothing else is comparable."""
    last = [(p, v) for p in chain.points if (v := p.value(f"{label}/v2")) is not None]
    if label != "core" or not last:
        return None
    point, _ = last[-1]
    name = f"{point.run}, step {point.step}"
    own = (point.value("core/v1"), point.value("core/v2"))
    ranked = sorted([*PUBLISHED.items(), (name, own)], key=lambda entry: -(entry[1][0] or 0))
    rows = [[n, *("–" if v is None else f"{v:.3f}" for v in values)] for n, values in ranked]
    values = {n: (v[0], n == name) for n, v in ranked if v[0] is not None}
    return (
        "Against published models",
        table(["model", "CORE v1", "CORE v2"], rows),
        [charts.bars(values, "CORE v1")],
    )


def cost_section(chain: Chain) -> Section:
    rows = [
        [
            point.run,
            str(point.step),
            e["suite"],
            f"{sum(t.get('n', 0) for t in e['tasks'].values()):,}",
            f"{e['seconds']:,.1f}",
            f"{e['device']} × {e['processes']}",
            e["settings_hash"],
        ]
        for point in chain.points
        for e in point.suites
    ]
    head = ["run", "step", "suite", "items", "seconds", "device", "settings"]
    return "Cost", table(head, rows), []


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write report.md and report.html into `out` (default: the last run's evals); the HTML's path."""
    chain = load_chain(paths)
    labels = means(chain)
    sections = [mean_section(chain, label) for label in labels]
    sections += [s for label in labels if (s := published_section(chain, label))]
    sections += [
        s
        for s in (
            code_section(chain),
            held_out_section(chain),
            *(task_section(chain, n) for n in ("core", "builtin")),
        )
        if s
    ]
    sections.append(cost_section(chain))
    folder = out or RunFiles(paths[-1]).evals
    folder.mkdir(parents=True, exist_ok=True)
    title = f"Evaluation of {', '.join(name for _, name in chain.boundaries)}"
    text, page = [f"# {title}"], []
    for heading, body, pictures in sections:
        text.append(f"## {heading}\n\n{body}")
        page.append(f"<h2>{heading}</h2>{markdown(body, extensions=['tables'])}")
        for number, picture in enumerate(pictures):
            name = f"report-{heading.lower().replace(' ', '-')}-{number}.png"
            (folder / name).write_bytes(picture)
            text.append(f"![{heading}]({name})")
            page.append(
                f'<img alt="{heading}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
            )
    write_atomic(folder / "report.md", "\n\n".join(text) + "\n")
    write_atomic(folder / "report.html", PAGE.format(title=title, body="\n".join(page)))
    return folder / "report.html"


PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:920px;margin:2em auto;padding:0 1em;color:#222}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
td,th{{border-bottom:1px solid #ddd;padding:.25em .7em;text-align:left}}img{{max-width:100%}}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""
