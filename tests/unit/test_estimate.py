"""The memory estimate: against the peaks of runs, counted tensor by tensor, and its sums."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import train
from tests.tiny import tiny_config
from train.cli import main
from train.config import RunConfig, compose
from train.estimate import estimate
from train.profiling import RECORDED, SKIPPED

STEPS = SKIPPED + RECORDED
WORDS = ("profile=on", "checkpoint.every_steps=1000", "checkpoint.asynchronous=false", "data.max_epochs=1000")
BATCH = ("train.seq_len=64", "train.global_batch_size=16", "train.local_batch_size=16")
POLICIES = ("none", "selective", "segments:2")
LARGER = (  # 8 lanes, 6 layers, 3 layers' delay
    "model.hidden_size=128",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=8",
    "model.intermediate_size=256",
    "model.num_hidden_layers=6",
    "model.num_lanes=8",
    "model.broadcast_delay=3",
)
DENSE = ("model.num_lanes=1", "model.broadcast_delay=0", "model.hidden_size=128", "model.num_hidden_layers=3")


def measured(config: RunConfig) -> int:
    """Peak bytes of tensors on rank 0, over three steps in the middle of a run."""
    run = train(config)
    (folder,) = (run.path / "profile").iterdir()
    return json.loads((folder / "memory.json").read_text())["peak_bytes"]


def run_config(data: Path, runs: Path, *words: str, ranks: int = 1) -> RunConfig:
    config = tiny_config(data, runs, *WORDS, *BATCH, *words, ranks=ranks)
    return replace(config, data=replace(config.data, tokens=STEPS * config.tokens_per_step))


def check(config: RunConfig) -> None:
    estimated, peak = estimate(config).peak, measured(config)
    print(f"estimated {estimated:,} bytes, measured {peak:,}: {estimated / peak:.3f}")
    assert estimated == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_checkpointing_policy(policy: str, tiny_data: Path, tmp_path: Path) -> None:
    check(run_config(tiny_data, tmp_path, f"parallel.activation_checkpoint={policy}"))


def test_the_dense_twin(tiny_data: Path, tmp_path: Path) -> None:
    check(run_config(tiny_data, tmp_path, *DENSE))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_larger_size(policy: str, tiny_data: Path, tmp_path: Path) -> None:
    check(run_config(tiny_data, tmp_path, *LARGER, f"parallel.activation_checkpoint={policy}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("train.local_batch_size=8",),  # gradient accumulation
        ("parallel.loss_chunks=4",),
        ("model.num_key_value_heads=2", "model.num_lanes=2"),
        ("train.local_batch_size=8", "cluster.ranks_per_node=2"),
    ],
    ids=["accumulation", "chunked loss", "grouped queries", "2 ranks"],
)
def test_other_settings(words: tuple[str, ...], tiny_data: Path, tmp_path: Path) -> None:
    check(run_config(tiny_data, tmp_path, *LARGER[:5], *words))


def test_what_stays_is_spread_over_the_ranks_that_share() -> None:
    one = estimate(compose(["experiment=phase1"]))
    replicas = estimate(compose(["experiment=phase1", "parallel.replicate=24"]))
    assert one.weights == 2_320_069_632 * 4 // 192
    assert (one.optimizer, one.gradients, one.host_copy) == (2 * one.weights, one.weights, 3 * one.weights)
    assert replicas.weights == 2_320_069_632 * 4 // 8
    assert replicas.activations == one.activations


def test_what_a_token_keeps_at_the_2b_size() -> None:
    """Calculated by hand from the shapes, bfloat16, selective: 15 layers, the final norm, the head's chunks."""
    config = compose(["experiment=phase1", "parallel.loss_chunks=8"])
    lanes, width, swiglu, keys, heads = 8, 3072, 12288, 1536, 32
    layer = 2 * (2 * lanes * width + 4 * width + 3 * keys + 2 * swiglu) + 4 * (heads + 2 * lanes)
    end = 2 * (lanes * width + 2 * width) + 2 * 32000 / 8
    assert estimate(config).activations == 8192 * (15 * layer + end)


def test_less_is_kept_with_more_recomputation() -> None:
    base = compose(["experiment=phase1", "parallel.loss_chunks=8"])
    peaks = [
        estimate(replace(base, parallel=replace(base.parallel, activation_checkpoint=policy))).peak
        for policy in ("none", "selective", "segments:5")
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment=phase2", "--estimate"]) == 0
    table = capsys.readouterr().out
    assert "2 x 4096 tokens at a time" in table
    assert "The peak is reached in:" in table
    assert main(["experiment=phase2", "--estimate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"peak {found['peak'] / 2**30:34.2f} GiB"[-12:] in table
