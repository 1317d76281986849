"""Runs under a real Slurm on this machine: `make test` has these, the longer ones are in test_slurm_slow.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from launch.submit import ROOT
from tests.runs import consumed, numbers
from tests.slurm.conftest import STEPS, Site
from train.run_dir import RunDir, append_line, read_lines


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> RunDir:
    """A run submitted with sbatch itself, on two nodes, its overrides as typed; nothing happens to it."""
    words = site.words("undisturbed", "metrics.wandb_project='a project, \"quoted\"'")
    options = ["--parsable", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"]
    job = site.slurm.run("sbatch", *options, "launch/phase1.slurm", *words, cwd=ROOT).strip()
    site.end(job, "COMPLETED")
    (ROOT / f"phase1-{job}.log").unlink()
    return site.run_dir("undisturbed")


def test_overrides_reach_the_run_and_it_trains_on_two_nodes(site: Site, undisturbed: RunDir) -> None:
    assert undisturbed.done
    assert list(numbers(undisturbed)) == list(range(1, STEPS + 1))
    assert 'wandb_project: a project, "quoted"' in undisturbed.resolved.read_text()
    begun = next(line for line in read_lines(undisturbed.attempts) if line["event"] == "start")
    assert (begun["nodes"], begun["ranks"], begun["checkpoint"]) == ("n[1-2]", 2, 0)
    assert begun["code"] == (undisturbed.code / "tree.sha256").read_text().strip()
    assert "healthy n2" in (undisturbed.logs / f"health-{begun['job']}-0.txt").read_text()
    assert site.decisions("undisturbed") == ["finish"]


def test_a_run_that_is_done_does_nothing(site: Site, undisturbed: RunDir) -> None:
    before = undisturbed.attempts.read_text()
    options = ["--parsable", "--nodes=2", f"--comment={undisturbed.path}"]
    job = site.slurm.run("sbatch", *options, "launch/phase1.slurm", cwd=ROOT).strip()
    site.end(job, "COMPLETED")
    assert undisturbed.attempts.read_text() == before
    (ROOT / f"phase1-{job}.log").unlink()


def test_signal_save_requeue_same_losses(site: Site, undisturbed: RunDir) -> None:
    """What Slurm sends before the time limit and before a preemption."""
    job = site.submit("signalled")
    site.wait_step("signalled", 8)
    site.slurm.run("scancel", "--batch", "--signal=USR1", job)
    fields = site.end(job, "COMPLETED")
    run = site.run_dir("signalled")
    assert fields["Restarts"] == "1"
    assert site.outcomes("signalled") == ["stopped", "done"]
    assert site.decisions("signalled") == ["requeue", "finish"]
    stopped = next(line["step"] for line in read_lines(run.attempts) if line["event"] == "end")
    second = [line for line in read_lines(run.attempts) if line["event"] == "start"][1]
    assert second["checkpoint"] == stopped < STEPS, "it did not resume from where it stopped"
    assert stopped - 8 < 40, "the signal was not obeyed at the next steps"
    assert numbers(run) == numbers(undisturbed)  # bitwise
    assert consumed(run) == consumed(undisturbed)


def test_a_killed_rank_restarts_in_the_allocation(site: Site, undisturbed: RunDir) -> None:
    job = site.submit("killed")
    site.wait_step("killed", 8)
    os.kill(rank_pid(site.run_dir("killed"), rank=1), signal.SIGKILL)
    fields = site.end(job, "COMPLETED")
    assert fields["Restarts"] == "0"
    assert site.outcomes("killed") == ["failed", "done"]
    assert site.decisions("killed") == ["again", "finish"]
    assert numbers(site.run_dir("killed")) == numbers(undisturbed)


def rank_pid(run: RunDir, rank: int) -> int:
    """The process of a rank, by its command line and its RANK."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            b"train" in words
            and f"resolved={run.resolved}".encode() in words
            and f"RANK={rank}".encode() in variables
        ):
            return int(folder.name)
    raise AssertionError(f"rank {rank} of {run.path} does not run")


def test_a_configuration_that_cannot_run_ends_without_a_requeue(site: Site) -> None:
    """Its earlier run does not exist, which shows when the job starts, not when it is submitted."""
    job = site.submit("unready", "train.init_from=never")
    fields = site.end(job, "FAILED", 60)
    assert (fields["ExitCode"], fields["Restarts"]) == ("2:0", "0")
    last = list(read_lines(site.run_dir("unready").attempts))[-1]
    assert last["event"] == "gave_up"
    assert "train.init_from=never" in last["reason"]
    told = site.launch("status", f"runs={site.runs}", "unready")
    assert "unready: given up: exit 2: the configuration cannot run" in told


