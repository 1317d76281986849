"""How fast a CPU decodes: `python -m tests.benchmarks.decode size=350m tokens=64 prompt=128 repeats=5 --json FILE`.

Two tables. The first: one sequence in one process, ours with each kind of weights beside the bare linear maps, the
exported model under transformers, and a plain Llama of the same size in llama.cpp; tokens per second, time to the
first token, and how much of the machine's memory bandwidth the weights get. The second: two, four and eight
processes under three schedules, with a simulated delay of messages (decode_lanes.py). Weights are random.

All rows are measured in turn, `repeats` times; a figure is the median, the spread (largest − smallest) / median. A
share of the memory read is taken within each turn. `--quick` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from model.config import LaneformerConfig, load_size
from model.laneformer import build_model
from model.native import backend
from model.weights import WEIGHT_KINDS
from tests.benchmarks import decode_lanes
from tests.benchmarks.decode_llama import FORMATS, llama
from tests.benchmarks.decode_single import Contestant, Run, exported, linear_maps, ours, reader, short

DEFAULTS = {"size": "350m", "tokens": 64, "prompt": 128, "repeats": 5}
QUICK = {"size": "smoke", "tokens": 4, "prompt": 8, "repeats": 1}
READ_BYTES = 2**30
PROCESSES, DELAYS, MODULE_SECONDS = (2, 4, 8), (0.0, 0.001, 0.005), 0.001


def contestants(config: LaneformerConfig, read_bytes: int) -> tuple[list[Contestant], dict[str, str]]:
    """Those that can run here, the memory read first, and why others cannot, by name."""
    state = build_model(config).state_dict()
    found, absent = [reader(read_bytes)], {}
    dtypes = (torch.float32, torch.bfloat16)
    found += [linear_maps(config, state, dtype) for dtype in dtypes]
    found += [ours(config, state, kind) for kind in WEIGHT_KINDS if kind != "as_is"]
    packages: dict[str, Callable[[str], Contestant]] = {}
    for dtype in dtypes:
        name = f"transformers, {short(dtype)}"
        packages[name] = lambda name, dtype=dtype: exported(config, state, dtype, name)
    for form in FORMATS:
        name = f"llama.cpp, {form}"
        packages[name] = lambda name, form=form: llama(config, form, torch.get_num_threads(), name)
    for name, make in packages.items():
        try:
            found.append(make(name))
        except ModuleNotFoundError as error:
            absent[name] = str(error)
    return found, absent


def measure_single(config: LaneformerConfig, values: dict[str, Any], read_bytes: int) -> list[dict[str, Any]]:
    found, absent = contestants(config, read_bytes)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, config.vocab_size, (values["prompt"],), generator=generator).tolist()
    for contestant in found:
        contestant.run(prompt, 2)
    runs: list[list[Run]] = [[] for _ in found]
    for _ in range(values["repeats"]):
        for contestant, own in zip(found, runs, strict=True):
            own.append(contestant.run(prompt, values["tokens"]))
    read = [found[0].bytes_per_token / run.seconds_per_token for run in runs[0]]
    rows = []
    for contestant, own in zip(found, runs, strict=True):
        seconds = [run.seconds_per_token for run in own]
        rates = [contestant.bytes_per_token / s for s in seconds]
        row: dict[str, Any] = {
            "row": contestant.name,
            "ms": [1e3 * s for s in seconds],
            "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
            "GB/s": statistics.median(rates) / 1e9,
            "share of read": statistics.median(a / b for a, b in zip(rates, read, strict=True)),
        }
        if contestant is not found[0]:
            row["tokens/s"] = 1 / statistics.median(seconds)
        first = [run.seconds_to_first for run in own if run.seconds_to_first is not None]
        if first:
            row["first token, s"] = statistics.median(first)
        rows.append(row)
    return rows + [{"row": name, "not run": why} for name, why in absent.items()]


def measure_lanes(config: LaneformerConfig, values: dict[str, Any], quick: bool) -> list[dict[str, Any]]:
    rows = []
    for processes in PROCESSES[: 1 if quick else None]:
        plan = decode_lanes.Plan(
            config=config,
            delays=DELAYS[: 2 if quick else None],
            repeats=values["repeats"],
            tokens=max(2, values["tokens"] // 8),
            module_seconds=MODULE_SECONDS,
            real=processes <= 4,
        )
        rows += decode_lanes.measure(processes, plan)
    return rows


def show_single(rows: list[dict[str, Any]], title: str) -> Table:
    columns = {
        "tokens/s": ".1f",
        "spread": ".0%",
        "first token, s": ".2f",
        "GB/s": ".1f",
        "share of read": ".0%",
    }
    table = Table(title=title, box=None)
    table.add_column("one process")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        if "not run" in row:
            table.add_row(f"{row['row']}: not run: {row['not run']}")
            continue
        table.add_row(row["row"], *(format(row[c], form) if c in row else "" for c, form in columns.items()))
    return table


def show_lanes(rows: list[dict[str, Any]]) -> Table:
    """Milliseconds per token under each schedule, one line for what is otherwise the same."""
    table = Table(title="several processes, ms per token (spread)", box=None)
    for column in ("processes", "compute", "carrier", "delay, ms", *decode_lanes.SCHEDULES, "TP / DTP"):
        table.add_column(column, justify="right")
    lines: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        key = (row["processes"], row["compute"], row["carrier"], row["delay"])
        lines.setdefault(key, {})[row["schedule"]] = row["ms"]
    for (processes, compute, carrier, delay), by_schedule in sorted(lines.items()):
        times = [by_schedule[schedule] for schedule in decode_lanes.SCHEDULES]
        cells = [
            f"{statistics.median(ms):.1f} ({(max(ms) - min(ms)) / statistics.median(ms):.0%})" for ms in times
        ]
        ratio = statistics.median(a / b for a, b in zip(times[0], times[-1], strict=True))
        table.add_row(str(processes), compute, carrier, f"{1e3 * delay:g}", *cells, f"{ratio:.2f}")
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "words", nargs="*", help=" ".join(f"{key}={value}" for key, value in DEFAULTS.items())
    )
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few repeats")
    options = parser.parse_args(arguments)
    values: dict[str, Any] = dict(QUICK if options.quick else DEFAULTS)
    for key, _, value in (word.partition("=") for word in options.words):
        if key not in values:
            sys.exit(f"unknown key {key!r}; the keys are {', '.join(values)}")
        values[key] = value if key == "size" else int(value)
    config = load_size(values["size"])
    single = measure_single(config, values, READ_BYTES >> 6 if options.quick else READ_BYTES)
    threads = torch.get_num_threads()
    title = f"{values['size']}, prompt of {values['prompt']}, {values['tokens']} tokens, {threads} threads, {backend()}"
    console = Console(width=120)
    console.print(show_single(single, title))
    lanes = measure_lanes(config, values, options.quick)
    console.print(show_lanes(lanes))
    if options.json:
        figures = {**values, "threads": threads, "backend": backend(), "single": single, "lanes": lanes}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
