"""200 steps of training by forms of the model that tests/parallel/test_parity.py's trainer does not run on a CPU.

The task is to predict a sequence in which each token follows from the one before, which is learned within the steps.
Run with -s for the differences.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model.config import LaneformerConfig, load_size
from model.laneformer import build_model
from model.parallelize import set_checkpointing, set_float8
from tests.benchmarks.einsum_lanes import EinsumLaneformer

STEPS = 200


def size(layers: int = 4, **change: object) -> LaneformerConfig:
    shape = {"num_hidden_layers": layers, "vocab_size": 64, "swa_layers": [0, 1], "num_lanes": 4}
    return LaneformerConfig.from_dict({**load_size("smoke").to_dict(), **shape, **change})


def curve(model: nn.Module, rows: int = 4, seq: int = 16) -> list[float]:
    """Losses of AdamW on rows x seq tokens a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    told = []
    for step in range(STEPS):
        start = torch.randint(0, 64, (rows, 1), generator=torch.Generator().manual_seed(step))
        tokens = (start * 5 ** torch.arange(seq + 1)) % 63
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


class Mixed(nn.Module):
    """Weights in float32, and everything computed with their bfloat16 copies, as FSDP's mixed precision does."""

    def __init__(self, policy: str):
        super().__init__()
        self.weights = nn.ParameterList(build_model(size()).parameters())
        copied = build_model(size(), torch.bfloat16)
        set_checkpointing(copied, policy)
        self.copied = (copied,)  # in a tuple, so that its parameters are not this module's
        for weight, copy in zip(self.weights, copied.parameters(), strict=True):
            copy.register_post_accumulate_grad_hook(partial(self._hand_over, weight))

    def _hand_over(self, weight: nn.Parameter, copy: torch.Tensor) -> None:
        assert copy.grad is not None
        weight.grad, copy.grad = copy.grad.float(), None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for weight, copy in zip(self.weights, self.copied[0].parameters(), strict=True):
                copy.copy_(weight)
        return self.copied[0](tokens).float()


def part(name: str, got: list[float], expected: list[float]) -> float:
    """The largest difference, as a share of the first loss, once it is seen that the task was learned."""
    assert expected[-1] < 0.5 * expected[0]
    worst = max(abs(a - b) for a, b in zip(got, expected, strict=True)) / expected[0]
    print(f"{name}: largest difference {worst:.2e} of the first loss")
    return worst


def test_ours_follows_the_published_form():
    """No line in common but the optimizer: einsums, separate weights, norms before the linear maps."""
    ours = build_model(size())
    published = EinsumLaneformer(size()).load(ours)
    assert part("published form", curve(ours), curve(published)) < 1e-5


def test_float8_follows_float32():
    plain, float8 = build_model(size()), build_model(size())
    set_float8(float8)
    assert 0 < part("float8", curve(float8), curve(plain)) < 0.01


@pytest.mark.parametrize("policy", ["none", "segments:2"])
def test_bfloat16_follows_float32(policy: str):
    assert 0 < part(f"bfloat16, {policy}", curve(Mixed(policy)), curve(build_model(size()))) < 0.01


@pytest.mark.slow
def test_the_triton_kernel_follows_plain_operations():
    """Under Triton's interpreter, in a process of its own."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.interpreted_lane_add", "curve"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-3000:]
    assert "Triton kernel: largest difference" in finished.stdout
