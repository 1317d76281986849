"""Evaluation results beside the training curves: metrics.jsonl, TensorBoard and W&B.

What is logged is derived from the recorded results: every entry of evals/step-N.json that has no row in
metrics.jsonl is logged now, and its row is written last. So a crash in between loses nothing, and a result is
at most logged twice. W&B gets the run's fixed id and `eval/step` as the x-axis, never its own step counter,
which refuses to go back when an old checkpoint is scored late.
"""

from __future__ import annotations

import netrc
import os
import time
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml

from eval.results import RunFiles, append_lines, locked, read_lines


def log_results(run: RunFiles) -> int:
    """Log every result that is not logged yet; how many."""
    with locked(run.evals / ".log-lock"):
        logged = {
            (row["step"], row["suite"], row["settings_hash"])
            for row in read_lines(run.metrics)
            if row["kind"] == "eval"
        }
        results = run.results()
        rows = [
            {
                "kind": "eval",
                "step": result["step"],
                "time": time.time(),
                "suite": entry["suite"],
                "settings_hash": entry["settings_hash"],
                **{f"eval/{key}": value for key, value in entry["scores"].items()},
            }
            for result in results
            for entry in result["suites"]
            if (result["step"], entry["suite"], entry["settings_hash"]) not in logged
        ]
        if rows:
            wanted = _wanted(run)
            if wanted["tensorboard"]:
                _to_tensorboard(run, rows)
            if wanted["wandb"]:
                _to_wandb(run, rows, best(results), wanted)
            append_lines(run.metrics, rows)
        return len(rows)


def best(results: list[dict[str, Any]]) -> dict[str, float]:
    """The best value of each score over all steps: the lowest held-out loss, the highest of anything else."""
    found: dict[str, float] = {}
    for result in results:
        for entry in result["suites"]:
            for key, value in entry["scores"].items():
                better = min if entry["suite"] == "validation" else max
                found[key] = better(value, found.get(key, value))
    return found


def _wanted(run: RunFiles) -> dict[str, Any]:
    """Where the run logs, by its own configuration; a folder without one gets TensorBoard only."""
    if not run.resolved.exists():
        return {"tensorboard": True, "wandb": False}
    config = yaml.safe_load(run.resolved.read_text(encoding="utf-8"))
    return {**config["metrics"], "name": config["name"]}


def _scores(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key.startswith("eval/")}


def _to_tensorboard(run: RunFiles, rows: list[dict[str, Any]]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    # A folder of its own: TensorBoard follows only the newest file of a folder, and the trainer still writes.
    with SummaryWriter(os.fspath(run.tensorboard / "eval")) as writer:
        for row in rows:
            for key, value in _scores(row).items():
                writer.add_scalar(key, value, row["step"])


def _to_wandb(
    run: RunFiles, rows: list[dict[str, Any]], highest: dict[str, float], config: dict[str, Any]
) -> None:
    import wandb

    mode = _wandb_mode()
    # The trainer owns the run's name, group and state; this process only adds to its history.
    session = wandb.init(
        project=config["wandb_project"],
        id=run.wandb_id(),
        resume=None if mode == "shared" else "allow",  # what is shared is appended to in any case
        dir=os.fspath(run.path),
        mode=mode,
        settings=wandb.Settings(
            console="off",
            silent=True,
            x_disable_stats=True,
            x_primary=mode != "shared",
            x_label="eval",
            x_update_finish_state=mode != "shared",
        ),
    )
    session.define_metric("eval/step")
    session.define_metric("eval/*", step_metric="eval/step")
    for row in rows:
        session.log({"eval/step": row["step"], **_scores(row)})
    session.summary.update({f"best/{key}": value for key, value in highest.items()})
    session.finish()


def _wandb_mode() -> Literal["shared", "offline", "disabled"]:
    """As the trainer (train/wandb_mode.py says why "shared"): both may write to the same W&B run at once."""
    asked = os.environ.get("WANDB_MODE", "")
    if asked == "disabled":
        return "disabled"
    return "offline" if asked in ("offline", "dryrun") or not _has_wandb_key() else "shared"


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
