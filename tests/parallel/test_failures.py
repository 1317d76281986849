"""Saves that fail and steps that never end, on real ranks."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torchtitan.components.metrics import BaseLogger

from tests.ranks import start_ranks
from tests.runs import numbers, rank_main, train
from tests.tiny import tiny_config
from train.checkpoint import damage
from train.cli import prepare
from train.config import RunConfig
from train.metrics import RunMetrics
from train.run_dir import RunDir, read_lines


def start(config: RunConfig) -> tuple[RunDir, Sequence[BaseProcess]]:
    run = prepare(config)
    attempt = run.start_attempt(ranks=config.cluster.ranks)
    log = run.path / f"output-{attempt}.log"
    return run, start_ranks(config.cluster.ranks, log, rank_main, str(run.resolved), attempt)


def wait(ready: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def logged(run: RunDir, step: int) -> bool:
    return any(row["step"] >= step for row in read_lines(run.metrics))


def train_with_full_disk(config: RunConfig, steps: Sequence[int]) -> tuple[RunDir, list[int | None]]:
    """Run to the end; rank 1's file of the saves at `steps` goes to a device that is always full."""
    run, ranks = start(config)
    wait(lambda: logged(run, 1))  # what an earlier attempt left behind is removed at the start
    for step in steps:
        folder = run.checkpoints / f".step-{step}.tmp"
        folder.mkdir(parents=True)
        (folder / "__1_0.distcp").symlink_to("/dev/full")
    for rank in ranks:
        rank.join(120)
    return run, [rank.exitcode for rank in ranks]


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_save_that_fails_is_told_and_survived(asynchronous: str, tiny_data: Path, tmp_path: Path) -> None:
    words = [f"checkpoint.asynchronous={asynchronous}"]
    run, codes = train_with_full_disk(tiny_config(tiny_data, tmp_path, *words, ranks=2), [10])
    assert codes == [0, 0]
    assert run.done
    assert list(numbers(run)) == list(range(1, 21))
    complete = run.complete_checkpoints()
    assert [step for step, _ in complete] == [5, 15, 20]
    assert [problem for _, directory in complete for problem in damage(directory)] == []
    [told] = [row for row in read_lines(run.metrics) if row["kind"] == "failed_save"]
    assert told["step"] == 10
    assert "rank 1" in told["reason"]
    assert "No space left on device" in told["reason"]
    assert "CHECKPOINT NOT SAVED at step 10" in (run.logs / "1" / "rank-0.log").read_text()
    assert not list(run.checkpoints.glob(".*")), "what the failed save left behind was not removed"


def test_saves_that_keep_failing_end_the_attempt_and_the_next_one_goes_on(
    tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_data, tmp_path, "checkpoint.max_failed_saves=2", ranks=2)
    run, codes = train_with_full_disk(config, [10, 15])
    assert codes == [1, 1]
    end = [line for line in read_lines(run.attempts) if line["event"] == "end"][-1]
    assert end["outcome"] == "failed"
    assert "2 saves in a row failed, the last at step 15" in end["reason"]
    assert [step for step, _ in run.complete_checkpoints()] == [5]
    train(config)
    assert run.done


def test_failures_that_are_not_in_a_row_do_not_add_up(tiny_data: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_data, tmp_path, "checkpoint.max_failed_saves=2", ranks=2)
    run, codes = train_with_full_disk(config, [5, 15])
    assert codes == [0, 0]
    assert [step for step, _ in run.complete_checkpoints()] == [10, 20]


def test_the_last_step_must_be_saved(tiny_data: Path, tmp_path: Path) -> None:
    run, codes = train_with_full_disk(tiny_config(tiny_data, tmp_path, ranks=2), [20])
    assert codes == [1, 1]
    assert not run.done
    end = [line for line in read_lines(run.attempts) if line["event"] == "end"][-1]
    assert "the last step, 20, was not saved: rank 1" in end["reason"]


def test_a_stopped_rank_is_found_and_named(tiny_data: Path, tmp_path: Path) -> None:
    """SIGSTOP of rank 1: rank 0 writes its stacks, says whose are missing, and ends the attempt."""
    words = ["cluster.hang_factor=10", "cluster.hang_seconds=2"]
    run, ranks = start(tiny_config(tiny_data, tmp_path, *words, ranks=2, steps=200))
    wait(lambda: logged(run, 8))
    victim = ranks[1].pid
    assert victim is not None
    os.kill(victim, signal.SIGSTOP)
    begun = time.monotonic()
    ranks[0].join(60)
    took = time.monotonic() - begun
    os.kill(victim, signal.SIGKILL)
    ranks[1].join()
    assert ranks[0].exitcode == 5
    assert took < 40, "a collective's timeout, not the watchdog, ended it"
    end = [line for line in read_lines(run.attempts) if line["event"] == "end"][-1]
    assert "did not end in" in end["reason"]
    assert end["reason"].endswith("none from rank 1")
    stacks = (run.logs / "1" / "stacks-rank-0.txt").read_text()
    assert "in train_step" in stacks
    recorded = pickle.loads((run.logs / "1" / "flight-recorder-rank-0.pickle").read_bytes())
    assert any("all_reduce" in entry["profiling_name"] for entry in recorded["entries"])


def test_rows_wait_in_memory_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.metrics.dist.get_rank", lambda: 0)
    metrics = RunMetrics.__new__(RunMetrics)
    metrics.run, metrics.unwritten, metrics.logger = RunDir(tmp_path), [], BaseLogger()
    metrics.run.metrics.symlink_to("/dev/full")
    metrics.log_row("train", 1, {"loss": 3.0})
    metrics.log_row("train", 2, {"loss": 2.0})
    metrics.run.metrics.unlink()
    metrics.log_row("train", 3, {"loss": 1.0})
    assert [row["loss"] for row in metrics.run.metric_rows("train")] == [3.0, 2.0, 1.0]
