"""A run's checkpoint, exported with its card, loads in transformers; imported again, it generates and trains on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint
from model.cli import main
from tests.runs import train
from tests.tiny import tiny_config
from train.cli import prepare
from train.run_dir import RunDir

transformers = pytest.importorskip("transformers", reason="transformers is in the dev extra")


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(tiny_config(tiny_data, tmp_path_factory.mktemp("run"), "optim.lr=0.01"))


@pytest.fixture(scope="module")
def exported(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, with results of an evaluation and of another step, which are not its own."""
    suite = {"suite": "core", "settings_hash": "0a1b2c3d", "notes": ["one | note"]}
    for step, score in ((15, 0.1), (20, 0.25)):
        suite["scores"] = {"core/centered": score, "core_task/piqa": 0.5}
        result = {
            "format": "laneformer-eval",
            "version": 1,
            "step": step,
            "checkpoint": {},
            "suites": [suite],
        }
        run.evals.mkdir(exist_ok=True)
        (run.evals / f"step-{step}.json").write_text(json.dumps(result))
    folder = tmp_path_factory.mktemp("exported") / "model"
    checkpoint = run.complete_checkpoints()[-1][1]
    assert main(["export", f"checkpoint={checkpoint}", f"out={folder}", "dtype=float32"]) == 0
    return folder


def test_transformers_continues_a_text_as_we_do(
    run: RunDir,
    exported: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = run.complete_checkpoints()[-1][1]
    capsys.readouterr()
    words = ["prompt=the lane hears", "max_new_tokens=30", "--json"]
    assert main(["generate", f"checkpoint={checkpoint}", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(exported)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    inputs = tokenizer("the lane hears", return_tensors="pt")
    assert inputs["input_ids"].shape[1] == told["prompt_tokens"]
    got = model.generate(**inputs, max_new_tokens=30)[0, told["prompt_tokens"] :]
    assert got.tolist() == told["tokens"]
    assert tokenizer.decode(got, skip_special_tokens=True) == told["text"]
    ours, _, _ = load_checkpoint(checkpoint)
    with torch.no_grad():
        ids = inputs["input_ids"]
        torch.testing.assert_close(model(ids).logits, ours(ids), rtol=0, atol=1e-5)


def test_the_card_tells_sizes_data_scores_and_licences(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    parameters = sum(value.numel() for value in load_file(exported / "model.safetensors").values())
    assert f"| parameters | {parameters:,} |" in card
    assert "| tiny | smoke_phase1 | 2,560 | prose 70 %, code 30 % |" in card
    assert "| code | made for tests | not on record |" in card
    assert "| core | core/centered | 0.2500 | 0a1b2c3d | one \\| note |" in card
    assert "0.1000" not in card
    assert "core_task/piqa" not in card
    assert "Whether it may be passed on is yours to check" in card


def test_training_goes_on_from_an_imported_folder(
    run: RunDir, exported: Path, tiny_data: Path, tmp_path: Path
) -> None:
    imported = tmp_path / "imported"
    assert main(["import", str(exported), f"out={imported}"]) == 0
    assert (imported / "tokenizer.model").read_bytes() == (tiny_data / "tokenizer.model").read_bytes()
    words = ["optim.lr=1e-6", "name=later", f"train.init_from={imported}"]
    later = train(tiny_config(tiny_data, tmp_path, *words, steps=10))
    losses = [row["loss"] for row in run.metric_rows("train")]
    assert abs(later.metric_rows("train")[0]["loss"] - losses[-1]) < 0.5 < losses[0] - losses[-1]


def test_the_card_of_a_later_phase_names_the_data_of_the_earlier(
    run: RunDir, tiny_data: Path, tmp_path: Path
) -> None:
    words = ["name=group/phase_2", f"train.init_from={run.path.name}"]
    phase_2 = prepare(tiny_config(tiny_data, run.path.parent, *words, steps=10))
    checkpoint = phase_2.checkpoints / "step-20"
    shutil.copytree(run.complete_checkpoints()[-1][1], checkpoint)
    assert main(["export", f"checkpoint={checkpoint}", f"out={tmp_path / 'model'}"]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    earlier, later = "| tiny | smoke_phase1 | 2,560 |", "| group/phase_2 | smoke_phase1 | 1,280 |"
    assert card.index("# group/phase_2, step 20") < card.index(earlier) < card.index(later)
    assert "None on record for this checkpoint." in card
