"""The parts of a decoding step, on any number of lanes, writing into buffers that are made once.

Each function computes what model/lanes.py and the blocks of model/laneformer.py define, in inference only. On the
CPU they write into `Buffers`, so that a token takes no new memory; on a GPU, where a CUDA graph does that, the
buffers are None and the plain functions run.

Shape suffixes:
  L lanes   B batch   C columns   T = B·C tokens   D hidden width   F hidden width of SwiGLU per lane
  N query heads   K key/value heads, both per lane   E head width   H half the head width   M slots seen
  X key/value heads of all rows and lanes   G query heads that share one
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from model.kv_cache import LayerCache
from model.lanes import heads_first, lanes_first, rotate
from model.lanes import rms_norm as plain_rms_norm
from model.native import library

SHARE = 2**17
"""Numbers of keys that are worth a thread of their own."""


class Buffers:
    """Named buffers, each as large as the largest shape asked for; off the CPU there are none."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.on = device.type == "cpu"
        self.compiled = library() if self.on and dtype == torch.float32 else None
        """The C functions that do a step's parts in one pass each, if there are any."""
        self.storage: dict[str, torch.Tensor] = {}
        self.views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """A buffer of this shape; its content lasts until the name is asked for again."""
        if not self.on:
            return None
        view = self.views.get((name, shape))
        if view is None:
            count = math.prod(shape)
            if name not in self.storage or self.storage[name].numel() < count:
                self.storage[name] = torch.empty(count, dtype=dtype or self.dtype)
                self.views = {key: value for key, value in self.views.items() if key[0] != name}
            view = self.views[name, shape] = self.storage[name][:count].view(shape)
        return view


