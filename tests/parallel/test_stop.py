"""A stop asked for while the run validates, and while its learning rate still warms up, is obeyed at the next step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks
from tests.tiny import tiny_config
from train.cli import prepare, run_rank
from train.run_dir import RunDir, read_lines


def stopping_rank(resolved: str, attempt: int) -> int:
    """One rank; on rank 0, somebody asks for a stop in the middle of step 2's validation."""
    from train.validate import SourceValidator

    validator: Any = SourceValidator
    inner = validator._report
    run = RunDir(Path(resolved).parent)

    def report(self: Any, step: int, *args: Any) -> None:
        if step == 2 and os.environ["RANK"] == "0":
            run.stop_file.parent.mkdir(exist_ok=True)
            run.stop_file.touch()
        inner(self, step, *args)

    validator._report = report
    return run_rank(Path(resolved), attempt)


def test_a_stop_during_validation_and_warm_up(tiny_data: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_data, tmp_path, "validation.every_steps=2", ranks=2)
    assert config.warmup_steps == 4
    run = prepare(config)
    attempt = run.start_attempt(ranks=2)
    run_ranks(2, tmp_path / "log", stopping_rank, str(run.resolved), attempt)
    ends = [(line["outcome"], line["step"]) for line in read_lines(run.attempts) if line["event"] == "end"]
    assert ends == [("stopped", 3)]
    assert [step for step, _ in run.complete_checkpoints()] == [3]
