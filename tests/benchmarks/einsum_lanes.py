"""The Laneformer in the form in which such models are published for `transformers`: what ours is measured against.

As there, activations are (B, S, L, D), every projection is an einsum with a weight of its own, rotations are complex,
keys and values are repeated for their groups, attention is two products with a float32 softmax of the whole scores in
between, norms are torch's, and partial outputs travel in lists. Two things are spared here: masks are made once for
all layers, and there is no cache. Written for the benchmark alone; tests/unit/test_bench_train.py holds its logits and
gradients against ours.

Shape suffixes: B batch   S sequence   L lanes   D width   N query heads   K key/value heads   E head width
  H half the head width
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from model.config import Kind, LaneformerConfig
from model.laneformer import Laneformer


def turn(x_BSNE: torch.Tensor, rotation_S1H: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x_BSNE.float().reshape(*x_BSNE.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation_S1H).flatten(-2).type_as(x_BSNE)


def repeat(x_BSKE: torch.Tensor, times: int) -> torch.Tensor:
    batch, seq, heads, width = x_BSKE.shape
    return x_BSKE[:, :, :, None].expand(-1, -1, -1, times, -1).reshape(batch, seq, heads * times, width)


def hidden(age_SS: torch.Tensor, window: int | None) -> torch.Tensor:
    """0 where a key of that age is seen, else −inf."""
    sees = age_SS >= 0 if window is None else (age_SS >= 0) & (age_SS < window)
    return torch.zeros(age_SS.shape).masked_fill(~sees, -torch.inf)


class EinsumBlock(nn.Module):
    def __init__(self, config: LaneformerConfig, layer: int):
        super().__init__()
        lanes, width, head = config.num_lanes, config.hidden_size, config.head_dim
        keys, hidden = config.num_key_value_heads * head // lanes, config.intermediate_size // lanes
        self.config, self.layer = config, layer
        self.attention_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(width, eps=config.norm_eps)
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
        rotation_S1H: torch.Tensor,
        mask_SS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attention = self.attend(self.attention_norm(x_BSLD), rotation_S1H, mask_SS)
        x_BSLD = x_BSLD + self.exchange("attention", attention, past[0])
        normed = self.ffn_norm(x_BSLD)
        gate = F.silu(torch.einsum("bsld,lfd->bslf", normed, self.w1))
        value = torch.einsum("bsld,lfd->bslf", normed, self.w3)
        mlp = torch.einsum("bslf,ldf->bsld", gate * value, self.w2)
        return x_BSLD + self.exchange("mlp", mlp, past[1]), attention, mlp

    def attend(self, x_BSLD: torch.Tensor, rotation_S1H: torch.Tensor, mask_SS: torch.Tensor) -> torch.Tensor:
        batch, seq, lanes, _ = x_BSLD.shape
        q, k, v = (
            torch.einsum("bsld,lod->bslo", x_BSLD, weight).reshape(batch, seq, -1, self.config.head_dim)
            for weight in (self.wq, self.wk, self.wv)
        )
        q, k = turn(q, rotation_S1H), turn(k, rotation_S1H)
        groups = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, repeat(k, groups), repeat(v, groups)))
        scores_BNSS = torch.matmul(q, k.transpose(2, 3)) * self.config.head_dim**-0.5 + mask_SS
        heads = torch.matmul(F.softmax(scores_BNSS, dim=-1, dtype=torch.float32).to(q.dtype), v)
        joined = heads.transpose(1, 2).contiguous().view(batch, seq, lanes, -1)
        return torch.einsum("bslo,ldo->bsld", joined, self.wo)

    def exchange(self, kind: Kind, own_BSLD: torch.Tensor, past_BSLD: torch.Tensor | None) -> torch.Tensor:
        mode = self.config.exchange(self.layer, kind)
        if mode == "sum":
            return own_BSLD.sum(2, keepdim=True).expand_as(own_BSLD)
        if mode == "local":
            return own_BSLD * self.config.num_lanes**0.5
        assert past_BSLD is not None
        return own_BSLD + (past_BSLD.sum(2, keepdim=True) - past_BSLD)


class EinsumLaneformer(nn.Module):
    """Takes tokens (B, S) of one document a row; gives logits (B, S, V). For replicated heads and scales only."""

    def __init__(self, config: LaneformerConfig):
        super().__init__()
        assert config.lm_head_type == "replicate"
        assert config.replicated_rmsn_scale
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(EinsumBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        config, seq = self.config, tokens_BS.shape[1]
        position = torch.arange(seq)
        rates = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles_S1H = (position[:, None] * rates)[:, None]
        rotation_S1H = torch.polar(torch.ones_like(angles_S1H), angles_S1H)
        age_SS = position[:, None] - position[None, :]
        masks = {
            window: hidden(age_SS, window) for window in {config.window(i) for i in range(len(self.layers))}
        }
        x_BSLD = self.embed(tokens_BS)[:, :, None].expand(-1, -1, config.num_lanes, -1)
        partials: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i, layer in enumerate(self.layers):
            early = i - config.broadcast_delay
            past = partials[early] if 0 <= early < i else (None, None)
            x_BSLD, attention, mlp = layer(x_BSLD, past, rotation_S1H, masks[config.window(i)])
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
