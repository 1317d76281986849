"""Logits of released-format weights against an independent float64 implementation's, case by case."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from model.config import LaneformerConfig
from model.hf import from_released, to_released
from model.laneformer import empty_model

CASES = sorted(path.stem for path in Path(__file__).parent.glob("*.npz"))


def load_case(name: str) -> tuple[LaneformerConfig, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The configuration, the released weights, and the other arrays (input_ids, logits, maybe positions)."""
    path = Path(__file__).parent / f"{name}.npz"
    config = LaneformerConfig.from_dict(json.loads(path.with_suffix(".json").read_text()))
    arrays = {key: torch.from_numpy(value) for key, value in np.load(path).items()}
    weights = {key.removeprefix("weights/"): value for key, value in arrays.items() if "/" in key}
    return config, weights, {key: value for key, value in arrays.items() if "/" not in key}


def test_all_cases_are_here():
    assert len(CASES) == 6


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_logits(name: str, dtype: torch.dtype, tolerance: float):
    config, weights, arrays = load_case(name)
    model = empty_model(config, dtype, "cpu")
    model.load_state_dict(from_released(weights, config))
    with torch.no_grad():
        logits = model(arrays["input_ids"], arrays.get("positions"))
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.double(), arrays["logits"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_released_weights_survive_the_round_trip(name: str):
    config, weights, _ = load_case(name)
    again = to_released(from_released(weights, config), config)
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[key], weights[key]) for key in weights)
