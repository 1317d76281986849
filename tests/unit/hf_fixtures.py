"""Small models of every kind, as checkpoints and as exported folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data_mixtures.chat import JINJA_TEMPLATE
from model.config import LaneformerConfig
from model.hf_import import write_checkpoint
from model.laneformer import Laneformer, build_model
from tests.architectures import architecture

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "no_delay": {"broadcast_delay": 0},
    "delay_1": {"broadcast_delay": 1},
    "delay_of_all_layers": {"broadcast_delay": 5},
    "early_comm": {"use_early_comm": True},
    "no_attention_comm": {"use_attention_comm": False},
    "no_mlp_comm": {"use_mlp_comm": False},
    "no_comm": {"use_attention_comm": False, "use_mlp_comm": False},
    "lane_head": {"lm_head_type": "lane", "replicated_rmsn_scale": False},
    "vocab_parallel": {"lm_head_type": "vocab_parallel"},
    "lane_norms": {"replicated_rmsn_scale": False},
    "pre_norm": {"pre_norm_lane_agg": True},
    "pre_norm_lane_norms": {"pre_norm_lane_agg": True, "replicated_rmsn_scale": False},
    "no_window": {"sliding_window": None, "swa_layers": ()},
    "all_windowed": {"swa_layers": (0, 1, 2, 3, 4)},
    "window_of_one": {"sliding_window": 1},
    "all_heads": {"num_key_value_heads": 8},
    "tied": {"tie_word_embeddings": True},
    "one_lane": {"num_lanes": 1},
    "one_lane_tied_no_delay": {"num_lanes": 1, "broadcast_delay": 0, "tie_word_embeddings": True},
}


def small_config(variant: str) -> LaneformerConfig:
    return architecture(vocab_size=384, **VARIANTS[variant])


def small_model(variant: str) -> Laneformer:
    """With random norm scales, so that none can be mistaken for another, and logits that tell tokens apart."""
    model = build_model(small_config(variant), init_seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


def small_checkpoint(variant: str, tokenizer: Path, out: Path) -> Laneformer:
    """Write the variant's checkpoint; returns its model."""
    model = small_model(variant)
    template = JINJA_TEMPLATE.read_text(encoding="utf-8")
    extras = {"chat_template.jinja": template}
    write_checkpoint(out, model.sizes, model.state_dict(), tokenizer.read_bytes(), extras)
    return model
