"""The training loop: torchtitan's Trainer with its step and its outer loop written out for one purpose.

Taken from torchtitan: device and process-group set-up, the build of model, optimizer and scheduler, gradient
clipping. Ours: a loss kept per source, a check for non-finite values before they reach the weights, control
files, checkpoints that commit, and the step's time split. Pipeline, tensor and context parallelism are not
supported (model/titan_spec.py refuses them), which keeps the step short.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from model.laneformer import Laneformer
from train.bad_steps import BadSteps
from train.checkpoint import RunCheckpointer
from train.lanes import LaneMetrics
from train.loader import MixtureDataLoader
from train.metrics import RunMetrics, peak_memory_gib
from train.profiling import StepProfiler, tensor_bytes
from train.run_dir import RunDir, write_atomic
from train.stragglers import OwnTime, RankTimes, node_name
from train.watchdog import Watchdog

# Shapes: B sequences of a micro-batch, S tokens, V vocabulary, K sources of the mixture.
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class BadStepError(RuntimeError):
    """A loss or gradient that is not a finite number, or a loss that spikes. The weights are those before it."""


@dataclass(frozen=True)
class Requests:
    """What the run directory's control files ask for."""

    stop: bool = False
    save: bool = False


@dataclass
class StepTimes:
    """Seconds of one step, by what this process waited for."""

    data: float = 0.0
    forward_backward: float = 0.0
    optimizer: float = 0.0
    checkpoint: float = 0.0
    validation: float = 0.0

    def row(self) -> dict[str, float]:
        return {f"seconds/{name}": value for name, value in vars(self).items()}


