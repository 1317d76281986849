"""`profile=on`: the files of a profile, by hand-made steps and in a run."""

from __future__ import annotations

import gzip
import json
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import numbers, train
from tests.tiny import MODEL, tiny_config
from train.profiling import RECORDED, SKIPPED, StepProfiler, tensor_bytes
from train.run_dir import RunDir


def test_memory_is_counted_exactly(tmp_path: Path) -> None:
    """1,000 + 2,000 numbers live at once on top of what is resident, in each step."""
    profiler = StepProfiler(RunDir(tmp_path), torch.device("cpu"), resident=lambda: 500)
    for step in range(1, SKIPPED + RECORDED + 3):
        with profiler.step(step):
            first = torch.empty(1000)
            second = torch.empty(2000)
            del first, second
    profiler.close()
    (folder,) = (tmp_path / "profile").iterdir()
    assert folder.name == f"step-{SKIPPED + 1}"
    memory = json.loads((folder / "memory.json").read_text())
    assert memory["peak_bytes"] == 500 + 12_000
    used = [bytes_ for _, bytes_ in memory["timeline"]["microseconds_and_bytes"]]
    assert used == [4_500, 12_500, 8_500, 500] * RECORDED


def test_bytes_of_shared_storages_count_once() -> None:
    matrix = torch.zeros(10, 10)
    assert tensor_bytes([matrix, matrix[3:], matrix.t(), torch.zeros(5)]) == 420


def test_a_run_too_short_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = StepProfiler(RunDir(tmp_path), torch.device("cpu"), resident=lambda: 0)
    with profiler.step(1):
        pass
    with caplog.at_level(logging.WARNING):
        profiler.close()
    assert f"ended {SKIPPED + RECORDED - 1} steps before the profile was complete" in caplog.text
    assert not (tmp_path / "profile").exists()


def test_a_run_is_profiled_and_trains_the_same(tiny_data: Path, tmp_path: Path) -> None:
    steps = SKIPPED + RECORDED
    plain, profiled = (
        train(tiny_config(tiny_data, tmp_path, f"name={on}", f"profile={on}", ranks=2, steps=steps))
        for on in ("off", "on")
    )
    assert numbers(plain) == numbers(profiled)
    assert not (plain.path / "profile").exists()
    (folder,) = (profiled.path / "profile").iterdir()
    names = {"trace.json.gz", "ops.txt", "memory.json", "profile.png"}
    assert {file.name for file in folder.iterdir()} == names
    with gzip.open(folder / "trace.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    assert {"aten::bmm", "c10d::_allgather_base_"} <= {event.get("name") for event in events}
    assert_gathered_ahead(events, layers=MODEL["num_hidden_layers"])
    assert "aten::bmm" in (folder / "ops.txt").read_text()
    assert (folder / "profile.png").read_bytes()[:4] == b"\x89PNG"


def assert_gathered_ahead(events: list[dict[str, Any]], layers: int) -> None:
    """In every backward pass, a layer's weights are asked for before the layer above has computed its gradients: the
    transfer has the time of one layer's backward pass to hide in. What it hides, only a GPU's profile tells."""
    starts: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            starts[event["name"]].append(event["ts"])
    for above in range(1, layers):
        asked = sorted(starts[f"FSDP::backward_prefetch for layers.{above - 1}"])
        computed = sorted(starts[f"FSDP::post_backward_reduce (layers.{above})"])
        assert len(asked) == len(computed) == RECORDED
        assert all(a < b for a, b in zip(asked, computed, strict=True))
