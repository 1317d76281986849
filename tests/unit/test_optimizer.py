"""Which parameters shrink, and by exactly how much."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer

from model.laneformer import build_model, empty_model
from tests.benchmarks import quality
from tests.unit.test_estimate import LARGER, check, run_config
from tests.unit.test_model_laneformer import tiny
from train.config import ConfigError, compose
from train.estimate import estimate
from train.titan import muon_matrices, optimizer

LR, DECAY = 0.01, 0.5


@pytest.mark.parametrize(
    ("no_decay", "spared"),
    [
        ("[]", []),
        ("[norms]", ["norm"]),
        ("[embeddings]", ["tok_embeddings"]),
        ("[norms,embeddings]", ["norm", "tok_embeddings"]),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_decay_groups(no_decay: str, spared: list[str], tied: bool):
    """With zero gradients a step of AdamW multiplies what decays by 1 - lr · weight_decay, and nothing else."""
    config = compose(
        [
            "experiment=smoke_phase1",
            f"optim.no_decay={no_decay}",
            f"optim.lr={LR}",
            f"optim.weight_decay={DECAY}",
        ]
    )
    model = build_model(tiny(tie_word_embeddings=tied))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    container = optimizer(config).build(model_parts=[model])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    container.step()
    for name, parameter in model.named_parameters():
        factor = 1.0 if any(part in name for part in spared) else 1 - LR * DECAY
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=0)
    assert len(container.optimizers) == 1


def test_by_default_only_norms_are_spared_and_there_is_no_z_loss():
    optim = compose(["experiment=smoke_phase1"]).optim
    assert (optim.name, optim.no_decay, optim.z_loss) == ("adamw", ("norms",), 0.0)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optim.name=sgd", "optim.name='sgd' must be one of adamw, muon"),
        ("optim.no_decay=[biases]", r"optim.no_decay\[0\]='biases' must be one of norms, embeddings"),
        ("optim.no_decay=[norms,norms]", "optim.no_decay=.* repeats itself"),
        ("optim.z_loss=-1.0", "optim.z_loss=-1.0 must not be negative"),
        ("parallel.loss_chunks=0", "parallel.loss_chunks=0 must be at least 1"),
        ("parallel.loss_chunks=3", "train.seq_len=256 is not a multiple of parallel.loss_chunks=3"),
        (
            "parallel.kernels=triton",
            "parallel.kernels=triton needs cluster.device=cuda, not cpu: use auto or torch",
        ),
        ("parallel.float8=true", "parallel.float8=true needs cluster.device=cuda, not cpu: use false"),
        ("parallel.kernels=cuda", "parallel.kernels='cuda' must be one of auto, triton, torch"),
        (
            "parallel.activation_checkpoint=full",
            "parallel.activation_checkpoint='full' must be none, selective",
        ),
        (
            "parallel.activation_checkpoint=segments:0",
            "parallel.activation_checkpoint='segments:0' must be none",
        ),
    ],
)
def test_wrong_values_are_told(word: str, says: str):
    with pytest.raises(ConfigError, match=says):
        compose(["experiment=smoke_phase1", word])


def test_settings_reach_the_model_and_the_loss(tmp_path: Path):
    """What the configuration says is what torchtitan's trainer is given."""
    from torchtitan.components.loss import ChunkedLossWrapper

    from train.loss import RowCrossEntropy
    from train.run_dir import RunDir
    from train.titan import trainer_config

    config = compose(
        [
            "experiment=smoke_phase1",
            "parallel.activation_checkpoint=segments:3",
            "parallel.kernels=torch",
            "parallel.loss_chunks=8",
            "optim.z_loss=1e-4",
        ]
    )
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    titan: Any = trainer_config(config, run, None)
    settings = {"kernels": "torch", "activation_checkpoint": "segments:3", "float8": False}
    assert titan.model_spec.parallelize_fn.keywords == settings
    assert isinstance(titan.loss, ChunkedLossWrapper.Config)
    assert titan.loss.num_chunks == 8
    assert titan.loss.loss_fn == RowCrossEntropy.Config(z_loss=1e-4)


