"""One attempt of one rank, from building the trainer to the attempt's recorded end."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.tools.logging import init_logger, logger

from train.bad_steps import BadSteps
from train.config import RunConfig
from train.run_dir import RunDir
from train.titan import trainer_config
from train.trainer import BadStepError, LaneformerTrainer
from train.watchdog import Watchdog


def train_session(config: RunConfig, run: RunDir, init_from: Path | None, attempt: int) -> int:
    """Train; rank 0 records how the attempt ended. Returns 0, or 1 for a failure that was logged."""
    rank = int(os.environ["RANK"])
    start_log(run.logs / str(attempt) / f"rank-{rank}.log")
    trainer: LaneformerTrainer | None = None
    try:
        watchdog = Watchdog(config.cluster, run, attempt, rank)
        bad_steps = BadSteps(config.stability, run, attempt)
        trainer = LaneformerTrainer(
            trainer_config(config, run, init_from),
            run=run,
            watchdog=watchdog,
            bad_steps=bad_steps,
            profile=config.profile == "on",
        )
        outcome = trainer.train()
        trainer.close()
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        if isinstance(error, BadStepError):
            logger.error(str(error))
        else:
            logger.exception("The attempt failed")
        if rank == 0:
            run.end_attempt(attempt, "failed", trainer.step if trainer else None, reason=str(error))
        return 1
    if rank == 0:
        if outcome == "done":
            run.mark_done(trainer.step)
        run.stop_file.unlink(missing_ok=True)
        run.end_attempt(attempt, outcome, trainer.step)
    dist.destroy_process_group()
    return 0


def start_log(path: Path) -> None:
    """Log to standard output, plainly, and to `path`."""
    init_logger()  # torchtitan's, for its other settings; its format says nothing a reader needs
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
    logger.addHandler(to_file)
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        handler.addFilter(is_meant)


# Lines of torchtitan that are wrong here: it knows the peak of GPUs only and has its own words for what is set.
NOT_MEANT = (
    "Peak flops undefined",
    "Peak FLOPS used",
    "Error running lspci",
    "initial_load_model_only=True has no",
    "[GC]",
    "Destroying the purge",
)


def is_meant(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NOT_MEANT)
