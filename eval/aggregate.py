"""From accuracies to Core: each task's accuracy is centred on random guessing, and Core is their plain mean.

    centred = (accuracy − baseline) / (1 − baseline)

Only all 22 tasks make CORE. The 21 without SQuAD make a mean of its own, core_21, which is not comparable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.core_tasks import CORE, Task

VERSIONS = ("v1", "v2")


def baseline(task: Task, version: str) -> float:
    return task.baseline if version == "v1" else task.baseline_v2


def centred(task: Task, accuracy: float, version: str) -> float:
    chance = baseline(task, version)
    return (accuracy - chance) / (1 - chance)


def mean_centred(accuracies: Mapping[str, float], tasks: Mapping[str, Task], version: str) -> float:
    """Unweighted mean of the centred accuracies, over all of `accuracies`."""
    return sum(centred(tasks[name], value, version) for name, value in accuracies.items()) / len(accuracies)


def aggregate(accuracies: Mapping[str, float]) -> dict[str, Any]:
    """{"core_v1", "core_v2"} of all 22 accuracies (fractions), else {"missing": […]}, with core_21_v1 and
    core_21_v2 where only SQuAD is missing. Raises ValueError on unknown tasks and on values outside 0..1."""
    unknown = sorted(set(accuracies) - set(CORE))
    if unknown:
        raise ValueError(f"unknown tasks {', '.join(unknown)}; CORE has {', '.join(CORE)}")
    outside = [
        f"{name} = {value!r}"
        for name, value in accuracies.items()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1
    ]
    if outside:
        raise ValueError(f"accuracies must be fractions between 0 and 1: {', '.join(outside)}")
    missing = [name for name in CORE if name not in accuracies]
    if not missing:
        return {f"core_{v}": mean_centred(accuracies, CORE, v) for v in VERSIONS}
    if missing == ["squad"]:
        return {"missing": missing, **{f"core_21_{v}": mean_centred(accuracies, CORE, v) for v in VERSIONS}}
    return {"missing": missing}


def aggregate_file(path: Path) -> list[dict[str, Any]]:
    """`aggregate` of each entry of a JSON list of {"name": …, "accuracy": {task: fraction}}."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path} must hold a list of {{name, accuracy}}, not {type(entries).__name__}")
    rows = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("accuracy"), dict):
            raise ValueError(f"{path} entry {number} has no accuracy: {{task: fraction}}")
        name = str(entry.get("name", number))
        try:
            rows.append({"name": name, **aggregate(entry["accuracy"])})
        except ValueError as error:
            raise ValueError(f"{path} entry {name}: {error}") from error
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of `aggregate_file` for reading."""
    lines = []
    for row in rows:
        parts = [f"{key} {value:.6f}" for key, value in row.items() if key not in ("name", "missing")]
        if "missing" in row:
            parts.append(f"no CORE: {', '.join(row['missing'])} missing")
        lines.append(f"{row['name']}: {'  '.join(parts)}")
    return "\n".join(lines)
