"""Muon: matrix by matrix what torch.optim.Muon does, and one run, however it is executed. Over gloo.

It computes in bfloat16, whose rounding turns the last digits of a sum over ranks into a difference of 1e-4 after 20
steps; a run repeated or resumed on as many ranks is bitwise the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_training import step_logged
from tests.ranks import run_ranks
from tests.runs import numbers, train, train_and_kill
from tests.tiny import tiny_config
from train.config import compose
from train.run_dir import RunDir

LAYOUTS = {  # ranks, overrides
    "1 rank, accumulation 4": (1, ["train.local_batch_size=1"]),
    "2 ranks": (2, []),
    "4 ranks": (4, []),
    "HSDP 2x2": (4, ["parallel.replicate=2", "parallel.shard=2"]),
    "2 ranks, segments recomputed": (2, ["parallel.activation_checkpoint=segments:3"]),
}
BOUND = 5e-4  # of relative differences between layouts; see the docstring
LR, DECAY = 0.01, 0.5
SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128}
ROWS = {"wqkv": 8, "wo": 64, "w13": 64, "w2": 64}  # of one matrix, with 2 lanes and heads 8 wide


def muon(data: Path, runs: Path, *words: str, ranks: int = 1) -> Any:
    return tiny_config(data, runs, "optim=muon", *words, ranks=ranks)


@pytest.fixture(scope="module")
def one_rank(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(muon(tiny_data, tmp_path_factory.mktemp("one"), "train.local_batch_size=4"))


@pytest.fixture(scope="module")
def two_ranks(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(muon(tiny_data, tmp_path_factory.mktemp("two"), ranks=2))


def two_steps() -> None:
    """On one rank of four: each matrix of a sharded model moves as torch's Muon moves it alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    from model.laneformer import build_model
    from train.titan import optimizer

    dist.init_process_group("gloo")
    sizes = [f"model.{key}={value}" for key, value in SIZES.items()]
    rates = [f"optim.lr={LR}", f"optim.weight_decay={DECAY}"]
    config = compose(["experiment=smoke_phase1", "optim=muon", "model.num_lanes=2", *sizes, *rates])
    model = build_model(config.model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    fully_shard(model, mesh=mesh)
    container = optimizer(config).build(model_parts=[model])
    assert [type(found).__name__ for found in container.optimizers] == ["DistMuon", "AdamW"]

    generator = torch.Generator().manual_seed(0)
    weights = {name: p for name, p in model.named_parameters() if name.split(".")[-2] in ROWS}
    assert set(container.optimizers[0].state_dict()["param_groups"][0]["param_names"]) == set(weights)
    alone = {}
    for name, weight in weights.items():
        assert isinstance(weight, DTensor)
        matrices = weight.full_tensor().detach().split(ROWS[name.split(".")[-2]])
        alone[name] = [torch.nn.Parameter(matrix.clone()) for matrix in matrices]
    settings: Any = {"lr": LR, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    reference = torch.optim.Muon([matrix for matrices in alone.values() for matrix in matrices], **settings)
    before = {name: torch.cat([m.detach().clone() for m in matrices]) for name, matrices in alone.items()}
    for _ in range(2):
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(gradient, mesh, parameter.placements, src_data_rank=None)
        for name, matrices in alone.items():
            gradient = weights[name].grad
            assert isinstance(gradient, DTensor)
            for matrix, part in zip(matrices, gradient.full_tensor().split(len(matrices[0])), strict=True):
                matrix.grad = part
        container.step()
        reference.step()
    for name, weight in weights.items():
        assert isinstance(weight, DTensor)
        expected = torch.cat([matrix.detach() for matrix in alone[name]]) - before[name]
        found = weight.full_tensor().detach() - before[name]
        difference = float((found - expected).norm() / expected.norm())
        assert difference < 0.01, f"{name}: the update differs by {difference:.1%}"
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 4])
def test_each_matrix_moves_as_torchs_muon_moves_it_alone(ranks: int, tmp_path: Path) -> None:
    """Two lanes on four ranks, whose shards cut the matrices of wo, w13 and w2; and heads that share keys."""
    run_ranks(ranks, tmp_path / "log", two_steps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_do_not_depend_on_the_layout(
    layout: str, one_rank: RunDir, tiny_data: Path, tmp_path: Path
) -> None:
    ranks, words = LAYOUTS[layout]
    expected, got = numbers(one_rank), numbers(train(muon(tiny_data, tmp_path, *words, ranks=ranks)))
    assert list(got) == list(expected) == list(range(1, 21))
    for step, values in expected.items():
        assert got[step] == pytest.approx(values, rel=BOUND), f"step {step}"


def test_lanes_are_measured(one_rank: RunDir, two_ranks: RunDir) -> None:
    rows = [list(run.metric_rows("train"))[-1] for run in (one_rank, two_ranks)]
    tags = [tag for tag in rows[0] if tag.endswith("update_ratio")]
    assert len(tags) == 4
    for tag in tags:
        assert rows[0][tag] > 0
        assert rows[1][tag] == pytest.approx(rows[0][tag], rel=1e-3)


@pytest.mark.parametrize("ranks_after", [2, 1, 4])
def test_killed_and_resumed(ranks_after: int, two_ranks: RunDir, tiny_data: Path, tmp_path: Path) -> None:
    """The checkpoint holds the momentum: bitwise the same on two ranks again, and close on others."""
    run = train_and_kill(muon(tiny_data, tmp_path, ranks=2), step_logged(8))
    assert not run.done
    assert run.complete_checkpoints()[-1][0] >= 5
    train(muon(tiny_data, tmp_path, ranks=ranks_after))
    expected, got = numbers(two_ranks), numbers(run)
    assert list(got) == list(range(1, 21))
    if ranks_after == 2:
        assert got == expected
    for step, values in expected.items():
        assert got[step] == pytest.approx(values, rel=BOUND), f"step {step}"


def test_it_is_another_optimizer(one_rank: RunDir, tiny_data: Path, tmp_path: Path) -> None:
    """Differences between layouts are small against that from AdamW."""
    adamw = numbers(train(tiny_config(tiny_data, tmp_path, "train.local_batch_size=4")))
    last = numbers(one_rank)[20][0]
    assert abs(adamw[20][0] / last - 1) > 20 * BOUND
    assert last < 0.7 * numbers(one_rank)[1][0]
