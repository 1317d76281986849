"""`python -m train` as a user types it: its own process, torchrun, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tiny import tiny_words
from train.run_dir import RunDir, read_lines, write_atomic

ROOT = Path(__file__).resolve().parents[2]


def python_m(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_two_ranks_under_torchrun_then_nothing_to_do_then_refused(tiny_data: Path, tmp_path: Path) -> None:
    words = tiny_words(tiny_data, tmp_path, ranks=2)
    result = python_m("train", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    run = RunDir(tmp_path / "tiny")
    assert run.done
    assert "step 20/20" in result.stdout
    assert "ETA 00:00:00" in result.stdout
    assert [line["event"] for line in read_lines(run.attempts)] == ["start", "end"]
    assert (run.logs / "1" / "rank-1.log").exists()
    assert (run.code / "commit.txt").read_text()

    again = python_m("train", *words)
    assert (again.returncode, again.stdout.strip()) == (0, f"{run.path} is done: nothing to do")

    other = python_m("train", *words, "optim.lr=1e-4")
    assert other.returncode == 2
    assert "optim.lr: 0.003 -> 0.0001" in other.stderr
    assert "--allow-change=KEY" in other.stderr
    assert "Traceback" not in other.stderr


def test_a_change_is_allowed_by_name_and_recorded(tiny_data: Path, tmp_path: Path) -> None:
    words = tiny_words(tiny_data, tmp_path)
    run = RunDir(tmp_path / "tiny")
    assert python_m("train", *words, "--prepare").stdout.strip() == str(run.path)
    changed = [*words, "optim.lr=1e-4", "optim.weight_decay=0.2", "--prepare", "--allow-change=optim.lr"]
    result = python_m("train", *changed)
    assert result.returncode == 2
    assert "optim.weight_decay: 0.1 -> 0.2" in result.stderr
    assert "optim.lr" not in result.stderr
    assert python_m("train", *changed, "--allow-change=optim.weight_decay").returncode == 0
    assert "lr: 0.0001" in run.resolved.read_text()
    [line] = read_lines(run.attempts)
    assert line["event"] == "change"
    assert line["keys"] == ["optim.lr: 0.003 -> 0.0001", "optim.weight_decay: 0.1 -> 0.2"]
    assert run.start_attempt() == 1


def test_problems_found_while_preparing(tiny_data: Path, tmp_path: Path) -> None:
    """What the configuration alone can't tell: missing data, another tokenizer, too many epochs, a missing run."""
    words = tiny_words(tiny_data, tmp_path)
    cases = {
        "data.root=nowhere": "nowhere/tokenizer.model does not exist: prepare the data first",
        "model.vocab_size=512": "model.vocab_size=512 but",
        "data.max_epochs=0.01": "cap is 0.01",
        "train.init_from=never": "does not exist, and no such checkpoint exists",
        "cluster.nodes=2": "several nodes are started by a scheduler",
        f"runs={tmp_path}/a-file": f"the run directory {tmp_path}/a-file/tiny cannot be written",
        f"name=other train.init_from={tmp_path}/step-1": "step-1/model.json is missing or damaged",
        f"name=other train.init_from={tmp_path}/step-2": "step-2/model.json is missing or damaged",
        f"name=other train.init_from={tmp_path}/step-3": "its model has num_heads=3, this one has no such key",
    }
    (tmp_path / "a-file").touch()
    for step, model in ((1, None), (2, "[3"), (3, '{"num_heads": 3}')):
        write_atomic(tmp_path / f"step-{step}" / "manifest.json", "{}")
        if model:
            write_atomic(tmp_path / f"step-{step}" / "model.json", model)
    for override, message in cases.items():
        result = python_m("train", *words, *override.split())
        assert result.returncode == 2, override
        assert message in result.stderr
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "tiny" / "checkpoints").exists()


def test_a_dry_run_needs_no_data_and_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch must not be imported')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "train", "experiment=phase2", "--dry-run"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "423,855 (1,999,9" in result.stdout
