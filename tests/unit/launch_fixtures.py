"""A run directory as training leaves it, written by hand: for tests of what only reads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from train.config import compose, dump_yaml
from train.run_dir import RunDir, append_line, write_atomic

BEGUN = 1_000_000.0  # Unix time of the first attempt
SECONDS_PER_STEP = 2.0


def write_run(folder: Path, *, name: str = "a", steps: int = 100, logged: int = 40) -> RunDir:
    """A run of `steps` steps of 4,096 tokens on 2 ranks; one attempt of job 7, `logged` steps, one checkpoint.

    Steps take 2 s, the first began 20 s after the attempt; the checkpoint is of step 30.
    """
    words = ["experiment=smoke_phase1", f"name={name}", f"runs={folder}", f"data.tokens={steps * 4096}"]
    config = compose([*words, "optim.warmup_tokens=0", "cluster.ranks_per_node=2"])
    run = RunDir(folder / name)
    write_atomic(run.resolved, dump_yaml(config))
    start_attempt(run, 1, BEGUN)
    log_steps(run, 1, logged, BEGUN + 20)
    write_checkpoint(run, 30, BEGUN + 80)
    return run


def start_attempt(run: RunDir, number: int, time: float, **facts: Any) -> None:
    given = {"job": "7", "restart": number - 1, "ranks": 2, "checkpoint": 0, "nodes": "n[1-2]"}
    append_line(run.attempts, {"event": "start", "attempt": number, "time": time, **given, **facts})


def end_attempt(run: RunDir, number: int, time: float, outcome: str, reason: str = "") -> None:
    line = {"event": "end", "attempt": number, "time": time, "outcome": outcome, "step": 1, "reason": reason}
    append_line(run.attempts, line)


def log_steps(run: RunDir, first: int, last: int, begun: float) -> None:
    for step in range(first, last + 1):
        row = {
            "kind": "train",
            "step": step,
            "time": begun + SECONDS_PER_STEP * (step - first + 1),
            "loss": 5.0 - 0.02 * step,
            "loss/prose": 5.0,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "tokens": 4096 * step,
            "tokens_per_second": 4096 / SECONDS_PER_STEP,
            "seconds/step": SECONDS_PER_STEP,
            "data/prose/share": 0.5,
            "data/prose/planned": 0.5,
            "data/prose/sequences": 8 * step,
            "data/code/sequences": 8 * step,
            "data/reasoning/sequences": 0,
        }
        append_line(run.metrics, row)


def write_checkpoint(run: RunDir, step: int, time: float) -> None:
    manifest = run.checkpoints / f"step-{step}" / "manifest.json"
    write_atomic(manifest, "{}")
    os.utime(manifest, (time, time))
