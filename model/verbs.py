"""The verbs of `python -m model` that look at models and convert them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import LaneformerConfig, load_size, size_names

if TYPE_CHECKING:  # torch is imported by the verbs that compute, so that the others answer at once
    import numpy as np


def sizes(values: dict[str, Any], switches: set[str]) -> None:
    """All shipped sizes with what they cost."""
    context, processes = values["context"], values["lanes"]
    rows = []
    for name in size_names():
        config = load_size(name)
        rows.append(
            {
                "size": name,
                "parameters": config.num_parameters(),
                "layers": config.num_hidden_layers,
                "width": config.hidden_size,
                "lanes": config.num_lanes,
                "delay": config.broadcast_delay,
                "decode_bytes": config.decode_bytes(2),
                **_memory(config, context, processes),
                "train_flops_per_token": config.flops_per_token(context),
            }
        )
    if "--json" in switches:
        print(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    title = f"16-bit weights and cache, {context} tokens of context"
    if processes > 1:
        title += f"; weights and cache of each of {processes} processes"
    table = Table(title=title, box=None)
    headers = ["size", "parameters", "layers", "width", "lanes", "delay"]
    headers += ["MB a decoded token", "weights MB", "KV cache MB", "training GFLOP a token"]
    for header in headers:
        table.add_column(header, justify="left" if header == "size" else "right")
    for row in rows:
        counts = [f"{row[key]:,}" for key in ("parameters", "layers", "width", "lanes", "delay")]
        megabytes = [
            "-" if row[key] is None else f"{row[key] / 1e6:,.1f}"
            for key in ("decode_bytes", "weight_bytes", "kv_bytes")
        ]
        table.add_row(row["size"], *counts, *megabytes, f"{row['train_flops_per_token'] / 1e9:.3f}")
    Console(width=120).print(table)


def _memory(config: LaneformerConfig, context: int, processes: int) -> dict[str, int | None]:
    """16-bit bytes of weights and cache in each process; None where the lanes cannot be shared so."""
    if config.num_lanes % processes:
        return {"weight_bytes": None, "kv_bytes": None}
    return {
        "weight_bytes": 2 * config.part_parameters(processes),
        "kv_bytes": config.kv_bytes(context, 2) // processes,
    }


def logits(values: dict[str, Any], switches: set[str]) -> None:
    """Logits of given token ids under given weights, for comparing implementations."""
    import numpy as np
    import torch

    from model.hf import from_released, read_weights
    from model.laneformer import empty_model

    config = _read_config(values["config"])
    ids_BS = _read_integers(values["ids"])
    if ids_BS.min() < 0 or ids_BS.max() >= config.vocab_size:
        raise ValueError(
            f"{values['ids']}: ids {ids_BS.min()}..{ids_BS.max()} leave 0..{config.vocab_size - 1}"
        )
    positions_BS = None
    if values["positions"]:
        positions_BS = _read_integers(Path(values["positions"]))
        _check_positions(values["positions"], positions_BS, ids_BS)
        positions_BS = torch.from_numpy(positions_BS)
    model = empty_model(config, getattr(torch, values["dtype"]), "cpu")
    model.load_state_dict(from_released(read_weights(values["weights"]), config))
    with torch.no_grad():
        result = model(torch.from_numpy(ids_BS), positions_BS)
    result = result.float() if values["dtype"] in ("bfloat16", "float16") else result
    temporary = values["out"].with_name(values["out"].name + ".tmp")
    with temporary.open("wb") as stream:
        np.save(stream, result.numpy())
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(values["out"])


def _read_config(file: Path) -> LaneformerConfig:
    try:
        return LaneformerConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _read_integers(file: Path) -> np.ndarray:
    """An npy file of integers (B, S), as int64."""
    import numpy as np

    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file} is not an npy file: {error}") from None
    kind = getattr(array, "dtype", None)
    if kind is None or kind.kind not in "iu" or array.ndim != 2 or not array.size:
        raise ValueError(f"{file} must hold integers (B, S), not {kind} {getattr(array, 'shape', '')}")
    return array.astype(np.int64)


def _check_positions(file: str, positions_BS: np.ndarray, ids_BS: np.ndarray) -> None:
    """Positions count up from 0, and start again at 0 where a document does."""
    if positions_BS.shape != ids_BS.shape:
        raise ValueError(f"{file} has shape {positions_BS.shape}, the ids have {ids_BS.shape}")
    follows = positions_BS[:, 1:] == positions_BS[:, :-1] + 1
    if (positions_BS[:, 0] != 0).any() or not (follows | (positions_BS[:, 1:] == 0)).all():
        raise ValueError(f"{file}: positions must start at 0 and each be 0 or one more than the one before")


def export(values: dict[str, Any], switches: set[str]) -> None:
    """A checkpoint as a folder for Hugging Face's transformers."""
    import torch

    from model.hf_export import export_checkpoint

    dtype = getattr(torch, values["dtype"])
    out = export_checkpoint(values["checkpoint"], values["out"], dtype, values["shard_bytes"])
    print(f"{out}: {sum(f.stat().st_size for f in out.iterdir()):,} bytes in {len([*out.iterdir()])} files")


def import_released(values: dict[str, Any], switches: set[str]) -> None:
    """A folder of Hugging Face's layout as a checkpoint."""
    from model.hf_import import import_folder

    tokenizer = Path(values["tokenizer"]) if values["tokenizer"] else None
    print(import_folder(values["path"], values["out"], tokenizer))
