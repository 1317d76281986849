"""The Laneformer on one device, as a TorchTitan model.

Activations are lane-major, (L, T, D), so that every linear map is one batched matrix multiplication. Each
weight is one two-dimensional parameter (L·out, in), lane after lane, which fully_shard cuts evenly at any
world size. The rows of lane l are [queries; keys; values] in wqkv and [w1; w3] in w13. Released names and
shapes exist only in model/hf.py; initial weights are in model/initialisation.py, masks in model/masks.py, and
the mathematics that decoding shares in model/lanes.py.

A block takes the residual streams and the two partial outputs (attention, SwiGLU) that reach it from `delay`
layers earlier. It returns the streams and its own two partials, or None for one that no later layer awaits.
The model keeps those under way in a queue of `delay` entries. Nothing else passes between blocks, so
activation checkpointing, compilation and FSDP apply to each block by itself.

Shape suffixes:
  L lanes   B batch   S sequence   T = B·S tokens   D hidden width   V vocabulary
  N query heads   K key/value heads   E head width   H half the head width   O a linear map's outputs per lane
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torchtitan.models.common.attention import BaseAttention, FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module

from model.config import Exchange, LaneformerConfig
from model.initialisation import initialise
from model.kv_cache import LayerCache
from model.lanes import (
    heads_first,
    increment,
    lane_matmul,
    lanes_first,
    rms_norm,
    rotary_table,
    rotate,
)
from model.masks import Mask, attention_masks

Partials = tuple[torch.Tensor | None, torch.Tensor | None]  # of attention and SwiGLU


class LaneLinear(Module):
    """One linear map per lane: (L, T, in) → (L, T, out)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_lanes: int
        in_features: int
        out_features: int

    def __init__(self, config: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_lanes * config.out_features, config.in_features))

    def forward(self, x_LTI: torch.Tensor) -> torch.Tensor:
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


