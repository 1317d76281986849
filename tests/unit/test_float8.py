"""Linear maps in float8: what is rounded and what is not. The CPU runs the same products as a GPU, slowly."""

import pytest
import torch

from model.float8 import LARGEST, float8_lane_matmul, quantise
from model.laneformer import build_model
from model.lanes import lane_matmul
from model.parallelize import set_float8
from tests.unit.test_model_laneformer import tiny

L, T, I, O = 3, 32, 64, 48  # noqa: E741 - lanes, tokens, inputs, outputs


def rounded(x: torch.Tensor) -> torch.Tensor:
    q, scale = quantise(x)
    return q.double() * scale


def test_rows_are_scaled_to_the_largest_number_and_rounded_to_four_significant_bits():
    x = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-6], [1], [30], [1e5]]
    )
    x[3] = 0
    q, scale = quantise(x)
    assert q.dtype == torch.float8_e4m3fn
    assert q[:3].float().abs().amax(-1).tolist() == [LARGEST] * 3
    assert torch.equal(q[3].float(), torch.zeros(100))
    # Half a unit in the last of four bits; numbers below 2**-6 of 448's scale are spaced by 2**-9.
    bound = torch.maximum(x.abs() * 2**-4, scale * 2**-10) * (1 + 1e-6)
    assert ((rounded(x) - x).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_the_rounded_numbers(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(L, T, I, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(L * O, I, generator=generator).to(dtype).requires_grad_()
    seed = torch.randn(L, T, O, generator=generator).to(dtype)
    out = float8_lane_matmul(x, weight)
    out.backward(seed)
    assert x.grad is not None
    assert weight.grad is not None
    assert (out.dtype, x.grad.dtype, weight.grad.dtype) == (dtype, dtype, dtype)

    def near(got: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
        return bool((got.double() - expected).norm() <= bound * expected.norm())

    weight_LOI = weight.detach().view(L, O, I)
    assert near(out, rounded(x.detach()) @ rounded(weight_LOI).mT, 2**-8)
    assert near(x.grad, rounded(seed) @ rounded(weight_LOI.mT.contiguous()).mT, 2**-8)
    exact = seed.double().mT @ x.detach().double()
    assert near(weight.grad.view(L, O, I), exact, 1e-6 if dtype == torch.float32 else 2**-8)
    # And that is a few percent away from the product itself.
    assert near(out, lane_matmul(x, weight).detach().double(), 0.06)
    assert not near(out, lane_matmul(x, weight).detach().double(), 0.01)


def test_compiled_whole():
    x, weight = torch.randn(L, T, I, requires_grad=True), torch.randn(L * O, I, requires_grad=True)
    compiled = torch.compile(float8_lane_matmul, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(float8_lane_matmul(x, weight).sum(), (x, weight))
    got = torch.autograd.grad(compiled(x, weight).sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_sizes_that_the_hardware_cannot_take_are_refused():
    with pytest.raises(ValueError, match=r"attention\.wqkv has 32 inputs and 24 outputs a lane"):
        set_float8(build_model(tiny(num_key_value_heads=8)))
