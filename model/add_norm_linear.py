"""How a block takes up its residual: add partial outputs, norm the sum, apply a linear map.

A norm divides each state by a number of its own and multiplies each column by a learned scale g. Both pass through
the linear map W that follows: with r = 1 / sqrt(mean(x²) + eps),

    W (g ⊙ r x) = r · (W diag(g)) x = r · W (g ⊙ x)

so the product is taken of the residual itself, and its output y is multiplied by r. The normed state, L·D wide, is not
kept, nor even written where the scale multiplies the weights: that is done where a lane has more tokens than the map
has outputs, and the weights are the smaller of the two. y is kept by what follows in any case. Backward, over D inputs,

    dp = r · dy        dx = dnew + (W diag(g))ᵀ dp − (dy · y) r² / D · x        d(W diag(g)) = dp xᵀ

where the matrix product itself adds the first two terms, if the weights are scaled.

Shape suffixes: L lanes   T tokens   D hidden width   O the linear map's outputs per lane
"""

from typing import Any

import torch

from model.config import Exchange
from model.float8 import float8_input_gradient, float8_product
from model.kernels.lane_add import lane_add, lane_add_backward
from model.lanes import increment, lane_matmul, norm_factor


def add_norm_linear(
    x_LTD: torch.Tensor,
    own_LTD: torch.Tensor | None,
    awaited_LTD: torch.Tensor | None,
    scale: torch.Tensor,
    weight: torch.Tensor,
    exchange: Exchange | None,
    eps: float,
    fused: bool = False,
    float8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`new = x + increment(exchange, own, awaited)`, and `lane_matmul(rms_norm(new, scale, eps), weight)`.

    Without own partials nothing is added, and new is x. scale is (D,) or (L·D,), weight (L·O, D). fused adds by the
    Triton kernel, which takes contiguous tensors of one dtype; float8 multiplies as model/float8.py says. Returns
    (L, T, D) and (L, T, O).
    """
    new_LTD, out_LTO = _AddNormLinear.apply(
        x_LTD, own_LTD, awaited_LTD, scale, weight, exchange, eps, fused, float8
    )
    return x_LTD if own_LTD is None else new_LTD, out_LTO


class _AddNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_LTD: torch.Tensor,
        own_LTD: torch.Tensor | None,
        awaited_LTD: torch.Tensor | None,
        scale: torch.Tensor,
        weight: torch.Tensor,
        exchange: Exchange | None,
        eps: float,
        fused: bool,
        float8: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        exchange = None if own_LTD is None else exchange
        ctx.exchange, ctx.fused, ctx.float8 = exchange, fused and exchange is not None, float8
        if own_LTD is None or exchange is None:
            new_LTD, rstd_LT1 = x_LTD, norm_factor(x_LTD, eps)
        elif fused:
            new_LTD, rstd_LT = lane_add(x_LTD, own_LTD, awaited_LTD, exchange, eps)
            rstd_LT1 = rstd_LT[..., None]
        else:
            added = increment(exchange, own_LTD, awaited_LTD)
            # In place where the sum is a tensor of its own: a new one costs the CPU as much as the addition.
            new_LTD = x_LTD + added if exchange == "sum" else added.add_(x_LTD)
            rstd_LT1 = norm_factor(new_LTD, eps)
        states_LTD, weights_LOD = _scaled(new_LTD, weight, scale)
        multiply = float8_product if float8 else lane_matmul
        product_LTO = multiply(states_LTD, weights_LOD.flatten(0, 1))
        out_LTO = product_LTO.mul_(rstd_LT1)
        ctx.save_for_backward(new_LTD, rstd_LT1, out_LTO, scale, weight)
        return None if exchange is None else new_LTD, out_LTO  # an output must not be an input

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_new_LTD: torch.Tensor | None, d_out_LTO: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        new_LTD, rstd_LT1, out_LTO, scale, weight = ctx.saved_tensors
        width = new_LTD.shape[2]
        d_product_LTO = (d_out_LTO * rstd_LT1).to(new_LTD.dtype)
        inner_LT1 = (d_out_LTO * out_LTO).sum(-1, keepdim=True, dtype=rstd_LT1.dtype)
        shrink_LT1 = inner_LT1 * rstd_LT1.square() / width
        states_LTD, weights_LOD = _scaled(new_LTD, weight, scale)
        d_weights_LOD = torch.bmm(d_product_LTO.mT, states_LTD)
        onto_LTD = None if ctx.fused else d_new_LTD  # the kernel adds it
        if _scales_weights(new_LTD, weight):
            d_LTD = _input_gradient(d_product_LTO, weights_LOD, onto_LTD, ctx.float8)
            d_scale_LD = (d_weights_LOD * weight.view_as(d_weights_LOD)).sum(1)
            d_weights_LOD.mul_(scale.view(-1, 1, width))
        else:
            d_states_LTD = _input_gradient(d_product_LTO, weights_LOD, None, ctx.float8)
            d_scale_LD = (d_states_LTD * new_LTD).sum(1)
            d_LTD = d_states_LTD.mul_(scale.view(-1, 1, width))
            d_LTD = d_LTD if onto_LTD is None else d_LTD.add_(onto_LTD)
        d_scale = d_scale_LD.sum(0) if scale.shape[0] == width else d_scale_LD.flatten()
        gradients = _residual_gradients(ctx, d_new_LTD, d_LTD, new_LTD, shrink_LT1)
        return *gradients, d_scale, d_weights_LOD.view_as(weight), None, None, None, None


def _scales_weights(x_LTD: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a lane's part of the weight has fewer rows than the states have tokens."""
    lanes, tokens, _ = x_LTD.shape
    return weight.shape[0] < lanes * tokens


def _scaled(
    x_LTD: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States and weights (L, O, D) to multiply, one of them with its columns scaled."""
    lanes, _, width = x_LTD.shape
    weight_LOD, scale_G1D = weight.view(lanes, -1, width), scale.view(-1, 1, width)
    if _scales_weights(x_LTD, weight):
        return x_LTD, weight_LOD * scale_G1D
    return x_LTD * scale_G1D, weight_LOD


def _input_gradient(
    d_product_LTO: torch.Tensor, weights_LOD: torch.Tensor, onto_LTD: torch.Tensor | None, float8: bool
) -> torch.Tensor:
    """A linear map's gradient of its input, added onto another one."""
    if float8:
        d_LTD = float8_input_gradient(d_product_LTO, weights_LOD.flatten(0, 1))
        return d_LTD if onto_LTD is None else d_LTD.add_(onto_LTD)
    if onto_LTD is None:
        return torch.bmm(d_product_LTO, weights_LOD)
    return torch.baddbmm(onto_LTD, d_product_LTO, weights_LOD)


def _residual_gradients(
    ctx: Any,
    d_new_LTD: torch.Tensor | None,
    d_LTD: torch.Tensor,
    new_LTD: torch.Tensor,
    shrink_LT1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the residual, of the own partial outputs and of those awaited.

    d is what the new residual gets through the product and, unless the kernel is to add it, d_new.
    """
    exchange: Exchange | None = ctx.exchange
    if ctx.fused:
        assert d_new_LTD is not None
        assert exchange is not None
        d_LTD, d_other = lane_add_backward(d_new_LTD, d_LTD, new_LTD, shrink_LT1[..., 0], exchange)
        if exchange == "delayed":
            return d_LTD, d_LTD, d_other
        return d_LTD, d_other.expand_as(d_LTD), None
    d_LTD.addcmul_(new_LTD, shrink_LT1, value=-1)
    lanes = d_LTD.shape[0]
    if exchange is None:
        return d_LTD, None, None
    if exchange == "delayed":
        return d_LTD, d_LTD, d_LTD.sum(0, keepdim=True) - d_LTD
    if lanes == 1:
        return d_LTD, d_LTD, None
    if exchange == "sum":
        return d_LTD, d_LTD.sum(0, keepdim=True).expand_as(d_LTD), None
    return d_LTD, d_LTD * lanes**0.5, None
