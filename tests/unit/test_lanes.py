"""Metrics of each lane: against copies of the weights and residuals, and the same on two ranks as on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.blocks import LaneLinear
from model.config import load_size
from model.laneformer import Laneformer, build_model
from tests.runs import train
from tests.tiny import tiny_config
from train.lanes import LaneMetrics
from train.loss import row_losses

SIZES = replace(
    load_size("smoke"), vocab_size=64, num_hidden_layers=3, swa_layers=(), sliding_window=None, num_lanes=4
)


def step(
    model: Laneformer, metrics: LaneMetrics, optimizer: torch.optim.Optimizer, recording: bool
) -> dict[str, float]:
    tokens = torch.randint(0, 64, (2, 16))
    metrics.begin(recording)
    optimizer.zero_grad()
    row_losses(model(tokens), tokens)[1].sum().backward()
    metrics.gradients([optimizer])
    optimizer.step()
    metrics.updates([optimizer])
    return metrics.row()


@pytest.fixture(params=["AdamW", "Muon"])
def trained(request: pytest.FixtureRequest) -> tuple[Laneformer, LaneMetrics, torch.optim.Optimizer]:
    """Three steps on, with two weight decays, so that AdamW's moments are under way; or by Muon."""
    torch.manual_seed(0)
    model = build_model(SIZES)
    metrics = LaneMetrics(model, torch.device("cpu"))
    decayed = [p for p in model.parameters() if p.ndim == 2]
    groups = [
        {"params": decayed[::2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if not any(p is q for q in decayed[::2])]},
    ]
    optimizer: torch.optim.Optimizer
    if request.param == "AdamW":
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, fused=True)
    else:
        optimizer = torch.optim.Muon(metrics.weights, lr=1e-2)
    for _ in range(3):
        assert step(model, metrics, optimizer, recording=False) == {}
    return model, metrics, optimizer


def test_against_copies(trained: tuple[Laneformer, LaneMetrics, torch.optim.Optimizer]) -> None:
    model, metrics, optimizer = trained
    weights = [module.weight for module in model.modules() if isinstance(module, LaneLinear)]
    assert len(weights) == 4 * SIZES.num_hidden_layers
    before = [weight.detach().clone() for weight in weights]
    entered: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda _, args: entered.append(args[0].detach()))
    row = step(model, metrics, optimizer, recording=True)

    def squares(tensors: list[torch.Tensor], lane: int) -> float:
        return sum(float((t.double().view(4, -1)[lane] ** 2).sum()) for t in tensors)

    gradients = [weight.grad for weight in weights if weight.grad is not None]
    changes = [weight.detach() - old for weight, old in zip(weights, before, strict=True)]
    for lane in range(4):
        expected = squares(gradients, lane) ** 0.5
        assert row[f"lanes/{lane}/grad_norm"] == pytest.approx(expected, rel=1e-6)
        expected = (squares(changes, lane) / squares(before, lane)) ** 0.5
        assert row[f"lanes/{lane}/update_ratio"] == pytest.approx(expected, rel=1e-4)
        expected = squares([entered[0]], lane) / float((entered[0].double() ** 2).sum())
        assert row[f"lanes/{lane}/residual_share"] == pytest.approx(expected, rel=1e-6)


def test_a_dead_lane_is_seen(trained: tuple[Laneformer, LaneMetrics, torch.optim.Optimizer]) -> None:
    """Lane 2's projections give nothing: no gradient reaches its queries, keys, values and gates."""
    model, metrics, optimizer = trained
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LaneLinear):
                module.weight.view(4, -1)[2] = 0
    row = step(model, metrics, optimizer, recording=True)
    assert row["lanes/2/grad_norm"] == 0
    assert all(row[f"lanes/{lane}/grad_norm"] > 0 for lane in (0, 1, 3))


def test_one_lane_has_none() -> None:
    model = build_model(replace(SIZES, num_lanes=1, broadcast_delay=0))
    metrics = LaneMetrics(model, torch.device("cpu"))
    assert step(model, metrics, torch.optim.AdamW(model.parameters()), recording=True) == {}


def test_two_ranks_agree_with_one(tiny_data: Path, tmp_path: Path) -> None:
    """Sharded weights, and replicas of them, give the numbers of one rank; steps that are not logged have none."""
    words = ("metrics.every_steps=3", "data.max_epochs=100")
    runs = [
        train(tiny_config(tiny_data, tmp_path, f"name=r{n}", *words, *more, ranks=n, steps=8))
        for n, more in ((1, ()), (2, ()), (2, ("name=copies", "parallel.replicate=2")))
    ]
    rows = [{row["step"]: row for row in run.metric_rows("train")} for run in runs]
    tags = [tag for tag in rows[0][6] if tag.startswith("lanes/")]
    assert len(tags) == 3 * 4
    for other in rows[1:]:
        for number in (3, 6):
            found = {tag: other[number][tag] for tag in tags}
            assert found == pytest.approx({tag: rows[0][number][tag] for tag in tags}, rel=1e-4)
    assert not any(tag.startswith("lanes/") for tag in rows[0][8])
