"""Score checkpoints: one, or every complete one of a run as they appear, each exactly once.

What has been done is what the run's evals/step-N.json hold (eval/results.py). A lock on the suite's folder
keeps two evaluators off the same work; the system drops it with the process, so that a killed evaluator's work
is taken up where it stopped.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from eval.adapter import checkpoint_facts, checkpoint_step, is_run_checkpoint
from eval.results import RunFiles, locked, package_versions, read_result, settings_hash
from eval.suite import Job, Suite
from eval.tracking import log_results

Say = Callable[[str], None]
Outcome = Literal["scored", "done", "busy", "not run"]


@dataclass(frozen=True)
class Machine:
    """Where and how to compute."""

    device: str
    dtype: str
    processes: int

    @staticmethod
    def choose(device: str, dtype: str, processes: int) -> Machine:
        """Replace "auto": a GPU and bfloat16 where there is one, else the CPU and float32."""
        import torch

        from eval.adapter import DTYPES

        gpus = torch.cuda.device_count()
        device = ("cuda" if gpus else "cpu") if device == "auto" else device
        if not (device == "cpu" or (gpus and device.startswith("cuda"))):
            raise ValueError(
                f"device={device} is not on this machine, which has {gpus} GPUs; use cpu or cuda"
            )
        dtype = ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype} must be auto, {', '.join(DTYPES)}")
        if processes < 1 or (device != "cpu" and processes > gpus):
            raise ValueError(
                f"processes={processes} must be 1 or more, and at most one per GPU (there are {gpus})"
            )
        return Machine(device, dtype, processes)

    def describe(self) -> str:
        if self.device == "cpu":
            return f"cpu ({platform.machine()})"
        import torch

        return torch.cuda.get_device_name(self.device)


def locate(checkpoint: Path, out: Path | None) -> tuple[RunFiles, int]:
    """The run directory that a checkpoint's results go to, and its step.

    runs/x/checkpoints/step-N belongs to runs/x; results of any other folder go to `out`, as step 0 where no
    step is known. Raises ValueError for an incomplete checkpoint and where `out` is missing.
    """
    if not checkpoint.is_dir():
        raise ValueError(f"checkpoint={checkpoint} is not a folder")
    if not (is_run_checkpoint(checkpoint) or (checkpoint / "config.json").exists()):
        raise ValueError(
            f"checkpoint={checkpoint} is not complete: it has no manifest.json (nor a config.json, as a "
            "Hugging Face folder would)"
        )
    step = checkpoint_step(checkpoint)
    if out is not None:
        return RunFiles(out), step
    parent = checkpoint.resolve().parent
    if parent.name != "checkpoints":
        raise ValueError(
            f"checkpoint={checkpoint} is not in a run directory, so say where results go: out=runs/eval/NAME"
        )
    return RunFiles(parent.parent), step


def evaluate(
    run: RunFiles, step: int, checkpoint: Path, suites: Sequence[Suite], machine: Machine, say: Say = print
) -> dict[str, Outcome]:
    """Score a checkpoint with each suite that has not scored it yet; what became of each, by its name.

    Raises ValueError when the step has results of other weights.
    """
    facts = checkpoint_facts(checkpoint)
    _check_same_weights(run.result_file(step), facts)
    outcomes: dict[str, Outcome] = {}
    for suite in suites:
        settings = suite.settings() | {"dtype": machine.dtype}
        digest = settings_hash(suite.name, settings)
        folder = run.suite_folder(step, suite.name, digest)
        if run.is_done(step, suite.name, digest):
            say(f"step {step}: {suite.name} is done ({digest})")
            outcomes[suite.name] = "done"
            continue
        try:
            with locked(folder / ".lock", wait=False):
                if run.is_done(step, suite.name, digest):  # another process has finished just now
                    outcomes[suite.name] = "done"
                else:
                    outcomes[suite.name] = _score(run, step, facts, suite, settings, digest, machine, say)
        except BlockingIOError:
            say(f"step {step}: another process is scoring {suite.name} ({digest})")
            outcomes[suite.name] = "busy"
    log_results(run)
    return outcomes


def _check_same_weights(file: Path, facts: dict[str, Any]) -> None:
    if not file.exists():
        return
    scored = read_result(file)["checkpoint"]
    if scored["sha256"] != facts["sha256"]:
        raise ValueError(
            f"{file} holds results of other weights ({scored['path']}) than {facts['path']}: give another out=, "
            "or move the old results away"
        )


def _score(
    run: RunFiles,
    step: int,
    facts: dict[str, Any],
    suite: Suite,
    settings: dict[str, Any],
    digest: str,
    machine: Machine,
    say: Say,
) -> Outcome:
    started = time.perf_counter()
    folder = run.suite_folder(step, suite.name, digest)
    job = Job(Path(facts["path"]), step, folder, machine.device, machine.dtype, machine.processes)
    if is_run_checkpoint(job.checkpoint):
        from model.checkpoint import check_files  # imports torch, which what is scored already does without

        check_files(job.checkpoint, hashes=True)
    result = suite.run(job)
    if result.not_run:
        say(f"step {step}: {suite.name} was not run: {result.not_run}")
        return "not run"
    entry = {
        "suite": suite.name,
        "settings_hash": digest,
        "settings": settings,
        "scores": result.scores,
        "tasks": result.tasks,
        "notes": result.notes,
        "seconds": round(time.perf_counter() - started, 3),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.describe(),
        "processes": machine.processes,
        "packages": package_versions(),
    }
    run.record(step, facts, entry)
    shown = "  ".join(f"{key} {value:.4f}" for key, value in result.scores.items() if "_task/" not in key)
    say(f"step {step}: {suite.name} in {entry['seconds']:.1f} s  {shown}")
    for note in result.notes:
        say(f"step {step}: note: {note}")
    return "scored"


def follow(run: RunFiles, suites: Sequence[Suite], machine: Machine, poll: float, say: Say = print) -> int:
    """Score every complete checkpoint, oldest first, until training is done; how many results were added.

    A suite that can't run here is left out after its first attempt. What another process is scoring is looked
    at again later, in case that process dies.
    """
    if not run.path.is_dir():
        raise ValueError(f"run={run.path} is not a run directory")
    scored = 0
    settled: set[int] = set()
    while True:
        finished = (
            run.done_file.exists()
        )  # before looking: the last checkpoint is complete before DONE is there
        open_steps = [(step, path) for step, path in run.complete_checkpoints() if step not in settled]
        for step, path in open_steps:
            try:
                outcomes = evaluate(run, step, path, suites, machine, say)
            except (OSError, ValueError, RuntimeError):
                if (path / "manifest.json").exists():
                    raise
                say(f"step {step}: the run removed this checkpoint before it was scored")
                outcomes = {}
            scored += sum(outcome == "scored" for outcome in outcomes.values())
            suites = [suite for suite in suites if outcomes.get(suite.name) != "not run"]
            if "busy" not in outcomes.values():
                settled.add(step)
        if finished and all(step in settled for step, _ in open_steps):
            return scored
        time.sleep(poll if all(step not in settled for step, _ in open_steps) else 0)
