"""The plan of a run on record: what decides the order of its data, as JSON that can be compared field by
field.

The loader's state holds only the hash. The trainer writes the whole description to `plan.json` in the run
directory, so that a resume under another plan can be refused with the names of what changed, and so that
`audit` can recompute what the run should have read.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from data_mixtures.mixture import Mixture, SourceSize
from data_mixtures.recipe import Phase
from data_mixtures.shards import read_json, write_json

FORMAT = "laneformer-plan"
VERSION = 1


class PlanChanged(ValueError):
    """The data is not what the run was started with; the message names each difference."""


def describe(mixture: Mixture) -> dict[str, Any]:
    """Everything the order of `mixture` depends on, in plain JSON types."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "algorithms": {"schedule": "edf-1", "order": "feistel-1"},
        "seq_len": mixture.seq_len,
        "seed": mixture.seed,
        "packing": mixture.packing,
        "tokenizer": mixture.tokenizer,
        "phases": [phase.to_dict() for phase in mixture.phases],
        "sources": {
            source: {"items": size.items, "tokens": size.tokens, "sha256": size.sha256}
            for source, size in mixture.sizes.items()
        },
    }


def plan_hash(plan: dict[str, Any]) -> str:
    """SHA-256 of a description. The budget of the last phase is left out: a run may be extended."""
    *earlier, last = plan["phases"]
    core = {**plan, "phases": [*earlier, {key: value for key, value in last.items() if key != "tokens"}]}
    return hashlib.sha256(json.dumps(core, sort_keys=True).encode()).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line per field that differs, with both values; the last phase's budget is not compared."""
    ignored = f"phases.{len(new['phases']) - 1}.tokens"
    before, after = _flatten(old), _flatten(new)
    return [
        f"{key}: {before.get(key, 'absent')} → {after.get(key, 'absent')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key != ignored
    ]


def record_plan(mixture: Mixture, path: Path) -> None:
    """Write the plan of a run that starts, or check the plan of one that resumes against the file.

    Raises PlanChanged, naming every difference, when the file holds another plan.
    """
    plan = describe(mixture)
    if path.exists():
        changes = differences(read_json(path), plan)
        if changes:
            raise PlanChanged(
                f"{path}: the data plan of this run has changed: {'; '.join(changes)}. "
                "Restore the old values, or start a new run"
            )
    write_json(path, plan)


def recorded_mixture(plan: dict[str, Any]) -> Mixture:
    """The mixture that a recorded plan describes; needs no data."""
    return Mixture(
        [Phase.from_dict(phase) for phase in plan["phases"]],
        {source: SourceSize(**size) for source, size in plan["sources"].items()},
        seq_len=plan["seq_len"],
        seed=plan["seed"],
        packing=plan["packing"],
        max_epochs=float("inf"),
        tokenizer=plan["tokenizer"],
    )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = ((str(i), entry) for i, entry in enumerate(value))
    else:
        return {prefix[:-1]: value}
    return {key: leaf for name, entry in items for key, leaf in _flatten(entry, f"{prefix}{name}.").items()}
