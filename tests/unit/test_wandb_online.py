"""Trainer, evaluation and alert write to one W&B run at once: the real client against a stand-in for the server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from launch.submit import ROOT
from tests.unit.launch_fixtures import write_run
from tests.unit.wandb_server import wandb_server

SECRET = "0123456789abcdef" * 2 + "01234567"
TRAINER = """
from train.metrics import WandbRun
from train.run_dir import RunDir
run = WandbRun(RunDir(sys.argv[1]), "project", "chain/phase1", "chain", 128, {})
run.log({"loss": 3.0}, 1)
Path(sys.argv[1], "begun").touch()
while not Path(sys.argv[1], "evaluated").exists():
    time.sleep(0.05)
run.log({"loss": 2.0}, 2)
run.close()
"""
EVALUATION = """
from eval.results import RunFiles
from eval.tracking import _to_wandb
row = {"step": 1, "eval/core/v2": 0.5}
_to_wandb(RunFiles(Path(sys.argv[1])), [row], {"core/v2": 0.5}, {"wandb_project": "project"})
"""
IMPORTS = "import sys, time\nfrom pathlib import Path\n"


def test_nobody_overwrites_anybody(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with wandb_server() as sent:
        # Not those of W&B: an earlier test may have left its service's address, through which both would go.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        environment |= {"WANDB_API_KEY": SECRET, "WANDB_BASE_URL": sent.address}
        environment |= {"PYTHONPATH": str(ROOT), "WANDB_ERROR_REPORTING": "false"}

        def start(code: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-c", IMPORTS + code, str(run.path)], env=environment, cwd=tmp_path
            )

        trainer = start(TRAINER)
        deadline = time.monotonic() + 60
        while not (run.path / "begun").exists():
            assert trainer.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert start(EVALUATION).wait(60) == 0
        (run.path / "evaluated").touch()
        assert trainer.wait(60) == 0
    lines = [(headers["x-wandb-async-client-id"], line) for headers, line in sent.history]
    assert all(headers["x-wandb-use-async-filestream"] == "true" for headers, _ in sent.history)
    trained = [(client, line["train/step"], line["train/tokens"]) for client, line in lines if "loss" in line]
    evaluated = [(client, line["eval/step"]) for client, line in lines if "eval/core/v2" in line]
    assert [step[1:] for step in trained] == [(1, 128), (2, 256)]
    assert [step[1:] for step in evaluated] == [(1,)]
    assert len({client for client, *_ in trained} | {client for client, *_ in evaluated}) == 2
    assert {given["name"] for given in sent.runs} == {run.wandb_id()}
    # Only the trainer names the run and its group.
    assert {(given["displayName"], given["groupName"]) for given in sent.runs} == {
        ("chain/phase1", "chain"),
        (None, None),
    }
    for file in run.path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
