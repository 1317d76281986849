"""Write a checkpoint as a folder that `AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)` loads.

The folder is written under a temporary name beside the destination and renamed when it is complete and synced. Its
contents depend on the checkpoint and the arguments alone, so the same export twice gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from model.checkpoint import check_files, load_checkpoint
from model.config import LaneformerConfig
from model.hf import to_released
from model.hf_card import model_card
from model.hf_tokenizer import Pieces, write_tokenizer
from model.new_folder import new_folder, refuse_existing

CODE = Path(__file__).with_name("hf_files")
SHARD_BYTES = 5_000_000_000


def export_checkpoint(
    checkpoint: Path, out: Path, dtype: torch.dtype = torch.bfloat16, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Export a `step-N` directory to the new folder `out`; returns it.

    Weights are cast to `dtype` and split into files of at most `shard_bytes`, or of one larger tensor. Raises
    ValueError if `out` exists and is not an empty folder, if a file of the checkpoint is damaged, or if something of
    it cannot be expressed.
    """
    refuse_existing(out)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes} must be at least 1")
    check_files(checkpoint, hashes=True)  # what is given to others is not made of damaged weights
    model, config, tokenizer = load_checkpoint(checkpoint, dtype)
    template_file = checkpoint / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else None
    card = checkpoint / "README.md"  # an imported folder's own
    with new_folder(out) as folder:
        pieces = write_tokenizer(tokenizer, folder, config.max_position_embeddings, template)
        if len(pieces.tokens) > config.vocab_size:
            raise ValueError(
                f"{tokenizer} has {len(pieces.tokens)} pieces, the model's vocab_size is {config.vocab_size}"
            )
        type_name = str(dtype).removeprefix("torch.")
        _write_json(folder / "config.json", hugging_face_config(config, pieces, type_name))
        _write_json(folder / "generation_config.json", _generation_config(pieces))
        weights = to_released(model.state_dict(), config)
        _check_finite(weights, dtype)
        write_shards(weights, folder, shard_bytes)
        for file in ("configuration_laneformer.py", "modeling_laneformer.py"):
            shutil.copyfile(CODE / file, folder / file)
        text = (
            card.read_text(encoding="utf-8")
            if card.is_file()
            else model_card(config, type_name, checkpoint, template is not None)
        )
        (folder / "README.md").write_text(text, encoding="utf-8")
    return out


def _check_finite(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    wrong = [name for name, value in weights.items() if not value.isfinite().all()]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong[:5])} has values that are not finite in {dtype}; choose another dtype, if the "
            "checkpoint's own are"
        )


def hugging_face_config(config: LaneformerConfig, pieces: Pieces, dtype: str) -> dict[str, Any]:
    """The contents of config.json."""
    return {
        "architectures": ["LaneformerForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_laneformer.LaneformerConfig",
            "AutoModel": "modeling_laneformer.LaneformerModel",
            "AutoModelForCausalLM": "modeling_laneformer.LaneformerForCausalLM",
        },
        "model_type": "laneformer",
        "dtype": dtype,
        **config.to_dict(),
        "layer_types": [
            "full_attention" if config.window(i) is None else "sliding_attention"
            for i in range(config.num_hidden_layers)
        ],
        **_token_ids(pieces),
        "use_cache": True,
    }


def _generation_config(pieces: Pieces) -> dict[str, Any]:
    return {**_token_ids(pieces), "do_sample": False}


def _token_ids(pieces: Pieces) -> dict[str, int]:
    return {
        "bos_token_id": pieces.tokens.index(pieces.bos),
        "eos_token_id": pieces.tokens.index(pieces.eos),
        "pad_token_id": pieces.tokens.index(pieces.pad or pieces.unknown),
    }


def write_shards(weights: dict[str, torch.Tensor], folder: Path, shard_bytes: int) -> None:
    """Write safetensors, filled in order; an index if there are several."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, value in weights.items():
        if shards[-1] and size + value.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # it makes them readable by their owner alone
    if count > 1:
        index = {
            "metadata": {"total_size": sum(value.nbytes for value in weights.values())},
            "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
        }
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
