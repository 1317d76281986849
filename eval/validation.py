"""Held-out loss and bits per byte of each source of a run's mixture: the trainer's validation, of a saved checkpoint.

It reads the same sequences as train/validate.py, by the run's own configuration, so that in float32 it gives the
numbers that the trainer logs at that step; and on any machine, for checkpoints at which the trainer did not validate,
or with more sequences than training has time for. Each sequence's result is a line of its own; a killed evaluation goes
on after the last one.

Shapes: B sequences of a batch, S tokens, V vocabulary, T predicted tokens.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml

from data_mixtures.loader import ValidationSet
from data_mixtures.tokenizer import Tokenizer
from eval.adapter import DTYPES, default_batch_tokens
from eval.results import append_lines, read_lines, sha256_file
from eval.suite import Job, SuiteResult

VERSION = 1  # raise it when the same settings would give other numbers
IGNORED = -100  # label of a position that is not predicted


@dataclass(frozen=True)
class ValidationSuite:
    """`folder` is the run directory whose resolved.yaml says what to read."""

    folder: Path
    data: str = ""
    """Folder of the prepared data; empty: the run's data.root."""
    limit: int | None = None
    """Sequences of each source at most; None: the run's validation.sequences_per_source."""
    batch_tokens: int | None = None

    name = "validation"

    @cached_property
    def config(self) -> dict[str, Any]:
        file = self.folder / "resolved.yaml"
        if not file.exists():
            raise ValueError(
                f"suite=validation reads what a run held out, but {file} does not exist: "
                "give a checkpoint in a run directory, or --follow run=runs/NAME"
            )
        return yaml.safe_load(file.read_text(encoding="utf-8"))

    @cached_property
    def sets(self) -> dict[str, ValidationSet]:
        """The held-out sequences by source. Raises ValueError where a source has none."""
        config = self.config
        root, most = self.root, self.limit or config["validation"]["sequences_per_source"]
        return {
            source: ValidationSet(root, source, config["train"]["seq_len"], most, config["data"]["packing"])
            for source in config["data"]["weights"]
        }

    @property
    def root(self) -> Path:
        return Path(self.data or self.config["data"]["root"])

    def settings(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "seq_len": self.config["train"]["seq_len"],
            "packing": self.config["data"]["packing"],
            "sequences": {source: len(held_out) for source, held_out in self.sets.items()},
            "manifests": {
                source: sha256_file(self.root / source / "validation" / "manifest.json")
                for source in self.sets
            },
        }

    def run(self, job: Job) -> SuiteResult:
        missing = {
            source: [i for i in range(len(held_out)) if i not in done]
            for source, held_out in self.sets.items()
            for done in [{line["item"] for line in read_lines(job.folder / f"{source}.jsonl")}]
        }
        if any(missing.values()):
            scorer = Scorer(job, self.batch_tokens)
            for source, items in missing.items():
                scorer.score(self.sets[source], items, job.folder / f"{source}.jsonl")
        tasks = {source: summarise(job.folder / f"{source}.jsonl", len(s)) for source, s in self.sets.items()}
        scores = {
            f"validation/{source}/{key}": task[key]
            for source, task in tasks.items()
            for key in ("loss", "bits_per_byte")
        }
        return SuiteResult(scores, tasks)


class Scorer:
    """The checkpoint's model, and the bytes of its tokenizer's pieces."""

    def __init__(self, job: Job, batch_tokens: int | None):
        from model.checkpoint import load_checkpoint

        self.device = torch.device(job.device)
        self.model, _, tokenizer = load_checkpoint(job.checkpoint, dtype=DTYPES[job.dtype], device=job.device)
        self.bytes_V = torch.from_numpy(Tokenizer(tokenizer).bytes_per_token())
        self.batch_tokens = batch_tokens or default_batch_tokens(self.device)

    @torch.inference_mode()
    def score(self, held_out: ValidationSet, items: list[int], file: Path) -> None:
        """Append a line for each of `items`: nats, predicted tokens, UTF-8 bytes of those tokens."""
        size = max(1, self.batch_tokens // len(held_out[0][0]))
        for first in range(0, len(items), size):
            begun, chunk = time.perf_counter(), items[first : first + size]
            columns = zip(*(held_out[item] for item in chunk), strict=True)
            inputs_BS, positions_BS, labels_BS = (torch.stack(column) for column in columns)
            nats_B = self._nats(
                inputs_BS.to(self.device), positions_BS.to(self.device), labels_BS.to(self.device)
            )
            seconds = (time.perf_counter() - begun) / len(chunk)
            lines = []
            for item, nats, labels_S in zip(chunk, nats_B, labels_BS, strict=True):
                predicted_T = labels_S[labels_S != IGNORED]
                counts = {"tokens": len(predicted_T), "bytes": int(self.bytes_V[predicted_T].sum())}
                lines.append({"item": item, "nats": nats, **counts, "seconds": round(seconds, 6)})
            append_lines(file, lines)

    def _nats(
        self, inputs_BS: torch.Tensor, positions_BS: torch.Tensor, labels_BS: torch.Tensor
    ) -> list[float]:
        """Each sequence's cross entropy over its predicted tokens."""
        masks = self.model.get_attention_masks(positions_BS)
        logits_BSV = self.model(inputs_BS, positions_BS, masks).float()
        nats_BS = F.cross_entropy(
            logits_BSV.transpose(1, 2), labels_BS, reduction="none", ignore_index=IGNORED
        )
        return nats_BS.double().sum(1).tolist()


def summarise(file: Path, count: int) -> dict[str, Any]:
    """A source's entry in the results."""
    lines = [line for line in read_lines(file) if line["item"] < count]
    if len(lines) != count:
        raise RuntimeError(f"{file}: {len(lines)} of {count} sequences are scored")
    nats, tokens, size = (math.fsum(line[key] for line in lines) for key in ("nats", "tokens", "bytes"))
    return {
        "n": count,
        "tokens": int(tokens),
        "bytes": int(size),
        "loss": nats / max(tokens, 1),
        "bits_per_byte": nats / math.log(2) / max(size, 1),
        "seconds": round(sum(line["seconds"] for line in lines), 3),
    }
