"""Residual, exchange between lanes and RMS norm in one pass over memory, for GPUs (Triton).

A lane model's residual is L times as wide as a plain one's, so what a step costs beyond its matrix products is
how often the residual crosses the memory bus. `lane_add_norm` reads the residual, the partial outputs and those
awaited once each, and writes the new residual and its normed state; its backward reads three such tensors and
writes two. In plain operations the same takes three to five times as many passes.

The mathematics is `x + increment(mode, own, awaited)` followed by `rms_norm`, of model/lanes.py, which is the
reference. Sums are taken in float32 (float64 for float64 tensors) whatever the tensors' dtype. There are no
atomics: equal inputs give equal bits, as long as the number of warps is the same. Autotuning chooses it at the first
call; under torch.use_deterministic_algorithms it is fixed.

Every program handles whole tokens, all their lanes: the sum over lanes needs no second kernel. In the backward
pass a program takes every P-th token and keeps its own part of the scale's gradient; the parts are added up at
the end.

Shape suffixes: L lanes   T tokens   D hidden width   G scales (1 replicated, or L)   P programs
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
PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit
def forward_kernel(
    x_LTD,
    own_LTD,
    awaited_LTD,
    scale_GD,
    new_LTD,
    normed_LTD,
    rstd_LT,
    tokens,
    D: tl.constexpr,
    L: tl.constexpr,
    MODE: tl.constexpr,
    PER_LANE: tl.constexpr,
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
    scale = tl.load(scale_GD + column, mask=inside, other=0).to(ACC)
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
        # The norm is that of the residual as it is stored, so that backward sees the same numbers.
        stored = x.to(new_LTD.dtype.element_ty)
        tl.store(new_LTD + at, stored, mask=inside)
        x = stored.to(ACC)
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS)
        tl.store(rstd_LT + lane * tokens + token, rstd)
        if PER_LANE:
            scale = tl.load(scale_GD + lane * D + column, mask=inside, other=0).to(ACC)
        tl.store(normed_LTD + at, (x * rstd * scale).to(normed_LTD.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    d_new_LTD,
    d_normed_LTD,
    kept_LTD,
    rstd_LT,
    scale_GD,
    d_x_LTD,
    d_other,
    d_scale_PGD,
    tokens,
    D: tl.constexpr,
    L: tl.constexpr,
    MODE: tl.constexpr,
    PER_LANE: tl.constexpr,
    GAIN: tl.constexpr,
    KEPT_NORMED: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < D
    scale = tl.load(scale_GD + column, mask=inside, other=0).to(ACC)
    d_scale = tl.zeros([BLOCK], dtype=ACC)
    filled = 0  # columns of this program's part that hold something, if PER_LANE
    for token in range(program, tokens, programs):
        shared = tl.zeros([BLOCK], dtype=ACC)
        for lane in range(L):
            at = (lane * tokens + token) * D + column
            if PER_LANE:
                scale = tl.load(scale_GD + lane * D + column, mask=inside, other=0).to(ACC)
            rstd = tl.load(rstd_LT + lane * tokens + token)
            kept = tl.load(kept_LTD + at, mask=inside, other=0).to(ACC)
            d_normed = tl.load(d_normed_LTD + at, mask=inside, other=0).to(ACC)
            if KEPT_NORMED:
                unit = kept / tl.where(scale == 0, 1, scale)
            else:
                unit = kept * rstd
            d_unit = d_normed * scale
            mean = tl.sum(d_unit * unit, axis=0) / D
            d_x = tl.load(d_new_LTD + at, mask=inside, other=0).to(ACC) + rstd * (d_unit - unit * mean)
            stored = d_x.to(d_x_LTD.dtype.element_ty)
            tl.store(d_x_LTD + at, stored, mask=inside)
            if MODE == 1:
                tl.store(d_other + at, (stored.to(ACC) * GAIN).to(d_other.dtype.element_ty), mask=inside)
            else:
                shared += stored.to(ACC)
            if PER_LANE:  # too many for registers: kept in this program's part, which stays in the cache
                part = d_scale_PGD + (program * L + lane) * D + column
                before = tl.load(part, mask=column < filled, other=0)
                tl.store(part, before + d_normed * unit, mask=inside)
            else:
                d_scale += d_normed * unit
        filled = D
        if MODE == 0:
            tl.store(d_other + token * D + column, shared.to(d_other.dtype.element_ty), mask=inside)
        if MODE == 2:
            tl.debug_barrier()  # what follows reads what was just stored
            for lane in range(L):
                at = (lane * tokens + token) * D + column
                d_x = tl.load(d_x_LTD + at, mask=inside, other=0).to(ACC)
                tl.store(d_other + at, (shared - d_x).to(d_other.dtype.element_ty), mask=inside)
    if not PER_LANE:
        tl.store(d_scale_PGD + program * D + column, d_scale, mask=inside)


def _tuned(kernel: Any) -> Any:
    configs = [triton.Config({}, num_warps=warps) for warps in WARPS]
    return triton.autotune(configs, key=["D", "L", "MODE", "PER_LANE"])(kernel)


_tuned_forward, _tuned_backward = _tuned(forward_kernel), _tuned(backward_kernel)


def constants(
    lanes: int, width: int, mode: Exchange, num_scales: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """The compile-time arguments that both kernels share."""
    return {
        "D": width,
        "L": lanes,
        "MODE": MODES[mode],
        "PER_LANE": num_scales > 1,
        "GAIN": math.sqrt(lanes),
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
        "BLOCK": triton.next_power_of_2(width),
    }


def _launch(
    kernel: Any, tuned: Any, programs: int, tensors: list[torch.Tensor], tokens: int, fixed: Any
) -> None:
    # The order of additions in a row depends on the warps, and which are fastest on chance.
    if tensors[0].is_cuda and not torch.are_deterministic_algorithms_enabled():
        tuned[(programs,)](*tensors, tokens, **fixed)
    else:  # also for Triton's interpreter, on the CPU
        kernel[(programs,)](*tensors, tokens, **fixed, num_warps=DEFAULT_WARPS)


def _check(mode: str, awaited: torch.Tensor | None, *tensors: torch.Tensor) -> None:
    if (mode == "delayed") != (awaited is not None):
        raise ValueError(f"mode {mode} {'needs' if awaited is None else 'takes no'} awaited partials")
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.shape != tensors[0].shape:
            raise ValueError(
                f"lane_add_norm takes contiguous tensors of one shape (L, T, D), got {tuple(tensor.shape)} "
                f"with strides {tensor.stride()} beside {tuple(tensors[0].shape)}"
            )


@torch.library.custom_op("laneformer::lane_add_norm", mutates_args=())
def _forward(
    x: torch.Tensor,
    own: torch.Tensor,
    awaited: torch.Tensor | None,
    scale: torch.Tensor,
    mode: str,
    eps: float,
    keep_normed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(mode, awaited, x, own, *([awaited] if awaited is not None else []))
    lanes, tokens, width = x.shape
    fixed = constants(lanes, width, mode, scale.numel() // width, x.dtype)  # pyright: ignore[reportArgumentType]
    new, normed, rstd = _outputs(x)
    tensors = [x, own, own if awaited is None else awaited, scale, new, normed, rstd]
    _launch(forward_kernel, _tuned_forward, tokens, tensors, tokens, {**fixed, "EPS": eps})
    return new, normed, rstd


def _outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rstd = x.new_empty(x.shape[:2], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    return torch.empty_like(x), torch.empty_like(x), rstd


@_forward.register_fake
def _(
    x: torch.Tensor,
    own: torch.Tensor,
    awaited: torch.Tensor | None,
    scale: torch.Tensor,
    mode: str,
    eps: float,
    keep_normed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _outputs(x)


@torch.library.custom_op("laneformer::lane_add_norm_backward", mutates_args=())
def _backward(
    d_new: torch.Tensor,
    d_normed: torch.Tensor,
    kept: torch.Tensor,
    rstd: torch.Tensor,
    scale: torch.Tensor,
    mode: str,
    kept_normed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, of what the mode leaves (sum: own, (1, T, D); local: own; delayed: awaited), of scale."""
    d_new, d_normed = d_new.contiguous(), d_normed.contiguous()
    lanes, tokens, width = kept.shape
    fixed = constants(lanes, width, mode, scale.numel() // width, kept.dtype)  # pyright: ignore[reportArgumentType]
    d_x, d_other, d_scale = _gradients(kept, scale, mode)
    programs = min(tokens, _programs(kept.device))
    d_scale_PGD = torch.empty((programs, *scale.shape), dtype=rstd.dtype, device=kept.device)
    tensors = [d_new, d_normed, kept, rstd, scale, d_x, d_other, d_scale_PGD]
    _launch(
        backward_kernel, _tuned_backward, programs, tensors, tokens, {**fixed, "KEPT_NORMED": kept_normed}
    )
    return d_x, d_other, d_scale_PGD.sum(0).to(d_scale.dtype)


def _gradients(
    kept: torch.Tensor, scale: torch.Tensor, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_other = kept.new_empty((1, *kept.shape[1:])) if mode == "sum" else torch.empty_like(kept)
    return torch.empty_like(kept), d_other, torch.empty_like(scale)


@_backward.register_fake
def _(
    d_new: torch.Tensor,
    d_normed: torch.Tensor,
    kept: torch.Tensor,
    rstd: torch.Tensor,
    scale: torch.Tensor,
    mode: str,
    kept_normed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _gradients(kept, scale, mode)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return PROGRAMS_PER_MULTIPROCESSOR
    properties = torch.cuda.get_device_properties(device)
    return PROGRAMS_PER_MULTIPROCESSOR * properties.multi_processor_count


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, _, _, scale, ctx.mode, _, ctx.keep_normed = inputs
    new, normed, rstd = output
    ctx.save_for_backward(normed if ctx.keep_normed else new, rstd, scale)


def _differentiate(ctx: Any, d_new: torch.Tensor, d_normed: torch.Tensor, d_rstd: Any) -> tuple[Any, ...]:
    kept, rstd, scale = ctx.saved_tensors
    d_x, d_other, d_scale = _backward(d_new, d_normed, kept, rstd, scale, ctx.mode, ctx.keep_normed)
    d_own = d_x if ctx.mode == "delayed" else d_other.expand_as(d_x)
    d_awaited = d_other if ctx.mode == "delayed" else None
    return d_x, d_own, d_awaited, d_scale, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def lane_add_norm(
    x_LTD: torch.Tensor,
    own_LTD: torch.Tensor,
    awaited_LTD: torch.Tensor | None,
    scale: torch.Tensor,
    mode: Exchange,
    eps: float,
    keep_normed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`new = x + increment(mode, own, awaited)` and `rms_norm(new, scale, eps)`, both (L, T, D).

    All (L, T, D) tensors are contiguous and of one dtype; scale is (D,) or (L·D,). A leaf to torch.compile.

    Backward needs the new residual or its normed state. keep_normed keeps the second, which the linear map
    that follows keeps anyway, so that the norm adds nothing to memory but a number per lane and token. Dividing
    the scale out again has the rounding of the stored dtype, and a scale of exactly 0 then gets no gradient.
    """
    new_LTD, normed_LTD, _ = _forward(x_LTD, own_LTD, awaited_LTD, scale, mode, eps, keep_normed)
    return new_LTD, normed_LTD
