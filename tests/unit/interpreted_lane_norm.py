"""Checks of model/kernels/lane_norm.py under Triton's interpreter, on the CPU.

Run by tests/unit/test_lane_norm.py as `python -m tests.unit.interpreted_lane_norm`.

A process of its own, because TRITON_INTERPRET is read where a kernel is defined. Prints the largest relative
errors; exits with 1 if one exceeds its bound.

Shape suffixes: L lanes   T tokens   D hidden width
"""

import itertools
import os
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from train.device import prepare_torchtitan

prepare_torchtitan("cpu")

from model.config import LaneformerConfig  # noqa: E402 - torchtitan must know the device first
from model.kernels.lane_norm import lane_add_norm  # noqa: E402
from model.laneformer import Laneformer, build_model  # noqa: E402
from model.lanes import increment, rms_norm  # noqa: E402
from model.parallelize import set_checkpointing, set_kernels  # noqa: E402
from tests.unit.test_model_laneformer import TINY  # noqa: E402

EPS = 1e-5
# Bounds on |difference| / largest value, of outputs and gradients, by the dtype of the tensors.
BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}


def difference(got: list[Any], expected: list[Any]) -> float:
    assert [g is None for g in got] == [e is None for e in expected]
    pairs = [(g.double(), e.double()) for g, e in zip(got, expected, strict=True) if g is not None]
    return max(((g - e).abs().max() / e.abs().max()).item() for g, e in pairs)


def operation(dtype: torch.dtype, mode: Any, per_lane: bool, keep_normed: bool, shape: Any) -> float:
    """The kernel on tensors of a dtype against the plain operations on the same numbers in float64."""
    lanes, _, width = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = [draw(*shape), draw(*shape), draw(*shape) if mode == "delayed" else None]
    inputs.append(draw(width * (lanes if per_lane else 1)))
    seeds = draw(*shape), draw(*shape)

    def run(function: Any, dtype: torch.dtype) -> list[Any]:
        leaves = [None if x is None else x.to(dtype, copy=True).requires_grad_() for x in inputs]
        outputs = function(*leaves)
        torch.autograd.backward(outputs, [seed.to(dtype) for seed in seeds])
        return [*outputs, *(x.grad for x in leaves if x is not None)]

    def plain(x: torch.Tensor, own: torch.Tensor, awaited: Any, scale: torch.Tensor) -> Any:
        new = x + increment(mode, own, awaited)
        return new, rms_norm(new, scale, EPS)

    def fused(x: torch.Tensor, own: torch.Tensor, awaited: Any, scale: torch.Tensor) -> Any:
        return lane_add_norm(x, own, awaited, scale, mode, EPS, keep_normed)

    got = run(fused, dtype)
    return difference(got, run(plain, torch.float64))


def operations() -> Iterator[tuple[torch.dtype, str, float]]:
    # On the CPU there are four programs: some have two tokens, some one. 24 is no power of two.
    shapes = [(4, 6, 24), (1, 2, 32)]
    for dtype, mode, per_lane, keep_normed, shape in itertools.product(
        BOUNDS, ("sum", "local", "delayed"), (False, True), (False, True), shapes
    ):
        if shape[0] == 1 and mode != "sum":
            continue
        name = f"{mode}, {'per lane' if per_lane else 'replicated'}, {shape}, keep_normed {keep_normed}"
        yield dtype, name, operation(dtype, mode, per_lane, keep_normed, shape)


def gradients(model: Laneformer) -> list[torch.Tensor]:
    tokens = torch.randint(0, 32, (1, 2), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    (logits**2).sum().backward()
    return [logits, *(p.grad for p in model.parameters() if p.grad is not None)]


def models() -> Iterator[tuple[torch.dtype, str, float]]:
    """Whole models in float64, with the kernel and without, in every variant of the exchange."""
    switches = itertools.product(range(4), *[(False, True)] * 4)
    for number, (delay, early, attention, mlp, replicated) in enumerate(switches):
        if delay == 0 and not (early and attention and mlp):
            continue  # without a delay these have no meaning
        change = {
            "num_lanes": 2,
            "broadcast_delay": delay,
            "use_early_comm": early,
            "use_attention_comm": attention,
            "use_mlp_comm": mlp,
            "replicated_rmsn_scale": replicated,
            "hidden_size": 16,
            "intermediate_size": 16,
        }
        config = LaneformerConfig.from_dict({**TINY, **change})
        expected, fused = (build_model(config, torch.float64) for _ in range(2))
        with torch.no_grad():  # scales that differ from 1
            for one, other in zip(expected.parameters(), fused.parameters(), strict=True):
                if one.ndim == 1:
                    one.normal_(generator=torch.Generator().manual_seed(number))
                    other.copy_(one)
        set_kernels(fused, "triton", "cpu")
        set_checkpointing(fused, "selective" if number % 2 else "none")
        yield torch.float64, f"model {change}", difference(gradients(fused), gradients(expected))


def compiled() -> Iterator[tuple[torch.dtype, str, float]]:
    """A compiled block sees the kernel as one operation, forward and backward."""
    for policy in ("none", "selective"):
        config = LaneformerConfig.from_dict(TINY)
        expected, fused = (build_model(config, torch.float64) for _ in range(2))
        set_kernels(fused, "triton", "cpu")
        set_checkpointing(fused, policy)
        for layer in fused.layers.values():
            layer.compile(backend="aot_eager", fullgraph=True)
        yield (
            torch.float64,
            f"compiled, checkpointing {policy}",
            difference(gradients(fused), gradients(expected)),
        )


def main() -> int:
    worst: dict[torch.dtype, tuple[float, str]] = {}
    for dtype, name, error in itertools.chain(operations(), models(), compiled()):
        worst[dtype] = max(worst.get(dtype, (0.0, "")), (error, name))
    for dtype, (error, name) in worst.items():
        print(f"{dtype}: {error:.1e} of at most {BOUNDS[dtype]:.0e} ({name})")
    return int(any(error > BOUNDS[dtype] for dtype, (error, _) in worst.items()))


if __name__ == "__main__":
    raise SystemExit(main())
