"""What the delay costs in quality: held-out loss after equal tokens of equal data, at the smoke size.

    python tests/benchmarks/quality.py [--tokens 163840] [--seeds 0 1 2] [--json FILE] [--plot FILE]
    python tests/benchmarks/quality.py --optimizers [--tokens 163840] [--seeds 0 1 2] [--json FILE]

Trains, one run after another and each in the pipeline's own trainer: the lane model with delays of 0 to 3 layers,
those with a delay with and without early communication, and the dense twin. A seed sets the initial weights and the
order of the data; variants of one seed read the same sequences. Runs that are done are not run again, and one that
was cut off goes on. --optimizers compares AdamW and Muon instead, on the lane model with a delay of 2: each at the
learning rate that gives it the lowest loss of the first seed. `python -m data_mixtures smoke root=data/smoke` prepares
the data.

The loss is that on held-out text of the three sources, weighted as the mixture is, in nats per token. Differences
are taken between runs of one seed, and their interval is Student's t over the seeds (95 %): it covers the luck of
weights and data order, and not other sizes, budgets or learning rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.runs import train  # noqa: E402
from train.config import RunConfig, compose  # noqa: E402
from train.run_dir import RunDir  # noqa: E402

BATCH, SEQUENCE = 4, 256
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # by number of seeds
BASE = "delay 0"
# What a row's differences are taken from, by their name.
DELAYS = {"over_delay_0": BASE, "over_dense": "dense"}
OPTIMIZERS = {"over_adamw": "adamw"}
RATES = {
    "adamw": (1.5e-3, 3e-3, 4.5e-3, 6e-3, 1.2e-2),
    "muon": (3e-3, 4.5e-3, 6e-3, 8e-3, 1.2e-2),
}


@dataclass(frozen=True)
class Variant:
    name: str
    words: tuple[str, ...]

    @property
    def slug(self) -> str:
        return self.name.replace(", ", "-").replace(" ", "-")


def variants() -> list[Variant]:
    """The dense twin, then the lane model by delay. Early communication means nothing without a delay."""
    found = [Variant("dense", ("model=smoke_dense",)), Variant(BASE, ("model.broadcast_delay=0",))]
    for delay in (1, 2, 3):
        for early in (False, True):
            name = f"delay {delay}" + (", early" if early else "")
            found.append(
                Variant(
                    name, (f"model.broadcast_delay={delay}", f"model.use_early_comm={str(early).lower()}")
                )
            )
    return found


def optimizer_variant(name: str, rate: float) -> Variant:
    """The lane model with a delay of 2 layers, trained by one optimizer at one learning rate."""
    words = ("model.broadcast_delay=2", "model.use_early_comm=false", f"optim={name}", f"optim.lr={rate}")
    return Variant(f"{name} {rate:g}", words)


def configuration(variant: Variant, seed: int, tokens: int, runs: Path, extra: Sequence[str]) -> RunConfig:
    steps = tokens // (BATCH * SEQUENCE)
    words = [
        "experiment=smoke_phase1",
        f"name={variant.slug}-seed{seed}",
        f"runs={runs}",
        f"data.tokens={tokens}",
        f"data.seed={seed}",
        f"train.seed={seed}",
        f"train.seq_len={SEQUENCE}",
        f"train.global_batch_size={BATCH}",
        f"train.local_batch_size={BATCH}",
        f"optim.warmup_tokens={tokens // 10}",
        f"optim.decay_tokens={tokens * 3 // 10}",
        f"checkpoint.every_steps={max(steps // 2, 1)}",
        "checkpoint.asynchronous=false",
        "checkpoint.keep_latest=1",
        f"validation.every_steps={steps}",
        "metrics.every_steps=8",
        "metrics.tensorboard=false",
        "metrics.wandb=false",
        "cluster.threads_per_rank=1",
    ]
    return compose([*words, *extra, *variant.words])


def held_out_loss(config: RunConfig) -> float:
    """Of the finished run, weighted over the sources as the mixture is."""
    row = list(RunDir(Path(config.runs) / config.name).metric_rows("validation"))[-1]
    assert row["step"] == config.steps, row
    return sum(share * row[f"validation/{source}/loss"] for source, share in config.data.weights.items())


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of the mean; None of a single value."""
    if len(values) < 2:
        return None
    return T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def summarise(losses: dict[str, list[float]], bases: Mapping[str, str] = DELAYS) -> list[dict[str, Any]]:
    """One row a variant, with its differences from each of `bases`; losses hold one value for each seed."""
    rows = []
    for name, values in losses.items():
        row: dict[str, Any] = {"variant": name, "loss": statistics.mean(values), "losses": values}
        for key, base in bases.items():
            differences = [a - b for a, b in zip(values, losses[base], strict=True)]
            row[key] = statistics.mean(differences)
            row[f"{key}_interval"] = interval(differences)
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]], bases: Mapping[str, str]) -> None:
    def difference(row: dict[str, Any], key: str) -> str:
        half = row[f"{key}_interval"]
        return f"{row[key]:+.4f}" + (f" ± {half:.4f}" if half is not None else "")

    titles = ["variant", "held-out loss", *(key.replace("_", " ") for key in bases), "each seed"]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for row in rows:
        seeds = ", ".join(f"{value:.4f}" for value in row["losses"])
        cells = [row["variant"], f"{row['loss']:.4f}", *(difference(row, key) for key in bases), seeds]
        print("| " + " | ".join(cells) + " |")


