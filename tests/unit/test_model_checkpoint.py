"""Reading a checkpoint directory: all of it or a clear refusal."""

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from model.checkpoint import CheckpointError, check_files, load_checkpoint
from model.config import LaneformerConfig
from model.laneformer import Laneformer, build_model
from tests.unit.test_model_laneformer import tiny


def write_manifest(directory: Path, version: int = 1) -> None:
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in directory.iterdir()
        if file.name != "manifest.json"
    }
    manifest = {"format": "laneformer-checkpoint", "version": version, "step": 3, "files": files}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def write(directory: Path, config: LaneformerConfig) -> Laneformer:
    """What training leaves, without a trainer: parameters beside things that inference ignores."""
    model = build_model(config, init_seed=4)
    directory.mkdir()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state = {**model.state_dict(), "optimizer.state.norm.weight.step": torch.ones(3), "step": 3}
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    (directory / "model.json").write_text(json.dumps(config.to_dict()))
    (directory / "tokenizer.model").write_bytes(b"pieces")
    write_manifest(directory)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_come_back_in_the_asked_precision(tmp_path: Path, dtype: torch.dtype, tied: bool):
    config = tiny(tie_word_embeddings=tied)
    written = write(tmp_path / "step-3", config).state_dict()
    model, read_config, tokenizer = load_checkpoint(tmp_path / "step-3", dtype=dtype)
    assert read_config == config
    assert tokenizer.read_bytes() == b"pieces"
    for name, value in model.state_dict().items():
        assert value.dtype == dtype
        assert torch.equal(value, written[name].to(dtype)), name
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert (model.tok_embeddings.weight is model.lm_head.weight) == tied
    # Rotations are made anew, and never in less than float32.
    assert model.rotary.table.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert model.rotary.table.abs().max() == 1


def test_warnings_stay_out_of_the_way(tmp_path: Path):
    write(tmp_path / "step-3", tiny())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path / "step-3")


def delete(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


def replace(name: str, content: str) -> Callable[[Path], object]:
    """Write other content, and a manifest that agrees with it."""

    def change(directory: Path) -> None:
        (directory / name).write_text(content)
        if name != "manifest.json":
            write_manifest(directory)

    return change


def cut(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:-1])


def blank(name: str) -> Callable[[Path], object]:
    """Fill with 255, and write a manifest that agrees with it."""

    def change(directory: Path) -> None:
        (directory / name).write_bytes(b"\xff" * (directory / name).stat().st_size)
        write_manifest(directory)

    return change


OTHER_MODEL = json.dumps(tiny(num_hidden_layers=5).to_dict())

WIDER_MODEL = json.dumps(tiny(intermediate_size=64).to_dict())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (delete("manifest.json"), "is not a complete checkpoint: it has no manifest.json"),
        (delete("tokenizer.model"), r"tokenizer\.model is missing, the manifest lists it"),
        (cut("__0_0.distcp"), r"__0_0\.distcp has \d+ bytes, the manifest says \d+"),
        (replace("manifest.json", "{"), r"manifest\.json is not JSON"),
        (replace("manifest.json", "[]"), r"manifest\.json must hold one JSON object"),
        (replace("manifest.json", '{"format": "other", "version": 1}'), r"has format \('other', 1\)"),
        (
            lambda directory: write_manifest(directory, version=2),
            r"this code reads \('laneformer-checkpoint', 1\)",
        ),
        (
            replace("manifest.json", '{"format": "laneformer-checkpoint", "version": 1, "files": {}}'),
            r"does not list \.metadata, model\.json, tokenizer\.model",
        ),
        *(
            (
                replace(
                    "manifest.json",
                    f'{{"format": "laneformer-checkpoint", "version": 1, "files": {files}}}',
                ),
                r"manifest\.json: 'files' must give the bytes and sha256 of each file",
            )
            for files in ("null", '["model.json"]', '{"model.json": {}}', '{"model.json": 3}')
        ),
        (blank("__0_0.distcp"), r"step-3: its weights are damaged and cannot be read: "),
        (replace("model.json", "{}"), r"model\.json: invalid model configuration"),
        (replace("model.json", OTHER_MODEL), r"lacks the weights layers\.4\.attention\.wo\.weight, .*w13"),
        (
            replace("model.json", WIDER_MODEL),
            r"layers\.0\.feed_forward\.w13\.weight has shape .*96, 32.*128, 32",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, damage: Callable[[Path], object], says: str):
    directory = tmp_path / "step-3"
    write(directory, tiny())
    damage(directory)
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(directory)


def test_hashes_of_weights_are_compared_when_asked(tmp_path: Path):
    directory = tmp_path / "step-3"
    write(directory, tiny())
    check_files(directory, hashes=True)
    flip(directory / "__0_0.distcp")
    check_files(directory)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged: its SHA-256 differs"):
        check_files(directory, hashes=True)


@pytest.mark.parametrize("name", [".metadata", "model.json", "tokenizer.model"])
def test_hashes_of_small_files_are_always_compared(tmp_path: Path, name: str):
    directory = tmp_path / "step-3"
    write(directory, tiny())
    flip(directory / name)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: its SHA-256 differs from the manifest's"):
        check_files(directory)


def flip(file: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
