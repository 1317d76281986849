"""Turn a folder in Hugging Face's layout into a checkpoint that training, evaluation and generation read.

Only safetensors are read. Weights in .bin, .pt and the like are pickles, which run code of their author's choosing
when they are loaded, so they are refused. Nor is any Python file of the folder run or copied.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from model.checkpoint import FORMAT, VERSION, file_sha256, read_json
from model.config import LaneformerConfig
from model.hf import from_released
from model.hf_config import read_config
from model.new_folder import new_folder, refuse_existing

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def import_folder(path: Path, out: Path, tokenizer: Path | None = None) -> Path:
    """Write the checkpoint directory `out` from the folder `path`; returns it.

    `tokenizer` is a SentencePiece file, where the folder has no tokenizer.model. Weights are kept in float32. Raises
    ValueError for anything that is missing, unknown or does not fit, naming the file and the field or tensor.
    """
    refuse_existing(out)
    weights = read_released(path)
    content = read_json(path / "config.json")
    config = _read_config(path, content, weights)
    _drop_tied_head(path, config, weights)
    try:
        state = from_released(weights, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    pieces = _read_tokenizer(tokenizer or path / "tokenizer.model", config)
    extras = {"chat_template.jinja": _chat_template(path), "README.md": _read_text(path / "README.md")}
    write_checkpoint(out, config, state, pieces, {k: v for k, v in extras.items() if v is not None})
    return out


def write_checkpoint(
    out: Path,
    config: LaneformerConfig,
    state: Mapping[str, torch.Tensor],
    tokenizer: bytes,
    extras: Mapping[str, str],
) -> None:
    """Write a checkpoint directory whole: a model's state_dict(), its architecture and tokenizer, other files."""
    with new_folder(out) as folder:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant
            dcp.save({k: v.float() for k, v in state.items()}, checkpoint_id=folder, no_dist=True)
        (folder / "model.json").write_text(json.dumps(config.to_dict(), indent=1), encoding="utf-8")
        (folder / "tokenizer.model").write_bytes(tokenizer)
        for name, text in extras.items():
            (folder / name).write_text(text, encoding="utf-8")
        _write_manifest(folder)


def read_released(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's safetensors, by released name."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder")
    if (path / INDEX).is_file():
        return _read_shards(path)
    if (path / "model.safetensors").is_file():
        return load_weights(path / "model.safetensors")
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise ValueError(
            f"{path} has no safetensors, only {', '.join(pickles)}: pickles, which can run any code when they are "
            "loaded. Convert them to safetensors where that is safe, and import the result"
        )
    raise ValueError(f"{path} has neither model.safetensors nor {INDEX}")


def _read_shards(path: Path) -> dict[str, torch.Tensor]:
    named: dict[str, str] = read_json(path / INDEX).get("weight_map") or {}
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(set(named.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{path / INDEX} names {file!r}, which is no safetensors file of the folder")
        shard = load_weights(path / file)
        expected = {name for name, where in named.items() if where == file}
        if shard.keys() != expected:
            odd = sorted(shard.keys() ^ expected)
            raise ValueError(f"{path / file} does not hold what {INDEX} says: {', '.join(odd[:5])}")
        weights |= shard
    return weights


def load_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of one safetensors file. Raises ValueError for a damaged file or one that has no floats."""
    try:
        weights = load_file(file)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing") from None
    except Exception as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    exact = (torch.float32, torch.bfloat16, torch.float16)
    wrong = [f"{name} is {value.dtype}" for name, value in weights.items() if value.dtype not in exact]
    if wrong:
        raise ValueError(f"{file}: weights must be float32, bfloat16 or float16, but {'; '.join(wrong[:5])}")
    return weights


def _read_config(path: Path, content: dict[str, Any], weights: dict[str, torch.Tensor]) -> LaneformerConfig:
    has_head = any(name.startswith("lm_head.") for name in weights)
    try:
        return read_config(content, has_head)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _drop_tied_head(path: Path, config: LaneformerConfig, weights: dict[str, torch.Tensor]) -> None:
    """A tied head may have been written out again; it must then be the embedding."""
    if not config.tie_word_embeddings or "lm_head.weight" not in weights:
        return
    head, embedding = weights.pop("lm_head.weight"), weights.get("model.tok_embeddings.weight")
    if embedding is None or not torch.equal(head, embedding):
        raise ValueError(f"{path}: tie_word_embeddings is true, but lm_head.weight is not the embedding")


def _read_tokenizer(file: Path, config: LaneformerConfig) -> bytes:
    if not file.is_file():
        raise ValueError(f"{file} is missing; name a SentencePiece model with tokenizer=FILE")
    content = file.read_bytes()
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise ValueError(f"{file} is not a SentencePiece model: {error}") from error
    if processor.vocab_size() > config.vocab_size:
        raise ValueError(
            f"{file} has {processor.vocab_size()} pieces, more than the model's vocab_size {config.vocab_size}"
        )
    return content


def _chat_template(path: Path) -> str | None:
    """The folder's template, from its own file or from tokenizer_config.json."""
    own = _read_text(path / "chat_template.jinja")
    if own is not None:
        return own
    config = path / "tokenizer_config.json"
    template = read_json(config).get("chat_template") if config.is_file() else None
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{config}: chat_template must be one template; several cannot be imported")
    return template


def _read_text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _write_manifest(folder: Path) -> None:
    """The list of all files, which makes the directory a complete checkpoint; step 0 of whatever comes next."""
    files = {}
    for file in sorted(folder.iterdir()):
        files[file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    manifest = {"format": FORMAT, "version": VERSION, "step": 0, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
