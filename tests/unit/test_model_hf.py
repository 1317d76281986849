"""Released weights that do not fit are refused by name; every layout survives the way out and in."""

from typing import Any

import pytest
import torch

from model.config import LaneformerConfig
from model.hf import from_released, released_shapes, to_released
from model.laneformer import build_model
from tests.unit.test_model_laneformer import VARIANTS, tiny


def released(config: LaneformerConfig) -> dict[str, torch.Tensor]:
    return to_released(build_model(config).state_dict(), config)


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_out_and_in_again(change: dict[str, Any]):
    config = tiny(**change)
    state = build_model(config).state_dict()
    weights = to_released(state, config)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == released_shapes(config)
    assert list(weights) == list(released_shapes(config))
    again = from_released(weights, config)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_released_names_say_which_norms_are_per_lane():
    assert "model.norm.weight" in released_shapes(tiny())
    per_lane = released_shapes(tiny(replicated_rmsn_scale=False))
    assert per_lane["model.norm.scale"] == (4, 32)
    assert per_lane["model.layers.3.ffn_norm.scale"] == (4, 32)
    # The norm of the lanes' sum has one stream.
    summed = released_shapes(tiny(replicated_rmsn_scale=False, pre_norm_lane_agg=True))
    assert summed["model.norm.weight"] == (32,)
    assert released_shapes(tiny(lm_head_type="lane"))["lm_head.linear.weight"] == (32, 128)
    assert released_shapes(tiny(lm_head_type="vocab_parallel"))["lm_head.weight"] == (4, 8, 32)


def test_a_lane_owns_its_rows():
    """Lane l's rows of wqkv are its queries, keys and values, in this order."""
    config = tiny()
    weights = released(config)
    wqkv = from_released(weights, config)["layers.1.attention.wqkv.weight"].view(4, -1, 32)
    for lane in range(4):
        parts = [weights[f"model.layers.1.attention.w{x}.weight"][lane] for x in "qkv"]
        assert torch.equal(wqkv[lane], torch.cat(parts))


def test_every_wrong_tensor_is_named():
    config = tiny()
    weights = released(config)
    del weights["model.layers.2.feed_forward.w3.weight"]
    weights["model.layers.0.attention.bias"] = torch.zeros(1)
    with pytest.raises(ValueError, match="do not fit") as error:
        from_released(weights, config)
    assert "- missing: model.layers.2.feed_forward.w3.weight" in str(error.value)
    assert "- unexpected: model.layers.0.attention.bias" in str(error.value)

    weights = released(config)
    weights["lm_head.weight"] = torch.zeros(32, 16)
    weights["model.norm.weight"] = torch.zeros(4, 32)
    with pytest.raises(ValueError, match="do not fit") as error:
        from_released(weights, config)
    assert "lm_head.weight has shape (32, 16), expected (32, 32)" in str(error.value)
    assert "model.norm.weight has shape (4, 32), expected (32,)" in str(error.value)

    state = dict(build_model(config).state_dict())
    del state["norm.weight"]
    with pytest.raises(ValueError, match=r"missing: norm\.weight"):
        to_released(state, config)
