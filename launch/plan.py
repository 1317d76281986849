"""`python -m launch plan`: days, disk, checkpoint interval and goodput of a run before it is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch import scaling
from launch.capacity import Failures, goodput, simulated_goodput, young_daly
from launch.status import amount, duration
from train.config import ConfigError, RunConfig, compose

DAY = 86400.0
MTBF_DAYS = (1.0, 3.0, 7.0, 14.0)  # published rates put 192 GPUs between 1.8 and 14 days
SIMULATED_RUNS = 400
FILES = ("plot", "scaling_plot")


@dataclass(frozen=True)
class Assumptions:
    """What the configuration does not say. Given as key=value beside the configuration's own keys."""

    tokens_per_second_per_rank: float | None = None  # default: cluster.expected_tokens_per_second_per_rank
    # Instead of it: of a step measured on the configured ranks, with its waiting.
    seconds_per_step: float | None = None
    save_seconds: float = 10.0  # that a save blocks training
    recovery_minutes: float = 10.0  # from a failure to the first new step, without a person
    plot: str | None = None  # also draw goodput over the number of GPUs into this file
    network_gbytes: float = (
        scaling.Links.network / 1e9
    )  # a GPU's network port, GB/s in one direction as reached
    nvlink_gbytes: float = scaling.Links.nvlink / 1e9  # the same within a node
    scaling_plot: str | None = None  # also draw a rank's speed over the number of GPUs into this file

    @staticmethod
    def split(words: Sequence[str]) -> tuple[Assumptions, list[str]]:
        """The assumptions among the words, and the others, which are the configuration's."""
        names = Assumptions.__dataclass_fields__
        given = {k: v for k, _, v in (word.partition("=") for word in words) if k in names}
        try:
            numbers = {key: value if key in FILES else float(value) for key, value in given.items()}
        except ValueError as error:
            raise ConfigError([f"{', '.join(given)}: {error}"]) from error
        wrong = [
            f"{key}={value} must be a finite number greater than 0"
            for key, value in numbers.items()
            if key not in FILES and not 0 < float(value) < math.inf
        ]
        if wrong:
            raise ConfigError(wrong)
        return Assumptions(**numbers), [word for word in words if word.partition("=")[0] not in names]  # pyright: ignore[reportArgumentType]


def plan(words: Sequence[str], console: Console) -> int:
    """Print what the run needs and what interruptions cost it."""
    assumed, rest = Assumptions.split(words)
    config = compose(rest)
    links = scaling.Links(
        network=assumed.network_gbytes * 1e9,
        nvlink=assumed.nvlink_gbytes * 1e9,
        gpus_per_node=config.cluster.ranks_per_node,
    )
    speed, alone = speeds(config, assumed, links)
    seconds_per_step = config.tokens_per_step / (speed * config.cluster.ranks)
    work = seconds_per_step * config.steps
    for key, value in facts(config, speed, work, assumed).items():
        console.print(f"{key:<28} {value}", highlight=False)
    console.print()
    console.print(interruptions(config, seconds_per_step, work, assumed))
    if assumed.plot:
        draw(Path(assumed.plot), config, seconds_per_step, assumed)
        console.print(f"\ngoodput over the number of GPUs: {assumed.plot}")
    console.print(
        f"\ntokens/s of a rank that computes {alone:,.0f} without waiting, by the sequences it takes at a time "
        f"(modelled: {assumed.nvlink_gbytes:g} GB/s in a node, {assumed.network_gbytes:g} between nodes)",
        highlight=False,
    )
    console.print(scaling.table(config, alone, links))
    if assumed.scaling_plot:
        scaling.draw(Path(assumed.scaling_plot), config, alone, links)
        console.print(f"\nspeed over the number of GPUs: {assumed.scaling_plot}")
    return 0


