"""Residual, exchange between lanes and the norm's factor in one pass over memory, for GPUs (Triton).

A lane model's residual is L times as wide as a plain one's, so what a step costs beyond its matrix products is
how often the residual crosses the memory bus. `lane_add` reads the residual, the partial outputs and those awaited
once each, and writes the new residual and, for each lane and token, the factor by which the norm scales it.
`lane_add_backward` reads three such tensors and writes two. In plain operations the same takes two to three times as
many passes. model/add_norm_linear.py, which calls both, says why no normed state is written.

The mathematics is `x + increment(mode, own, awaited)` of model/lanes.py, which is the reference. Sums are taken in
float32 (float64 for float64 tensors) whatever the tensors' dtype. There are no atomics: equal inputs give equal bits,
as long as the number of warps is the same. Autotuning chooses it at the first call; under
torch.use_deterministic_algorithms it is fixed.

Every program handles one token, all its lanes: the sum over lanes needs no second kernel.

Shape suffixes: L lanes   T tokens   D hidden width
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from model.config import Exchange

SUM, LOCAL, DELAYED = 0, 1, 2
MODES: dict[str, int] = {"sum": SUM, "local": LOCAL, "delayed": DELAYED}
WARPS = (4, 8, 16)  # what autotuning tries
DEFAULT_WARPS = 8


@triton.jit
def forward_kernel(
    x_LTD,
    own_LTD,
    awaited_LTD,
    new_LTD,
    rstd_LT,
    tokens,
    D: tl.constexpr,
    L: tl.constexpr,
    MODE: tl.constexpr,
    GAIN: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    shared = tl.zeros([BLOCK], dtype=ACC)
    if MODE != 1:  # sum: of these partials; delayed: of those awaited
        for lane in range(L):
            at = (lane * tokens + token) * D + column
            if MODE == 0:
                shared += tl.load(own_LTD + at, mask=inside, other=0).to(ACC)
            else:
                shared += tl.load(awaited_LTD + at, mask=inside, other=0).to(ACC)
    for lane in range(L):
        at = (lane * tokens + token) * D + column
        x = tl.load(x_LTD + at, mask=inside, other=0).to(ACC)
        if MODE == 0:
            x += shared
        else:
            own = tl.load(own_LTD + at, mask=inside, other=0).to(ACC)
            if MODE == 1:
                x += own * GAIN
            else:
                awaited = tl.load(awaited_LTD + at, mask=inside, other=0).to(ACC)
                x += own + (shared - awaited)
        # The norm is that of the residual as it is stored, which is what the linear map multiplies.
        stored = x.to(new_LTD.dtype.element_ty)
        tl.store(new_LTD + at, stored, mask=inside)
        x = stored.to(ACC)
        tl.store(rstd_LT + lane * tokens + token, tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS))


@triton.jit
def backward_kernel(
    d_new_LTD,
    d_product_LTD,
    new_LTD,
    shrink_LT,
    d_x_LTD,
    d_other,
    tokens,
    D: tl.constexpr,
    L: tl.constexpr,
    MODE: tl.constexpr,
    GAIN: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    shared = tl.zeros([BLOCK], dtype=ACC)
    for lane in range(L):
        at = (lane * tokens + token) * D + column
        d_x = tl.load(d_new_LTD + at, mask=inside, other=0).to(ACC)
        d_x += tl.load(d_product_LTD + at, mask=inside, other=0).to(ACC)
        d_x -= tl.load(shrink_LT + lane * tokens + token) * tl.load(new_LTD + at, mask=inside, other=0).to(
            ACC
        )
        stored = d_x.to(d_x_LTD.dtype.element_ty)
        tl.store(d_x_LTD + at, stored, mask=inside)
        if MODE == 1:
            tl.store(d_other + at, (stored.to(ACC) * GAIN).to(d_other.dtype.element_ty), mask=inside)
        else:
            shared += stored.to(ACC)
    if MODE == 0:
        tl.store(d_other + token * D + column, shared.to(d_other.dtype.element_ty), mask=inside)
    if MODE == 2:
        tl.debug_barrier()  # what follows reads what was just stored
        for lane in range(L):
            at = (lane * tokens + token) * D + column
            d_x = tl.load(d_x_LTD + at, mask=inside, other=0).to(ACC)
            tl.store(d_other + at, (shared - d_x).to(d_other.dtype.element_ty), mask=inside)


def _tuned(kernel: Any) -> Any:
    configs = [triton.Config({}, num_warps=warps) for warps in WARPS]
    return triton.autotune(configs, key=["D", "L", "MODE"])(kernel)


_tuned_forward, _tuned_backward = _tuned(forward_kernel), _tuned(backward_kernel)


def constants(lanes: int, width: int, mode: Exchange, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The compile-time arguments that both kernels share."""
    return {
        "D": width,
        "L": lanes,
        "MODE": MODES[mode],
        "GAIN": math.sqrt(lanes),
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
        "BLOCK": triton.next_power_of_2(width),
    }


