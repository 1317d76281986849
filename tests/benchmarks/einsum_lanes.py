"""The Laneformer in the form in which such models are published for `transformers`: what ours is measured against.

Activations are (B, S, L, D), every projection is an einsum with a weight of its own, norms compute in float32 by
separate operations, and partial outputs travel in lists. Written for the benchmark alone, from the architecture's
description; tests/unit/test_bench_train.py holds its logits and gradients against ours.

Shape suffixes: B batch   S sequence   L lanes   D width   N query heads   K key/value heads   E head width
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from model.config import Kind, LaneformerConfig
from model.laneformer import Laneformer


class EinsumNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def turn(x_BSNE: torch.Tensor, cos_SH: torch.Tensor, sin_SH: torch.Tensor) -> torch.Tensor:
    even, odd = x_BSNE[..., 0::2], x_BSNE[..., 1::2]
    cos, sin = cos_SH[:, None], sin_SH[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class EinsumBlock(nn.Module):
    def __init__(self, config: LaneformerConfig, layer: int):
        super().__init__()
        lanes, width, head = config.num_lanes, config.hidden_size, config.head_dim
        keys, hidden = config.num_key_value_heads * head // lanes, config.intermediate_size // lanes
        self.config, self.layer = config, layer
        self.attention_norm = EinsumNorm(width, config.norm_eps)
        self.ffn_norm = EinsumNorm(width, config.norm_eps)
        self.wq = nn.Parameter(torch.empty(lanes, width // lanes, width))
        self.wk = nn.Parameter(torch.empty(lanes, keys, width))
        self.wv = nn.Parameter(torch.empty(lanes, keys, width))
        self.wo = nn.Parameter(torch.empty(lanes, width, width // lanes))
        self.w1 = nn.Parameter(torch.empty(lanes, hidden, width))
        self.w3 = nn.Parameter(torch.empty(lanes, hidden, width))
        self.w2 = nn.Parameter(torch.empty(lanes, width, hidden))

    def forward(
        self,
        x_BSLD: torch.Tensor,
        past: tuple[torch.Tensor | None, torch.Tensor | None],
        cos_SH: torch.Tensor,
        sin_SH: torch.Tensor,
        mask_SS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attention = self.attend(self.attention_norm(x_BSLD), cos_SH, sin_SH, mask_SS)
        x_BSLD = x_BSLD + self.exchange("attention", attention, past[0])
        normed = self.ffn_norm(x_BSLD)
        gate = F.silu(torch.einsum("bsld,lfd->bslf", normed, self.w1))
        value = torch.einsum("bsld,lfd->bslf", normed, self.w3)
        mlp = torch.einsum("bslf,ldf->bsld", gate * value, self.w2)
        return x_BSLD + self.exchange("mlp", mlp, past[1]), attention, mlp

    def attend(
        self, x_BSLD: torch.Tensor, cos_SH: torch.Tensor, sin_SH: torch.Tensor, mask_SS: torch.Tensor
    ) -> torch.Tensor:
        batch, seq, lanes, _ = x_BSLD.shape
        q, k, v = (
            torch.einsum("bsld,lod->bslo", x_BSLD, weight).reshape(batch, seq, -1, self.config.head_dim)
            for weight in (self.wq, self.wk, self.wv)
        )
        q, k = turn(q, cos_SH, sin_SH), turn(k, cos_SH, sin_SH)
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        heads = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask_SS
        )
        joined = heads.transpose(1, 2).reshape(batch, seq, lanes, -1)
        return torch.einsum("bslo,ldo->bsld", joined, self.wo)

    def exchange(self, kind: Kind, own_BSLD: torch.Tensor, past_BSLD: torch.Tensor | None) -> torch.Tensor:
        mode = self.config.exchange(self.layer, kind)
        if mode == "sum":
            return own_BSLD.sum(2, keepdim=True).expand_as(own_BSLD)
        if mode == "local":
            return own_BSLD * self.config.num_lanes**0.5
        assert past_BSLD is not None
        return own_BSLD + past_BSLD.sum(2, keepdim=True) - past_BSLD


class EinsumLaneformer(nn.Module):
    """Takes tokens (B, S) of one document a row; gives logits (B, S, V). For replicated heads and scales only."""

    def __init__(self, config: LaneformerConfig):
        super().__init__()
        assert config.lm_head_type == "replicate"
        assert config.replicated_rmsn_scale
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(EinsumBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = EinsumNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        config, seq = self.config, tokens_BS.shape[1]
        position = torch.arange(seq)
        rates = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles_SH = position[:, None] * rates
        cos_SH, sin_SH = angles_SH.cos(), angles_SH.sin()
        age_SS = position[:, None] - position[None, :]
        x_BSLD = self.embed(tokens_BS)[:, :, None].repeat(1, 1, config.num_lanes, 1)
        partials: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i, layer in enumerate(self.layers):
            window = config.window(i) or seq
            mask_SS = (age_SS >= 0) & (age_SS < window)
            early = i - config.broadcast_delay
            past = partials[early] if 0 <= early < i else (None, None)
            x_BSLD, attention, mlp = layer(x_BSLD, past, cos_SH, sin_SH, mask_SS)
            partials.append((attention, mlp))
        return self.lm_head(self.norm(x_BSLD).mean(2))

    @torch.no_grad()
    def load(self, model: Laneformer) -> EinsumLaneformer:
        """Take the weights of ours."""
        self.embed.weight.copy_(model.tok_embeddings.weight)
        self.norm.weight.copy_(model.norm.weight)
        self.lm_head.weight.copy_(model.lm_head.weight)
        lanes, width = self.config.num_lanes, self.config.hidden_size
        layers: Any = zip(self.layers, model.layers.values(), strict=True)
        for block, ours in layers:
            rows = (block.wq.shape[1], block.wk.shape[1], block.wv.shape[1])
            wqkv = ours.attention.wqkv.weight.view(lanes, -1, width).split(rows, dim=1)
            w13 = ours.feed_forward.w13.weight.view(lanes, -1, width).chunk(2, dim=1)
            wo, w2 = ours.attention.wo.weight, ours.feed_forward.w2.weight
            theirs = (block.wq, block.wk, block.wv, block.w1, block.w3, block.wo, block.w2)
            parts = (*wqkv, *w13, wo.view_as(block.wo), w2.view_as(block.w2))
            for parameter, part in zip(theirs, parts, strict=True):
                parameter.copy_(part)
            block.attention_norm.weight.copy_(ours.attention_norm.weight)
            block.ffn_norm.weight.copy_(ours.ffn_norm.weight)
        return self
