"""Submission without Slurm: words, commands, frozen code."""

from __future__ import annotations

import shlex
from collections import namedtuple
from pathlib import Path

import pytest

from launch.cli import main
from launch.submit import ROOT, disk_problems, freeze, read_phases, with_experiment
from train.config import ConfigError, compose
from train.run_dir import RunDir, write_atomic


def test_words_before_the_first_phase_go_to_all_and_words_after_it_to_that_one() -> None:
    phases = read_phases(
        ["runs=x", "phase1", "optim.lr=1", "~data.weights", "phase2", "experiment=smoke_phase2"]
    )
    assert [(p.name, p.words) for p in phases] == [
        ("phase1", ("experiment=phase1", "runs=x", "optim.lr=1", "~data.weights")),
        ("phase2", ("experiment=smoke_phase2", "runs=x")),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name at least one phase"),
        (["phase9"], "'phase9' is neither"),
        (["runs=x"], "at least one phase"),
    ],
)
def test_what_is_not_understood(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_phases(words)


def test_the_last_experiment_replaces_the_phases_own() -> None:
    words = with_experiment("phase2", ["a=1", "experiment=x", "experiment=y"])
    assert words == ["experiment=y", "a=1"]


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    """The commands that a dry run prints, split as a shell would."""
    assert main(["submit", *words, "--dry-run"]) == 0
    return [shlex.split(line.split(": ", 1)[1]) for line in capsys.readouterr().out.splitlines()]


def test_overrides_reach_sbatch_as_they_were_typed(capsys: pytest.CaptureFixture[str]) -> None:
    awkward = ["~data.weights", "+data.weights={prose: 0.7, code: 0.3}", "data.root='/tmp/with space'"]
    [command] = dry_run(capsys, "phase1", "experiment=smoke_phase1", "name=a", *awkward)
    assert command[-5:] == ["experiment=smoke_phase1", "name=a", *awkward]
    assert command[-6] == str(ROOT / "launch" / "phase1.slurm")


def test_the_machine_of_the_configuration_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    [command] = dry_run(capsys, "phase2", "cluster.nodes=12", "--partition=gpu", "--time=1:00:00")
    for option in ("--nodes=12", "--ntasks-per-node=8", "--cpus-per-task=12", "--gpus-per-node=8"):
        assert option in command
    script = command.index(str(ROOT / "launch" / "phase2.slurm"))
    assert command.index("--partition=gpu") < script
    assert command.index("--time=1:00:00") < script
    assert f"--comment={ROOT / 'runs' / 'phase2'}" in command


def test_a_chain_waits_for_a_good_end(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = dry_run(capsys, "phase1", "phase2", "sft")
    assert not any("dependency" in word for word in first)
    assert "--dependency=afterok:<phase1 job>" in second
    assert "--dependency=afterok:<phase2 job>" in third


def test_evaluation_is_submitted_beside_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, evaluation = dry_run(capsys, "phase1", "--evals=core,code")
    assert evaluation[-3:] == [
        str(ROOT / "launch" / "eval.slurm"),
        f"run={ROOT}/runs/phase1",
        "suite=core,code",
    ]
    assert "--dependency=after:<phase1 job>" in evaluation
    assert not any("comment" in word for word in evaluation), "it would count as the run's own job"


def test_wrong_configurations_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", f"runs={tmp_path}/runs", "phase1", "phase2", "optim.lrr=1"]) == 2
    assert "optim.lrr is not a key" in capsys.readouterr().err
    assert main(["submit", "phase2", "phase1", "--dry-run"]) == 2
    assert "phase2: train.init_from=phase1 is not submitted before it" in capsys.readouterr().err
    for suites, wrong in (("core,cod", "'cod'"), ("", "''"), ("core,", "''")):
        assert main(["submit", "phase1", "--dry-run", f"--evals={suites}"]) == 2
        said = f"--evals={suites}: {wrong} is none of core, builtin, code, validation"
        assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_checkpoints_that_do_not_fit_the_disk_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs share the disk; what one of them has written already counts."""
    words = ["experiment=smoke_phase1", f"runs={tmp_path}", "checkpoint.keep_latest=2"]
    configs = [compose([*words, f"name={name}"]) for name in ("a", "deeper/b")]
    size = configs[0].checkpoint_bytes
    assert [config.most_checkpoints for config in configs] == [4, 4]
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(8 * size))
    assert disk_problems(configs) == []
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(7 * size))
    [problem] = disk_problems(configs)
    assert f"{8 * size / 1e9:.1f} GB" in problem
    assert str(tmp_path) in problem
    write_atomic(tmp_path / "a" / "checkpoints" / "step-1" / "manifest.json", "{}")
    assert disk_problems(configs) == []


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None)
    assert main(["submit", "phase1", "--test-only"]) == 2
    assert "sbatch is not installed here" in capsys.readouterr().err


def test_frozen_code_is_replaced_only_where_it_differs(tmp_path: Path) -> None:
    root, run = tmp_path / "root", RunDir(tmp_path / "runs" / "a")
    (root / "train" / "__pycache__").mkdir(parents=True)
    (root / "train" / "__pycache__" / "x.pyc").touch()
    (root / "train" / "a.py").write_text("one")
    (root / "notes.txt").write_text("not code")
    first = freeze(root, run)
    frozen = run.code / "tree"
    assert [str(f.relative_to(frozen)) for f in sorted(frozen.rglob("*")) if f.is_file()] == ["train/a.py"]
    inode = (frozen / "train" / "a.py").stat().st_ino
    assert freeze(root, run) == first
    assert (frozen / "train" / "a.py").stat().st_ino == inode
    (root / "train" / "a.py").write_text("two")
    assert freeze(root, run) != first
    assert (frozen / "train" / "a.py").read_text() == "two"


def test_data_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["source=a,b", "tasks=4", "root=data/x", "workers=8", "--time=1:00:00", "--dry-run"]
    assert main(["data", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    array, merge = (line.split(": ", 1)[1].split() for line in lines[:2])
    assert "--array=0-3" in array
    assert array[-4:] == ["tasks=4", "source=a", "root=data/x", "workers=8"]
    assert merge[-3:] == ["merge", "source=a", "root=data/x"]
    assert "--kill-on-invalid-dep=yes" in merge
    assert all("--time=1:00:00" in line for line in lines)
    assert [line.split(": ")[0] for line in lines] == ["a", "a", "b", "b"]
    assert main(["data", "root=x", "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "give source=NAME" in told
    assert "tasks= must be a whole number" in told
