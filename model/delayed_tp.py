"""Delayed Tensor Parallelism: who holds which weights, and when a partial output lands.

Each of P processes holds L / P neighbouring lanes: their weights, their keys and values, and one slice of the
vocabulary's embedding and head. A module's partial output is summed over the process's own lanes and pushed to the
others at once; it is collected where the architecture adds it, `broadcast_delay` layers later, so it travels while
those layers are computed. A message is D numbers a token, however many lanes a process holds, because

    x_l += o_l + Σ_{j≠l} p_j = o_l + (Σ_j p_j − p_l)

needs of the other processes only their sums. Three exchanges of a token are waited for at once: the embedding's
row, the final state and the choice of the token. P = 1 is the ordinary case of one process.

Shape suffixes:
  L lanes of this process   P processes   B batch   C columns   T = B·C tokens   D hidden width   I a map's inputs
  V this process's slice of the vocabulary   H half the head width
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from model.config import Kind, LaneformerConfig
from model.exchange import Alone, Exchange
from model.kv_cache import KeyValueCache, LayerCache
from model.lane_steps import Buffers, Norm, attention, swiglu
from model.lanes import rotary_table
from model.weights import LaneWeight, lane_weight

if TYPE_CHECKING:  # it imports torchtitan, which takes seconds
    from model.laneformer import Laneformer

PROCESSES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Part:
    """Which lanes and which tokens of the vocabulary a process holds."""

    lanes: range
    vocabulary: range

    @classmethod
    def of(cls, config: LaneformerConfig, rank: int, size: int) -> Part:
        """Raises ValueError if the lanes cannot be dealt out evenly."""
        if config.num_lanes % size:
            fitting = [str(n) for n in range(1, config.num_lanes + 1) if config.num_lanes % n == 0]
            raise ValueError(
                f"{size} processes cannot share {config.num_lanes} lanes evenly; {', '.join(fitting)} can"
            )

        def share(whole: int) -> range:
            return range(whole * rank // size, whole * (rank + 1) // size)

        return cls(share(config.num_lanes), share(config.vocab_size))

    def cut(self, name: str, weight: torch.Tensor, config: LaneformerConfig) -> torch.Tensor:
        """This process's rows of a parameter, by the model's name for it: a view."""
        if name in ("tok_embeddings.weight", "lm_head.weight"):
            rows = self.vocabulary
        elif weight.ndim == 1 and weight.shape[0] == config.hidden_size:
            return weight  # a norm's scale that all lanes share
        else:
            each = weight.shape[0] // config.num_lanes
            rows = range(self.lanes.start * each, self.lanes.stop * each)
        return weight[rows.start : rows.stop]


@dataclass(frozen=True)
class LayerPart:
    attention_norm: Norm
    wqkv: LaneWeight
    wo: LaneWeight
    ffn_norm: Norm
    w13: LaneWeight
    w2: LaneWeight


Awaited = tuple[torch.Tensor, torch.Tensor | None]
"""A module's partials (L, T, D) of the own lanes and, where it is known already, the sum over all lanes (T, D)."""