def speeds(config: RunConfig, assumed: Assumptions, links: scaling.Links) -> tuple[float, float]:
    """Tokens per second of a rank as configured, and what it would compute without waiting for others.

    A measured step tells them apart. An assumed speed serves as both.
    """
    given, seconds = assumed.tokens_per_second_per_rank, assumed.seconds_per_step
    if seconds is None:
        speed = given or config.cluster.expected_tokens_per_second_per_rank
        if speed is None:
            how = "seconds_per_step= as measured, or tokens_per_second_per_rank="
            raise ConfigError([f"how fast is a rank? give {how} (or set the cluster's expected speed)"])
        return speed, speed
    if given is not None:
        raise ConfigError(
            [f"seconds_per_step={seconds:g} and tokens_per_second_per_rank={given:g} say the same: give one"]
        )
    ranks = config.cluster.ranks
    speed = config.tokens_per_step / (seconds * ranks)
    try:
        return speed, scaling.without_waiting(config, ranks, config.shard_ranks, speed, links)
    except ValueError as error:
        raise ConfigError([f"seconds_per_step={seconds:g}: {error}"]) from error


def facts(config: RunConfig, speed: float, work: float, assumed: Assumptions) -> dict[str, str]:
    cluster, size = config.cluster, config.checkpoint_bytes
    every = config.checkpoint.every_steps * work / config.steps
    return {
        "run": f"{config.name}: {amount(config.steps * config.tokens_per_step)} tokens, {config.steps:,} steps",
        "ranks": f"{cluster.ranks:,} ({cluster.nodes} x {cluster.ranks_per_node})",
        "assumed speed": f"{speed:,.0f} tokens/s a rank, {speed * cluster.ranks / 1e6:.2f}M in all",
        "time without interruptions": f"{work / DAY:.1f} days, {work / 3600 * cluster.ranks:,.0f} rank-hours",
        "checkpoint": f"{size / 1e9:.1f} GB, {size / cluster.nodes / 1e9:.2f} GB a node",
        "write bandwidth": f"{size / assumed.save_seconds / 1e9:.2f} GB/s in all for {assumed.save_seconds:g} s",
        "checkpoints kept": f"{config.most_checkpoints * size / 1e12:.2f} TB at most",
        "configured interval": f"{config.checkpoint.every_steps:,} steps, {duration(every)}",
    }


def interruptions(config: RunConfig, seconds_per_step: float, work: float, assumed: Assumptions) -> Table:
    """One row for each mean time between failures."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for column in (
        "MTBF",
        "interruptions",
        "best interval",
        "goodput at best",
        "goodput as configured",
        "days",
    ):
        table.add_column(column)
    for days in MTBF_DAYS:
        configured = Failures(
            mtbf=days * DAY,
            recovery=assumed.recovery_minutes * 60,
            save=assumed.save_seconds,
            interval=config.checkpoint.every_steps * seconds_per_step,
        )
        best = young_daly(configured.save, configured.mtbf)
        mean, error, count = simulated_goodput(work, configured, SIMULATED_RUNS)
        table.add_row(
            f"{days:g} d",
            f"{count:.1f}",
            f"{duration(best)} ({max(1, round(best / seconds_per_step)):,} steps)",
            f"{100 * goodput(replace(configured, interval=best)):.2f} %",
            f"{100 * goodput(configured):.2f} % (simulated {100 * mean:.2f} ± {100 * error:.2f})",
            f"{work / mean / DAY:.1f}",
        )
    return table


def draw(file: Path, config: RunConfig, seconds_per_step: float, assumed: Assumptions) -> None:
    """Goodput over the number of GPUs, the failures of each GPU as often as at the configured size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    sizes = [192 * 2**n for n in range(7)] + [16384]
    for days in MTBF_DAYS:
        points = []
        for size in sizes:
            mtbf = days * DAY * config.cluster.ranks / size
            save, recovery = assumed.save_seconds, assumed.recovery_minutes * 60
            best = Failures(mtbf, recovery, save, young_daly(save, mtbf))
            points.append(100 * goodput(best))
        axes.plot(sizes, points, marker="o", markersize=3, label=f"{days:g} d at {config.cluster.ranks} GPUs")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
    axes.set_ylim(0, 100)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("goodput (%), saving at the best interval")
    axes.legend(title="mean time between failures", frameon=False, fontsize=8)
    axes.grid(alpha=0.25)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
