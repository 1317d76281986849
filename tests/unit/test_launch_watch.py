"""The terminal dashboard: its curve dot by dot, and a frame of a run written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli import main
from launch.watch import curve
from tests.unit.launch_fixtures import BEGUN, end_attempt, log_steps, start_attempt, write_run
from train.run_dir import append_line


def test_the_curve_dot_by_dot() -> None:
    assert curve([0, 1, 2, 3], 2, 1) == ["⡠⠊"]  # one dot a column, rising
    assert curve([3, 2, 1, 0], 2, 1) == ["⠑⢄"]
    assert curve([0, 7], 1, 2) == ["⢸", "⡸"]  # lowest and highest of two lines, connected
    assert curve([7, 0], 1, 2) == ["⢱", "⢸"]
    assert curve([5, 5, 5, 5], 2, 1) == ["⣀⣀"]


def test_more_values_than_columns_are_averaged_and_fewer_are_spread() -> None:
    assert curve([0, 0, 3, 3, 0, 0, 3, 3], 2, 1) == curve([0, 3, 0, 3], 2, 1)
    assert curve([0, 3], 2, 1) == curve([0, 1, 2, 3], 2, 1)
    assert curve([7], 30, 4)[-1] == "⣀" * 30


def test_a_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path)
    end_attempt(run, 1, BEGUN + 100, "failed", "a rank was lost")
    start_attempt(run, 2, BEGUN + 200, checkpoint=30)
    log_steps(run, 31, 60, BEGUN + 220)
    end_attempt(run, 2, BEGUN + 300, "stopped")
    append_line(run.metrics, {"kind": "eval", "step": 30, "suite": "core", "eval/core": 0.123})
    append_line(run.metrics, {"kind": "failed_save", "step": 55, "time": BEGUN + 270, "reason": "disk full"})
    assert main(["watch", str(run.path), "--once"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "60.0 %  step 60 of 100  246k tokens",
        "1,024 tokens/s a rank",
        "goodput 40 %",
        "1 SAVES FAILED",
        "4.98",  # the first step's loss, the highest
        "a rank was lost",
        "from 30",
        "stopped",
        "50.0 %",  # consumed
        "0.1230",
    ):
        assert words in shown, f"{words}\n{shown}"


def test_a_run_without_a_step_and_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, logged=0)
    assert main(["watch", str(run.path), "--once"]) == 0
    assert "no step logged yet" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "nothing"), "--once"]) == 2
    assert "is no run directory" in capsys.readouterr().err
