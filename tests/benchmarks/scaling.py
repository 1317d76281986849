"""The model of speed over the number of ranks, launch/scaling.py, against training steps on this machine's CPU.

    python tests/benchmarks/scaling.py [--ranks 1 2 4] [--rounds 7] [--json FILE] [--quick]

Ranks are processes that talk over gloo and share this machine's cores. What the model wants to know is measured, and
what it says is compared with steps (forward, loss, backward, clipping, AdamW; eager, float32) of a model that is
sharded as training shards it:

    alone           every rank trains a whole model by itself, all at the same time: the speed without communication
                    that ranks have which share these cores. Clipping and AdamW count by a rank's share of the weights.
    communication   an all-gather and a reduce-scatter of a layer's size, and of almost nothing, among the ranks: the
                    links' bandwidth and latency
    measured        the sharded model

The three take turns, and an error is the median over rounds of prediction over measurement, both of the same round,
so that other work on the machine falls on all alike. One rank, which exchanges nothing, shows what error remains of
the measurement itself. Two predictions: with communication hidden behind computation, as launch plan counts for
GPUs, and with all of it waited for, as FSDP does on a CPU. --quick is one round of a small size on one and two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch.scaling import Links, speed  # noqa: E402
from model.config import load_size  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from train.config import RunConfig, compose  # noqa: E402

SEQUENCE = 32  # tokens
MICRO_BATCHES = (1, 4)  # sequences
WIDTH = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 1024}  # 5.6M parameters
SMALL = 1024  # elements of each rank in a gather whose time is latency
STEPS = 2  # of each kind in a round
Times = dict[str, float]  # of one round, in seconds


def configuration(quick: bool) -> RunConfig:
    sizes = load_size("smoke") if quick else replace(load_size("smoke"), **WIDTH)
    words = [f"model.{key}={value}" for key, value in sizes.to_dict().items()]
    return compose(["experiment=smoke_phase1", *words, f"train.seq_len={SEQUENCE}"])


def layer_elements(config: RunConfig, ranks: int) -> int:
    """One rank's share of a layer, embedding and head counted as one more, as launch.scaling cuts a model."""
    return config.model.num_parameters() // (config.model.num_hidden_layers + 1) // ranks


# --- on every rank


