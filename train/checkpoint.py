"""Checkpoints that are complete or absent, checked before they are trusted, and pruned by rule.

Every rank writes its own file of a distributed checkpoint (torch.distributed.checkpoint, DCP) under
`.step-N.tmp` and records its SHA-256; when all have finished, rank 0 writes the manifest, syncs and renames
the directory to `step-N`. That is the commit: a crash before it leaves a temporary directory which the next
attempt removes, a crash after it leaves a whole checkpoint. The manifest lists size and SHA-256 of each file;
loading verifies them (each rank its share), sets a damaged directory aside as `step-N.damaged`, and goes on
with the one before.

A save that fails (disk full, read-only, a lost mount) leaves the checkpoints before it as they are. Training
goes on to the next save; it ends after `max_failed_saves` failures in a row, or when the failed one was the
last step's or came with a request to stop.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.tools.logging import logger

from model.checkpoint import FORMAT, VERSION, file_sha256
from train.run_dir import append_line, complete_checkpoints, sync_directory, write_atomic


class AtomicWriter(FileSystemWriter):
    """DCP's file writer, with checksums and a commit. `attachments` are copied into the directory."""

    def __init__(self, directory: Path, step: int, attachments: dict[str, Path]):
        self.final = directory
        self.step = step
        self.attachments = attachments
        super().__init__(directory.with_name(f".{directory.name}.tmp"))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future = super().write_data(plan, planner)
        folder = Path(self.path)
        for name in {result.storage_data.relative_path for result in future.value()}:
            file = folder / name
            entry = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
            write_atomic(folder / f"{name}.entry", json.dumps(entry))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        folder = Path(self.path)
        files = {}
        for note in folder.glob("*.entry"):
            files[note.name.removesuffix(".entry")] = json.loads(note.read_text())
            note.unlink()
        for name, source in self.attachments.items():
            shutil.copyfile(source, folder / name)
        for name in [".metadata", *self.attachments]:
            file = folder / name
            files[name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        manifest = {"format": FORMAT, "version": VERSION, "step": self.step, "files": files}
        write_atomic(folder / "manifest.json", json.dumps(manifest, indent=1))
        folder.rename(self.final)
        sync_directory(self.final.parent)


def damage(directory: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """What is wrong with every `world_size`-th file of a checkpoint, from the `rank`-th on; [] when sound."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        files = sorted(manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{directory / 'manifest.json'}: unreadable ({error})"]
    problems = []
    for name, entry in files[rank::world_size]:
        file = directory / name
        size = file.stat().st_size if file.exists() else None
        if size is None:
            problems.append(f"{file}: missing")
        elif size != entry["bytes"]:
            problems.append(f"{file}: {size} bytes instead of {entry['bytes']}")
        elif file_sha256(file) != entry["sha256"]:
            problems.append(f"{file}: SHA-256 differs from the manifest's")
    return problems


class SaveError(RuntimeError):
    """A checkpoint that had to be written could not be."""


def first_cause(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed, in one line."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"


class RunCheckpointer(CheckpointManager):
    """TorchTitan's checkpoint manager over `AtomicWriter`, with verification and milestones."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        milestone_every_steps: int = 0
        max_failed_saves: int = 3
        attachments: dict[str, str] = dataclasses.field(default_factory=dict)

        def __post_init__(self) -> None:
            # torchtitan refuses to keep one checkpoint because it deletes before the new one is complete;
            # here the purge runs after the commit, so keeping one is safe.
            keep, self.keep_latest_k = self.keep_latest_k, 0
            CheckpointManager.Config.__post_init__(self)
            self.keep_latest_k = keep

    def __init__(self, config: Config, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.milestone_every_steps = config.milestone_every_steps
        self.max_failed_saves = config.max_failed_saves
        self.failed_saves = 0  # in a row
        self.saving_step = 0  # of the asynchronous save in flight
        self.attachments = {name: Path(source) for name, source in config.attachments.items()}
        if dist.get_rank() == 0:
            for leftover in Path(self.folder).glob(".step-*.tmp"):
                logger.warning(f"Removing {leftover}: a save that was cut off")
                shutil.rmtree(leftover)

    # --- saving

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        del enable_garbage_collection, to_hf  # the trainer collects garbage; export is model/hf.py's
        directory = Path(checkpoint_id)
        writer = AtomicWriter(directory, self.states["train_state"].step, self.attachments)
        if async_mode == AsyncMode.DISABLED:
            return dcp.save(state_dict, storage_writer=writer)
        return dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save where the interval or the end asks for it; whether it did. Raises SaveError as the module says."""
        try:
            saved = super().save(curr_step, last_step)
        except CheckpointException as error:
            if last_step:
                raise SaveError(f"the last step, {curr_step}, was not saved: {first_cause(error)}") from error
            self._note_failed_save(curr_step, error)
            return True
        if saved:
            self.saving_step = curr_step
            if self.save_future is None:
                self.failed_saves = 0
        return saved

    def maybe_wait_for_saving(self) -> None:
        """Wait until the last asynchronous save is complete. Raises SaveError as the module says."""
        if self.save_future is None:
            return
        try:
            super().maybe_wait_for_saving()
            self.failed_saves = 0
        except CheckpointException as error:
            self.save_future = None
            self._note_failed_save(self.saving_step, error)

    def _note_failed_save(self, step: int, error: CheckpointException) -> None:
        """Tell of it and clean up; every rank gets here with the same error."""
        self.failed_saves += 1
        cause, folder = first_cause(error), Path(self.folder)
        logger.error(
            f"CHECKPOINT NOT SAVED at step {step} (failure {self.failed_saves} in a row, "
            f"{self.max_failed_saves} end the attempt): {cause}"
        )
        if dist.get_rank() == 0:
            shutil.rmtree(folder / f".step-{step}.tmp", ignore_errors=True)
            row = {"kind": "failed_save", "step": step, "time": time.time(), "reason": cause}
            try:
                append_line(folder.parent / "metrics.jsonl", row)
            except OSError as full:
                logger.error(f"metrics.jsonl can't be written either: {full}")
        if self.failed_saves >= self.max_failed_saves:
            raise SaveError(f"{self.failed_saves} saves in a row failed, the last at step {step}: {cause}")

    def save_now(self, directory: Path) -> None:
        """Write the present state to `directory` and return when it is complete, or raise SaveError."""
        self.finish()
        try:
            self.dcp_save(self._flattened_model_states_sd(), str(directory), AsyncMode.DISABLED)
        except CheckpointException as error:
            raise SaveError(f"{directory} was not saved: {first_cause(error)}") from error

    def save_at_request(self, curr_step: int) -> None:
        """A full checkpoint at a step that the interval does not name, complete on return, or raise SaveError."""
        self.save_now(Path(self._create_checkpoint_id(curr_step)))
        self._purge_stale_checkpoints()

    def finish(self) -> None:
        """`maybe_wait_for_saving`, at the end of something."""
        self.maybe_wait_for_saving()

    def _purge_stale_checkpoints(self) -> None:
        """Remove all complete checkpoints but the latest k and the milestones. Rank 0 only."""
        if dist.get_rank() != 0:
            return
        complete = complete_checkpoints(Path(self.folder))
        for step, directory in complete[: -self.keep_latest_k]:
            if self.milestone_every_steps and step % self.milestone_every_steps == 0:
                continue
            # Renamed first, so that a crash in the middle leaves no half-deleted checkpoint under its name.
            doomed = directory.with_name(f".{directory.name}.tmp")
            directory.rename(doomed)
            shutil.rmtree(doomed)
            logger.info(f"Removed checkpoint {directory}")

    # --- loading

    def _find_load_step(self, folder: str = "") -> int:
        """The newest complete and undamaged step, or -1; damaged ones are named and set aside."""
        for step, directory in reversed(complete_checkpoints(Path(folder or self.folder))):
            problems = self.verify(directory)
            if not problems:
                return step
            dist.barrier()
            if dist.get_rank() == 0:
                aside = directory.with_name(f"{directory.name}.damaged")
                directory.rename(aside)
                logger.error(
                    f"Checkpoint {directory} is damaged and was set aside as {aside.name}; "
                    "falling back to the one before:\n  " + "\n  ".join(problems)
                )
            dist.barrier()
        return -1

    @staticmethod
    def verify(directory: Path) -> list[str]:
        """`damage` of the whole directory, the work shared among ranks; every rank gets all findings."""
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, damage(directory, dist.get_rank(), dist.get_world_size()))
        return [problem for part in found for problem in part]

    def _load(self, step: int = -1) -> bool:
        if self.initial_load_path and not complete_checkpoints(Path(self.folder)):
            problems = self.verify(Path(self.initial_load_path))
            if problems:
                raise ValueError("train.init_from is damaged:\n  " + "\n  ".join(problems))
        return super()._load(step)

    def _close(self) -> None:
        self.finish()
        super()._close()
