"""Compare what a run logged that it read with what its plan says it should have read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_mixtures.mixture import Mixture
from data_mixtures.plan_record import recorded_mixture
from data_mixtures.shards import read_json


@dataclass(frozen=True)
class Audit:
    """The result: one line per difference (empty when there is none), and the last step's counts by source."""

    steps: int
    differences: list[str]
    planned: dict[str, int]
    logged: dict[str, int]

    def table(self) -> str:
        """Planned and logged sequences of each source at the last logged step."""
        width = max(map(len, [*self.planned, "source"]))
        total = max(1, sum(self.planned.values()))
        lines = [f"{'source':{width}} {'planned':>14} {'logged':>14} {'share':>8}"]
        for source, planned in self.planned.items():
            logged = self.logged.get(source, 0)
            lines.append(f"{source:{width}} {planned:>14,} {logged:>14,} {planned / total:>8.3%}")
        return "\n".join(lines)


def audit_run(run: Path) -> Audit:
    """Recompute, at every logged step, the sequences each source should have given, from the run's plan.json.

    Reads `plan.json` and `metrics.jsonl` (rows with `sequences` and `data/<source>/sequences`), no data.
    Raises ValueError when one of them is missing or holds nothing to compare.
    """
    mixture = recorded_mixture(read_json(run / "plan.json"))
    path = run / "metrics.jsonl"
    steps, differences = 0, []
    planned, logged = dict.fromkeys(mixture.sources, 0), dict.fromkeys(mixture.sources, 0)
    for row in _rows(path):
        steps += 1
        planned = mixture.consumed(row["sequences"])
        logged = _logged(row)
        differences += _compare(mixture, row, planned, logged)
    if not steps:
        raise ValueError(f"{path} has no row that says which sequences were read; there is nothing to audit")
    return Audit(steps, differences, planned, logged)


def _compare(
    mixture: Mixture, row: dict[str, Any], planned: dict[str, int], logged: dict[str, int]
) -> list[str]:
    step = row["step"]
    lines = [
        f"step {step}: {source} gave {logged.get(source, 0):,} sequences, the plan says {count:,}"
        for source, count in planned.items()
        if logged.get(source, 0) != count
    ]
    lines += [f"step {step}: {source} is not in the plan" for source in logged if source not in planned]
    if row["sequences"] > mixture.sequences:
        lines.append(
            f"step {step}: {row['sequences']:,} sequences were read, the phase has {mixture.sequences:,}"
        )
    return lines


def _logged(row: dict[str, Any]) -> dict[str, int]:
    head, tail = "data/", "/sequences"
    return {
        key[len(head) : -len(tail)]: int(value)
        for key, value in row.items()
        if key.startswith(head) and key.endswith(tail)
    }


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl that count sequences. A line cut off by a crash is passed over."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; is {path.parent} a run directory?")
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and "sequences" in row and _logged(row):
                yield {**row, "sequences": int(row["sequences"])}
