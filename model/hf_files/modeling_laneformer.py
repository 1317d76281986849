"""The Laneformer for `transformers`: loading, training, and generation with a key/value cache.

Activations are lane-major, (L, T, D): every linear map is one batched matrix multiplication over lanes. A block
adds to the residual streams its own outputs and those that reach it from `broadcast_delay` layers earlier, which
the model keeps in a queue. Nothing but keys and values outlives a forward pass.

Attention is either `sdpa` or `eager`. Padding may be on either side. Without an attention mask, position_ids that
start again at 0 separate packed documents. Static caches are not supported. Tested with transformers 4.57.1 and
5.24.0.

Shape suffixes:
  L lanes   B batch   S new tokens   T = B·S   D hidden width   V vocabulary   I, O inputs, outputs of a lane
  N query heads   K key/value heads   M keys   E head width   H half of it
"""

from collections import deque
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_laneformer import LaneformerConfig

# Releases of transformers differ in what they call the cache, as an argument and in outputs.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


class LaneLinear(nn.Module):
    """One linear map per lane, weight (L, O, I): (L, T, I) → (L, T, O). std is that of initial weights."""

    def __init__(self, lanes, inputs, outputs, std):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(lanes, outputs, inputs))
        self.std = std

    def forward(self, x):
        if len(self.weight) == 1:
            return F.linear(x, self.weight[0])
        return torch.bmm(x, self.weight.transpose(1, 2))


class LaneNorm(nn.Module):
    """RMS norm over D, with one scale for all streams (`weight`) or one per lane (`scale`)."""

    def __init__(self, config, per_lane):
        super().__init__()
        self.eps = config.norm_eps
        if per_lane:
            self.scale = nn.Parameter(torch.ones(config.num_lanes, config.hidden_size))
        else:
            self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.per_lane = per_lane

    def forward(self, x_LTD):
        width = x_LTD.shape[-1:]
        if self.per_lane:
            return F.rms_norm(x_LTD, width, None, self.eps) * self.scale[:, None]
        return F.rms_norm(x_LTD, width, self.weight, self.eps)


class Visibility:
    """What the new tokens of one forward pass see.

    past: tokens before them, columns 0 … past - 1. real_BC: whether a column holds a token or padding; None if all
    do. document_BS: the number of each new token's document; None if there is one only (and past must be 0).
    """

    def __init__(self, batch, new, past, real_BC, document_BS, device):
        self.batch, self.new, self.past, self.device = batch, new, past, device
        self.real_BC, self.document_BS = real_BC, document_BS
        self.masks = {}

    def mask(self, keys, window, always=False):
        """Boolean (B or 1, 1, S, M) for the newest `keys` columns; None if causality alone hides anything.

        With `always` a mask is made even then. Layers with equally many keys and the same window share it.
        """
        total = self.past + self.new
        if keys > total:
            raise ValueError("static caches are not supported; use the dynamic cache, which is the default")
        if window is not None and window >= keys:
            window = None  # it hides nothing
        plain = window is None and self.real_BC is None and self.document_BS is None
        if plain and not always and (self.new == 1 or keys == self.new):
            return None
        if (keys, window) not in self.masks:
            self.masks[keys, window] = self._make(total - keys, total, window)
        return self.masks[keys, window]

    def _make(self, first, total, window):
        queries_S = torch.arange(self.past, total, device=self.device)
        keys_M = torch.arange(first, total, device=self.device)
        age_SM = queries_S[:, None] - keys_M
        seen_BSM = (age_SM >= 0)[None]
        if window is not None:
            seen_BSM = seen_BSM & (age_SM < window)
        if self.real_BC is not None:
            # Padding sees itself, so that its softmax is defined; nothing else sees it.
            seen_BSM = (seen_BSM & self.real_BC[:, None, first:]) | (age_SM == 0)
        if self.document_BS is not None:
            seen_BSM = seen_BSM & (self.document_BS[:, :, None] == self.document_BS[:, None])
        return seen_BSM[:, None]


