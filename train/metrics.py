"""What a run reports: metrics.jsonl, TensorBoard, W&B and one progress line, from the same row of numbers.

The row's keys are the tags everywhere. W&B gets one fixed run id and `train/step` as its x-axis, never its
own step counter, because that counter can't go back when an attempt resumes before the last logged step. What is
drawn of it, and how, is train/views.py.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor, TensorBoardLogger
from torchtitan.tools.logging import logger

from train.run_dir import RunDir, append_line
from train.stragglers import RankTimes, summary, write_report
from train.views import VIEWS
from train.wandb_mode import wandb_mode


class WandbRun(BaseLogger):
    """One W&B run for all attempts and for the evaluation beside them (eval/tracking.py)."""

    def __init__(
        self,
        run: RunDir,
        project: str,
        name: str,
        group: str,
        tokens_per_step: int,
        config: dict[str, Any] | None,
    ):
        import wandb

        run.wandb.mkdir(parents=True, exist_ok=True)
        mode = wandb_mode()
        self.tokens_per_step = tokens_per_step
        self.run = wandb.init(
            project=project,
            name=name,
            group=group,
            id=run.wandb_id(),
            resume=None if mode == "shared" else "allow",  # what is shared is appended to in any case
            dir=os.fspath(run.path),
            mode=mode,
            config=config,
            settings=wandb.Settings(console="off", x_disable_stats=True, x_primary=True, x_label="train"),
        )
        for axis in ("train/step", "train/tokens"):
            self.run.define_metric(axis)
        self.run.define_metric("*", step_metric="train/step")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.run.log({"train/step": step, "train/tokens": step * self.tokens_per_step, **metrics})

    def close(self) -> None:
        self.run.finish()


class RunMetrics(MetricsProcessor):
    """TorchTitan's metrics processor, writing into the run directory."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        run: str = ""
        """The run directory."""
        name: str = ""
        total_steps: int = 0
        tokens_per_step: int = 0
        wandb_project: str = ""
        wandb_group: str = ""
        resolved: dict[str, Any] | None = None
        """The resolved configuration, shown in W&B."""

    def __init__(self, config: Config, **kwargs: Any):
        self.run = RunDir(config.run)
        super().__init__(config, **kwargs)
        self.total_steps = config.total_steps
        self.started = time.perf_counter()
        self.first_step: int | None = None
        self.unwritten: list[dict[str, Any]] = []  # rows that the disk did not take

    def _build_metric_logger(self, *, config: Config, **kwargs: Any) -> BaseLogger:  # pyright: ignore[reportIncompatibleMethodOverride]
        container = LoggerContainer()
        if dist.get_rank() == 0:
            if config.enable_tensorboard:
                tensorboard = TensorBoardLogger(os.fspath(self.run.tensorboard))
                tensorboard.writer.add_custom_scalars(tensorboard_layout())
                container.add_logger(tensorboard)
            if config.enable_wandb:
                wandb_run = WandbRun(
                    self.run,
                    config.wandb_project,
                    config.name,
                    config.wandb_group,
                    config.tokens_per_step,
                    config.resolved,
                )
                container.add_logger(wandb_run)
        return container

    def log_row(self, kind: str, step: int, row: dict[str, float]) -> None:
        """Write one row of scalars under its tags. `kind` is "train" or "validation"."""
        if dist.get_rank() != 0:
            return
        self.unwritten.append({"kind": kind, "step": step, "time": time.time(), **row})
        try:
            while self.unwritten:
                append_line(self.run.metrics, self.unwritten[0])
                self.unwritten.pop(0)
        except OSError as error:
            logger.error(
                f"metrics.jsonl can't be written, {len(self.unwritten)} rows wait in memory: {error}"
            )
        self.logger.log(row, step)

    def log_ranks(self, step: int, ranks: Sequence[RankTimes]) -> dict[str, float]:
        """Write which ranks are slow into the run directory; returns what belongs into the step's row.

        Nothing of either where there is one rank.
        """
        if len(ranks) == 1:
            return {}
        if dist.get_rank() == 0:
            try:
                write_report(self.run, step, ranks)
            except OSError as error:
                logger.error(f"stragglers.json can't be written: {error}")
        return summary(ranks)

    def progress(self, step: int, row: dict[str, float], seconds_per_step: float) -> None:
        """The line a person watches: where it is, how well, how fast, how long still."""
        left = (self.total_steps - step) * seconds_per_step
        logger.info(
            f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  loss {row['loss']:.4f}  "
            f"grad norm {row['grad_norm']:.3f}  lr {row['lr']:.3e}  "
            f"{row['tokens_per_second']:,.0f} tokens/s  memory {row['memory_gib']:.2f} GiB  ETA {duration(left)}"
        )


def tensorboard_layout() -> dict[str, dict[str, list[Any]]]:
    """train/views.py as TensorBoard's "custom scalars" takes it: tags are regular expressions there."""
    return {
        section: {chart.title: ["Multiline", [chart.pattern]] for chart in charts}
        for section, charts in VIEWS.items()
    }


def duration(seconds: float) -> str:
    """1 d 02:03:04, or 02:03:04."""
    days, rest = divmod(round(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days} d {clock}" if days else clock


def peak_memory_gib(device: torch.device) -> float:
    """Peak bytes reserved on the GPU, or the peak resident set of this process on the CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