class LaneformerTrainer(Trainer):
    """One process of a training run. Build from train/titan.py's Trainer.Config; `train()` runs to the end."""

    checkpointer: RunCheckpointer  # pyright: ignore[reportIncompatibleVariableOverride]
    metrics_processor: RunMetrics  # pyright: ignore[reportIncompatibleVariableOverride]

    dataloader: MixtureDataLoader  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        config: Trainer.Config,
        *,
        run: RunDir,
        watchdog: Watchdog,
        bad_steps: BadSteps,
        profile: bool = False,
    ):
        super().__init__(config)
        self.run = run
        self.watchdog = watchdog
        self.bad_steps = bad_steps
        self.sources = sources = self.dataloader.sources
        self.model = cast(Laneformer, self.model_parts[0])
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        profiled = profile and dist.get_rank() == 0
        self.profiler = StepProfiler(run, self.device, self._resident_bytes) if profiled else None
        self.own_time = OwnTime(self.model.layers.values(), self.device, node_name())
        self.lanes = LaneMetrics(self.model, self.device)
        self.consumed_sequences = dict.fromkeys(sources, 0)
        self.consumed_tokens = dict.fromkeys(sources, 0)

    # --- one step

    def train_step(self, data_iterator: Iterator[Batch]) -> tuple[dict[str, float], Requests]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One optimizer step. Returns its metrics row and what the control files asked for."""
        times = StepTimes()
        clock = time.perf_counter()
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        position_before = self.dataloader.state_dict()

        self.lanes.begin(self.metrics_processor.should_log(self.step))
        self.optimizers.zero_grad()
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        own = time.perf_counter() - clock
        valid = torch.tensor(sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches))
        global_valid = self._sum_over_ranks(valid.to(self.device))
        times.data, clock = time.perf_counter() - clock, time.perf_counter()

        tally_2K = torch.zeros(2, len(self.sources), dtype=torch.float64, device=self.device)
        rows_K = torch.zeros(len(self.sources), dtype=torch.int64, device=self.device)
        for batch in batches:
            self._forward_backward(batch, global_valid, tally_2K, rows_K)
        loss, requests = self._reduce_tally(tally_2K, rows_K)
        problem, grad_norm = self.bad_steps.judge(loss), float("nan")
        if problem is None:
            self.lanes.gradients(self.optimizers)
            grad_norm = float(
                dist_utils.clip_grad_norm_(self.parameters, self.config.training.max_norm, foreach=True)
            )
            if not math.isfinite(grad_norm):
                problem = f"gradient norm is {grad_norm} (loss {loss:.4f})"
        times.forward_backward, clock = time.perf_counter() - clock, time.perf_counter()
        if problem is not None:
            self._stop_at_bad_step(problem, tally_2K, batches, position_before)

        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lanes.updates(self.optimizers)
        self.lr_schedulers.step()
        times.optimizer = time.perf_counter() - clock
        self.own_time.step(own + times.optimizer)

        tokens_K = tally_2K[1].tolist()
        for source, sequences, tokens in zip(self.sources, rows_K.tolist(), tokens_K, strict=True):
            self.consumed_sequences[source] += sequences
            self.consumed_tokens[source] += int(tokens)
        self.ntokens_seen += sum(rows_K.tolist()) * self.config.training.seq_len
        row = {"loss": loss, "grad_norm": grad_norm, "lr": lr, **times.row()}
        for source, total, tokens in zip(self.sources, tally_2K[0].tolist(), tokens_K, strict=True):
            if tokens:
                row[f"loss/{source}"] = total / tokens
        row |= self.lanes.row()
        return row, requests

    def _forward_backward(
        self, batch: Batch, global_valid: torch.Tensor, tally_2K: torch.Tensor, rows_K: torch.Tensor
    ) -> None:
        inputs = {key: value.to(self.device, non_blocking=True) for key, value in batch[0].items()}
        labels_BS = batch[1].to(self.device, non_blocking=True)
        source_B = inputs["source"]
        masks = self.model.get_attention_masks(inputs["positions"])
        with self.train_context():
            pred_BSV = self.model(inputs["input"], inputs["positions"], masks)
            loss, extra = self.loss_fn(pred_BSV, labels_BS, global_valid)
            del pred_BSV
            loss.backward()
        # A product rather than index_add_, whose order of additions is not fixed on a GPU.
        is_source_KB = (source_B == torch.arange(len(self.sources), device=self.device)[:, None]).double()
        tally_2K[0] += is_source_KB @ extra["rows"].double()
        tally_2K[1] += is_source_KB @ (labels_BS != IGNORE_INDEX).sum(1).double()
        rows_K += is_source_KB.sum(1).long()

    def _reduce_tally(self, tally_2K: torch.Tensor, rows_K: torch.Tensor) -> tuple[float, Requests]:
        """Sum the counts over ranks in place; returns the mean loss and the requests of the control files.

        Rank 0 reads the files and they travel in the same reduction, so that all ranks obey at one step.
        """
        first = dist.get_rank() == 0
        asked = [first and self.run.stop_file.exists(), first and self.run.save_file.exists()]
        flat = torch.cat(
            [
                tally_2K.flatten(),
                rows_K.double(),
                torch.tensor(asked, dtype=torch.float64, device=self.device),
            ]
        )
        flat = self._sum_over_ranks(flat)
        tally_2K.copy_(flat[: tally_2K.numel()].view_as(tally_2K))
        rows_K.copy_(flat[tally_2K.numel() : -2].long())
        total, tokens = tally_2K.sum(1).tolist()
        stop, save = (bool(value) for value in flat[-2:].tolist())
        return total / max(tokens, 1.0), Requests(stop=stop, save=save)

    def _resident_bytes(self) -> int:
        """What lives between steps on this rank: weights, buffers and the optimizer's state."""
        moments = [
            value
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return tensor_bytes([*self.model.parameters(), *self.model.buffers(), *moments])

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        if dist.get_world_size() > 1:
            dist.all_reduce(value)
        return value

    def _pass_over_step(self, data_iterator: Iterator[Batch]) -> Requests:
        """A step that was bad before: its sequences are read and counted, the weights stay, the schedule goes on."""
        tally_2K = torch.zeros(2, len(self.sources), dtype=torch.float64, device=self.device)
        rows_K = torch.zeros(len(self.sources), dtype=torch.int64, device=self.device)
        for _ in range(self.gradient_accumulation_steps):
            source_B = next(data_iterator)[0]["source"]
            rows_K += torch.bincount(source_B, minlength=len(self.sources)).to(self.device)
        _, requests = self._reduce_tally(tally_2K, rows_K)
        self.lr_schedulers.step()
        for source, sequences in zip(self.sources, rows_K.tolist(), strict=True):
            self.consumed_sequences[source] += sequences
        self.ntokens_seen += sum(rows_K.tolist()) * self.config.training.seq_len
        logger.warning(f"step {self.step} is passed over: it was bad in two attempts; see bad_steps.jsonl")
        sequences = dict(zip(self.sources, rows_K.tolist(), strict=True))
        self.metrics_processor.log_row(
            "passed_over",
            self.step,
            {f"passed_over/{source}/sequences": n for source, n in sequences.items()},
        )
        return requests

    def _stop_at_bad_step(
        self,
        problem: str,
        tally_2K: torch.Tensor,
        batches: list[Batch],
        position_before: dict[str, Any],
    ) -> None:
        """Write what reproduces the step, then raise on every rank.

        failures/step-N/ gets a full checkpoint of the state before the step (so resuming from it runs into the
        same step), each rank's batch, and a report.
        """
        self.watchdog.rest()
        step, folder = self.step, self.run.failures / f"step-{self.step}"
        folder.mkdir(parents=True, exist_ok=True)
        totals, tokens = tally_2K.tolist()
        losses = {s: t / n for s, t, n in zip(self.sources, totals, tokens, strict=True) if n}
        guilty = [source for source, value in losses.items() if not math.isfinite(value)]
        for number, (inputs, labels) in enumerate(batches):
            name = folder / f"batch-rank{dist.get_rank()}-{number}.npz"
            arrays: dict[str, Any] = {key: value.numpy() for key, value in inputs.items()}
            np.savez(name, labels=labels.numpy(), **arrays)
        if dist.get_rank() == 0:
            report = {
                "step": step,
                "problem": problem,
                "loss_by_source": losses,
                "position": position_before["position"],
                "batch": "batch-rank<rank>-<micro-batch>.npz: input, positions, source, labels",
                "state": "checkpoint: everything before the step; copy it to checkpoints/step-<step - 1> to resume",
            }
            write_atomic(folder / "report.json", json.dumps(report, indent=1))
            self.bad_steps.record(step, problem)
        self.step -= 1
        self.dataloader.load_state_dict(position_before)
        if not (folder / "checkpoint").exists():  # it does when an earlier attempt met the same step
            self.checkpointer.save_now(folder / "checkpoint")
        raise BadStepError(
            f"step {step}: {problem}; "
            + (f"not finite in: {', '.join(guilty)}; " if guilty else "")
            + f"sources in the batch: {', '.join(losses)}; written for reproduction: {folder}"
        )

    # --- the run

    def train(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Train to the token budget or until asked to stop. Returns "done" or "stopped"."""
        total = self.config.training.steps
        self.checkpointer.load(step=-1)
        loaded_step = self.step
        logger.info(f"Training from step {self.step + 1} to {total}")
        data_iterator = iter(self.dataloader)
        since_log, logged_step = time.perf_counter(), self.step
        requests = Requests()
        while self.step < total and not requests.stop:
            self.step += 1
            self.gc_handler.run(self.step)
            if self.step in self.bad_steps.passed_over:
                requests = self._pass_over_step(data_iterator)
                self._save(requests)
                continue
            profiled = self.profiler.step(self.step) if self.profiler else nullcontext()
            with (
                profiled,
                self.watchdog.step(self.step),
            ):  # so that a hang in any of these collectives is seen
                row, requests = self.train_step(data_iterator)
                logged = self.metrics_processor.should_log(self.step) or requests.stop or self.step == total
                ranks = self.own_time.gather() if logged else []
            row["seconds/checkpoint"] = self._save(requests)
            row["seconds/validation"] = self._validate()
            if logged:
                seconds = (time.perf_counter() - since_log) / (self.step - logged_step)
                since_log, logged_step = time.perf_counter(), self.step
                self._log(row, seconds, ranks)
            if self.step - loaded_step == 1:
                self._tighten_timeouts()
        if self.profiler:
            self.profiler.close()
        self.checkpointer.finish()
        self.checkpointer._purge_stale_checkpoints()
        return "stopped" if self.step < total else "done"

    def _save(self, requests: Requests) -> float:
        """Save where the interval, the end or a control file asks for it; returns the seconds it blocked."""
        before = time.perf_counter()
        last = self.step == self.config.training.steps
        saved = self.checkpointer.save(self.step, last_step=last)
        if requests.stop or requests.save:
            if not saved:
                self.checkpointer.save_at_request(self.step)
            if dist.get_rank() == 0:
                self.run.save_file.unlink(missing_ok=True)
        return time.perf_counter() - before

    def _validate(self) -> float:
        before = time.perf_counter()
        last = self.step == self.config.training.steps
        if self.config.validator.enable and (last or self.validator.should_validate(self.step)):
            self.validator.validate(self.model_parts, self.step)
        return time.perf_counter() - before

    def _log(self, row: dict[str, float], seconds_per_step: float, ranks: list[RankTimes]) -> None:
        row["tokens"] = self.ntokens_seen
        row["sequences"] = sum(self.consumed_sequences.values())
        row["seconds/step"] = seconds_per_step
        tokens_per_step = self.ntokens_seen / self.step
        row["tokens_per_second"] = tokens_per_step / seconds_per_step
        row["memory_gib"] = peak_memory_gib(self.device)
        row["loader/ready"] = self.dataloader.loader.ready
        row["loader/wait_seconds"] = self.dataloader.loader.wait_seconds
        if self.device.type == "cuda":
            flops = (
                row["tokens_per_second"] / dist.get_world_size() * self.metrics_processor.num_flops_per_token
            )
            row["mfu"] = flops / self.metrics_processor.gpu_peak_flops
        planned = self.dataloader.loader.mixture.consumed(int(row["sequences"]))
        for source in self.sources:
            row[f"data/{source}/sequences"] = self.consumed_sequences[source]
            row[f"data/{source}/tokens"] = self.consumed_tokens[source]
            row[f"data/{source}/share"] = self.consumed_sequences[source] / row["sequences"]
            row[f"data/{source}/planned"] = planned[source] / row["sequences"]
        row |= self.metrics_processor.log_ranks(self.step, ranks)
        self.metrics_processor.log_row("train", self.step, row)
        self.metrics_processor.progress(self.step, row, seconds_per_step)

    def _tighten_timeouts(self) -> None:
        """After the first step nothing slow (compilation, lazy set-up) is left: hang less long on a dead rank."""
        timeout = timedelta(seconds=self.config.comm.train_timeout_seconds)
        dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "ntokens_seen": self.ntokens_seen,
            "consumed_sequences": dict(self.consumed_sequences),
            "consumed_tokens": dict(self.consumed_tokens),
            "recent_losses": self.bad_steps.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]
        self.consumed_sequences = dict(state_dict["consumed_sequences"])
        self.consumed_tokens = dict(state_dict["consumed_tokens"])
        self.bad_steps.load_state(state_dict["recent_losses"])
