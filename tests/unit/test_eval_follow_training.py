"""A follower beside a training run; both are killed and started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eval.results import RunFiles
from tests.runs import train, train_and_kill
from tests.tiny import tiny_config
from train.cli import prepare
from train.run_dir import read_lines

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_checkpoint_is_scored_once(tiny_data: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_data, tmp_path)
    run = RunFiles(prepare(config).path)
    command = [sys.executable, "-m", "eval", "--follow", f"run={run.path}", "suite=builtin", "poll=1"]
    follower = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        train_and_kill(config, lambda r: len(r.complete_checkpoints()) >= 2)
        follower.kill()
        follower.wait()
        follower = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        train(config)
        output, _ = follower.communicate(timeout=300)
    finally:
        follower.kill()
    assert follower.returncode == 0, output
    steps = [step for step, _ in run.complete_checkpoints()]
    assert steps == [5, 10, 15, 20]
    assert [(result["step"], len(result["suites"])) for result in run.results()] == [
        (step, 1) for step in steps
    ]
    rows = [row for row in read_lines(run.metrics) if row["kind"] == "eval"]
    assert sorted(row["step"] for row in rows) == steps
