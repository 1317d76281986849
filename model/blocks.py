"""The layers of a Laneformer: linear maps, norm, attention and SwiGLU of each lane, and the block of one layer.

Activations are lane-major, (L, T, D), so that every linear map is one batched matrix multiplication. Each
weight is one two-dimensional parameter (L·out, in), lane after lane, which fully_shard cuts evenly at any
world size. The rows of lane l are [queries; keys; values] in wqkv and [w1; w3] in w13.

Where a block begins and ends is chosen for speed. Adding partial outputs to the residual and the norm that
follows read and write the same wide tensors, so they belong together; and what follows a SwiGLU is the next
layer's attention norm. A block therefore leaves its SwiGLU output unadded, and the next block begins by adding
it. Only the last block adds its own.

Shape suffixes:
  L lanes   B batch   S sequence   T = B·S tokens   D hidden width
  N query heads   K key/value heads   E head width   H half the head width   O a linear map's outputs per lane
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torchtitan.models.common.attention import BaseAttention, FlexAttention
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module

from model.add_norm_linear import add_norm_linear
from model.config import Exchange, LaneformerConfig
from model.float8 import float8_lane_matmul
from model.lanes import heads_first, increment, lane_matmul, lanes_first, rms_norm, rotate
from model.masks import Mask
from model.recompute import recomputed


class LaneLinear(Module):
    """One linear map per lane: (L, T, in) → (L, T, out)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_lanes: int
        in_features: int
        out_features: int

    float8 = False
    """Whether products are of float8 numbers; see model/float8.py."""

    def __init__(self, config: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_lanes * config.out_features, config.in_features))

    def forward(self, x_LTI: torch.Tensor) -> torch.Tensor:
        if self.float8:
            return float8_lane_matmul(x_LTI, self.weight)
        return lane_matmul(x_LTI, self.weight)


class LaneNorm(RMSNorm):
    """RMS norm of each lane, with one scale (D,) or, for num_scales = L, one per lane (L·D,)."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        num_scales: int

    def __init__(self, config: Config):
        super().__init__(config)
        self.norm_eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.num_scales * config.normalized_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.norm_eps)


def _linear(sizes: LaneformerConfig, inputs: int, outputs: int) -> LaneLinear:
    return LaneLinear.Config(num_lanes=sizes.num_lanes, in_features=inputs, out_features=outputs).build()


def _norm(sizes: LaneformerConfig) -> LaneNorm:
    num_scales = 1 if sizes.replicated_rmsn_scale else sizes.num_lanes
    return LaneNorm.Config(
        normalized_shape=sizes.hidden_size, eps=sizes.norm_eps, num_scales=num_scales
    ).build()


class MaskedAttention(FlexAttention):
    """Attention under a mask: flex for a BlockMask, else fused attention with a tensor (B, 1, S, S).

    Head n of N reads key/value head n // (N / K), which lies in the same lane.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q_BNSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask: Mask | None
    ) -> torch.Tensor:
        grouped = q_BNSE.shape[1] != k_BKSE.shape[1]
        if not isinstance(mask, BlockMask):
            return F.scaled_dot_product_attention(q_BNSE, k_BKSE, v_BKSE, attn_mask=mask, enable_gqa=grouped)
        out_BNSE, _ = FlexAttention.compiled_flex_attn(
            q_BNSE,
            k_BKSE,
            v_BKSE,
            score_mod=None,
            block_mask=mask,
            scale=None,
            enable_gqa=grouped,
            return_aux=AuxRequest(lse=False),
            kernel_options=self.kernel_options,
        )
        return out_BNSE


