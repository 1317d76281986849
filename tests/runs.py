"""Runs of tests/tiny.py on forked ranks: start, kill, resume, and read what they logged."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks, start_ranks
from train.cli import prepare, run_rank
from train.config import RunConfig
from train.run_dir import RunDir


def rank_main(resolved: str, attempt: int) -> int:
    return run_rank(Path(resolved), attempt)


def train(config: RunConfig) -> RunDir:
    """Prepare and run to the end on config.cluster.ranks ranks."""
    run = prepare(config)
    attempt = run.start_attempt(ranks=config.cluster.ranks)
    log = run.path / f"output-{attempt}.log"
    run_ranks(config.cluster.ranks, log, rank_main, str(run.resolved), attempt)
    return run


def train_and_kill(config: RunConfig, when: Any, timeout: float = 120) -> RunDir:
    """Start the run and send SIGKILL to every rank as soon as `when(run)` is true."""
    run = prepare(config)
    attempt = run.start_attempt(ranks=config.cluster.ranks)
    log = run.path / f"output-{attempt}.log"
    ranks = start_ranks(config.cluster.ranks, log, rank_main, str(run.resolved), attempt)
    deadline = time.monotonic() + timeout
    while not when(run):
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        assert any(rank.is_alive() for rank in ranks), (
            "the run ended before it could be killed:\n" + log.read_text()
        )
        time.sleep(0.002)
    for rank in ranks:
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.join()
    return run


def numbers(run: RunDir) -> dict[int, tuple[float, float, float, float]]:
    """What must not depend on how a run was executed: loss, gradient norm, learning rate, tokens by step."""
    return {
        row["step"]: (row["loss"], row["grad_norm"], row["lr"], row["tokens"])
        for row in run.metric_rows("train")
    }


def consumed(run: RunDir) -> dict[int, dict[str, float]]:
    """Cumulative sequences and tokens of each source by step."""
    return {
        row["step"]: {key: value for key, value in row.items() if key.startswith("data/")}
        for row in run.metric_rows("train")
    }
