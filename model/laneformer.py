"""The Laneformer on one device, as a TorchTitan model.

The layers are in model/blocks.py, the mathematics that decoding shares in model/lanes.py, initial weights in
model/initialisation.py, masks in model/masks.py. Released names and shapes exist only in model/hf.py.

Between layers pass the residual streams, the SwiGLU outputs that the next block is to add, and the partial
outputs under way: a queue with one entry for each layer of the delay, from which a block gets those that have
arrived. Nothing else does, so activation checkpointing, compilation and FSDP apply to each block by itself.

Shape suffixes:
  L lanes   B batch   S sequence   T = B·S tokens   D hidden width   V vocabulary
  H half the head width   I inputs of the head
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from model.blocks import LaneAttention, LaneBlock, LaneLinear, LaneNorm, MaskedAttention
from model.config import LaneformerConfig
from model.initialisation import initialise
from model.lanes import lane_matmul, norm_factor, rotary_table
from model.masks import Mask, additive_masks, attention_masks
from model.segments import run_in_segments, run_layers


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
        if self.join:
            return LaneNorm.forward(self, x).transpose(0, 1).flatten(1)
        lanes, _, width = x.shape
        normed_LTD = x * norm_factor(x, self.norm_eps)
        if self.weight.shape[0] == width:  # scaled after the sum, where it is L times as narrow
            return (normed_LTD.sum(0) * (self.weight / lanes)).type_as(x)
        return ((normed_LTD * self.weight.view(lanes, 1, width)).sum(0) / lanes).type_as(x)


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

    segment_length: int | None = None
    """Layers that backward computes again together; None: none. See model/segments.py."""

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
        h_BSI = self.norm(self.streams(tokens, positions, masks)).view(batch, seq, -1)
        return h_BSI if self._skip_lm_head else self.lm_head(h_BSI)

    def streams(
        self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, masks: Mapping[str, Mask]
    ) -> torch.Tensor:
        """The residual streams (L, T, D) after the last layer."""
        cos_BSH, sin_BSH = self.rotary(positions_BS)
        x_1TD = self.tok_embeddings(tokens_BS).view(1, tokens_BS.numel(), -1)
        masks, swa_layers = additive_masks(masks, x_1TD.dtype), self.sizes.swa_layers
        layers = [
            (layer, masks["swa" if i in swa_layers else "full"])
            for i, layer in enumerate(self.layers.values())
        ]
        if self.segment_length is not None:
            return run_in_segments(layers, self.segment_length, self.sizes, cos_BSH, sin_BSH, x_1TD)
        # Repeated rather than expanded, so that compiled blocks all see the same strides.
        x_LTD = x_1TD.repeat(self.sizes.num_lanes, 1, 1)
        nothing = [None] * (2 + 2 * self.sizes.broadcast_delay)
        streams_LTD = run_layers(layers, cos_BSH, sin_BSH, x_LTD, *nothing)[0]
        assert streams_LTD is not None
        return streams_LTD


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