def attend(q_BNSE, k_BKME, v_BKME, visibility, window, implementation):
    """Attention under what is visible: (B, N, S, E). Query head n reads key/value head n // (N / K)."""
    new, keys = q_BNSE.shape[2], k_BKME.shape[2]
    groups = q_BNSE.shape[1] // k_BKME.shape[1]
    if implementation == "sdpa":
        mask = visibility.mask(keys, window)
        causal = mask is None and new > 1
        return F.scaled_dot_product_attention(
            q_BNSE, k_BKME, v_BKME, attn_mask=mask, is_causal=causal, enable_gqa=groups > 1
        )
    mask = visibility.mask(keys, window, always=True)
    k_BNME, v_BNME = k_BKME.repeat_interleave(groups, dim=1), v_BKME.repeat_interleave(groups, dim=1)
    scores_BNSM = q_BNSE @ k_BNME.transpose(2, 3) * q_BNSE.shape[-1] ** -0.5
    scores_BNSM = scores_BNSM.masked_fill(~mask, float("-inf"))
    precise = torch.promote_types(q_BNSE.dtype, torch.float32)
    return scores_BNSM.softmax(-1, dtype=precise).type_as(v_BNME) @ v_BNME


def rotations(config, positions_BS, dtype):
    """Cosines and sines (B, 1, 1, S, H) of the positions; float32 at least, whatever the weights' type is."""
    # Angles are exact only in float64, which MPS lacks.
    device = "cpu" if positions_BS.device.type == "mps" else positions_BS.device
    pairs_H = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=device)
    angles = positions_BS.to(device)[..., None] * config.rope_theta ** (-pairs_H / config.head_dim)
    dtype = torch.promote_types(dtype, torch.float32)
    return [t.to(dtype).to(positions_BS.device)[:, None, None] for t in (angles.cos(), angles.sin())]


