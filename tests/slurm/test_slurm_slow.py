"""The longer scenarios under a real Slurm: chains, lost nodes, hung ranks, evaluation, 24 nodes."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.submit import ROOT
from tests.runs import numbers
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import STEPS, Site
from tests.slurm.test_slurm import rank_pid, undisturbed  # noqa: F401 - a fixture
from train.run_dir import RunDir, read_lines

pytestmark = pytest.mark.slow


def test_a_chain_starts_each_phase_from_the_one_before(site: Site) -> None:
    """phase2 is submitted before phase1 has trained, and waits for it; its init_from is looked up then."""
    words = [word for word in site.words("chain1") if not word.startswith("name=")]
    second = ["name=chain2", "train.init_from=chain1"]
    out = site.launch("submit", *words, "phase1", "name=chain1", "phase2", "experiment=smoke_phase1", *second)
    first_job, second_job = [line.split("job ")[1].split()[0] for line in out.splitlines()]
    assert site.slurm.job(second_job)["Dependency"].startswith(f"afterok:{first_job}")
    site.end(first_job, "COMPLETED", 200)
    site.end(second_job, "COMPLETED", 200)
    first, second_run = site.run_dir("chain1"), site.run_dir("chain2")
    assert numbers(second_run)[1][0] < 0.7 * numbers(first)[1][0], "it did not start from the first's weights"


def test_a_chain_does_not_go_on_after_a_failure(site: Site) -> None:
    words = [word for word in site.words("broken1") if not word.startswith("name=")]
    first, second = ["name=broken1", "train.init_from=never"], ["name=broken2", "train.init_from=broken1"]
    out = site.launch("submit", *words, "phase1", *first, "phase2", "experiment=smoke_phase1", *second)
    first_job, second_job = [line.split("job ")[1].split()[0] for line in out.splitlines()]
    site.end(first_job, "FAILED", 60)
    site.end(second_job, "CANCELLED", 60)
    assert not site.run_dir("broken2").attempts.exists()


def test_a_hung_rank_is_found_and_the_run_goes_on(site: Site, undisturbed: RunDir) -> None:  # noqa: F811
    job = site.submit("hung", "cluster.hang_factor=20", "cluster.hang_seconds=4")
    site.wait_step("hung", 8)
    os.kill(rank_pid(site.run_dir("hung"), rank=1), signal.SIGSTOP)
    assert site.end(job, "COMPLETED", 200)["Restarts"] == "0"
    run = site.run_dir("hung")
    reasons = [line.get("reason", "") for line in read_lines(run.attempts) if line["event"] == "end"]
    assert "none from rank 1" in reasons[0]
    assert (run.logs / "1" / "stacks-rank-0.txt").exists()
    assert numbers(run) == numbers(undisturbed)


def test_an_operators_stop_holds_the_job_until_released(site: Site, undisturbed: RunDir) -> None:  # noqa: F811
    job = site.submit("held")
    site.wait_step("held", 8)
    stop = site.run_dir("held").stop_file
    stop.parent.mkdir(exist_ok=True)
    stop.touch()
    site.slurm.wait(
        lambda: site.slurm.job(job)["Reason"].lower() == "job_requeued_in_held_state", 60, "the hold"
    )
    assert site.outcomes("held") == ["stopped"]
    site.slurm.run("scontrol", "release", job)
    site.end(job, "COMPLETED", 200)
    assert numbers(site.run_dir("held")) == numbers(undisturbed)


def test_evaluation_of_every_checkpoint(site: Site, undisturbed: RunDir) -> None:  # noqa: F811
    options = [
        "--parsable",
        "--gpus-per-node=0",
        "--cpus-per-task=1",
        f"--output={undisturbed.logs}/eval-%j.log",
    ]
    keys = [f"run={undisturbed.path}", "suite=builtin", "device=cpu"]
    job = site.slurm.run("sbatch", *options, "launch/eval.slurm", *keys, cwd=ROOT).strip()
    site.end(job, "COMPLETED", 400)
    steps = [step for step, _ in undisturbed.complete_checkpoints()]
    assert sorted(undisturbed.evals.glob("step-*.json")) == sorted(
        undisturbed.evals / f"step-{step}.json" for step in steps
    )


@pytest.fixture
def spare(site: Site) -> Iterator[SlurmCluster]:
    """The site's Slurm, with whatever node a test kills started again."""
    yield site.slurm
    for number in range(1, site.slurm.nodes + 1):
        if site.slurm.processes[f"n{number}"].poll() is not None:
            site.slurm.start_node(f"n{number}")
    site.slurm.wait(lambda: site.slurm.idle_nodes() == site.slurm.nodes, 60, "the killed nodes")