def test_muon_takes_the_matrices_of_the_layers_and_only_its_name_is_new() -> None:
    adamw, muon = (compose(["experiment=smoke_phase1", f"optim={name}"]) for name in ("adamw", "muon"))
    assert muon.optim == replace(adamw.optim, name="muon")
    matrices, *others = optimizer(muon).param_groups
    assert others == optimizer(adamw).param_groups
    names = [name for name, _ in build_model(tiny()).named_parameters()]
    taken = [name for name in names if re.search(matrices.pattern, name)]
    assert taken == [name for name in names if name.startswith("layers.") and "norm" not in name]


@pytest.mark.parametrize("no_decay", ["[]", "[norms]", "[embeddings]", "[norms,embeddings]"])
@pytest.mark.parametrize("tied", ["false", "true"])
def test_muon_leaves_the_decay_of_the_rest_as_it_is(no_decay: str, tied: str) -> None:
    """Also where nothing is left to decay: torchtitan refuses a group without parameters."""
    words = ["experiment=smoke_phase1", f"optim.no_decay={no_decay}", f"model.tie_word_embeddings={tied}"]
    model = build_model(tiny(tie_word_embeddings=tied == "true"))
    decay: list[dict[str, float]] = []
    for name in ("adamw", "muon"):
        groups = optimizer(compose([*words, f"optim={name}"])).param_groups
        built, _ = OptimizersContainer._build_param_groups(model, groups, {})
        found = [group for of_one in built.values() for group in of_one]
        decay.append({name: group["weight_decay"] for group in found for name in group["param_names"]})
    assert decay[0] == decay[1]


@pytest.mark.parametrize("words", [("experiment=phase1",), ("experiment=smoke_phase1", "model=smoke_dense")])
def test_muons_matrices_by_their_shapes(words: tuple[str, ...]) -> None:
    """Every weight is cut into whole matrices, no lane shares one, and w13's halves are apart."""
    sizes = compose([*words, "optim=muon"]).model
    weights = dict(empty_model(sizes, torch.float32, torch.device("meta")).named_parameters())
    found = muon_matrices(sizes)
    assert len(found["compute_sharding_by_fqn"]) == 4 * sizes.num_hidden_layers
    for name, layout in found["compute_sharding_by_fqn"].items():
        rows, kind = weights[name].shape[0], name.split(".")[-2]
        heads = sizes.num_attention_heads + 2 * sizes.num_key_value_heads
        matrices = {"wqkv": heads, "w13": 2 * sizes.num_lanes}.get(kind, sizes.num_lanes)
        assert rows == matrices * layout.shardings_by_mesh_axis["fsdp"].block_size


def test_muon_keeps_one_moment_of_the_layers_matrices(tiny_data: Path, tmp_path: Path) -> None:
    """The 2b size: 15 layers with queries and output, keys and values, and SwiGLU's three. And a measured peak."""
    config = compose(["experiment=phase1", "optim=muon"])
    matrices = 15 * (2 * 3072 * 3072 + 2 * 1536 * 3072 + 3 * 12288 * 3072)
    assert estimate(config).optimizer == (8 * 2_320_069_632 - 4 * matrices) // 192
    assert config.checkpoint_bytes == 12 * 2_320_069_632 - 4 * matrices
    check(run_config(tiny_data, tmp_path, *LARGER, "optim=muon"))


def test_quality_compares_optimizers_each_at_its_best_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """The rate is chosen on the first seed alone; differences are those of seeds."""
    calls = []

    def loss(variant: quality.Variant, seed: int) -> float:
        name, rate = variant.name.split()
        calls.append((name, float(rate), seed))
        best = {"adamw": 3e-3, "muon": 6e-3}[name]
        return 5 + abs(float(rate) - best) + (name == "adamw") * (1 + seed) / 10

    rows = quality.compare_optimizers(loss, [0, 1])
    assert [(row["variant"], row["learning_rate"]) for row in rows] == [("adamw", 3e-3), ("muon", 6e-3)]
    assert rows[1]["over_adamw"] == pytest.approx(-0.15)
    assert [call for call in calls if call[2] == 1] == [("adamw", 3e-3, 1), ("muon", 6e-3, 1)]
    assert "muon, seed 0: 5.0030 at 0.003" in capsys.readouterr().out
    config = quality.configuration(quality.optimizer_variant("muon", 6e-3), 1, 8192, Path("runs"), ())
    assert (config.optim.name, config.optim.lr, config.model.broadcast_delay) == ("muon", 6e-3, 2)
