"""The mathematics of lanes on plain tensors, which training and decoding share.

Every function takes any number of lanes along the first dimension, so that it serves all lanes in one process
or a single lane in a process of its own.

Shape suffixes:
  L lanes   T tokens (batch × sequence)   D hidden width   I, O a linear map's inputs and outputs per lane
  B batch   S sequence   N heads   E head width   H half the head width
"""

import torch
import torch.nn.functional as F

from model.config import Exchange, LaneformerConfig


def lane_matmul(x_LTI: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply to each lane its own linear map.

    The weight is (L·O, I), lane after lane; returns (L, T, O). One lane is a plain linear map.
    """
    lanes = x_LTI.shape[0]
    if lanes == 1:
        return F.linear(x_LTI, weight)
    weight_LOI = weight.view(lanes, -1, weight.shape[1])
    return torch.bmm(x_LTI, weight_LOI.transpose(1, 2))


def norm_factor(x_LTD: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x²) + eps) over D: (L, T, 1), in float32, or float64 for float64."""
    dtype = torch.float64 if x_LTD.dtype == torch.float64 else torch.float32
    length_LT1 = torch.linalg.vector_norm(x_LTD, dim=-1, keepdim=True, dtype=dtype)
    return (length_LT1.square() / x_LTD.shape[-1] + eps).rsqrt()


def rms_norm(x_LTD: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over D; the scale is (D,) for all lanes or (L·D,), lane after lane."""
    normed_LTD = x_LTD * norm_factor(x_LTD, eps)
    return (normed_LTD * scale.view(-1, 1, x_LTD.shape[-1])).type_as(x_LTD)


def increment(
    mode: Exchange, own_LTD: torch.Tensor, awaited_LTD: torch.Tensor | None, lanes: slice = slice(None)
) -> torch.Tensor:
    """What these lanes add to their residuals: (L, T, D), or (1, T, D) where all lanes add the same.

    own holds the partial outputs of this layer, awaited those of the same kind `broadcast_delay` layers
    earlier, which mode "delayed" needs. All lanes must be present in both.
    """
    count = own_LTD.shape[0]
    if count == 1:
        return own_LTD
    if mode == "sum":
        return own_LTD.sum(0, keepdim=True)
    if mode == "local":
        return own_LTD[lanes] * count**0.5
    assert awaited_LTD is not None
    return (awaited_LTD.sum(0, keepdim=True) - awaited_LTD[lanes]).add_(own_LTD[lanes])


def rotary_table(config: LaneformerConfig, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of all rotations, (2, max_position_embeddings, H), computed in float64 on the CPU."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequencies = config.rope_theta ** (-pairs / config.head_dim)
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the neighbouring pairs of the last dimension (E) by angles that broadcast over the others.

    cos and sin end in H. Computed in their precision, returned in x's dtype.
    """
    if torch.compiler.is_compiling():  # the compiler knows no complex numbers
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:  # one operation in place of seven
        pairs = torch.view_as_complex(x.to(cos.dtype).unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * torch.complex(cos, sin))
    return turned.flatten(-2).type_as(x)


def heads_first(x_LTO: torch.Tensor, batch: int, head_dim: int) -> torch.Tensor:
    """(L, B·S, n·E) → (B, L, n, S, E), a view: the heads of lane 0 come first, then lane 1's."""
    lanes, tokens, _ = x_LTO.shape
    return x_LTO.view(lanes, batch, tokens // batch, -1, head_dim).permute(1, 0, 3, 2, 4)


def lanes_first(x_BNSE: torch.Tensor, lanes: int) -> torch.Tensor:
    """(B, L·n, S, E) → (L, B·S, n·E), heads_first's inverse."""
    batch, heads, seq, width = x_BNSE.shape
    x_LBSnE = x_BNSE.view(batch, lanes, heads // lanes, seq, width).permute(1, 0, 3, 2, 4)
    return x_LBSnE.reshape(lanes, batch * seq, -1)