def test_three_attempts_without_progress_end_without_a_requeue(site: Site) -> None:
    """Three attempts that vanished with their nodes, and Slurm starts the job once more."""
    run = RunDir(site.launch("prepare", "experiment=phase1", *site.words("barren")).strip())
    for attempt in (1, 2, 3):
        facts = {"event": "start", "attempt": attempt, "time": 0.0, "job": "0", "restart": attempt}
        append_line(run.attempts, facts | {"checkpoint": 0})
    job = site.submit("barren")
    fields = site.end(job, "FAILED", 60)
    assert (fields["ExitCode"], fields["Restarts"]) == ("3:0", "0")
    assert "3 attempts in a row" in list(read_lines(run.attempts))[-1]["reason"]


def test_fewer_nodes_than_the_configuration_says(site: Site) -> None:
    job = site.submit("few", options=("--nodes=1",))
    assert site.end(job, "FAILED", 60)["ExitCode"] == "2:0"
    reason = list(read_lines(site.run_dir("few").attempts))[-1]["reason"]
    assert "cluster.nodes=2 but the job has 1" in reason


def test_a_node_that_fails_its_check_is_left_out_and_the_chain_follows(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor runs elsewhere (and ends at once: its configuration cannot run)."""
    environment = tmp_path / "site.env"
    environment.write_text("""HEALTH_EXTRA='[ $SLURMD_NODENAME != n1 ] || { echo fan stopped; false; }'\n""")
    monkeypatch.setitem(site.slurm.environment, "LANEFORMER_SITE", str(environment))
    job = site.submit("unhealthy", "train.init_from=never", options=("--begin=now+2",))
    waiting = site.slurm.run(
        "sbatch", "--parsable", f"--dependency=afterok:{job}", "launch/smoke.slurm", cwd=ROOT
    )
    site.end(job, "COMPLETED", 60)
    lines = list(read_lines(site.run_dir("unhealthy").attempts))
    assert (lines[0]["event"], lines[0]["excluded"]) == ("successor", "n1")
    new = lines[0]["new"]
    assert site.end(new, "FAILED", 60)["NodeList"] == "n[2-3]"
    assert f"afterok:{new}" in site.slurm.job(waiting.strip())["Dependency"]
    site.slurm.run("scancel", waiting.strip())
    assert "unhealthy n1 fan stopped" in (site.run_dir("unhealthy").logs / f"health-{job}-0.txt").read_text()


def test_scancel_is_not_undone(site: Site) -> None:
    job = site.submit("cancelled")
    site.wait_step("cancelled", 8)
    assert site.slurm.job_processes(job), "it would not be seen whether any are left"
    site.slurm.run("scancel", job)
    fields = site.end(job, "CANCELLED")
    assert fields["Restarts"] == "0"
    site.wait(lambda: site.slurm.idle_nodes() == 3)
    run = site.run_dir("cancelled")
    assert not run.done
    assert not any("requeue" in action for action in site.decisions("cancelled"))
    assert site.slurm.job_processes(job) == [], "processes of the job are left"


def test_slurm_accepts_the_real_phases(site: Site) -> None:
    """--test-only of the 2.3B recipe, shrunk to the nodes that this Slurm has."""
    out = site.launch("submit", "cluster.nodes=3", "phase1", "phase2", "sft", "--test-only")
    assert out.count("to start at") == 3, out


def test_submitting_twice_is_refused(site: Site) -> None:
    job = site.submit("twice", options=("--hold",))
    command = [str(ROOT / ".venv/bin/python"), "-m", "launch", "submit", "phase1", *site.words("twice")]
    again = subprocess.run(
        command, cwd=ROOT, env=site.slurm.environment, capture_output=True, text=True, check=False
    )
    site.slurm.run("scancel", job)
    assert again.returncode == 2
    assert f"has job {job} already" in again.stderr


def test_a_source_is_prepared_by_an_array_of_tasks(site: Site, tmp_path: Path) -> None:
    """Each task takes its share; a job that waits for all of them verifies the shares and puts them together."""
    raw = tmp_path / "raw"
    raw.mkdir()
    for number in range(6):
        lines = [json.dumps({"text": f"document {n} of file {number}: " + "words " * 20}) for n in range(20)]
        (raw / f"{number}.jsonl").write_text("\n".join(lines))
    source = tmp_path / "notes.yaml"
    source.write_text(
        f"kind: jsonl\npath: {raw}\nlicence: none\ncategory: general\ncolumns: {{text: text}}\n"
    )
    root = tmp_path / "prepared"
    shutil.copytree(site.data, root)
    keys = [f"source={source}", f"root={root}", "held_out=0.05"]
    options = ["--cpus-per-task=1", f"--output={tmp_path}/%x-%A_%a.log"]
    told = site.launch("data", *keys, "tasks=3", *options)
    array, merge = re.findall(r"job (\d+)", told)
    site.end(merge, "COMPLETED", 100)
    logs = sorted(file.name for file in tmp_path.glob(f"prepare-*-{array}_*.log"))
    assert [name[-5] for name in logs] == ["0", "1", "2"]
    manifest = json.loads((root / "notes" / "train" / "manifest.json").read_text())
    held_out = json.loads((root / "notes" / "validation" / "manifest.json").read_text())
    assert manifest["documents"] + held_out["documents"] == 120