class FinalNorm(LaneNorm):
    """Normalise the lanes and bring them together for the head: (L, T, D) → (T, D), or (T, L·D) if joined."""

    @dataclass(kw_only=True, slots=True)
    class Config(LaneNorm.Config):
        sum_first: bool
        """Normalise the lanes' sum, instead of averaging what each lane's norm gives."""
        join: bool
        """Lay the lanes' states side by side, for the heads that work on lanes."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.sum_first = config.sum_first
        self.join = config.join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sum_first:
            return LaneNorm.forward(self, x.sum(0, keepdim=True))[0]
        normed_LTD = LaneNorm.forward(self, x)
        if self.join:
            return normed_LTD.transpose(0, 1).flatten(1)
        return normed_LTD[0] if normed_LTD.shape[0] == 1 else normed_LTD.mean(0)


def _linear(sizes: LaneformerConfig, inputs: int, outputs: int) -> LaneLinear:
    return LaneLinear.Config(num_lanes=sizes.num_lanes, in_features=inputs, out_features=outputs).build()


def _norm(sizes: LaneformerConfig) -> LaneNorm:
    num_scales = 1 if sizes.replicated_rmsn_scale else sizes.num_lanes
    return LaneNorm.Config(
        normalized_shape=sizes.hidden_size, eps=sizes.norm_eps, num_scales=num_scales
    ).build()


class VocabParallelHead(LaneLinear):
    """Lane l's state gives the l-th slice of the vocabulary: (B, S, L·D) → (B, S, V)."""

    @dataclass(kw_only=True, slots=True)
    class Config(LaneLinear.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self.num_lanes = config.num_lanes

    def forward(self, x_BSI: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        batch, seq, _ = x_BSI.shape
        x_LTD = x_BSI.reshape(batch * seq, self.num_lanes, -1).transpose(0, 1)
        return lane_matmul(x_LTD, self.weight).transpose(0, 1).reshape(batch, seq, -1)


class MaskedAttention(FlexAttention):
    """Attention under a mask: flex for a BlockMask, else fused attention with a boolean (B, 1, S, S).

    When decoding, a layer's cache stands in the mask's place: it takes in the new keys and values and says what
    the queries see. Head n of N reads key/value head n // (N / K), which lies in the same lane.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q_BNSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask: Mask | LayerCache | None
    ) -> torch.Tensor:
        if isinstance(mask, LayerCache):
            k_BKSE, v_BKSE, mask = mask.extend(k_BKSE, v_BKSE)
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
    """Grouped-query attention within lanes: normed states (L, T, D) → partial outputs (L, T, D)."""

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
        self, x_LTD: torch.Tensor, cos_BSH: torch.Tensor, sin_BSH: torch.Tensor, mask: Mask | LayerCache
    ) -> torch.Tensor:
        batch = cos_BSH.shape[0]
        q, k, v = (heads_first(x, batch, self.head_dim) for x in self.wqkv(x_LTD).split(self.split, dim=-1))
        cos, sin = cos_BSH[:, None, None], sin_BSH[:, None, None]
        q_BNSE = rotate(q, cos, sin).flatten(1, 2)
        k_BKSE = rotate(k, cos, sin).flatten(1, 2)
        v_BKSE = v.flatten(1, 2)
        return self.wo(lanes_first(self.inner_attention(q_BNSE, k_BKSE, v_BKSE, mask), self.num_lanes))


class LaneFeedForward(Module):
    """SwiGLU within lanes: normed states (L, T, D) → partial outputs (L, T, D)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        sizes: LaneformerConfig

    def __init__(self, config: Config):
        super().__init__()
        sizes = config.sizes
        hidden = sizes.intermediate_size // sizes.num_lanes
        self.w13 = _linear(sizes, sizes.hidden_size, 2 * hidden)
        self.w2 = _linear(sizes, hidden, sizes.hidden_size)

    def forward(self, x_LTD: torch.Tensor) -> torch.Tensor:
        gate, value = self.w13(x_LTD).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * value)


class LaneBlock(Module):
    """One layer: attention and SwiGLU, each added to the residual streams by its kind of exchange."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        sizes: LaneformerConfig
        layer: int
        attention: LaneAttention.Config
        """A field of its own because the trainer looks here for how to mask."""

    def __init__(self, config: Config):
        super().__init__()
        sizes, layer = config.sizes, config.layer
        self.attention_norm = _norm(sizes)
        self.attention = config.attention.build()
        self.ffn_norm = _norm(sizes)
        self.feed_forward = LaneFeedForward.Config(sizes=sizes).build()
        self.attention_exchange: Exchange = sizes.exchange(layer, "attention")
        self.mlp_exchange: Exchange = sizes.exchange(layer, "mlp")
        self.attention_awaited = sizes.is_awaited(layer, "attention")
        self.mlp_awaited = sizes.is_awaited(layer, "mlp")

    def forward(
        self,
        x_LTD: torch.Tensor,
        awaited_attention_LTD: torch.Tensor | None,
        awaited_mlp_LTD: torch.Tensor | None,
        cos_BSH: torch.Tensor,
        sin_BSH: torch.Tensor,
        mask: Mask | LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        attention_LTD = self.attention(self.attention_norm(x_LTD), cos_BSH, sin_BSH, mask)
        x_LTD = x_LTD + increment(self.attention_exchange, attention_LTD, awaited_attention_LTD)
        mlp_LTD = self.feed_forward(self.ffn_norm(x_LTD))
        x_LTD = x_LTD + increment(self.mlp_exchange, mlp_LTD, awaited_mlp_LTD)
        return (
            x_LTD,
            attention_LTD if self.attention_awaited else None,
            mlp_LTD if self.mlp_awaited else None,
        )


class Rotary(Module):
    """The rotations of all positions, read once per forward: (B, S) → cosines and sines (B, S, H)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        sizes: LaneformerConfig

    def __init__(self, config: Config):
        super().__init__()
        self.sizes = config.sizes
        shape = (2, config.sizes.max_position_embeddings, config.sizes.head_dim // 2)
        self.register_buffer("table", torch.empty(shape), persistent=False)
        self.table: torch.Tensor

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        # Angles need float32 even where weights are bfloat16.
        dtype = torch.float64 if self.table.dtype == torch.float64 else torch.float32
        self.table = rotary_table(self.sizes, dtype).to(buffer_device or self.table.device)

    def forward(self, positions_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos_BSH, sin_BSH = self.table[:, positions_BS]
        return cos_BSH, sin_BSH


class Laneformer(Decoder):
    """The whole model. Build one with build_model, or through TorchTitan with model/titan_spec.py."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        sizes: LaneformerConfig
        init_seed: int = 0
        """Initial weights are a function of this seed and the parameters' names alone."""

        @classmethod
        def from_sizes(cls, sizes: LaneformerConfig, init_seed: int = 0) -> "Laneformer.Config":
            """The tree of module configurations for an architecture."""
            return cls(**_module_configs(sizes), sizes=sizes, init_seed=init_seed)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Refuse what the model cannot do, by the name of the setting; config is a Trainer.Config."""
            parallelism, seq_len = config.parallelism, config.training.seq_len
            problems = [
                f"parallelism.{kind}_parallel_degree is {degree}; only 1 is supported: use data parallelism"
                for kind in ("tensor", "context", "pipeline", "expert")
                if (degree := getattr(parallelism, f"{kind}_parallel_degree")) > 1
            ]
            if parallelism.spmd_backend != "partial_dtensor":
                problems.append(
                    f"parallelism.spmd_backend is {parallelism.spmd_backend}, but must be partial_dtensor"
                )
            longest = self.sizes.max_position_embeddings
            if seq_len > longest:
                problems.append(f"training.seq_len {seq_len} exceeds max_position_embeddings {longest}")
            if problems:
                raise ValueError("the Laneformer cannot train so:\n" + "\n".join(f"- {p}" for p in problems))

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            return self.sizes.num_parameters(), self.sizes.flops_per_token(seq_len)

    def __init__(self, config: Config):
        super().__init__(config)
        self.sizes = config.sizes
        self.init_seed = config.init_seed
        self.rotary = Rotary.Config(sizes=config.sizes).build()

    def tie_weights(self) -> None:
        """Make a tied embedding and head one parameter again after to_empty, which gives each its own."""
        if self.enable_weight_tying:
            self.tok_embeddings.weight = self.lm_head.weight

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Fill parameters and buffers, after to_empty and after sharding."""
        self.tie_weights()
        initialise(self.named_parameters(), self.sizes, self.init_seed)
        self.rotary._init_self_buffers(buffer_device=buffer_device)

    def get_attention_masks(self, positions: torch.Tensor) -> dict[str, Mask]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The masks that forward takes, for positions (B, S); see model.masks.attention_masks."""
        return attention_masks(positions, self.sizes)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: Mapping[str, Mask] | None = None,
    ) -> torch.Tensor:
        """Logits (B, S, V) of tokens (B, S).

        positions (B, S) start again at 0 in every packed document; None means one document per row. The masks
        are get_attention_masks(positions), made here when not given.
        """
        batch, seq = tokens.shape
        if seq > self.sizes.max_position_embeddings:
            raise ValueError(
                f"{seq} tokens exceed max_position_embeddings {self.sizes.max_position_embeddings}"
            )
        if positions is None:
            positions = torch.arange(seq, device=tokens.device).expand(batch, seq)
        masks = self.get_attention_masks(positions) if attention_masks is None else attention_masks
        swa_layers, layers = self.sizes.swa_layers, range(self.sizes.num_hidden_layers)
        x_LTD = self.streams(tokens, positions, [masks["swa" if i in swa_layers else "full"] for i in layers])
        h_BSI = self.norm(x_LTD).view(batch, seq, -1)
        return h_BSI if self._skip_lm_head else self.lm_head(h_BSI)

    def streams(
        self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, masks: Sequence[Mask | LayerCache]
    ) -> torch.Tensor:
        """The residual streams (L, T, D) after the last layer; masks holds each layer's mask or cache."""
        cos_BSH, sin_BSH = self.rotary(positions_BS)
        x_1TD = self.tok_embeddings(tokens_BS).view(1, tokens_BS.numel(), -1)
        # Contiguous, so that compiled blocks all see the same strides.
        x_LTD = x_1TD.expand(self.sizes.num_lanes, -1, -1).contiguous()
        under_way: deque[Partials] = deque([(None, None)] * self.sizes.broadcast_delay)
        for layer, mask in zip(self.layers.values(), masks, strict=True):
            awaited = under_way.popleft() if under_way else (None, None)
            x_LTD, *partials = layer(x_LTD, *awaited, cos_BSH, sin_BSH, mask)
            if self.sizes.broadcast_delay:
                under_way.append((partials[0], partials[1]))
        return x_LTD


def _module_configs(sizes: LaneformerConfig) -> dict[str, Any]:
    """Decoder.Config's fields for an architecture."""
    width = sizes.hidden_size
    replicated = sizes.replicated_rmsn_scale or sizes.pre_norm_lane_agg
    if sizes.lm_head_type == "vocab_parallel":
        head: Module.Config = VocabParallelHead.Config(
            num_lanes=sizes.num_lanes, in_features=width, out_features=sizes.vocab_size // sizes.num_lanes
        )
    else:
        inputs = width * (sizes.num_lanes if sizes.lm_head_type == "lane" else 1)
        head = Linear.Config(in_features=inputs, out_features=sizes.vocab_size)
    attention = LaneAttention.Config(
        sizes=sizes, n_heads=sizes.num_attention_heads, inner_attention=MaskedAttention.Config()
    )
    layers = range(sizes.num_hidden_layers)
    return {
        "dim": width,
        "vocab_size": sizes.vocab_size,
        "tok_embeddings": Embedding.Config(num_embeddings=sizes.vocab_size, embedding_dim=width),
        "layers": [LaneBlock.Config(sizes=sizes, layer=i, attention=attention) for i in layers],
        "norm": FinalNorm.Config(
            normalized_shape=width,
            eps=sizes.norm_eps,
            num_scales=1 if replicated else sizes.num_lanes,
            sum_first=sizes.pre_norm_lane_agg,
            join=sizes.lm_head_type != "replicate",
        ),
        "lm_head": head,
        "enable_weight_tying": sizes.tie_word_embeddings,
    }


def build_model(
    config: LaneformerConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    init_seed: int = 0,
) -> Laneformer:
    """A model on one device with initial weights."""
    model = empty_model(config, dtype, device, init_seed)
    with torch.no_grad():
        model.init_states()
    return model


def empty_model(
    config: LaneformerConfig, dtype: torch.dtype, device: torch.device | str, init_seed: int = 0
) -> Laneformer:
    """A model on one device whose parameters are still to be filled."""
    with torch.device("meta"):
        model = Laneformer.Config.from_sizes(config, init_seed).build()
    model = model.to(dtype).to_empty(device=device)
    model.tie_weights()
    model.rotary._init_self_buffers()
    return model
