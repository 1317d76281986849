"""The model against the slow reference in float64: logits for every variant, and gradients for some."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from model.config import LaneformerConfig
from model.hf import from_released, released_shapes, to_released
from model.laneformer import Laneformer, empty_model
from tests.golden.reference import reference_logits

BASE: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "num_lanes": 4,
    "broadcast_delay": 1,
    "use_early_comm": False,
    "use_attention_comm": True,
    "use_mlp_comm": True,
    "lm_head_type": "replicate",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
    "sliding_window": 3,
    "swa_layers": [0, 2],
    "rope_theta": 100.0,
    "norm_eps": 1e-3,  # large enough to be missed if it were left out
    "max_position_embeddings": 12,
    "tie_word_embeddings": False,
}
PACKED = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])

EXCHANGES = [
    {
        "num_lanes": lanes,
        "broadcast_delay": d,
        "use_early_comm": e,
        "use_attention_comm": a,
        "use_mlp_comm": m,
    }
    for lanes, d, e, a, m in itertools.product([1, 2, 4], range(4), *[[False, True]] * 3)
]
HEADS = [
    {"lm_head_type": "lane"},
    {"lm_head_type": "vocab_parallel"},
    {"pre_norm_lane_agg": True},
    {"tie_word_embeddings": True},
    {"pre_norm_lane_agg": True, "tie_word_embeddings": True},
    {},
]
OTHERS = [
    {"sliding_window": None, "swa_layers": []},
    {"sliding_window": 1, "swa_layers": [0, 1, 2]},
    {"sliding_window": 8, "swa_layers": [0, 1]},
    {"num_key_value_heads": 8},
    {"num_attention_heads": 4, "num_key_value_heads": 4},
    {"num_lanes": 2, "num_key_value_heads": 2},
]
VARIANTS = [
    *EXCHANGES,
    *[
        {**h, "replicated_rmsn_scale": r, "num_lanes": n}
        for h in HEADS
        for r in (True, False)
        for n in (1, 2, 4)
    ],
    *OTHERS,
]


def label(change: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in change.items()) or "base"


def random_weights(config: LaneformerConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Released weights large enough that every path shows in the logits; norm scales differ from 1."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in released_shapes(config).items():
        if "norm" in name:
            weights[name] = rng.uniform(0.5, 1.5, shape)
        else:
            weights[name] = rng.normal(0, 1.5 * shape[-1] ** -0.5, shape)
    return weights


def loaded(config: LaneformerConfig, weights: dict[str, np.ndarray]) -> Laneformer:
    model = empty_model(config, torch.float64, "cpu")
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    model.load_state_dict(from_released(tensors, config))
    return model


def token_ids(config: LaneformerConfig) -> np.ndarray:
    return np.random.default_rng(1).integers(0, config.vocab_size, PACKED.shape)


@pytest.mark.parametrize("change", VARIANTS, ids=label)
def test_logits(change: dict[str, Any]):
    config = LaneformerConfig.from_dict({**BASE, **change})
    weights, ids = random_weights(config), token_ids(config)
    model = loaded(config, weights)
    with torch.no_grad():
        packed = model(torch.from_numpy(ids), torch.from_numpy(PACKED))
        whole = model(torch.from_numpy(ids[:1]))
    np.testing.assert_allclose(packed, reference_logits(config, weights, ids, PACKED), rtol=0, atol=1e-11)
    np.testing.assert_allclose(whole, reference_logits(config, weights, ids[:1]), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {
            "broadcast_delay": 2,
            "use_early_comm": True,
            "replicated_rmsn_scale": False,
            "lm_head_type": "lane",
        },
        {"num_lanes": 2, "use_mlp_comm": False, "lm_head_type": "vocab_parallel"},
        {"num_lanes": 1, "broadcast_delay": 0, "tie_word_embeddings": True},
    ],
    ids=label,
)
def test_gradients(change: dict[str, Any]):
    """Autograd's slope of a loss along a random direction in each weight, against the reference's difference."""
    config = LaneformerConfig.from_dict({**BASE, **change})
    weights, ids = random_weights(config), token_ids(config)[1:2]
    rng = np.random.default_rng(2)
    mix = rng.normal(size=(1, ids.shape[1], config.vocab_size))
    model = loaded(config, weights)
    (model(torch.from_numpy(ids), torch.from_numpy(PACKED[1:2])) * torch.from_numpy(mix)).sum().backward()
    gradients = {
        name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None
    }
    for name, gradient in to_released(gradients, config).items():
        assert gradient.abs().max() > 1e-3, name
        direction = rng.normal(size=gradient.shape)

        def loss(step: float, name: str = name, direction: np.ndarray = direction) -> float:
            moved = {**weights, name: weights[name] + step * direction}
            return (reference_logits(config, moved, ids, PACKED[1:2]) * mix).sum()

        h = 1e-4  # the error of this difference is of order h⁴
        slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
        assert (gradient.numpy() * direction).sum() == pytest.approx(slope, rel=1e-7, abs=1e-8), name