def test_a_lost_node(site: Site, spare: SlurmCluster, undisturbed: RunDir) -> None:  # noqa: F811
    """The daemon of the second node and its ranks vanish at once; Slurm requeues, on the nodes that are left."""
    job = site.submit("lost")
    site.wait_step("lost", 8)
    assert spare.job_processes(job, "n2"), "no rank runs on n2"
    spare.kill_node("n2")
    fields = site.end(job, "COMPLETED", 300)
    assert fields["NodeList"] in ("n[1,3]", "n[1-2]", "n[2-3]")
    assert numbers(site.run_dir("lost")) == numbers(undisturbed)
    assert len(numbers(site.run_dir("lost"))) == STEPS


def test_a_node_with_a_slow_all_reduce_is_left_out(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two ranks each reduce, alone and with each other; n1 is made to miss its own floor."""
    python, environment = tmp_path / "python", tmp_path / "site.env"
    python.write_text(
        f"""#!/bin/bash
if [ "$2 $SLURMD_NODENAME" = "launch.allreduce n1" ] && [ "$3" != worker ]; then set -- -m "$2" 1e6 "$4"; fi
exec {ROOT}/.venv/bin/python "$@"
"""
    )
    python.chmod(0o755)
    environment.write_text(f"PYTHON={python}\nHEALTH_MIN_ALLREDUCE_GBPS=0.0001\n")
    monkeypatch.setitem(site.slurm.environment, "LANEFORMER_SITE", str(environment))
    job = site.submit("bottleneck", "train.init_from=never")
    site.end(job, "COMPLETED", 200)
    run = site.run_dir("bottleneck")
    told = (run.logs / f"health-{job}-0.txt").read_text()
    assert "unhealthy n1 all-reduce: its own 2 devices at" in told
    assert "healthy n2" in told.splitlines()
    assert "weak link" not in told
    lines = list(read_lines(run.attempts))
    assert (lines[0]["event"], lines[0]["excluded"]) == ("successor", "n1")
    assert site.end(lines[0]["new"], "FAILED", 100)["NodeList"] == "n[2-3]"


def test_a_node_that_gives_no_answer_is_left_out(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its check dies without a word."""
    environment = tmp_path / "site.env"
    environment.write_text("""HEALTH_EXTRA='[ $SLURMD_NODENAME != n2 ] || kill -9 $PPID'\n""")
    monkeypatch.setitem(site.slurm.environment, "LANEFORMER_SITE", str(environment))
    job = site.submit("silent", "train.init_from=never")
    site.end(job, "COMPLETED", 100)
    lines = list(read_lines(site.run_dir("silent").attempts))
    assert (lines[0]["event"], lines[0]["excluded"]) == ("successor", "n2")
    assert site.end(lines[0]["new"], "FAILED", 100)["NodeList"] == "n[1,3]"


def test_24_nodes_of_8_fake_gpus_take_five_steps(tiny_data: Path, tmp_path: Path, site: Site) -> None:
    """One rank a node, since a machine of two cores runs no 192: the shape of the job is phase 2's."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, SlurmCluster(Path(folder), 24) as slurm:
        large = Site(slurm, tiny_data, tmp_path)
        out = large.launch("submit", "phase1", "phase2", "sft", "--test-only")  # the real recipe, whole
        assert out.count("to start at") == 3, out
        words = ["cluster.nodes=24", "train.global_batch_size=24", "data.tokens=3840"]
        words += ["optim.warmup_tokens=0", "optim.decay_tokens=0", "cluster.step_timeout_seconds=600"]
        options = ("--gpus-per-node=8",)
        job = large.submit("large", *words, options=options)
        fields = large.end(job, "COMPLETED", 900)
        assert (fields["NumNodes"], fields["NodeList"]) == ("24", "n[1-24]")
        assert list(numbers(large.run_dir("large"))) == [1, 2, 3, 4, 5]
