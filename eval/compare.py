"""Is one checkpoint better than another? Paired bootstrap over the items that both have scored.

Both are asked the same items, so what is resampled is the difference on each item: −1, 0 or 1. Resampling n
such items with replacement and averaging is one draw from a multinomial over the three values, which makes
10,000 resamples of twenty thousand items a matter of milliseconds. Tasks (and categories) are resampled each
by itself, because CORE weighs them equally whatever their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.aggregate import baseline
from eval.core_tasks import BUILTIN, CORE, Task
from eval.results import RunFiles, read_lines, read_result

RESAMPLES = 10_000
TASKS: Mapping[str, Task] = {**CORE, **BUILTIN}


@dataclass(frozen=True)
class Difference:
    """B minus A in centred accuracy (v2), with the central 95 % of the bootstrap distribution."""

    name: str
    items: int
    a: float
    b: float
    low: float
    high: float
    better: float
    """Share of resamples in which B is above A; half of the ties count."""

    @property
    def difference(self) -> float:
        return self.b - self.a


def compare(a: Path, b: Path, seed: int = 0, resamples: int = RESAMPLES) -> list[Difference]:
    """One row for each task that both have scored on the same file, and first their mean.

    `a` and `b` are evals/step-N.json files, or run directories, of which the last scored step is taken. Raises
    ValueError when they have nothing in common.
    """
    lines_a, lines_b = item_lines(a), item_lines(b)
    rows, draws = [], []
    for (name, sha256), items_a in lines_a.items():
        items_b = lines_b.get((name, sha256), {})
        common = sorted(set(items_a) & set(items_b))
        if not common:
            continue
        pairs = [(items_a[item], items_b[item]) for item in common]
        stream = np.random.default_rng([seed, *name.encode()])
        row, draw = _task_difference(TASKS[name], pairs, stream, resamples)
        rows.append(row)
        draws.append(draw)
    if not rows:
        raise ValueError(f"{a} and {b} have no task in common that was scored on the same file")
    mean = _difference(
        f"mean of {len(rows)} tasks",
        sum(row.items for row in rows),
        float(np.mean([row.a for row in rows])),
        float(np.mean([row.b for row in rows])),
        np.mean(draws, axis=0),
    )
    return [mean, *rows]


def item_lines(path: Path) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Per-item lines by (task, hash of its file) and item; where a task was scored several ways, the most."""
    file = path
    if path.is_dir():
        files = [
            (result["step"], RunFiles(path).result_file(result["step"]))
            for result in RunFiles(path).results()
        ]
        if not files:
            raise ValueError(f"{path} has no evals/step-N.json")
        file = max(files)[1]
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for entry in read_result(file)["suites"]:
        folder = file.parent / file.stem / f"{entry['suite']}-{entry['settings_hash']}"
        for name, task in entry["tasks"].items():
            if name not in TASKS:
                continue
            lines = {line["item"]: line for line in read_lines(folder / f"{name}.jsonl")}
            key = (name, task["file_sha256"])
            if len(lines) > len(found.get(key, {})):
                found[key] = lines
    return found


def _task_difference(
    task: Task,
    pairs: list[tuple[dict[str, Any], dict[str, Any]]],
    stream: np.random.Generator,
    resamples: int,
) -> tuple[Difference, np.ndarray]:
    scale = 1 - baseline(task, "v2")
    groups: dict[str, list[tuple[bool, bool]]] = {}
    for line_a, line_b in pairs:
        category = line_a.get("category", "") if task.by_category else ""
        groups.setdefault(category, []).append((line_a["correct"], line_b["correct"]))
    means_a, means_b, draws = [], [], []
    for group in groups.values():
        right_a, right_b = np.array(group, dtype=int).T
        change = right_b - right_a
        shares = [np.mean(change == value) for value in (-1, 0, 1)]
        counts = stream.multinomial(len(group), shares, size=resamples)
        draws.append((counts[:, 2] - counts[:, 0]) / len(group))
        means_a.append(right_a.mean())
        means_b.append(right_b.mean())
    a, b = (float(np.mean(means) - baseline(task, "v2")) / scale for means in (means_a, means_b))
    draw = np.mean(draws, axis=0) / scale
    return _difference(task.name, len(pairs), a, b, draw), draw


def _difference(name: str, items: int, a: float, b: float, draw: np.ndarray) -> Difference:
    low, high = np.quantile(draw, [0.025, 0.975])
    better = np.mean(draw > 0) + np.mean(draw == 0) / 2
    return Difference(name, items, a, b, float(low), float(high), float(better))


def table(rows: list[Difference]) -> str:
    """Markdown."""
    lines = ["| task | items | A | B | B − A | 95 % interval | B better |", "|---|--:|--:|--:|--:|:-:|--:|"]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.items} | {row.a:.4f} | {row.b:.4f} | {row.difference:+.4f} "
            f"| {row.low:+.4f} … {row.high:+.4f} | {100 * row.better:.0f} % |"
        )
    return "\n".join(lines)
