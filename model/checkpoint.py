"""Read a training checkpoint for inference: one process, no process group, nothing of the trainer.

A checkpoint is a directory `step-N` that is usable by itself: `manifest.json` (written last, so a directory without
it is incomplete), `model.json` (the architecture), `tokenizer.model`, and the files of torch's distributed
checkpoint, whose `.metadata` is a pickle. Load only checkpoints that you or people you trust have written; weights
from outside come in as safetensors (model/hf.py).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from model.config import LaneformerConfig
from model.hf import internal_shapes

if TYPE_CHECKING:  # it imports torchtitan, which takes seconds and which decoding does not need
    from model.laneformer import Laneformer

FORMAT, VERSION = "laneformer-checkpoint", 1


class CheckpointError(ValueError):
    """A directory that is no complete, undamaged checkpoint; the message names the file."""


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_files(directory: Path, hashes: bool = False) -> None:
    """Compare all files with the manifest: sizes and, but for those of weights, SHA-256. Raises CheckpointError.

    hashes: those of the weights too, which are gigabytes and hold the optimizer's state as well.
    """
    manifest_file = directory / "manifest.json"
    if not manifest_file.exists():
        raise CheckpointError(
            f"{directory} is not a complete checkpoint: it has no manifest.json; give a step-N directory"
        )
    manifest = read_json(manifest_file)
    found = (manifest.get("format"), manifest.get("version"))
    if found != (FORMAT, VERSION):
        raise CheckpointError(f"{manifest_file} has format {found}, this code reads {(FORMAT, VERSION)}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in files.values()
    ):
        raise CheckpointError(f"{manifest_file}: 'files' must give the bytes and sha256 of each file")
    needed = {"model.json", "tokenizer.model", ".metadata"}
    if missing := needed - files.keys():
        raise CheckpointError(f"{manifest_file} does not list {', '.join(sorted(missing))}")
    for name, entry in files.items():
        file = directory / name
        size = file.stat().st_size if file.exists() else None
        if size is None:
            raise CheckpointError(f"{file} is missing, the manifest lists it")
        if size != entry["bytes"]:
            raise CheckpointError(f"{file} has {size} bytes, the manifest says {entry['bytes']}")
        if (hashes or file.suffix != ".distcp") and file_sha256(file) != entry["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 differs from the manifest's")


def load_checkpoint(
    path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Laneformer, LaneformerConfig, Path]:
    """The model of a checkpoint, in evaluation mode, its architecture, and the path of its tokenizer.

    Weights are converted to dtype as they are read. Raises CheckpointError.
    """
    from model.laneformer import empty_model

    directory = Path(path)
    config = read_architecture(directory)
    _check_weights(directory, config)
    model = empty_model(config, dtype, device)
    state = model.state_dict()
    _read(directory, state)
    model.load_state_dict(state)
    return model.requires_grad_(False).eval(), config, directory / "tokenizer.model"


def read_architecture(directory: Path) -> LaneformerConfig:
    """A checkpoint's architecture, after a look at whether it is complete. Raises CheckpointError."""
    check_files(directory)
    model_file = directory / "model.json"
    try:
        return LaneformerConfig.from_dict(read_json(model_file))
    except ValueError as error:
        raise CheckpointError(f"{model_file}: {error}") from None


def parameter_reader(directory: Path, config: LaneformerConfig) -> Callable[[str], torch.Tensor]:
    """A function that reads one parameter by name, whole, as it is stored: for whoever needs parts of a model only.

    Raises CheckpointError if the checkpoint does not hold the architecture's parameters.
    """
    _check_weights(directory, config)
    stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata

    def read(name: str) -> torch.Tensor:
        entry = stored[name]
        assert isinstance(entry, TensorStorageMetadata)
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        _read(directory, {name: tensor})
        return tensor

    return read


def _read(directory: Path, state: dict[str, torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant
        try:
            dcp.load(state, checkpoint_id=directory, no_dist=True)
        except CheckpointException as error:  # a BaseException, and also what it makes of Ctrl-C
            causes = [cause for cause, _ in error.failures.values()]
            if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
                raise KeyboardInterrupt from None
            kinds = ", ".join(
                type(cause).__name__ for cause in causes
            )  # torch's words advise to trust the file
            raise CheckpointError(
                f"{directory}: its weights are damaged and cannot be read: {kinds}"
            ) from error


def _check_weights(directory: Path, config: LaneformerConfig) -> None:
    """Compare names and shapes of what is stored with the architecture's."""
    stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    wanted = internal_shapes(config)
    if missing := wanted.keys() - stored.keys():
        raise CheckpointError(f"{directory} lacks the weights {', '.join(sorted(missing))}")
    for name, shape in wanted.items():
        found = getattr(stored[name], "size", None)
        if found != shape:
            raise CheckpointError(f"{directory}: {name} has shape {found}, model.json asks for {shape}")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises CheckpointError that names the file."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold one JSON object")
    return content
