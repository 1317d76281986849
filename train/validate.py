"""Held-out loss and bits per byte of each source, on a fixed set that does not depend on the world size."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import Validator
from torchtitan.tools.logging import logger

from data_mixtures.loader import ValidationSet
from data_mixtures.recipe import Packing
from model.laneformer import Laneformer
from train.loader import RunTokenizer
from train.metrics import RunMetrics


class SourceValidator(Validator):
    """Runs the model over the first `sequences` held-out sequences of each source, shared among ranks.

    Bits per byte are the loss in bits over all predicted tokens, divided by the UTF-8 bytes they stand for;
    unlike the loss they do not depend on the tokenizer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        root: str = ""
        sources: list[str] = field(default_factory=list)
        sequences: int = 1
        packing: Packing = "concat"

    def __init__(self, config: Config, *, metrics_processor: RunMetrics, **kwargs: Any):
        # Not the parent's: it would build a torchtitan data loader for text that is not there.
        self.config = config
        self.metrics = metrics_processor
        self.loss_fn = kwargs["loss_fn"]
        self.context = kwargs["validation_context"]
        self.rank, self.world_size = kwargs["dp_rank"], kwargs["dp_world_size"]
        self.batch_size = kwargs["local_batch_size"]
        self.sets = {
            source: ValidationSet(
                Path(config.root), source, kwargs["seq_len"], config.sequences, config.packing
            )
            for source in config.sources
        }
        tokenizer = cast(RunTokenizer, kwargs["tokenizer"])
        self.bytes_V = torch.from_numpy(tokenizer.inner.bytes_per_token())

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        model = cast(Laneformer, model_parts[0])
        device = next(model.parameters()).device
        begin = time.perf_counter()
        model.eval()
        # nats, predicted tokens, bytes of those tokens
        tally_K3 = torch.zeros(len(self.sets), 3, dtype=torch.float64, device=device)
        for index, held_out in enumerate(self.sets.values()):
            for first in range(0, len(held_out), self.batch_size * self.world_size):
                inputs, positions, labels = self._batch(held_out, first + self.rank * self.batch_size)
                positions = positions.to(device)
                with self.context():
                    pred_BSV = model(inputs.to(device), positions, model.get_attention_masks(positions))
                    _, extra = self.loss_fn(pred_BSV, labels.to(device))
                predicted = labels[labels != IGNORE_INDEX]
                counts = [predicted.numel(), int(self.bytes_V[predicted].sum())]
                tally_K3[index, 0] += extra["rows"].double().sum()
                tally_K3[index, 1:] += torch.tensor(counts, dtype=torch.float64, device=device)
        if self.world_size > 1:
            dist.all_reduce(tally_K3)
        model.train()
        self._report(step, tally_K3, time.perf_counter() - begin)

    def _batch(self, held_out: ValidationSet, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequences first … first + batch_size - 1; past the end, copies whose labels are all ignored.

        Every rank must run the same number of forward passes, because each one gathers weights from all.
        """
        rows = []
        for i in range(first, first + self.batch_size):
            inputs, positions, labels = held_out[min(i, len(held_out) - 1)]
            ignored = torch.full_like(labels, IGNORE_INDEX)
            rows.append((inputs, positions, labels if i < len(held_out) else ignored))
        inputs_BS, positions_BS, labels_BS = (torch.stack(column) for column in zip(*rows, strict=True))
        return inputs_BS, positions_BS, labels_BS

    def _report(self, step: int, tally_K3: torch.Tensor, seconds: float) -> None:
        row = {}
        for source, (nats, tokens, size) in zip(self.sets, tally_K3.tolist(), strict=True):
            row[f"validation/{source}/loss"] = nats / max(tokens, 1)
            row[f"validation/{source}/bits_per_byte"] = nats / math.log(2) / max(size, 1)
        self.metrics.log_row("validation", step, row)
        told = ", ".join(
            f"{source} {row[f'validation/{source}/loss']:.4f} ({row[f'validation/{source}/bits_per_byte']:.3f} bpb)"
            for source in self.sets
        )
        logger.info(f"validation at step {step}: {told}  [{seconds:.1f} s]")