def activation_dtype(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """What to compute in: on the CPU at least float32, because only reading the weights takes time there."""
    return torch.promote_types(weights, torch.float32) if device.type == "cpu" else weights


def weight_kind(weights: torch.dtype, device: torch.device) -> str:
    """How to keep linear maps that are stored so, of model.weights.WEIGHT_KINDS."""
    if device.type != "cpu" or weights == torch.float64:
        return "as_is"
    return "bfloat16" if weights == torch.bfloat16 else "float32"


class LaneGroup:
    """One process's lanes, ready to decode.

    weight(name) gives this process's part of a parameter and is asked once for each. dtype is that of activations
    and cache. weights: how linear maps are stored, one of model.weights.WEIGHT_KINDS.
    """

    def __init__(
        self,
        config: LaneformerConfig,
        weight: Callable[[str], torch.Tensor],
        exchange: Exchange,
        dtype: torch.dtype,
        weights: str,
    ):
        self.sizes = config
        self.exchange = exchange
        self.part = Part.of(config, exchange.rank, exchange.size)
        self.dtype = dtype
        lanes = len(self.part.lanes)

        def linear(name: str, count: int = lanes) -> LaneWeight:
            return lane_weight(weight(name), count, weights)

        def norm(name: str, parts: int = 1) -> Norm:
            return Norm(weight(name).to(dtype) / parts, config.hidden_size, config.norm_eps)

        self.layers = [
            LayerPart(
                norm(f"layers.{i}.attention_norm.weight"),
                linear(f"layers.{i}.attention.wqkv.weight"),
                linear(f"layers.{i}.attention.wo.weight"),
                norm(f"layers.{i}.ffn_norm.weight"),
                linear(f"layers.{i}.feed_forward.w13.weight"),
                linear(f"layers.{i}.feed_forward.w2.weight"),
            )
            for i in range(config.num_hidden_layers)
        ]
        averaged = config.lm_head_type == "replicate" and not config.pre_norm_lane_agg
        self.norm = norm("norm.weight", config.num_lanes if averaged else 1)
        self.embedding_VD = weight("tok_embeddings.weight")
        if exchange.size > 1:  # a row of zeros on either side, for the tokens of other processes
            self.embedding_VD = torch.nn.functional.pad(self.embedding_VD, (0, 0, 1, 1))
        self.head = linear("lm_head.weight", lanes if config.lm_head_type == "vocab_parallel" else 1)
        self.device = self.embedding_VD.device
        angles = torch.float64 if dtype == torch.float64 else torch.float32
        self.cos, self.sin = rotary_table(config, angles).to(self.device)
        queries = config.hidden_size // config.num_lanes
        keys = config.num_key_value_heads * config.head_dim // config.num_lanes
        self.split = (queries, keys, keys)
        self.buffers = Buffers(dtype, self.device)

    @classmethod
    def of(cls, model: Laneformer, exchange: Exchange | None = None) -> LaneGroup:
        """The lanes of a model in memory, whose weights are shared where they need no conversion."""
        exchange = exchange or Alone()
        state, part = model.state_dict(), Part.of(model.sizes, exchange.rank, exchange.size)

        def weight(name: str) -> torch.Tensor:
            return part.cut(name, state[name], model.sizes)

        dtype, device = model.norm.weight.dtype, model.norm.weight.device
        kind = weight_kind(dtype, device)
        return cls(model.sizes, weight, exchange, activation_dtype(dtype, device), kind)

    def cache(self, padding_B: torch.Tensor, capacity: int) -> KeyValueCache:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        graphs = self.device.type == "cuda"
        return KeyValueCache(self.sizes, padding_B, capacity, like, len(self.part.lanes), graphs)

    def vocabularies(self) -> list[range]:
        """The slices of all processes."""
        return [
            Part.of(self.sizes, rank, self.exchange.size).vocabulary for rank in range(self.exchange.size)
        ]

    def weight_bytes(self) -> int:
        """Bytes of the weights that this process holds."""
        linear = sum(w.nbytes for x in self.layers for w in (x.wqkv, x.wo, x.w13, x.w2)) + self.head.nbytes
        norms = [self.norm, *(norm for x in self.layers for norm in (x.attention_norm, x.ffn_norm))]
        return linear + self.embedding_VD.nbytes + sum(norm.scale.nbytes for norm in norms)

    def logits(
        self, tokens_BC: torch.Tensor, positions_BC: torch.Tensor, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Read new tokens after those in the caches; returns the logits (B, V) after the last column.

        V is this process's slice of the vocabulary. The result may be overwritten by the next call.
        """
        batch, columns = tokens_BC.shape
        x_LTD = self._streams(tokens_BC, positions_BC, caches)
        if columns > 1:
            x_LTD = x_LTD.unflatten(1, (batch, columns))[:, :, -1].contiguous()
        return self._head(x_LTD)

    # The layers

    def _streams(
        self, tokens_BC: torch.Tensor, positions_BC: torch.Tensor, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """The residual streams (L, T, D) after the last layer."""
        cos_BCH, sin_BCH = (self._angles(table, positions_BC) for table in ("cos", "sin"))
        x_LTD = self._embed(tokens_BC.reshape(-1))
        under_way: dict[Kind, deque[Awaited]] = {"attention": deque(), "mlp": deque()}
        buffers = self.buffers
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            normed_LTD = layer.attention_norm(x_LTD, buffers)
            qkv_LTO = layer.wqkv(normed_LTD, self._out("qkv", normed_LTD, sum(self.split)))
            heads_LTI = attention(qkv_LTO, cos_BCH, sin_BCH, cache, self.split, buffers)
            o_LTD = layer.wo(heads_LTI, self._partial_out("attention", i, x_LTD))
            self._add(x_LTD, o_LTD, i, "attention", under_way["attention"])
            normed_LTD = layer.ffn_norm(x_LTD, buffers)
            hidden = 2 * self.sizes.intermediate_size // self.sizes.num_lanes
            gated_LTF = swiglu(
                layer.w13(normed_LTD, self._out("gate and value", normed_LTD, hidden)), buffers
            )
            o_LTD = layer.w2(gated_LTF, self._partial_out("mlp", i, x_LTD))
            self._add(x_LTD, o_LTD, i, "mlp", under_way["mlp"])
        return x_LTD

    def _out(self, name: str, x_LTI: torch.Tensor, width: int) -> torch.Tensor | None:
        return self.buffers(name, *x_LTI.shape[:2], width)

    def _partial_out(self, kind: Kind, layer: int, x_LTD: torch.Tensor) -> torch.Tensor | None:
        """Where a partial output lies until it is added on the other lanes."""
        return self.buffers(f"{kind} {layer % (self.sizes.broadcast_delay + 1)}", *x_LTD.shape)

    def _add(
        self, x_LTD: torch.Tensor, o_LTD: torch.Tensor, layer: int, kind: Kind, under_way: deque[Awaited]
    ) -> None:
        """Add a module's output to the streams, in place, and send it on its way if a later layer awaits it."""
        mode, awaited = self.sizes.exchange(layer, kind), self.sizes.is_awaited(layer, kind)
        if mode == "sum":
            total_TD = self._sum(o_LTD)
            x_LTD.add_(total_TD)
            if awaited:
                kept_TD = self.buffers(f"{kind} {layer} sum", *total_TD.shape)
                under_way.append((o_LTD, total_TD.clone() if kept_TD is None else kept_TD.copy_(total_TD)))
            return
        if awaited:
            self.exchange.push(self._own_sum(o_LTD))
            under_way.append((o_LTD, None))
        if mode == "local":
            x_LTD.add_(o_LTD, alpha=self.sizes.num_lanes**0.5)
        else:
            before_LTD, total_TD = under_way.popleft()
            if total_TD is None:
                total_TD = self._collected_sum()
            if self.buffers.compiled is not None:
                pointers = (tensor.data_ptr() for tensor in (x_LTD, o_LTD, total_TD, before_LTD))
                self.buffers.compiled.add_delayed(*pointers, x_LTD.shape[0], total_TD.numel())
                return
            others_LTD = torch.sub(total_TD, before_LTD, out=self.buffers("others", *x_LTD.shape))
            x_LTD.add_(others_LTD.add_(o_LTD))

    def _own_sum(self, x_LTD: torch.Tensor) -> torch.Tensor:
        if x_LTD.shape[0] == 1:
            return x_LTD[0]
        return torch.sum(x_LTD, 0, out=self.buffers("own sum", *x_LTD.shape[1:]))

    def _collected_sum(self) -> torch.Tensor:
        """The sum over all lanes of what was pushed; the same bits in every process."""
        got_PTD = self.exchange.collect()
        if got_PTD.shape[0] == 1:
            return got_PTD[0]
        return torch.sum(got_PTD, 0, out=self.buffers("sum", *got_PTD.shape[1:]))

    def _sum(self, x_LTD: torch.Tensor) -> torch.Tensor:
        self.exchange.push(self._own_sum(x_LTD))
        return self._collected_sum()

    # Both ends

    def _angles(self, which: str, positions_BC: torch.Tensor) -> torch.Tensor:
        table = self.cos if which == "cos" else self.sin
        shape = (*positions_BC.shape, table.shape[1])
        out = self.buffers(which, *shape, dtype=table.dtype)
        flat = None if out is None else out.view(-1, table.shape[1])
        return torch.index_select(table, 0, positions_BC.reshape(-1), out=flat).view(shape)

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Each lane's copy of the tokens' embeddings, (L, T, D)."""
        lanes, count, width = len(self.part.lanes), tokens_T.shape[0], self.sizes.hidden_size
        if self.exchange.size > 1:
            ids_T = self.buffers("ids", count, dtype=torch.long)
            tokens_T = torch.sub(tokens_T, self.part.vocabulary.start - 1, out=ids_T)
            tokens_T = tokens_T.clamp_(0, len(self.part.vocabulary) + 1)
        table = self.embedding_VD
        rows_TD = torch.index_select(
            table, 0, tokens_T, out=self.buffers("embedding", count, width, dtype=table.dtype)
        )
        if self.exchange.size > 1:
            self.exchange.push(rows_TD)
            rows_TD = self.exchange.collect().sum(0)  # all but one are zero: exact
        x_LTD = self.buffers("streams", lanes, count, width)
        if x_LTD is None:
            x_LTD = torch.empty(lanes, count, width, dtype=self.dtype, device=self.device)
        return x_LTD.copy_(rows_TD)

    def _head(self, x_LBD: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) of the last states, as the model's final norm and head give them."""
        sizes, buffers = self.sizes, self.buffers
        lanes, batch, _ = x_LBD.shape
        tokens = len(self.part.vocabulary)
        if sizes.lm_head_type == "vocab_parallel":
            normed_LBD = self.norm(x_LBD, buffers)
            logits_LBV = self.head(normed_LBD, buffers("logits by lane", lanes, batch, tokens // lanes))
            return logits_LBV.transpose(0, 1).reshape(batch, tokens)
        if sizes.pre_norm_lane_agg:
            h_1BI = self.norm(self._sum(x_LBD)[None], buffers)
        elif sizes.lm_head_type == "lane":
            self.exchange.push(self.norm(x_LBD, buffers))
            h_1BI = self.exchange.collect().flatten(0, 1).transpose(0, 1).reshape(1, batch, -1)
        else:
            h_1BI = self._sum(self.norm(x_LBD, buffers))[None]  # the lanes' mean: the scale is divided by L
        return self.head(h_1BI, buffers("logits", 1, batch, tokens))[0]
