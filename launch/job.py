"""The verbs that launch/lib.sh calls inside a job, around each attempt. People use `submit` and `status`.

Each prints one line for the shell; what a person should read goes to standard error, which is the job's log.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from launch.alerts import alert
from launch.attempts import (
    BARREN_LIMIT,
    EXIT_CONFIGURATION,
    EXIT_NO_PROGRESS,
    Signal,
    barren_attempts,
    decide,
    no_progress,
    read_attempts,
)
from train.config import ConfigError, load_resolved
from train.run_dir import RunDir, append_line, read_lines


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} launch: {message}", file=sys.stderr, flush=True)


def newest_checkpoint(run: RunDir) -> int:
    complete = run.complete_checkpoints()
    return complete[-1][0] if complete else 0


def give_up(run: RunDir, reason: str, code: int) -> None:
    append_line(run.attempts, {"event": "gave_up", "time": time.time(), "reason": reason, "exit_code": code})
    say(f"giving up: {reason}")
    alert(run, f"given up: {reason}", say)


def begin(run: RunDir) -> int:
    """Record that an attempt starts; prints `<attempt> <nodes> <ranks a node>`, or `done`."""
    if run.done:
        say(f"{run.path} is done: nothing to do")
        print("done")
        return 0
    job = os.environ["SLURM_JOB_ID"]
    other = owner(run)
    if other not in (None, job) and other in running_jobs():
        raise ConfigError([f"{run.path} is being trained by job {other}: cancel one of the two"])
    newest = newest_checkpoint(run)
    lines = list(read_lines(run.attempts))
    barren = barren_attempts(lines, newest)
    if barren >= BARREN_LIMIT:  # attempts that were killed with their job decided nothing
        give_up(run, no_progress(lines, barren, newest), EXIT_NO_PROGRESS)
        return EXIT_NO_PROGRESS
    cluster, given = load_resolved(run.resolved).cluster, int(os.environ["SLURM_JOB_NUM_NODES"])
    if given < cluster.nodes:
        fix = f"sbatch --nodes={cluster.nodes} …, or cluster.nodes={given}"
        give_up(run, f"cluster.nodes={cluster.nodes} but the job has {given}: {fix}", EXIT_CONFIGURATION)
        return EXIT_CONFIGURATION
    # A request made to an earlier attempt; this one would stop at its first step.
    run.stop_file.unlink(missing_ok=True)
    attempt = run.start_attempt(
        job=job,
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        nodes=os.environ["SLURM_JOB_NODELIST"],
        ranks=cluster.ranks,
        checkpoint=newest,
        code=(run.code / "tree.sha256").read_text().strip(),
    )
    say(f"attempt {attempt} of {run.path} from step {newest} on {os.environ['SLURM_JOB_NODELIST']}")
    print(attempt, cluster.nodes, cluster.ranks_per_node)
    return 0


def end(run: RunDir, attempt: int, status: int, signal: Signal | None, problem: str) -> int:
    """Decide what follows an attempt; prints `<action> <exit code>`. `problem` is what stopped it, if known."""
    if not run.attempt_ended(attempt) and not run.done:
        reason = problem or f"srun exited with status {status}" + (f" after SIG{signal}" if signal else "")
        run.end_attempt(attempt, "ended" if signal == "TERM" else "failed", step=None, reason=reason)
    decision = decide(
        read_lines(run.attempts),
        attempt=attempt,
        status=status,
        signal=signal,
        done=run.done,
        newest=newest_checkpoint(run),
    )
    if decision.action == "give-up":
        give_up(run, decision.reason, decision.exit_code)
    else:
        append_line(
            run.attempts,
            {"event": "decision", "attempt": attempt, "time": time.time(), **vars(decision)},
        )
        say(f"{decision.action}: {decision.reason}")
        crashed = status and decision.action in ("again", "requeue")
        if crashed or decision.action in ("finish", "hold"):
            alert(run, f"{decision.action}: {decision.reason}", say)
    print(decision.action, decision.exit_code)
    return 0


def owner(run: RunDir) -> str | None:
    """The job of the last attempt."""
    attempts = read_attempts(read_lines(run.attempts))
    return attempts[-1].facts.get("job") if attempts else None


def running_jobs() -> set[str]:
    command = ["squeue", "--noheader", "--states=RUNNING,COMPLETING", "--format=%A"]
    return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())


def job_of(run: RunDir) -> list[str]:
    """Jobs of this run that wait or run: they carry its path as their comment."""
    command = ["squeue", "--noheader", "--format=%A %k"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = [line.split(maxsplit=1) for line in listing.splitlines()]
    return [job for job, *comment in words if comment and Path(comment[0]) == run.path]