def trainer_of(config: RunConfig, mesh: Any) -> Callable[[int], tuple[float, float]]:
    """A step on a micro-batch of so many sequences. Returns seconds of forward and backward, and of the rest."""
    import torch
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import utils as dist_utils

    from model.laneformer import build_model
    from model.parallelize import parallelize_laneformer
    from train.loss import row_losses

    model = parallelize_laneformer(
        build_model(config.model),
        parallel_dims=SimpleNamespace(dp_replicate_enabled=False, get_mesh=lambda axes: mesh),  # pyright: ignore[reportArgumentType]
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=ParallelismConfig(),
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    tokens = torch.randint(0, 1000, (max(MICRO_BATCHES), SEQUENCE))

    def step(sequences: int) -> tuple[float, float]:
        begin = time.perf_counter()
        logits = model(tokens[:sequences])
        row_losses(logits, tokens[:sequences].roll(-1, 1))[1].mean().backward()
        middle = time.perf_counter()
        dist_utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return middle - begin, time.perf_counter() - middle

    return step


def measure(file: str, quick: bool, rounds: int, micro_batches: Sequence[int]) -> None:
    """Rank 0 writes `{sequences: [Times of a round, …]}`, each each of the slowest rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    config = configuration(quick)
    own = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ranks", "fsdp"))["fsdp"]
    all_ranks = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    alone, sharded = trainer_of(config, own), trainer_of(config, all_ranks)

    def mean_seconds(collective: Callable[..., Any], elements: int) -> float:
        """Of a collective among all, with so many elements for each rank."""
        one, every = torch.ones(elements), torch.ones(elements * ranks)
        arguments = (every, one) if collective is dist.all_gather_into_tensor else (one, every)
        repeats = 4 * STEPS
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            collective(*arguments)
        return (time.perf_counter() - begin) / repeats

    def one_round(sequences: int) -> Times:
        dist.barrier()
        whole = [alone(sequences) for _ in range(STEPS)]
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS):
            sharded(sequences)
        step = (time.perf_counter() - begin) / STEPS
        gather, reduce = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
        large = layer_elements(config, ranks)
        return {
            "forward_backward": statistics.mean(seconds for seconds, _ in whole),
            "optimizer": statistics.mean(seconds for _, seconds in whole),
            "step": step,
            "gather": mean_seconds(gather, large),
            "reduce": mean_seconds(reduce, large),
            "small_gather": mean_seconds(gather, SMALL),
            "small_reduce": mean_seconds(reduce, SMALL),
        }

    found: dict[int, list[Times]] = {sequences: [] for sequences in micro_batches}
    for number in range(rounds + 1):  # the first one warms up
        for sequences in micro_batches:
            gathered: list[Any] = [None] * ranks
            dist.all_gather_object(gathered, one_round(sequences))
            if number:
                found[sequences].append({key: max(times[key] for times in gathered) for key in gathered[0]})
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    dist.destroy_process_group()


# --- arithmetic


def links_of(times: Times, ranks: int, size: int) -> Links:
    """Bandwidth and latency with which launch.scaling.ring gives the measured times: of a large size, in bytes, and of
    almost nothing. A layer gathers twice and reduces once, so that is how the two are weighed."""
    if ranks == 1:
        return Links()  # which nothing uses
    large = (2 * times["gather"] + times["reduce"]) / 3
    small = (2 * times["small_gather"] + times["small_reduce"]) / 3
    small = min(small, large / 2)  # other work on the machine may have held up the small ones alone
    bandwidth = size * (ranks - 1) / ranks / (large - small)
    return Links(nvlink=bandwidth, network=bandwidth, latency=small / (ranks - 1))


def predict(config: RunConfig, ranks: int, sequences: int, times: Times) -> dict[str, float]:
    """Tokens per second of a rank: alone, predicted in both ways, and measured; and the links."""
    tokens = sequences * config.train.seq_len
    links = links_of(times, ranks, 4 * layer_elements(config, ranks) * ranks)
    alone = tokens / (times["forward_backward"] + times["optimizer"] / ranks)
    hidden, waited = (
        speed(config, ranks, ranks, alone, links, sequences, overlap) for overlap in (True, False)
    )
    measured = tokens / times["step"]
    return {
        "alone": alone,
        "communication_seconds": tokens / waited - tokens / alone,
        "gbytes_per_second": links.nvlink / 1e9,
        "latency": links.latency,
        "hidden": hidden,
        "waited": waited,
        "measured": measured,
        "hidden_error": hidden / measured - 1,
        "waited_error": waited / measured - 1,
    }


def summarise(config: RunConfig, ranks: int, sequences: int, rounds: Sequence[Times]) -> dict[str, Any]:
    """The row of a table: medians over rounds, and the errors' quartiles."""
    found = [predict(config, ranks, sequences, times) for times in rounds]
    row: dict[str, Any] = {"ranks": ranks, "sequences": sequences}
    row |= {key: statistics.median(values[key] for values in found) for key in found[0]}
    for key in ("hidden_error", "waited_error"):
        errors = [values[key] for values in found]
        low, _, high = statistics.quantiles(errors, n=4) if len(errors) > 1 else errors * 3
        row |= {f"{key}_low": low, f"{key}_high": high}
    return row


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    titles = [
        "ranks",
        "sequences",
        "alone",
        "communication",
        "predicted, hidden",
        "error",
        "predicted, waited for",
    ]
    titles += ["error", "measured"]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for row in rows:
        errors = [
            f"{100 * row[key]:+.0f} % ({100 * row[f'{key}_low']:+.0f} to {100 * row[f'{key}_high']:+.0f})"
            for key in ("hidden_error", "waited_error")
        ]
        exchange = f"{1e3 * row['communication_seconds']:.0f} ms"
        cells = [row["ranks"], row["sequences"], f"{row['alone']:,.0f}", exchange, f"{row['hidden']:,.0f}"]
        cells += [errors[0], f"{row['waited']:,.0f}", errors[1], f"{row['measured']:,.0f}"]
        print("| " + " | ".join(map(str, cells)) + " |")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    micro_batches = MICRO_BATCHES
    if options.quick:
        options.ranks, options.rounds, micro_batches = [1, 2], 1, MICRO_BATCHES[:1]
    config, rows = configuration(options.quick), []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            file = Path(folder) / f"{ranks}.json"
            words = (str(file), options.quick, options.rounds, micro_batches)
            run_ranks(ranks, Path(folder) / "log", measure, *words)
            found = json.loads(file.read_text())
            rows += [summarise(config, ranks, n, found[str(n)]) for n in micro_batches]
    rows.sort(key=lambda row: row["sequences"])
    print(f"tokens/s of a rank; {config.model.num_parameters():,} parameters, sequences of {SEQUENCE} tokens")
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
