"""Which parameters shrink, and by exactly how much."""

from pathlib import Path
from typing import Any

import pytest
import torch

from model.laneformer import build_model
from tests.unit.test_model_laneformer import tiny
from train.config import ConfigError, compose
from train.titan import optimizer

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
    assert (optim.no_decay, optim.z_loss) == (("norms",), 0.0)


@pytest.mark.parametrize(
    ("word", "says"),
    [
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