class LaneAttention(BaseAttention):
    """Grouped-query attention within lanes: wqkv's projections (L, T, O) → partial outputs (L, T, D).

    The block applies wqkv, together with the norm before it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        sizes: LaneformerConfig

    def __init__(self, config: Config):
        super().__init__()
        sizes = config.sizes
        self.num_lanes = sizes.num_lanes
        self.head_dim = sizes.head_dim
        queries = sizes.hidden_size // sizes.num_lanes
        keys = sizes.num_key_value_heads * sizes.head_dim // sizes.num_lanes
        self.split = (queries, keys, keys)
        self.wqkv = _linear(sizes, sizes.hidden_size, sum(self.split))
        self.wo = _linear(sizes, queries, sizes.hidden_size)
        self.inner_attention = config.inner_attention.build()

    def forward(
        self, qkv_LTO: torch.Tensor, cos_BSH: torch.Tensor, sin_BSH: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        batch = cos_BSH.shape[0]
        q, k, v = (heads_first(x, batch, self.head_dim) for x in qkv_LTO.split(self.split, dim=-1))
        cos, sin = cos_BSH[:, None, None], sin_BSH[:, None, None]
        q_BNSE = rotate(q, cos, sin).flatten(1, 2)
        k_BKSE = rotate(k, cos, sin).flatten(1, 2)
        v_BKSE = v.flatten(1, 2)
        return self.wo(lanes_first(self.inner_attention(q_BNSE, k_BKSE, v_BKSE, mask), self.num_lanes))


class LaneFeedForward(Module):
    """SwiGLU within lanes: w13's projections (L, T, O) → partial outputs (L, T, D).

    The block applies w13, together with the norm before it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        sizes: LaneformerConfig

    def __init__(self, config: Config):
        super().__init__()
        sizes = config.sizes
        hidden = sizes.intermediate_size // sizes.num_lanes
        self.w13 = _linear(sizes, sizes.hidden_size, 2 * hidden)
        self.w2 = _linear(sizes, hidden, sizes.hidden_size)

    def forward(self, projected_LTO: torch.Tensor) -> torch.Tensor:
        gate, value = projected_LTO.chunk(2, dim=-1)
        return self.w2(F.silu(gate) * value)


class LaneBlock(Module):
    """One layer: attention and SwiGLU, each added to the residual streams by its kind of exchange."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        sizes: LaneformerConfig
        layer: int
        attention: LaneAttention.Config
        """A field of its own because the trainer looks here for how to mask."""

    fused = False
    """Whether adding and norm run as one kernel for GPUs, rather than as what torch makes of them."""
    recompute = False
    """Whether backward computes SwiGLU products again; see model/recompute.py."""

    def __init__(self, config: Config):
        super().__init__()
        sizes, layer = config.sizes, config.layer
        self.attention_norm = _norm(sizes)
        self.attention = config.attention.build()
        self.ffn_norm = _norm(sizes)
        self.feed_forward = LaneFeedForward.Config(sizes=sizes).build()
        self.previous_exchange: Exchange | None = sizes.exchange(layer - 1, "mlp") if layer else None
        self.attention_exchange: Exchange = sizes.exchange(layer, "attention")
        self.attention_awaited = sizes.is_awaited(layer, "attention")
        self.mlp_awaited = sizes.is_awaited(layer, "mlp")
        last = layer == sizes.num_hidden_layers - 1
        self.last_exchange: Exchange | None = sizes.exchange(layer, "mlp") if last else None

    def forward(
        self,
        x_LTD: torch.Tensor,
        previous_mlp_LTD: torch.Tensor | None,
        awaited_previous_LTD: torch.Tensor | None,
        awaited_attention_LTD: torch.Tensor | None,
        awaited_mlp_LTD: torch.Tensor | None,
        cos_BSH: torch.Tensor,
        sin_BSH: torch.Tensor,
        mask: Mask,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns the residual streams, and the partial outputs of attention and of SwiGLU.

        previous_mlp are those that the layer before has left unadded (None if it has not), and awaited_previous
        those that arrive with them. awaited_attention arrive in this layer; awaited_mlp do too,
        and are given to the last layer only, which returns all streams complete and no partial outputs. The
        attention's are None where no later layer awaits them.
        """
        x_LTD, qkv_LTO = self._project(
            x_LTD,
            previous_mlp_LTD,
            awaited_previous_LTD,
            self.previous_exchange,
            self.attention_norm,
            self.attention.wqkv,
        )
        attention_LTD = self.attention(qkv_LTO, cos_BSH, sin_BSH, mask)
        x_LTD, projected_LTO = self._project(
            x_LTD,
            attention_LTD,
            awaited_attention_LTD,
            self.attention_exchange,
            self.ffn_norm,
            self.feed_forward.w13,
        )
        if self.recompute:
            mlp_LTD = recomputed(self.feed_forward, projected_LTO)
        else:
            mlp_LTD = self.feed_forward(projected_LTO)
        if self.last_exchange is not None:
            return x_LTD + increment(self.last_exchange, mlp_LTD, awaited_mlp_LTD), None, None
        return x_LTD, attention_LTD if self.attention_awaited else None, mlp_LTD

    def _project(
        self,
        x_LTD: torch.Tensor,
        own_LTD: torch.Tensor | None,
        awaited_LTD: torch.Tensor | None,
        exchange: Exchange | None,
        norm: LaneNorm,
        linear: LaneLinear,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add partial outputs, if there are any; returns the new residual and a linear map of its norm."""
        return add_norm_linear(
            x_LTD,
            own_LTD,
            awaited_LTD,
            norm.weight,
            linear.weight,
            exchange,
            norm.norm_eps,
            fused=self.fused,
            float8=linear.float8,
        )
