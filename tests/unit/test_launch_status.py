"""What status shows, from run directories written by hand; and the health check's CPU part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main
from launch.progress import find_runs, read_progress
from launch.status import amount, cells, duration
from launch.submit import ROOT
from tests.unit.launch_fixtures import (
    BEGUN,
    end_attempt,
    log_steps,
    start_attempt,
    write_checkpoint,
    write_run,
)
from train.run_dir import RunDir, append_line, write_atomic


def test_numbers_of_a_run_that_was_interrupted(tmp_path: Path) -> None:
    """40 steps, killed; the second attempt begins at 200 s, resumes from step 30 and ends at step 60."""
    run = write_run(tmp_path)
    start_attempt(run, 2, BEGUN + 200, checkpoint=30)
    log_steps(run, 31, 60, BEGUN + 220)
    end_attempt(run, 2, BEGUN + 300, "stopped")
    write_checkpoint(run, 60, BEGUN + 280)
    progress = read_progress(run)
    assert (progress.step, progress.tokens, len(progress.attempts)) == (60, 60 * 4096, 2)
    assert progress.tokens_per_second_per_rank == 1024
    assert progress.seconds_left == 80
    assert progress.goodput == pytest.approx(60 * 2 / 300)
    assert progress.checkpoint == (60, BEGUN + 280)
    shown = cells(progress)
    assert shown[:7] == ["stopped", "2", "60 of 100 (60.0 %)", "246k", "1,024", "1 min 20 s", "40 %"]
    assert shown[7].startswith("step 60, ")


STATES = {
    "running": ({"state": ("7", "RUNNING", "None")}, "running", "job 7"),
    "queued": ({"state": ("8", "PENDING", "Dependency")}, "queued", "job 8 pending, Dependency"),
    "no job, no end": ({}, "lost", "attempt 1 of job 7 has no end and no job"),
}


@pytest.mark.parametrize("case", STATES)
def test_states_of_an_attempt_without_an_end(case: str, tmp_path: Path) -> None:
    jobs, state, note = STATES[case]
    run = write_run(tmp_path)
    progress = read_progress(run, {str(run.path): job for job in jobs.values()})
    assert (progress.state, progress.note) == (state, note)


def test_states_of_runs_that_ended(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    end_attempt(run, 1, BEGUN + 100, "failed", "loss is nan")
    assert (read_progress(run).state, read_progress(run).note) == ("failed", "loss is nan")
    append_line(run.attempts, {"event": "gave_up", "time": 1.0, "reason": "three crashes", "exit_code": 3})
    assert (read_progress(run).state, read_progress(run).note) == ("given up", "exit 3: three crashes")
    run.mark_done(100)
    assert read_progress(run).state == "done"


def test_scores_are_the_newest_of_each_suite(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for step, suite, key, value in [
        (20, "core", "core", 0.1),
        (30, "core", "core", 0.2),
        (30, "code", "humaneval_plus/pass@1", 0.3),
        (10, "core", "core", 0.05),  # an older checkpoint, scored late
    ]:
        append_line(run.metrics, {"kind": "eval", "step": step, "suite": suite, f"eval/{key}": value})
    assert cells(read_progress(run))[-1] == "core 0.200 @30, humaneval_plus/pass@1 0.300 @30"


def test_saves_that_failed_since_the_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path)
    for time in (BEGUN + 60, BEGUN + 90, BEGUN + 95):  # the checkpoint is of BEGUN + 80
        append_line(run.metrics, {"kind": "failed_save", "step": 35, "time": time, "reason": "disk full"})
    assert read_progress(run).failed_saves == 2
    assert main(["status", f"runs={tmp_path}"]) == 0
    assert "a: 2 SAVES FAILED" in capsys.readouterr().out


def test_slow_ranks_are_named_with_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path)
    seconds = {3: 0.3, 2: 0.13, 1: 0.1}
    ranks = [{"rank": r, "node": f"n{r}", "p50": p, "p95": p, "p99": p} for r, p in seconds.items()]
    write_atomic(run.stragglers, json.dumps({"step": 40, "median": 0.12, "ranks": ranks}))
    assert [rank.rank for rank in read_progress(run).slow_ranks] == [3]
    words = "slow: rank 3 on n3 (2.5 times the median rank's own time)"
    assert main(["watch", str(run.path), "--once"]) == 0
    assert words in capsys.readouterr().out
    for jobs, told in (
        ({str(run.path): ("7", "RUNNING", "None")}, True),
        ({}, False),
    ):  # only of runs that run
        monkeypatch.setattr("launch.status.queue", lambda jobs=jobs: jobs)
        assert main(["status", f"runs={tmp_path}"]) == 0
        assert (f"a: {words}" in capsys.readouterr().out) == told


def test_runs_are_found_by_name_and_what_they_hold_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, name="b")
    run = write_run(tmp_path, name="smoke/one")
    copy = run.code / "tree" / "resolved.yaml"
    copy.parent.mkdir(parents=True)
    copy.touch()
    assert [r.path.name for r in find_runs(tmp_path)] == ["b", "one"]
    assert main(["status", f"runs={tmp_path}", "smoke/one"]) == 0
    shown = capsys.readouterr().out
    assert "smoke/one" in shown
    assert "\nb " not in shown


@pytest.mark.parametrize("name", ["attempts.jsonl", "metrics.jsonl", "resolved.yaml"])
def test_a_damaged_run_is_named_and_hides_no_other(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, name="b")
    damaged = write_run(tmp_path, name="a")
    with (damaged.path / name).open("a") as stream:
        stream.write('{"a: [\n')
    assert main(["status", f"runs={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "40 of 100" in shown
    told = [line for line in shown.splitlines() if line.startswith("a: unreadable: ")]
    assert name in " ".join(told)
    for words in (["watch", "--once"], ["dashboard"]):
        assert main([*words, str(damaged.path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert name in said


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = write_run(tmp_path, logged=0)
    run.attempts.unlink()
    progress = read_progress(RunDir(run.path))
    assert progress.state == "new"
    assert cells(progress)[3:7] == ["0", "", "", ""]


def test_durations_and_amounts() -> None:
    assert [duration(s) for s in (0, 61, 3600, 90061, -3)] == [
        "0 s",
        "1 min 1 s",
        "1 h 0 min",
        "1 d 1 h",
        "0 s",
    ]
    assert [amount(n) for n in (7, 4096, 2.5e6, 4e12)] == ["7", "4.1k", "2.5M", "4T"]


# --- launch/health.sh

HEALTH = {
    "all is well": ({}, None),
    "run directory full": ({"HEALTH_MIN_RUN_GIB": "9999999"}, "GiB free, less than 9999999"),
    "temporary directory full": ({"HEALTH_MIN_TMP_GIB": "9999999"}, "GiB free, less than 9999999"),
    "memory": ({"HEALTH_MIN_MEMORY_GIB": "999999"}, "GiB of memory free"),
    "clock": ({"HEALTH_MAX_CLOCK_SKEW": "-1"}, "clock is off by"),
    "a site's own check": ({"HEALTH_EXTRA": "echo fan stopped; exit 4"}, "fan stopped"),
    "slow matrix product": ({"HEALTH_MIN_TFLOPS": "1e6"}, "matrix product: cpu at "),
    "quick enough": ({"HEALTH_MIN_TFLOPS": "1e-6"}, None),
    "slow all-reduce": ({"HEALTH_MIN_ALLREDUCE_GBPS": "1e6"}, "all-reduce: its own 2 devices at "),
    "GPU lost": ({"SMI": "0, 0, 40"}, "1 GPUs instead of 2"),
    "GPU memory errors": ({"SMI": "0, 0, 40\n1, 3, 41"}, "GPU 1: 3 uncorrectable ECC errors"),
    "GPU hot": ({"SMI": "0, [N/A], 40\n1, 0, 95"}, "GPU 1: 95 °C"),
    "GPU driver gone": ({"SMI": ""}, "nvidia-smi failed"),
}


@pytest.mark.parametrize("case", HEALTH)
def test_health(case: str, tmp_path: Path) -> None:
    """The GPU rows run against a stand-in for nvidia-smi that prints what the real one prints."""
    settings, finding = dict(HEALTH[case][0]), HEALTH[case][1]
    (tmp_path / "logs").mkdir()
    environment = os.environ | {"RUN": str(tmp_path), "SLURMD_NODENAME": "n7", "SLURM_GPUS_ON_NODE": "2"}
    environment |= {"CODE": str(ROOT), "PYTHON": sys.executable}
    settings = {"HEALTH_MIN_ALLREDUCE_GBPS": "0"} | settings  # where there are GPUs, it is on
    if "SMI" in settings:
        rows = settings.pop("SMI")
        fake = tmp_path / "bin" / "nvidia-smi"
        fake.parent.mkdir()
        (tmp_path / "rows").write_text(rows)
        fake.write_text(f"#!/bin/sh\n[ -s {tmp_path}/rows ] && cat {tmp_path}/rows\n")
        fake.chmod(0o755)
        environment["PATH"] = f"{fake.parent}:{environment['PATH']}"
    command = ["bash", str(ROOT / "launch" / "health.sh")]
    result = subprocess.run(
        command, env=environment | settings, capture_output=True, text=True, check=False, timeout=60
    )
    if finding is None:
        assert (result.returncode, result.stdout) == (0, "healthy n7\n"), result.stderr
    else:
        assert result.returncode == 1
        assert result.stdout.startswith("unhealthy n7 ")
        assert finding in result.stdout


def test_a_run_directory_that_cannot_be_written_is_a_finding(tmp_path: Path) -> None:
    environment = os.environ | {"RUN": str(tmp_path), "SLURMD_NODENAME": "n7"}  # it has no logs/
    command = ["bash", str(ROOT / "launch" / "health.sh")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert "cannot be written and read" in result.stdout