class Norm:
    """model.lanes.rms_norm: (L, T, D) → (L, T, D). The scale is (D,) or (L·D,), in the activations' dtype."""

    def __init__(self, scale: torch.Tensor, width: int, eps: float):
        self.scale, self.eps = scale, eps
        # x / √(|x|²/D + ε) · s = x / √(|x|² + D·ε) · (s·√D). Numbers as tensors: a Python number would become a new
        # tensor at every use.
        self.floor = torch.tensor(width * eps, dtype=scale.dtype, device=scale.device)
        self.scale_1D = (scale * width**0.5).view(-1, 1, width)

    def __call__(self, x_LTD: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        lanes, tokens, width = x_LTD.shape
        out_LTD, size_LT1 = buffers("normed", lanes, tokens, width), buffers("norm", lanes, tokens, 1)
        if out_LTD is None or size_LT1 is None:
            return plain_rms_norm(x_LTD, self.scale, self.eps)
        if buffers.compiled is not None and x_LTD.is_contiguous():
            scale_lane = width if self.scale_1D.shape[0] > 1 else 0
            pointers = (tensor.data_ptr() for tensor in (x_LTD, self.scale, out_LTD))
            buffers.compiled.rms_norm(*pointers, lanes, tokens, width, scale_lane, self.eps)
            return out_LTD
        torch.linalg.vector_norm(x_LTD, dim=-1, keepdim=True, out=size_LT1)
        size_LT1.square_().add_(self.floor).rsqrt_()
        return torch.mul(x_LTD, size_LT1, out=out_LTD).mul_(self.scale_1D)


def swiglu(x_LTI: torch.Tensor, buffers: Buffers) -> torch.Tensor:
    """silu(gate) · value, of a row [gate; value] (L, T, 2F) → (L, T, F)."""
    gate, value = x_LTI.chunk(2, dim=-1)
    out_LTF = buffers("swiglu", *gate.shape)
    if out_LTF is None:
        return F.silu(gate) * value
    if buffers.compiled is not None and x_LTI.is_contiguous():
        lanes, tokens, width = gate.shape
        buffers.compiled.swiglu(x_LTI.data_ptr(), out_LTF.data_ptr(), lanes * tokens, width)
        return out_LTF
    torch.sigmoid(gate, out=out_LTF)
    return out_LTF.mul_(gate).mul_(value)


def attention(
    qkv_LTO: torch.Tensor,
    cos_BCH: torch.Tensor,
    sin_BCH: torch.Tensor,
    cache: LayerCache,
    split: tuple[int, int, int],
    buffers: Buffers,
) -> torch.Tensor:
    """Attention of new tokens to what the cache holds, themselves included: (L, T, q+k+v) → (L, T, N·E)."""
    lanes, width = qkv_LTO.shape[0], 2 * cos_BCH.shape[-1]
    batch, columns, _ = cos_BCH.shape
    if columns == 1 and buffers.compiled is not None and qkv_LTO.is_contiguous():
        out_LBI = attend_column(qkv_LTO, cos_BCH, sin_BCH, cache, split, buffers)
        if out_LBI is not None:
            return out_LBI
    q, k, v = (heads_first(x, batch, width) for x in qkv_LTO.split(split, dim=-1))
    cos, sin = cos_BCH[:, None, None], sin_BCH[:, None, None]
    q_out, k_out = buffers("queries", *q.shape), buffers("keys", *k.shape)
    q_BLNCE, k_BLKCE = turn(q, cos, sin, q_out), turn(k, cos, sin, k_out)
    keys, values, mask = cache.extend(k_BLKCE, v)
    q_BNCE = q_BLNCE.flatten(1, 2)
    # A boolean mask with one column: a padded prompt that is read one by one.
    if columns == 1 and buffers.on and (mask is None or mask.is_floating_point()):
        return attend_once(q_BNCE, keys, values, mask, lanes, cache.slots, buffers)
    grouped = q_BNCE.shape[1] != keys.shape[1]
    out_BNCE = F.scaled_dot_product_attention(q_BNCE, keys, values, attn_mask=mask, enable_gqa=grouped)
    return lanes_first(out_BNCE, lanes)


def attend_column(
    qkv_LBO: torch.Tensor,
    cos_B1H: torch.Tensor,
    sin_B1H: torch.Tensor,
    cache: LayerCache,
    split: tuple[int, int, int],
    buffers: Buffers,
) -> torch.Tensor | None:
    """`attention` of one column, compiled; None where the cache's step is of another kind."""
    step, width = cache.step, 2 * cos_B1H.shape[-1]
    assert step is not None
    assert buffers.compiled is not None
    mask = step.mask
    if not isinstance(step.slots, slice) or (mask is not None and not mask.is_floating_point()):
        return None
    batch, lanes, heads, slots, _ = cache.keys.shape
    scores = buffers("scores", batch * lanes, split[0] // width, slots)
    out_LBI = buffers("attended", lanes, batch, split[0])
    assert scores is not None
    assert out_LBI is not None
    buffers.compiled.attend_column(
        qkv_LBO.data_ptr(),
        cos_B1H.data_ptr(),
        sin_B1H.data_ptr(),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        None if mask is None else mask.data_ptr(),
        scores.data_ptr(),
        out_LBI.data_ptr(),
        lanes,
        batch,
        heads,
        split[0] // width // heads,
        width,
        slots,
        step.slots.start,
        step.held,
        0 if mask is None else mask.stride(0),
        min(torch.get_num_threads(), max(1, cache.keys[..., : step.held, :].numel() // SHARE)),
    )
    return out_LBI


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """model.lanes.rotate."""
    if out is None:
        return rotate(x, cos, sin)
    (even, odd), (even_out, odd_out) = (
        x.unflatten(-1, (-1, 2)).unbind(-1),
        out.unflatten(-1, (-1, 2)).unbind(-1),
    )
    torch.mul(even, cos, out=even_out).addcmul_(odd, sin, value=-1)
    torch.mul(even, sin, out=odd_out).addcmul_(odd, cos)
    return out


def attend_once(
    q_BN1E: torch.Tensor,
    k_BKME: torch.Tensor,
    v_BKME: torch.Tensor,
    mask_B11M: torch.Tensor | None,
    lanes: int,
    slots: int,
    buffers: Buffers,
) -> torch.Tensor:
    """Attention of one column, N and K over all lanes here: → (L, B, N·E / L)."""
    batch, queries, _, width = q_BN1E.shape
    heads, held = k_BKME.shape[1:3]
    group = queries // heads
    whole = buffers("scores", batch * heads, group, slots)
    out = buffers("attended", batch * heads, group, width)
    assert whole is not None
    assert out is not None
    scores = whole.view(-1)[: batch * queries * held].view(batch * heads, group, held)
    q_XGE, k_XEM = q_BN1E.view(-1, group, width), k_BKME.flatten(0, 1).transpose(1, 2)
    torch.baddbmm(scores, q_XGE, k_XEM, beta=0, alpha=width**-0.5, out=scores)
    if mask_B11M is not None:
        scores.view(batch, queries, 1, held).add_(mask_B11M)
    torch.softmax(scores, dim=-1, out=scores)
    torch.bmm(scores, v_BKME.flatten(0, 1), out=out)
    return out.view(batch, lanes, -1).transpose(0, 1)
