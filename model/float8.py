"""Linear maps of lanes in float8, for GPUs whose float8 products are twice as fast (H100 and later).

A product's two inputs are scaled so that the largest number of each row along the summed dimension becomes the
largest of float8 e4m3, 448. The forward product and the gradient of the input are computed so; the gradient of
the weight, whose sum runs over tokens, stays in the activations' precision. This is what torchao calls
rowwise_with_gw_hp; torchao's and TorchTitan's converters take plain linear maps, not a batch of one per lane.

Shape suffixes: L lanes   T tokens   I, O a linear map's inputs and outputs per lane   N, K, M any
"""

from typing import Any

import torch

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 e4m3 of the same shape, and the float32 scales (…, 1) of the last dimension's rows to multiply by."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


@torch.library.custom_op("laneformer::float8_lane_products", mutates_args=())
def _products(
    a_LNK: torch.Tensor, a_scale_LN1: torch.Tensor, b_LMK: torch.Tensor, b_scale_LM1: torch.Tensor
) -> torch.Tensor:
    """a @ b.T of each lane, bfloat16 (L, N, M), from float8 inputs and their scales."""
    out_LNM = _empty(a_LNK, b_LMK)
    for lane, out in enumerate(out_LNM):
        torch._scaled_mm(
            a_LNK[lane],
            b_LMK[lane].t(),
            scale_a=a_scale_LN1[lane],
            scale_b=b_scale_LM1[lane].t(),
            out_dtype=out.dtype,
            out=out,
        )
    return out_LNM


def _empty(a_LNK: torch.Tensor, b_LMK: torch.Tensor) -> torch.Tensor:
    return a_LNK.new_empty((a_LNK.shape[0], a_LNK.shape[1], b_LMK.shape[1]), dtype=torch.bfloat16)


@_products.register_fake
def _(
    a_LNK: torch.Tensor, a_scale_LN1: torch.Tensor, b_LMK: torch.Tensor, b_scale_LM1: torch.Tensor
) -> torch.Tensor:
    return _empty(a_LNK, b_LMK)


def float8_product(x_LTI: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """model.lanes.lane_matmul of float8 numbers, in x's dtype, without gradients."""
    weight_LOI = weight.view(x_LTI.shape[0], -1, weight.shape[1])
    return _products(*quantise(x_LTI), *quantise(weight_LOI)).to(x_LTI.dtype)


def float8_input_gradient(d_out_LTO: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of lane_matmul's input as a product of float8 numbers, in d_out's dtype."""
    weight_LIO = weight.view(d_out_LTO.shape[0], -1, weight.shape[1]).transpose(1, 2).contiguous()
    return _products(*quantise(d_out_LTO.contiguous()), *quantise(weight_LIO)).to(d_out_LTO.dtype)


class _LaneMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_LTI: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_LTI, weight)
        return float8_product(x_LTI, weight)

    @staticmethod
    def backward(ctx: Any, d_out_LTO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_LTI, weight = ctx.saved_tensors
        d_weight_LOI = torch.bmm(d_out_LTO.transpose(1, 2), x_LTI)
        return float8_input_gradient(d_out_LTO, weight), d_weight_LOI.view_as(weight)


def float8_lane_matmul(x_LTI: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """model.lanes.lane_matmul with products of float8 numbers; inputs and outputs keep their dtype.

    T, I and O must be multiples of 16 on a GPU.
    """
    return _LaneMatmul.apply(x_LTI, weight)