def rotate(x, cos, sin):
    """Turn neighbouring pairs of the last dimension."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


def increment(exchange, own_LTD, awaited_LTD):
    """What the lanes add to their streams: (L, T, D), or (1, T, D) where all add the same."""
    if exchange == "sum":
        return own_LTD.sum(0, keepdim=True)
    if exchange == "local":
        return own_LTD * len(own_LTD) ** 0.5
    return own_LTD + (awaited_LTD.sum(0, keepdim=True) - awaited_LTD)


class LaneformerAttention(nn.Module):
    """Grouped-query attention within lanes: normed states (L, T, D) → partial outputs (L, T, D)."""

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        lanes, width = config.num_lanes, config.hidden_size
        keys = config.num_key_value_heads * config.head_dim // lanes
        std = width**-0.5
        self.wq = LaneLinear(lanes, width, width // lanes, std)
        self.wk = LaneLinear(lanes, width, keys, std)
        self.wv = LaneLinear(lanes, width, keys, std)
        self.wo = LaneLinear(lanes, width // lanes, width, std * (2 * config.num_hidden_layers) ** -0.5)

    def _heads(self, x_LTO, batch):
        """(B, L, heads of a lane, S, E), a view."""
        lanes, tokens, _ = x_LTO.shape
        return x_LTO.view(lanes, batch, tokens // batch, -1, self.config.head_dim).permute(1, 0, 3, 2, 4)

    def forward(self, x_LTD, cos, sin, visibility, cache):
        batch, lanes = visibility.batch, self.config.num_lanes
        q, k, v = (self._heads(w(x_LTD), batch) for w in (self.wq, self.wk, self.wv))
        q_BNSE, k_BKSE = rotate(q, cos, sin).flatten(1, 2), rotate(k, cos, sin).flatten(1, 2)
        v_BKSE = v.flatten(1, 2)
        if cache is not None:
            k_BKSE, v_BKSE = cache.update(k_BKSE, v_BKSE, self.layer)
        window, implementation = self.config.window(self.layer), self.config._attn_implementation
        out_BNSE = attend(q_BNSE, k_BKSE, v_BKSE, visibility, window, implementation)
        out_LBSnE = out_BNSE.unflatten(1, (lanes, -1)).permute(1, 0, 3, 2, 4)
        return self.wo(out_LBSnE.reshape(lanes, x_LTD.shape[1], -1))


class LaneformerMLP(nn.Module):
    """SwiGLU within lanes: normed states (L, T, D) → partial outputs (L, T, D)."""

    def __init__(self, config):
        super().__init__()
        lanes, width, hidden = config.num_lanes, config.hidden_size, config.intermediate_size
        self.w1 = LaneLinear(lanes, width, hidden // lanes, width**-0.5)
        self.w3 = LaneLinear(lanes, width, hidden // lanes, width**-0.5)
        self.w2 = LaneLinear(lanes, hidden // lanes, width, (2 * config.num_hidden_layers * hidden) ** -0.5)

    def forward(self, x_LTD):
        return self.w2(F.silu(self.w1(x_LTD)) * self.w3(x_LTD))


class LaneformerBlock(GradientCheckpointingLayer):
    """One layer. Returns the streams and its two partial outputs, for the layers where they arrive."""

    def __init__(self, config, layer):
        super().__init__()
        self.attention = LaneformerAttention(config, layer)
        self.feed_forward = LaneformerMLP(config)
        self.attention_norm = LaneNorm(config, not config.replicated_rmsn_scale)
        self.ffn_norm = LaneNorm(config, not config.replicated_rmsn_scale)
        self.attention_exchange = config.exchange(layer, "attention")
        self.mlp_exchange = config.exchange(layer, "mlp")

    def forward(self, x_LTD, awaited_attention_LTD, awaited_mlp_LTD, cos, sin, visibility, cache):
        attention_LTD = self.attention(self.attention_norm(x_LTD), cos, sin, visibility, cache)
        x_LTD = x_LTD + increment(self.attention_exchange, attention_LTD, awaited_attention_LTD)
        mlp_LTD = self.feed_forward(self.ffn_norm(x_LTD))
        x_LTD = x_LTD + increment(self.mlp_exchange, mlp_LTD, awaited_mlp_LTD)
        return x_LTD, attention_LTD, mlp_LTD


class LaneformerPreTrainedModel(PreTrainedModel):
    config_class = LaneformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LaneformerBlock"]  # noqa: RUF012
    _supports_sdpa = True

    def _init_weights(self, module):
        if isinstance(module, LaneNorm):
            nn.init.ones_(module.scale if module.per_lane else module.weight)
        elif isinstance(module, LaneLinear):
            nn.init.normal_(module.weight, std=module.std)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(
                module.weight, std=self.config.hidden_size**-0.5 if self.config.tie_word_embeddings else 1.0
            )
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)


class LaneformerModel(LaneformerPreTrainedModel):
    """Everything but the head: tokens (B, S) → (B, S, D), or (B, S, L·D) for the heads that work on lanes."""

    def __init__(self, config):
        super().__init__(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LaneformerBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = LaneNorm(config, not (config.replicated_rmsn_scale or config.pre_norm_lane_agg))
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.tok_embeddings

    def set_input_embeddings(self, value):
        self.tok_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        cache=None,
        output_attentions=None,
        output_hidden_states=None,
        **kwargs,
    ):
        if output_attentions or output_hidden_states:
            raise ValueError("attentions and hidden states are per lane and are not returned")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.tok_embeddings(input_ids)
        cache = past_key_values if cache is None else cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            cache = None  # a recomputed layer would store its keys twice
        elif cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
        past = 0 if cache is None else int(cache.get_seq_length())
        positions_BS, visibility = self._look(inputs_embeds, attention_mask, position_ids, past)
        x_LTD = self._streams(inputs_embeds, positions_BS, visibility, cache)
        states = self._join(x_LTD).view(*inputs_embeds.shape[:2], -1)
        cached: dict[str, Any] = {CACHE: cache}
        return BaseModelOutputWithPast(last_hidden_state=states, **cached)

    def _look(self, inputs_embeds, attention_mask, position_ids, past):
        """Positions (B, S) of the new tokens, and what they see."""
        (batch, new), device = inputs_embeds.shape[:2], inputs_embeds.device
        real_BC = document_BS = None
        if attention_mask is not None:
            if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != (batch, past + new):
                raise ValueError(f"attention_mask must be (batch, tokens so far) = {(batch, past + new)}")
            real_BC = attention_mask.bool()
            if position_ids is None:
                position_ids = (real_BC.cumsum(1) - 1).clamp(min=0)[:, past:]
            if real_BC.all():
                real_BC = None
        elif position_ids is not None and past == 0 and (position_ids[:, 1:] == 0).any():
            document_BS = (position_ids == 0).cumsum(1).expand(batch, new)
        if position_ids is None:
            position_ids = torch.arange(past, past + new, device=device)[None]
        visibility = Visibility(batch, new, past, real_BC, document_BS, device)
        return position_ids.expand(batch, new), visibility

    def _streams(self, inputs_embeds, positions_BS, visibility, cache):
        """The residual streams (L, T, D) after the last layer."""
        cos, sin = rotations(self.config, positions_BS, inputs_embeds.dtype)
        x_LTD = inputs_embeds.flatten(0, 1).expand(self.config.num_lanes, -1, -1).contiguous()
        under_way = deque([(None, None)] * self.config.broadcast_delay)
        for layer in self.layers:
            awaited = under_way.popleft() if under_way else (None, None)
            x_LTD, *partials = layer(x_LTD, *awaited, cos, sin, visibility, cache)
            if self.config.broadcast_delay:
                under_way.append(partials)
        return x_LTD

    def _join(self, x_LTD):
        """Bring the lanes together for the head: (T, D) or (T, L·D)."""
        if self.config.pre_norm_lane_agg:
            return self.norm(x_LTD.sum(0, keepdim=True))[0]
        normed_LTD = self.norm(x_LTD)
        if self.config.lm_head_type != "replicate":
            return normed_LTD.transpose(0, 1).flatten(1)
        return normed_LTD[0] if len(normed_LTD) == 1 else normed_LTD.mean(0)


class LaneHead(nn.Module):
    """One head on all lanes' states side by side: (B, S, L·D) → (B, S, V)."""

    def __init__(self, config):
        super().__init__()
        self.linear = nn.Linear(config.num_lanes * config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x_BSI):
        return self.linear(x_BSI)


