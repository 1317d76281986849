"""Losses of a short training at full precision, kept for each kind of hardware.

On the kind that they were taken on (processor, instruction set, torch) they must come out bit for bit; elsewhere they
must agree with those kept for any other within rounding that training has amplified. A change that alters them on
purpose writes them anew: `python -m tests.golden.test_losses`, which adds this machine's kind to losses.json.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

from model.config import LaneformerConfig, load_size
from model.laneformer import build_model
from train.loss import row_losses

FILE = Path(__file__).with_name("losses.json")
STEPS, BATCH, SEQUENCE = 12, 4, 64
SIZES = ("smoke", "smoke_dense")


def hardware() -> str:
    """The kind of hardware and software that decides about the last bit."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    processor = name or platform.processor() or platform.machine()
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def train(sizes: LaneformerConfig) -> list[float]:
    """Losses of AdamW on tokens whose successor is a function of them, one thread."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    model = build_model(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 64, (BATCH, SEQUENCE), generator=draw)
        optimizer.zero_grad()
        loss = row_losses(model(tokens), (tokens * 7 + 3) % 64)[1].sum() / tokens.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("size", SIZES)
def test_losses_are_those_kept(size: str) -> None:
    kept: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text())
    found = train(load_size(size))
    assert found[-1] < 0.7 * found[0]
    own = kept.get(hardware())
    if own is not None:
        assert [value.hex() for value in found] == own[size]
    for other in kept.values():
        assert found == pytest.approx([float.fromhex(value) for value in other[size]], rel=1e-3)


def main() -> None:
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    kept[hardware()] = {size: [value.hex() for value in train(load_size(size))] for size in SIZES}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
