"""Loss curves of each fast path against the plain one: float32, torch's operations, nothing compiled or recomputed.

200 steps at the tiny size. Where only SwiGLU products are computed again, curves are equal. Elsewhere rounding differs
and training amplifies it, so that curves part slowly, where a wrong gradient would part them at once.
tests/unit/test_loss_curves.py holds the plain path against the published form of the lanes, and bfloat16, float8 and
the Triton kernel, which this trainer takes on GPUs only, against the plain path. Run with -s for the differences.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import train
from tests.tiny import tiny_config
from train.config import RunConfig

STEPS = 200
SELECTIVE, SEGMENTS = (f"parallel.activation_checkpoint={policy}" for policy in ("selective", "segments:2"))
COMPILED, TWO_RANKS = "parallel.compile=true", "cluster.ranks_per_node=2"
PATHS = {  # words, and the largest relative difference of a step's loss
    "selective": ((SELECTIVE,), 0.0),
    "segments": ((SEGMENTS,), 1e-4),
    "chunked loss": (("parallel.loss_chunks=4",), 1e-4),
    "compiled": ((COMPILED,), 1e-4),
    "compiled, selective": ((COMPILED, SELECTIVE), 1e-4),
    "compiled, segments": ((COMPILED, SEGMENTS), 1e-4),
    "2 ranks": ((TWO_RANKS,), 1e-4),
    "2 ranks, gradients reduced in bfloat16": ((TWO_RANKS, "parallel.reduce_dtype=bfloat16"), 0.01),
}


def config(data: Path, runs: Path, name: str, *words: str) -> RunConfig:
    return tiny_config(
        data, runs, f"name={name}", "data.max_epochs=1000", "checkpoint.every_steps=1000", *words, steps=STEPS
    )


def losses(data: Path, runs: Path, name: str, *words: str) -> list[float]:
    rows = train(config(data, runs, name, *words)).metric_rows("train")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def plain(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tiny_data, tmp_path_factory.mktemp("plain"), "plain")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_fast_path_follows_the_plain_one(
    path: str, plain: list[float], tiny_data: Path, tmp_path: Path
) -> None:
    words, bound = PATHS[path]
    fast = losses(tiny_data, tmp_path, "fast", *words)
    worst = max(abs(a - b) / b for a, b in zip(fast, plain, strict=True))
    print(f"{path}: largest relative difference {worst:.2e}")
    assert worst <= bound
    assert plain[-1] < 0.8 * plain[0], "the run learns, so that a difference can show"
