"""Adding, norm and linear map in one, with their gradients, against the plain operations in float64.

tests/unit/interpreted_lane_add.py holds the Triton kernel's form against the same.

Shape suffixes: L lanes   T tokens   D hidden width
"""

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from model.add_norm_linear import _scaled, add_norm_linear
from model.float8 import quantise
from model.lanes import increment, lane_matmul, rms_norm

EPS = 1e-5
OUTPUTS = 4  # of the linear map, per lane: fewer than some shapes have tokens, and more than others
# Bounds on |difference| / largest value, of outputs and gradients, by the dtype of the tensors.
BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}
Inputs = list[torch.Tensor | None]


def draw(dtype: torch.dtype, mode: Any, per_lane: bool, shape: Any) -> tuple[Inputs, list[torch.Tensor]]:
    """Residual, own and awaited partials, scale and weight; and gradients of both outputs."""
    lanes, tokens, width = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    own = None if mode is None else normal(*shape)
    awaited = normal(*shape) if mode == "delayed" else None
    scale, weight = normal(width * (lanes if per_lane else 1)), normal(lanes * OUTPUTS, width)
    return [normal(*shape), own, awaited, scale, weight], [normal(*shape), normal(lanes, tokens, OUTPUTS)]


def plain(x: Any, own: Any, awaited: Any, scale: Any, weight: Any, mode: Any, eps: float) -> Any:
    new = x if mode is None else x + increment(mode, own, awaited)
    return new, lane_matmul(rms_norm(new, scale, eps), weight)


def results(
    function: Any, inputs: Inputs, seeds: list[torch.Tensor], mode: Any, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Both outputs, and the gradients of all inputs."""
    leaves = [None if x is None else x.to(dtype, copy=True).requires_grad_() for x in inputs]
    outputs = function(*leaves, mode, EPS)
    torch.autograd.backward(outputs, [seed.to(dtype) for seed in seeds])
    found = [*outputs, *(x.grad for x in leaves if x is not None)]
    assert all(x is not None for x in found)
    return found


def difference(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = [(g.double(), e.double()) for g, e in zip(got, expected, strict=True)]
    return max(((g - e).abs().max() / e.abs().max()).item() for g, e in pairs)


VARIANTS = [
    (mode, per_lane, shape)
    for mode, per_lane, shape in itertools.product(
        (None, "sum", "local", "delayed"), (False, True), [(4, 6, 24), (1, 2, 32)]
    )
    if shape[0] > 1 or mode in (None, "sum")
]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("mode", "per_lane", "shape"), VARIANTS)
def test_outputs_and_gradients(mode: Any, per_lane: bool, shape: Any, dtype: torch.dtype):
    inputs, seeds = draw(dtype, mode, per_lane, shape)
    expected = results(plain, inputs, seeds, mode, torch.float64)
    got = results(add_norm_linear, inputs, seeds, mode, dtype)
    assert all(x.dtype == dtype for x in got)
    assert difference(got, expected) <= BOUNDS[dtype]


@pytest.mark.parametrize(("mode", "per_lane", "shape"), VARIANTS)
def test_gradients_by_finite_differences(mode: Any, per_lane: bool, shape: Any):
    """Independent of every other implementation, ours or autograd's."""
    inputs, _ = draw(torch.float64, mode, per_lane, shape)
    leaves: Any = [None if x is None else x.requires_grad_() for x in inputs]
    function: Any = add_norm_linear
    assert torch.autograd.gradcheck(lambda *x: function(*x, mode, EPS), leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_norm_rounds_once(dtype: torch.dtype):
    """To the dtype of the states, from at least float32."""
    generator = torch.Generator().manual_seed(0)
    x, scale = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 64, 24), (48,)))
    square = x.double().square().mean(-1, keepdim=True)
    expected = x.double() / (square + EPS).sqrt() * scale.double().view(2, 1, 24)
    normed = rms_norm(x, scale, EPS)
    assert normed.dtype == dtype
    assert ((normed.double() - expected) / expected).abs().max() <= {
        torch.float64: 1e-12,
        torch.float32: 3e-6,
    }.get(dtype, 2**-8 * 1.01)


@pytest.mark.parametrize("mode", [None, "sum", "local", "delayed"])
def test_compiled_whole(mode: Any):
    inputs, seeds = draw(torch.float64, mode, True, (4, 6, 24))
    compiled = torch.compile(add_norm_linear, backend="aot_eager", fullgraph=True)
    expected = results(add_norm_linear, inputs, seeds, mode, torch.float64)
    assert difference(results(compiled, inputs, seeds, mode, torch.float64), expected) <= 1e-14


def test_float8_rounds_the_residual_and_the_scaled_weight():
    """Rows are scaled before they are rounded, so that the norm's factor changes nothing about the rounding."""
    inputs, seeds = draw(torch.float32, "delayed", False, (4, 16, 32))
    x, own, awaited, scale, weight = (torch.as_tensor(tensor) for tensor in inputs)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        numbers, factor = quantise(x)
        return numbers.double() * factor

    new = x + increment("delayed", own, awaited)
    factor = (new.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    weights = rounded((weight * scale).view(4, OUTPUTS, 32))
    expected = rounded(new) @ weights.mT * factor
    eight = results(partial(add_norm_linear, float8=True), inputs, seeds, "delayed", torch.float32)
    assert difference([eight[1]], [expected]) <= 2**-8  # the products come in bfloat16
    d_new, d_out = (seed.double() for seed in seeds)
    through = rounded((d_out * factor).float()) @ rounded((weight * scale).view(4, OUTPUTS, 32).mT).mT
    shrink = (d_out * eight[1]).sum(-1, keepdim=True) * factor.square() / 32
    assert difference([eight[2]], [d_new + through - shrink * new]) <= 2**-8
    exact = results(add_norm_linear, inputs, seeds, "delayed", torch.float32)
    assert 0.005 < difference(eight, exact) < 0.2


@pytest.mark.parametrize("tokens", [OUTPUTS - 1, OUTPUTS + 1])
def test_the_scale_multiplies_the_smaller_of_states_and_weights(tokens: int):
    x, weight = torch.ones(3, tokens, 8), torch.ones(3 * OUTPUTS, 8)
    states, weights = _scaled(x, weight, torch.full((8,), 2.0))
    assert (states.mean(), weights.mean()) == ((2, 1) if tokens < OUTPUTS else (1, 2))


def test_the_factor_of_the_norm_is_not_rounded_to_bfloat16():
    """That of every row is 2/3, which bfloat16 would make 0.2 % larger in all products alike."""
    inputs, seeds = draw(torch.bfloat16, None, False, (4, 64, 64))
    inputs[0] = 1.5 * torch.as_tensor(inputs[0]).sign()
    expected = results(plain, inputs, seeds, None, torch.float64)
    got = results(add_norm_linear, inputs, seeds, None, torch.bfloat16)
    for i in (1, 4):  # the output, and the weight's gradient
        a, b = got[i].detach().double(), expected[i].detach()
        assert float((a * b).sum() / b.square().sum()) == pytest.approx(1, abs=5e-4)