class VocabParallelHead(LaneLinear):
    """Lane l's state gives the l-th slice of the vocabulary: (B, S, L·D) → (B, S, V)."""

    def __init__(self, config):
        lanes, width = config.num_lanes, config.hidden_size
        super().__init__(lanes, width, config.vocab_size // lanes, width**-0.5)

    def forward(self, x):
        x_LTD = x.flatten(0, 1).unflatten(1, (len(self.weight), -1)).transpose(0, 1)
        return LaneLinear.forward(self, x_LTD).transpose(0, 1).reshape(*x.shape[:2], -1)


class LaneformerForCausalLM(LaneformerPreTrainedModel, GenerationMixin):
    """The language model: tokens (B, S) → logits (B, S, V)."""

    _tied_weights_keys = {"lm_head.weight": "model.tok_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.model = LaneformerModel(config)
        if config.lm_head_type == "replicate":
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        else:
            self.lm_head = {"lane": LaneHead, "vocab_parallel": VocabParallelHead}[config.lm_head_type](
                config
            )
        self.post_init()

    def get_input_embeddings(self):
        return self.model.tok_embeddings

    def set_input_embeddings(self, value):
        self.model.tok_embeddings = value

    def get_output_embeddings(self):
        return self.lm_head if self.config.lm_head_type == "replicate" else None

    def set_output_embeddings(self, new_embeddings):
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        cache=None,
        output_attentions=None,
        output_hidden_states=None,
        **kwargs,
    ):
        """Logits of the last `logits_to_keep` tokens (0: all; or indices), and the loss if there are labels.

        attention_mask (B, tokens so far) is 0 on padding. labels (B, S) are the input ids, -100 where not trained.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        cached: dict[str, Any] = {CACHE: outputs.get(CACHE)}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **cached)


__all__ = ["LaneformerForCausalLM", "LaneformerModel", "LaneformerPreTrainedModel"]