def draw(rows: list[dict[str, Any]], title: str, file: Path) -> None:
    """Each variant's loss over that of delay 0: every seed, the mean, and its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    base = next(row for row in rows if row["variant"] == BASE)
    for at, row in enumerate(rows):
        seeds = [a - b for a, b in zip(row["losses"], base["losses"], strict=True)]
        axes.plot(seeds, [at] * len(seeds), "o", color="0.65", markersize=4)
        axes.errorbar(
            row["over_delay_0"], at, xerr=row["over_delay_0_interval"] or 0, fmt="D", color="C0", capsize=3
        )
    axes.axvline(0, color="0.5", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("held-out loss over delay 0, same seed (nats per token; grey: seeds; bar: 95 %)")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.25, axis="x")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def compare_optimizers(loss: Callable[[Variant, int], float], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One row an optimizer, at its best learning rate of the first seed; prints the losses by learning rate."""
    first, *others = seeds
    losses, chosen = {}, {}
    for name, rates in RATES.items():
        found = {rate: loss(optimizer_variant(name, rate), first) for rate in rates}
        print(
            f"{name}, seed {first}: " + ", ".join(f"{value:.4f} at {rate:g}" for rate, value in found.items())
        )
        best = chosen[name] = min(found, key=lambda rate: found[rate])
        losses[name] = [found[best], *(loss(optimizer_variant(name, best), seed) for seed in others)]
    rows = summarise(losses, OPTIMIZERS)
    return [{**row, "learning_rate": chosen[row["variant"]]} for row in rows]


def main(arguments: Sequence[str] | None = None, extra: Sequence[str] = ()) -> list[dict[str, Any]]:
    """`extra` are overrides of every run, for a test's smaller ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizers", action="store_true", help="AdamW and Muon, not delays")
    parser.add_argument("--tokens", type=int, default=163_840, help="of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "quality")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="of the delays")
    options = parser.parse_args(arguments)
    if options.optimizers and options.plot:
        parser.error("--plot draws delays: leave it or --optimizers out")

    def loss(variant: Variant, seed: int) -> float:
        config = configuration(variant, seed, options.tokens, options.runs / str(options.tokens), extra)
        if not RunDir(Path(config.runs) / config.name).done:
            train(config)
        found = held_out_loss(config)
        print(f"{variant.name}, seed {seed}: {found:.4f}", file=sys.stderr, flush=True)
        return found

    if options.optimizers:
        rows, bases = compare_optimizers(loss, options.seeds), OPTIMIZERS
    else:
        losses = {variant.name: [] for variant in variants()}
        for seed in options.seeds:
            for variant in variants():
                losses[variant.name].append(loss(variant, seed))
        rows, bases = summarise(losses), DELAYS
    print_table(rows, bases)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        title = f"{options.tokens:,} tokens a run, {len(options.seeds)} seeds, smoke size"
        draw(rows, title, options.plot)
    return rows


if __name__ == "__main__":
    main()
