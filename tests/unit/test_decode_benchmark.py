"""tests/benchmarks/decode.py runs, and its schedules compute what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import load_size
from model.decode import Decoder
from model.exchange import Alone
from tests.benchmarks.decode_lanes import LadderGroup, real_groups

ROOT = Path(__file__).resolve().parents[2]


def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.decode", "--quick", "--json", str(file)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    single = {row["row"]: row for row in figures["single"]}
    for kind in ("float32", "bfloat16", "int8"):
        assert single[f"ours, {kind}"]["tokens/s"] > 0
    assert single["transformers, float32"]["first token, s"] > 0
    assert {row["schedule"] for row in figures["lanes"]} == {"TP", "Ladder", "DTP"}
    # A simulated delay shows where it must: each of TP's exchanges waits for it.
    ms = {row["delay"]: row["ms"][0] for row in figures["lanes"] if _key(row) == ("sockets", "sleep", "TP")}
    assert ms[0.001] > ms[0.0]
    assert "llama.cpp" in done.stdout


def _key(row: dict[str, str]) -> tuple[str, str, str]:
    return row["carrier"], row["compute"], row["schedule"]


def test_ladder_adds_each_sum_one_module_late(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_size("smoke")
    group = real_groups(config, Alone())["Ladder"]
    streams, sums = [], []
    add = LadderGroup._add

    def watched(self: LadderGroup, x_LTD: torch.Tensor, o_LTD: torch.Tensor, *rest: Any) -> None:
        if not streams:
            streams.append(x_LTD.clone())
        sums.append(o_LTD.sum(0))
        add(self, x_LTD, o_LTD, *rest)
        streams.append(x_LTD.clone())

    monkeypatch.setattr(LadderGroup, "_add", watched)
    Decoder(group, [[5, 6, 7]], 1).prefill()
    assert len(sums) == 2 * config.num_hidden_layers
    for module in range(len(sums)):
        expected = streams[0] + torch.stack([torch.zeros_like(sums[0]), *sums[:module]]).sum(0)
        torch.testing.assert_close(streams[module + 1], expected)
