"""A checkpoint that training wrote on two ranks is read by one process, completely, and generates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from data_mixtures.loader import ValidationSet
from model.checkpoint import CheckpointError, check_files, load_checkpoint
from model.cli import main
from tests.runs import train
from tests.tiny import tiny_config
from train.run_dir import RunDir


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    words = ["validation.every_steps=20", "validation.sequences_per_source=5", "optim.lr=0.01"]
    return train(tiny_config(tiny_data, tmp_path_factory.mktemp("run"), *words, ranks=2))


def test_the_loaded_model_has_the_validation_loss_of_the_run(run: RunDir, tiny_data: Path) -> None:
    checkpoint = run.complete_checkpoints()[-1][1]
    model, config, tokenizer = load_checkpoint(checkpoint)
    assert config.to_dict() == json.loads((run.path / "model.json").read_text())
    assert tokenizer.read_bytes() == (tiny_data / "tokenizer.model").read_bytes()
    held_out = ValidationSet(tiny_data, "prose", 32, 5)
    nats, tokens = 0.0, 0
    for inputs, positions, labels in map(held_out.__getitem__, range(5)):
        logits = model(inputs[None], positions[None])[0]
        nats += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        tokens += int((labels != -100).sum())
    told = run.metric_rows("validation")[-1]
    assert told["step"] == 20
    assert told["validation/prose/loss"] == pytest.approx(nats / tokens, rel=1e-5)


def test_generate_command(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run.complete_checkpoints()[-1][1]
    words = ["generate", f"checkpoint={checkpoint}", "prompt=the lane", "max_new_tokens=12"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["end_reason"] in ("length", "eos")
    assert 1 <= len(told["tokens"]) <= 12
    assert main(words) == 0
    streamed = capsys.readouterr().out
    assert streamed.startswith("the lane" + told["text"])
    assert f"[{told['end_reason']}: {told['prompt_tokens']} prompt tokens" in streamed


def test_incomplete_and_damaged_checkpoints_are_refused(run: RunDir, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "step-20"
    shutil.copytree(run.complete_checkpoints()[-1][1], copy)
    check_files(copy, hashes=True)
    part = copy / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    load_checkpoint(copy)  # sizes agree
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is damaged: its SHA-256 differs"):
        check_files(copy, hashes=True)
    part.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp has \d+ bytes, the manifest says \d+"):
        load_checkpoint(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        load_checkpoint(copy)
