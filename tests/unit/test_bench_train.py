"""The benchmarks of training run, and what they compare with computes the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.config import LaneformerConfig, load_size
from model.laneformer import build_model
from tests.benchmarks import quality, train_gpu
from tests.benchmarks import train as bench
from tests.benchmarks.einsum_lanes import EinsumLaneformer

SIZES = replace(
    load_size("smoke"),
    vocab_size=64,
    num_attention_heads=16,
    num_hidden_layers=5,
    swa_layers=(0, 1),
    sliding_window=6,
)
KINDS = [
    SIZES,
    replace(SIZES, broadcast_delay=0),
    replace(SIZES, broadcast_delay=3, use_early_comm=True),
    replace(SIZES, use_mlp_comm=False),
]


@pytest.mark.parametrize("sizes", KINDS, ids=["delay 2", "delay 0", "early", "attention only"])
def test_the_published_form_is_the_same_model(sizes: LaneformerConfig) -> None:
    torch.manual_seed(0)
    ours = build_model(sizes)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs = EinsumLaneformer(sizes).load(ours)
    tokens = torch.randint(0, 64, (2, 16))
    logits = [model(tokens) for model in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(logits[0])
    for found in logits:
        (found * weights).sum().backward()
    torch.testing.assert_close(
        ours.tok_embeddings.weight.grad, theirs.embed.weight.grad, rtol=1e-3, atol=1e-3
    )


def test_the_speed_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    rows = bench.main(["--quick", "--json", str(file)])
    assert json.loads(file.read_text()) == rows
    assert [row["ratio"] for row in rows if "ratio" in row] == [f"{a} ÷ {b}" for a, b, _ in bench.RATIOS]
    shares = [row["share"] for row in rows if "part" in row and "save" not in row["part"]]
    assert sum(shares) == pytest.approx(1)
    assert "| smoke | eager | einsum ÷ ours |" in capsys.readouterr().out


def test_intervals_of_quality() -> None:
    """Differences of pairs: 0.1, 0.2, 0.3 have mean 0.2 and, by Student's t of 2 degrees, ± 4.303 · 0.1 / √3."""
    losses = {"dense": [1.0, 1.0, 1.0], quality.BASE: [2.0, 3.0, 4.0], "delay 1": [2.1, 3.2, 4.3]}
    row = quality.summarise(losses)[2]
    assert row["loss"] == pytest.approx(3.2)
    assert row["over_delay_0"] == pytest.approx(0.2)
    assert row["over_delay_0_interval"] == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert row["over_dense"] == pytest.approx(2.2)
    assert quality.interval([1.0]) is None


def test_quality_draws_delays_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quality.main(["--optimizers", "--plot", "quality.png"])
    assert "--plot draws delays: leave it or --optimizers out" in capsys.readouterr().err


def test_variants_of_quality_read_the_same_data(tmp_path: Path) -> None:
    configs = [quality.configuration(v, 1, 8192, tmp_path, ()) for v in quality.variants()]
    assert len({config.name for config in configs}) == len(configs) == 8
    assert all(
        (c.data, c.train, c.optim) == (configs[0].data, configs[0].train, configs[0].optim) for c in configs
    )
    assert {c.model.num_parameters() for c in configs} == {configs[0].model.num_parameters()}
    settings = [(c.model.num_lanes, c.model.broadcast_delay, c.model.use_early_comm) for c in configs]
    assert settings[:3] == [(1, 0, False), (8, 0, False), (8, 1, False)]


def test_wide_passes_by_hand() -> None:
    """y = (x + x·2).sum(0): 1 + 1 for the product, 2 + 1 for the sum of both, 1 for that over rows; bmm 1 + 1."""
    x, weight = torch.randn(4, 10, 8), torch.randn(4, 8, 8)
    with torch.profiler.profile(record_shapes=True) as profiled:
        (x + x * 2).sum(0)
        torch.bmm(x, weight.transpose(1, 2))
    assert train_gpu.wide_passes(profiled.events() or [], x.numel(), on_gpu=False) == 2 + 3 + 1 + 2


def test_the_gpu_benchmark_runs_dry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--size", "smoke", "--sequences", "1", "--sequence", "128", "--steps", "1"]
    rows = train_gpu.main([*words, "--json", str(tmp_path / "rows.json")])
    assert len(rows) == len(train_gpu.ROWS) + 1
    assert {row.get("not_run", "measured").split(":")[0] for row in rows} == {
        "measured",
        "needs a GPU",
        "compiles for a minute",
    }
    assert rows[0]["tokens_per_second"] > 0
    assert 20 < rows[0]["wide_passes_per_layer"] < 70
    assert "| adding and norm in one kernel | not run: needs a GPU |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train_gpu.main(["--size", "smoke"])
    assert "torch sees no GPU" in capsys.readouterr().err
