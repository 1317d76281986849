"""The HTML dashboard of a run written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.cli import main
from launch.dashboard import write_dashboard
from tests.unit.launch_fixtures import BEGUN, end_attempt, write_run
from train.run_dir import append_line, write_atomic

STRAGGLERS = {
    "step": 40,
    "median": 0.020,
    "ranks": [
        {"rank": 5, "node": "n3", "p50": 0.040, "p95": 0.050, "p99": 0.060},
        {"rank": 0, "node": "n1", "p50": 0.020, "p95": 0.021, "p99": 0.022},
    ],
}


def test_every_view(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    end_attempt(run, 1, BEGUN + 100, "failed", "rank 3 | lost")
    append_line(run.metrics, {"kind": "eval", "step": 30, "suite": "core", "eval/core/v2": 0.123})
    append_line(run.metrics, {"kind": "failed_save", "step": 35, "time": 1.0, "reason": "rank 0: disk full"})
    append_line(run.metrics, {"kind": "passed_over", "step": 12, "time": 1.0})
    append_line(run.metrics, {"kind": "validation", "step": 20, "validation/prose/bits_per_byte": 1.5})
    write_atomic(run.stragglers, json.dumps(STRAGGLERS))
    append_line(run.bad_steps, {"step": 12, "attempt": 1, "time": 1.0, "reason": "loss is nan"})
    text = write_dashboard(run).read_text()
    for heading in (
        "Progress",
        "Loss",
        "Data mixture",
        "System",
        "Stability",
        "Evaluation",
        "Attempts",
        "Troubles",
    ):
        assert f"<h2>{heading}</h2>" in text
    # loss, held-out bits, shares, speed, gradient norm, learning rate, CORE: what the run has of the table
    assert text.count("data:image/png;base64,") == 7
    for words in (
        "<td>40 of 100 (40.0 %)</td>",
        "rank 3 | lost",
        "rank 0: disk full",
        "loss is nan",
        "passed over",
        "<td>5</td>\n<td>n3</td>\n<td>40.0</td>\n<td>50.0</td>\n<td>60.0</td>\n<td>2.00 slow</td>",
    ):
        assert words in text
    assert 'http-equiv="refresh"' in text


def test_a_run_without_a_step_and_one_that_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, logged=0)
    run.mark_done(0)
    assert main(["dashboard", str(run.path), "--follow"]) == 0  # done, so it returns
    text = (run.path / "dashboard.html").read_text()
    assert "data:image" not in text
    assert 'http-equiv="refresh"' not in text
    assert "Troubles" not in text
    assert main(["dashboard", str(tmp_path / "nothing")]) == 2
    assert "is no run directory" in capsys.readouterr().err
