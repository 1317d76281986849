"""A slow rank is told from those that wait for it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_config
from train.cli import prepare, run_rank
from train.stragglers import quantile

STEPS = 12
DELAY = 0.02  # seconds in each of the 4 blocks; a whole step of this model takes about as long


def slow_rank(resolved: str, attempt: int, slow: int, where: str) -> int:
    """One rank, on a node of its own name; rank `slow` sleeps in each block's forward or at each batch."""
    from model.laneformer import LaneBlock
    from train.loader import MixtureDataLoader

    rank = int(os.environ["RANK"])
    os.environ["SLURMD_NODENAME"] = f"n{rank + 1}"
    block: Any = LaneBlock
    loader: Any = MixtureDataLoader
    forward, batches = block.forward, loader.__iter__

    def slow_forward(*args: Any) -> Any:
        time.sleep(DELAY)
        return forward(*args)

    def slow_batches(self: Any) -> Any:
        for batch in batches(self):
            time.sleep(4 * DELAY)
            yield batch

    if rank == slow and where == "forward":
        block.forward = slow_forward
    elif rank == slow:
        loader.__iter__ = slow_batches
    return run_rank(Path(resolved), attempt)


@pytest.mark.parametrize(
    ("ranks", "slow", "where", "words"),
    [
        (4, 2, "forward", []),
        (2, 1, "forward", ["parallel.activation_checkpoint=segments:2"]),
        (2, 0, "loader", []),
        pytest.param(2, 0, "loader", ["parallel.compile=true"], marks=pytest.mark.slow),
    ],
)
def test_the_slow_rank_and_its_node_are_named(
    ranks: int, slow: int, where: str, words: list[str], tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_data, tmp_path, *words, ranks=ranks, steps=STEPS)
    run = prepare(config)
    attempt = run.start_attempt(ranks=ranks)
    run_ranks(ranks, tmp_path / "log", slow_rank, str(run.resolved), attempt, slow, where)
    report = json.loads(run.stragglers.read_text())
    assert report["step"] == STEPS
    worst, *others = report["ranks"]
    assert (worst["rank"], worst["node"]) == (slow, f"n{slow + 1}")
    assert sorted(times["rank"] for times in report["ranks"]) == list(range(ranks))
    last = run.metric_rows("train")[-1]
    assert last["ranks/slowest"] == slow
    assert last["ranks/own_slowest"] == worst["p50"] > 1.5 * max(times["p50"] for times in others)
    assert all(times["p50"] <= times["p95"] <= times["p99"] for times in report["ranks"])
    if (
        where == "forward"
    ):  # the time of the sleeps themselves is found, and the others' waiting is not counted
        assert worst["p50"] >= 4 * DELAY
        assert max(times["p50"] for times in others) < 4 * DELAY


def test_quantiles() -> None:
    assert [quantile(range(100), q) for q in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert quantile([3.0], 0.99) == 3.0
