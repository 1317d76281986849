"""How fast one GPU decodes, and what eight would: `python -m tests.benchmarks.decode_gpu size=2b dtype=bfloat16`.

Rows: the memory's read bandwidth; one sequence with and without CUDA graphs; one lane of eight alone, as each of
eight GPUs would compute it, and from it an estimate of eight GPUs: an estimate, because one GPU cannot exchange
anything. Weights are random. Without a GPU, `device=cpu size=smoke` shows that the script runs; its figures say
nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from model.config import LaneformerConfig, load_size
from model.decode import Decoder
from model.delayed_tp import LaneGroup, Part
from model.exchange import Alone, Exchange
from model.hf import internal_shapes

EXCHANGE_SECONDS = 8e-6
"""A one-shot exchange of 6 KB between eight GPUs on NVLink, as published for such kernels; not measured here."""
WAITED_FOR = 3
"""Exchanges of a token that nothing hides: embedding, final state, choice."""
TOKENS, REPEATS = 64, 5


class Unheard:
    """The exchange of one process of several whose peers say the same as it does: for timing its compute alone."""

    def __init__(self, size: int):
        self.rank, self.size = 0, size
        self.sent: deque[torch.Tensor] = deque()

    def push(self, x: torch.Tensor) -> None:
        self.sent.append(x.expand(self.size, *x.shape))

    def collect(self, patient: bool = False) -> torch.Tensor:
        return self.sent.popleft()

    def close(self) -> None:
        pass


def random_group(
    config: LaneformerConfig, exchange: Exchange, dtype: torch.dtype, device: torch.device
) -> LaneGroup:
    shapes = internal_shapes(config)
    part = Part.of(config, exchange.rank, exchange.size)
    generator = torch.Generator(device).manual_seed(0)

    def weight(name: str) -> torch.Tensor:
        rows = part.cut(name, torch.empty(shapes[name], device="meta"), config).shape
        if "norm" in name:
            return torch.ones(rows, dtype=dtype, device=device)
        return torch.empty(rows, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    return LaneGroup(config, weight, exchange, dtype, "as_is")


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_token(group: LaneGroup, context: int, graphs: bool) -> list[float]:
    """Mean seconds of a step, one value per repeat."""
    decoder = Decoder(group, [[1] * context], TOKENS * (REPEATS + 1))
    decoder.prefill(512)
    token_B1 = torch.ones(1, 1, dtype=torch.long, device=group.device)

    def step() -> None:
        if graphs:
            decoder.advance(token_B1)
        else:
            with torch.inference_mode():
                positions_BC = decoder.cache.begin(1).clamp_(max=decoder.limit - 1)
                group.logits(token_B1, positions_BC, decoder.cache.layers)

    times = []
    for _ in range(REPEATS + 1):
        finish(group.device)
        begin = time.perf_counter()
        for _ in range(TOKENS):
            step()
        finish(group.device)
        times.append((time.perf_counter() - begin) / TOKENS)
    return times[1:]


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of a sum over a large tensor."""
    x = torch.ones(2**29 if device.type == "cuda" else 2**24, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        finish(device)
        begin = time.perf_counter()
        x.sum()
        finish(device)
        best = min(best, time.perf_counter() - begin)
    return x.nbytes / best


def measure(size: str, dtype: torch.dtype, device: torch.device, context: int) -> list[dict[str, Any]]:
    config, bandwidth = load_size(size), read_bandwidth(device)
    rows: list[dict[str, Any]] = [{"row": "memory read", "GB/s": bandwidth / 1e9}]

    def add(name: str, times: list[float], weight_bytes: float) -> float:
        median = statistics.median(times)
        rate = weight_bytes / median
        rows.append(
            {
                "row": name,
                "tokens/s": 1 / median,
                "spread": (max(times) - min(times)) / median,
                "GB/s": rate / 1e9,
                "share of read": rate / bandwidth,
            }
        )
        return median

    whole, alone = config.decode_bytes(dtype.itemsize), random_group(config, Alone(), dtype, device)
    add("one process, no graphs", seconds_per_token(alone, context, graphs=False), whole)
    if device.type == "cuda":
        add("one process, CUDA graphs", seconds_per_token(alone, context, graphs=True), whole)
    del alone
    lanes = config.num_lanes
    one = random_group(config, Unheard(lanes), dtype, device)
    times = seconds_per_token(one, context, graphs=device.type == "cuda")
    lane = add(f"one lane of {lanes}, compute alone", times, whole / lanes)
    estimate = lane + WAITED_FOR * EXCHANGE_SECONDS
    rows.append(
        {
            "row": f"{lanes} GPUs, an estimate: the lane + {WAITED_FOR} × {EXCHANGE_SECONDS * 1e6:g} µs",
            "tokens/s": 1 / estimate,
        }
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("words", nargs="*", help="size=2b dtype=bfloat16 context=512 device=cuda")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    values = {"size": "2b", "dtype": "bfloat16", "context": "512", "device": "cuda"}
    given = dict(word.split("=", 1) for word in arguments.words)
    if unknown := given.keys() - values.keys():
        sys.exit(f"unknown keys {sorted(unknown)}; the keys are {', '.join(values)}")
    values |= given
    if values["device"] == "cuda" and not torch.cuda.is_available():
        sys.exit("not run: torch sees no GPU here")
    device = torch.device(values["device"])
    rows = measure(values["size"], getattr(torch, values["dtype"]), device, int(values["context"]))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    table = Table(title=f"{values['size']}, {values['dtype']}, context {values['context']}, {name}", box=None)
    columns = {"tokens/s": ",.1f", "spread": ".1%", "GB/s": ",.1f", "share of read": ".1%"}
    table.add_column("row")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        cells = [format(row[key], form) if key in row else "" for key, form in columns.items()]
        table.add_row(row["row"], *cells)
    Console(width=120).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": name, **values, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