def _launch(kernel: Any, tuned: Any, tensors: list[torch.Tensor], fixed: dict[str, Any]) -> None:
    tokens = tensors[0].shape[1]
    # The order of additions in a row depends on the warps, and which are fastest on chance.
    if tensors[0].is_cuda and not torch.are_deterministic_algorithms_enabled():
        tuned[(tokens,)](*tensors, tokens, **fixed)
    else:  # also for Triton's interpreter, on the CPU
        kernel[(tokens,)](*tensors, tokens, **fixed, num_warps=DEFAULT_WARPS)


def _check(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.shape != tensors[0].shape:
            raise ValueError(
                f"lane_add takes contiguous tensors of one shape (L, T, D), got {tuple(tensor.shape)} "
                f"with strides {tensor.stride()} beside {tuple(tensors[0].shape)}"
            )


@torch.library.custom_op("laneformer::lane_add", mutates_args=())
def lane_add(
    x_LTD: torch.Tensor, own_LTD: torch.Tensor, awaited_LTD: torch.Tensor | None, mode: str, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`new = x + increment(mode, own, awaited)` (L, T, D), and its norm's factor 1 / sqrt(mean(new²) + eps).

    The tensors are contiguous, of one shape and dtype. The factors (L, T) are float32 (float64 for float64).
    """
    if (mode == "delayed") != (awaited_LTD is not None):
        raise ValueError(f"mode {mode} {'needs' if awaited_LTD is None else 'takes no'} awaited partials")
    _check(x_LTD, own_LTD, *([awaited_LTD] if awaited_LTD is not None else []))
    lanes, _, width = x_LTD.shape
    fixed = constants(lanes, width, mode, x_LTD.dtype)  # pyright: ignore[reportArgumentType]
    new_LTD, rstd_LT = _sums(x_LTD)
    tensors = [x_LTD, own_LTD, own_LTD if awaited_LTD is None else awaited_LTD, new_LTD, rstd_LT]
    _launch(forward_kernel, _tuned_forward, tensors, {**fixed, "EPS": eps})
    return new_LTD, rstd_LT


def _sums(x_LTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if x_LTD.dtype == torch.float64 else torch.float32
    return torch.empty_like(x_LTD), x_LTD.new_empty(x_LTD.shape[:2], dtype=dtype)


@lane_add.register_fake
def _(
    x_LTD: torch.Tensor, own_LTD: torch.Tensor, awaited_LTD: torch.Tensor | None, mode: str, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _sums(x_LTD)


@torch.library.custom_op("laneformer::lane_add_backward", mutates_args=())
def lane_add_backward(
    d_new_LTD: torch.Tensor,
    d_product_LTD: torch.Tensor,
    new_LTD: torch.Tensor,
    shrink_LT: torch.Tensor,
    mode: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`d_x = d_new + d_product − shrink · new`, and the gradient of what the mode leaves beside it.

    d_product is the gradient that new gets through the linear map, shrink (L, T) what the norm takes from it. The
    second output is that of own for "sum" (1, T, D) and "local", and of awaited for "delayed", where own's is d_x.
    """
    tensors = [d_new_LTD.contiguous(), d_product_LTD, new_LTD]
    _check(*tensors)
    lanes, _, width = new_LTD.shape
    fixed = constants(lanes, width, mode, new_LTD.dtype)  # pyright: ignore[reportArgumentType]
    d_x_LTD, d_other = _gradients(new_LTD, mode)
    _launch(backward_kernel, _tuned_backward, [*tensors, shrink_LT, d_x_LTD, d_other], fixed)
    return d_x_LTD, d_other


def _gradients(new_LTD: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    d_other = new_LTD.new_empty((1, *new_LTD.shape[1:])) if mode == "sum" else torch.empty_like(new_LTD)
    return torch.empty_like(new_LTD), d_other


@lane_add_backward.register_fake
def _(
    d_new_LTD: torch.Tensor,
    d_product_LTD: torch.Tensor,
    new_LTD: torch.Tensor,
    shrink_LT: torch.Tensor,
    mode: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _gradients(new_LTD, mode)
