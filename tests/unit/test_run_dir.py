"""The run directory: atomic files, whole lines, attempts, complete checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.run_dir import RunDir, append_line, read_lines, write_atomic


def test_write_atomic_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "state.json"
    write_atomic(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(file, "new \ud800")
    assert file.read_text() == "old"
    write_atomic(file, "new")
    assert file.read_text() == "new"
    assert [f.name for f in file.parent.iterdir() if not f.name.startswith(".")] == ["state.json"]


def test_a_last_line_cut_off_by_a_crash_is_passed_over_and_a_broken_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    append_line(file, {"a": 1})
    append_line(file, {"a": 2})
    with file.open("a") as stream:
        stream.write('{"a": 3')
    assert list(read_lines(file)) == [{"a": 1}, {"a": 2}]
    file.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl line 2 is not JSON"):
        list(read_lines(file))


def test_a_line_after_a_cut_off_one_is_not_lost(tmp_path: Path) -> None:
    """An attempt is killed while it writes; the next attempt's first line must not be glued to the torn one."""
    file = tmp_path / "rows.jsonl"
    append_line(file, {"a": 1})
    with file.open("a") as stream:
        stream.write('{"a": 2, "torn')
    append_line(file, {"a": 3})
    assert list(read_lines(file)) == [{"a": 1}, {"a": 3}]


def test_attempts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.start_attempt(ranks=2) == 1
    run.end_attempt(1, "failed", 7, reason="why")
    assert run.start_attempt(ranks=2) == 2
    assert run.attempt_ended(1)
    assert not run.attempt_ended(2)
    lines = list(read_lines(run.attempts))
    assert [(line["event"], line["attempt"]) for line in lines] == [("start", 1), ("end", 1), ("start", 2)]


def test_metric_rows_of_a_repeated_step_are_the_last_ones(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step, loss in [(1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5), (3, 3.5)]:
        append_line(run.metrics, {"kind": "train", "step": step, "loss": loss})
    append_line(run.metrics, {"kind": "validation", "step": 3})
    assert [row["loss"] for row in run.metric_rows("train")] == [5.0, 4.5, 3.5]


def test_only_complete_checkpoints_are_seen(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for name in ("step-10", "step-9", ".step-11.tmp", "step-8.damaged", "other"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "manifest.json").write_text(json.dumps({}))
    (run.checkpoints / "step-12").mkdir()
    assert [step for step, _ in run.complete_checkpoints()] == [9, 10]


def test_the_wandb_id_is_drawn_once(tmp_path: Path) -> None:
    assert RunDir(tmp_path).wandb_id() == RunDir(tmp_path).wandb_id()
    assert RunDir(tmp_path / "other").wandb_id() != RunDir(tmp_path).wandb_id()
