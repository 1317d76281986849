"""Checks of model/kernels/lane_add.py under Triton's interpreter, on the CPU.

Run by tests/unit/test_lane_add.py as `python -m tests.unit.interpreted_lane_add`.

With the argument `curve` it trains instead (tests/unit/test_loss_curves.py).

A process of its own, because TRITON_INTERPRET is read where a kernel is defined. Prints the largest relative
errors; exits with 1 if one exceeds its bound.

Shape suffixes: L lanes   T tokens   D hidden width
"""

import itertools
import os
import sys
from collections.abc import Iterator
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from train.device import prepare_torchtitan

prepare_torchtitan("cpu")

from model.add_norm_linear import add_norm_linear  # noqa: E402 - torchtitan must know the device first
from model.config import LaneformerConfig  # noqa: E402
from model.laneformer import Laneformer, build_model  # noqa: E402
from model.parallelize import set_checkpointing, set_kernels  # noqa: E402
from tests.unit.test_add_norm_linear import BOUNDS, difference, draw, plain, results  # noqa: E402
from tests.unit.test_loss_curves import curve, part, size  # noqa: E402
from tests.unit.test_model_laneformer import TINY  # noqa: E402


def operations() -> Iterator[tuple[torch.dtype, str, float]]:
    """add_norm_linear with the kernel, against plain operations on the same numbers in float64."""
    # 24 is no power of two.
    shapes = [(4, 6, 24), (1, 2, 32)]
    for dtype, mode, per_lane, shape in itertools.product(
        BOUNDS, ("sum", "local", "delayed"), (False, True), shapes
    ):
        if shape[0] == 1 and mode != "sum":
            continue
        name = f"{mode}, {'per lane' if per_lane else 'replicated'}, {shape}"
        inputs, seeds = draw(dtype, mode, per_lane, shape)
        expected = results(plain, inputs, seeds, mode, torch.float64)
        yield (
            dtype,
            name,
            difference(results(partial(add_norm_linear, fused=True), inputs, seeds, mode, dtype), expected),
        )


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


def curve_follows() -> bool:
    """200 training steps with the kernel in float32, against plain operations."""
    sizes = size(layers=3, num_lanes=2, broadcast_delay=1)
    plain_model, fused = build_model(sizes), build_model(sizes)
    set_kernels(fused, "triton", "cpu")
    return part("Triton kernel", *(curve(model, rows=1, seq=8) for model in (fused, plain_model))) < 1e-5


def main() -> int:
    if sys.argv[1:] == ["curve"]:
        return int(not curve_follows())
    worst: dict[torch.dtype, tuple[float, str]] = {}
    for dtype, name, error in itertools.chain(operations(), models(), compiled()):
        worst[dtype] = max(worst.get(dtype, (0.0, "")), (error, name))
    for dtype, (error, name) in worst.items():
        print(f"{dtype}: {error:.1e} of at most {BOUNDS[dtype]:.0e} ({name})")
    return int(any(error > BOUNDS[dtype] for dtype, (error, _) in worst.items()))


if __name__ == "__main__":
    raise SystemExit(main())
