"""How fast a rank trains on more GPUs: its own speed, and the communication that computation does not hide.

Under FSDP a rank sends and receives, for every micro-batch of a model of P parameters:

    gather       2·P − H elements of the gathered precision: each layer's weights before its forward and again before
                 its backward pass; the head's, H, stay in between
    reduce       P elements of the reduction's precision: the gradients, summed over the ranks that share the weights
    replicate    P / shard elements of it, under HSDP: those sums, added up over the replicas

A ring of n ranks moves (n − 1)/n of a gather's or reduction's bytes over each link, and twice that for a sum that all
receive; each of its steps also takes the link's latency. A ring within a node runs over NVLink, one that leaves it at
the speed of a GPU's network port. A layer's communication hides behind the computation beside it, the gather of the
layer that follows and the reduction of the one before; what takes longer than that computation, the first gather and
the last reduction are waited for.

Computation and weights are split evenly over the layers, and embedding and head count as one more; a third of the
computation is forward. Left out: slow ranks, contention between rings, copies into and out of what is exchanged, the
reduction of the loss, saves. tests/unit/test_launch_scaling.py holds the volumes against what runs exchange, and
tests/benchmarks/scaling.py the speed against steps on 1, 2 and 4 ranks, which can show it for a CPU alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from train.config import RunConfig

SIZES = (8, 64, 192, 1024)  # GPUs
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Links:
    """Bytes per second of one GPU in one direction, as collectives reach them, and seconds per step of a ring.

    The defaults are assumptions for H100 nodes (900 GB/s of NVLink in both directions, one 400 Gb/s port a GPU),
    not measurements.
    """

    nvlink: float = 360e9
    network: float = 45e9
    latency: float = 5e-6
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Volume:
    """Bytes of one micro-batch, before a ring's (n − 1)/n."""

    gather: int
    reduce: int
    replicate: int


def volume(config: RunConfig, shard: int) -> Volume:
    """`shard` ranks share one copy of the weights."""
    parameters = config.model.num_parameters()
    gathered, reduced = BYTES[config.parallel.param_dtype], BYTES[config.parallel.reduce_dtype]
    kept = config.model._head_weights() + config.model.hidden_size  # the head and the final norm
    return Volume((2 * parameters - kept) * gathered, reduced * parameters, reduced * parameters // shard)


def ring(size: float, ranks: int, links: Links, within_node: bool) -> float:
    """Seconds of a gather or reduction of `size` bytes."""
    bandwidth = links.nvlink if within_node else links.network
    return size * (ranks - 1) / ranks / bandwidth + (ranks - 1) * links.latency


def speed(
    config: RunConfig,
    ranks: int,
    shard: int,
    alone: float,
    links: Links,
    sequences: int | None = None,
    overlap: bool = True,
) -> float:
    """Tokens per second of one of `ranks` ranks that would compute `alone` tokens per second without waiting.

    `sequences` are those of a micro-batch; None: as configured. Without `overlap` all communication is waited for, as
    it is on the CPU.
    """
    layers, moved = config.model.num_hidden_layers + 1, volume(config, shard)
    tokens = (sequences or config.train.local_batch_size) * config.train.seq_len
    forward = tokens / alone / 3 / layers
    near = shard <= links.gpus_per_node
    gather = ring(moved.gather / 2 / layers, shard, links, near)
    reduce = ring(moved.reduce / layers, shard, links, near)
    if ranks > shard:
        replicas = ranks // shard
        reduce += 2 * ring(
            moved.replicate / layers, replicas, links, within_node=ranks <= links.gpus_per_node
        )
    if not overlap:
        return tokens / (tokens / alone + layers * (2 * gather + reduce))
    seconds = gather + (layers - 1) * max(forward, gather) + forward
    seconds += (layers - 1) * max(2 * forward, gather + reduce) + 2 * forward + reduce
    return tokens / seconds


def without_waiting(config: RunConfig, ranks: int, shard: int, measured: float, links: Links) -> float:
    """What a rank would compute alone that reached `measured` tokens per second on `ranks` ranks: `speed` inverted.

    Raises ValueError where the links do not allow what was measured.
    """
    most = speed(config, ranks, shard, 1e30, links)
    if measured >= most:
        raise ValueError(
            f"{measured:,.0f} tokens/s a rank were measured on {ranks:,} ranks, but the links allow {most:,.0f} at "
            "most: give what they reach by network_gbytes= and nvlink_gbytes="
        )
    low, high = 0.0, 1 / measured  # seconds a token
    for _ in range(60):
        middle = (low + high) / 2
        if speed(config, ranks, shard, 1 / middle, links) > measured:
            low = middle
        else:
            high = middle
    return 1 / high


def layouts(config: RunConfig, alone: float, links: Links, sequences: int) -> list[tuple[int, float, float]]:
    """GPUs, and a rank's tokens per second with one copy of the weights over all, and with one in every node."""
    return [
        (
            ranks,
            speed(config, ranks, ranks, alone, links, sequences),
            speed(config, ranks, min(ranks, links.gpus_per_node), alone, links, sequences),
        )
        for ranks in SIZES
    ]


def table(config: RunConfig, alone: float, links: Links) -> Table:
    """One row for each number of GPUs, at the configured micro-batch and at twice and four times as large ones."""
    found = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    found.add_column("GPUs")
    batches = [config.train.local_batch_size * factor for factor in (1, 2, 4)]
    columns = []
    for batch in batches:
        found.add_column(f"FSDP, {batch} sequences")
        found.add_column(f"HSDP, {batch} sequences")
        columns.append(layouts(config, alone, links, batch))
    for row, ranks in enumerate(SIZES):
        cells = [
            f"{value:,.0f} ({100 * value / alone:.0f} %)" for column in columns for value in column[row][1:]
        ]
        found.add_row(f"{ranks:,}", *cells)
    return found


def draw(file: Path, config: RunConfig, alone: float, links: Links) -> None:
    """Tokens per second of a rank over the number of GPUs, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    for factor, style in ((1, "-"), (2, "--"), (4, ":")):
        batch = config.train.local_batch_size * factor
        rows = layouts(config, alone, links, batch)
        for column, kind, colour in ((1, "FSDP", "C1"), (2, "HSDP, a copy in each node", "C0")):
            line = [row[column] for row in rows]
            label = f"{kind}, {batch} sequences"
            axes.plot(SIZES, line, style, color=colour, marker="o", markersize=3, label=label)
    axes.axhline(alone, color="0.6", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
    axes.set_ylim(0, alone * 1.08)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens per second of a GPU")
    axes.legend(frameon=False, fontsize=8, title="micro-batch")
    axes.grid(alpha=0.25)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
