"""One small architecture that tests vary, and the ways in which the Laneformer varies."""

from __future__ import annotations

from typing import Any

from model.config import LaneformerConfig

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "num_lanes": 4,
    "broadcast_delay": 2,
    "use_early_comm": False,
    "use_attention_comm": True,
    "use_mlp_comm": True,
    "lm_head_type": "replicate",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
    "sliding_window": 6,
    "swa_layers": [0, 1, 3],
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def architecture(**change: Any) -> LaneformerConfig:
    """SMALL with some fields changed."""
    return LaneformerConfig.from_dict(SMALL | change)
