"""`python -m launch <verb>`: what starts other commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

from launch.attempts import Signal
from launch.job import begin, end
from launch.submit import PHASES, prepare, submit, successor
from train.config import ConfigError
from train.run_dir import RunDir

USAGE = """usage: python -m launch VERB …

  smoke [--resume]
      The whole pipeline, small, on this machine's CPU: data, phase 1, phase 2, SFT, samples, report.
      Starts anew in runs/smoke; prepared data in data/smoke is kept. --resume goes on where it was cut off.

  submit [key=value …] PHASE [key=value …] [PHASE …] [--dry-run] [--test-only] [--SBATCH-OPTION=VALUE …]
      Check each phase's configuration, write its run directory, freeze the code there, and submit
      launch/PHASE.slurm; a phase waits until the one before it has ended well. Words before the first phase go
      to all, words after a phase to that one. Other switches go to sbatch unchanged.
      Phases: {phases}.
        --dry-run     print the commands; write nothing, submit nothing
        --test-only   let Slurm check the commands; submit nothing
        --allow-change=KEY   let a run that exists go on with another value of KEY
        --evals=SUITE[,SUITE…]   a job beside each run scores its checkpoints as they appear (launch/eval.slurm)

  data source=NAME[,NAME…] tasks=N [key=value …] [--dry-run] [--SBATCH-OPTION=VALUE …]
      Prepare sources by array jobs of N tasks (launch/prepare.slurm), each followed by the job that verifies their
      shares and puts them together. Words are those of `python -m data_mixtures prepare`.

  status [runs=runs] [NAME …]
      One table of runs: state, attempts, step, tokens, speed, time left, goodput, last checkpoint, scores; below it
      why a run was given up or waits.

  watch RUN-DIRECTORY [--once]
      One run, live in the terminal: progress, curves, mixture, attempts, scores. --once prints it once.

  dashboard RUN-DIRECTORY [--follow]
      Its charts: creates or updates the project's W&B workspace where a key is set, and writes the same views as one
      HTML file, RUN-DIRECTORY/dashboard.html; --follow draws that again every minute.

  plan experiment=NAME [key=value …] [seconds_per_step= | tokens_per_second_per_rank=] [save_seconds=10]
       [recovery_minutes=10] [plot=FILE]
      Days, disk, the best checkpoint interval and the goodput for several failure rates, in closed form and
      simulated; with plot=, goodput up to 16k GPUs.
      Also a rank's speed on 8 to 1,024 GPUs, modelled [network_gbytes=45] [nvlink_gbytes=360] [scaling_plot=FILE]:
      from seconds_per_step, measured on the configured ranks, or from a speed without waiting for others.

  inside a job (launch/lib.sh): prepare key=value …, begin run=, end run= attempt= status= signal= problem=,
      successor run= nodes=
"""


def main(arguments: list[str]) -> int:
    if "--help" in arguments or not arguments:
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    verb, *rest = arguments
    words = [word for word in rest if not word.startswith("--")]
    switches = [word for word in rest if word.startswith("--")]
    try:
        if verb not in VERBS:
            raise ConfigError([f"{verb!r} is not a verb: {', '.join(VERBS)}"])
        return VERBS[verb](words, switches)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        if verb not in LOOKING:  # in a job, status 2 would say that its run can never go on
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def usage() -> str:
    return USAGE.format(phases=", ".join(PHASES))


def only(switches: list[str], known: set[str]) -> set[str]:
    """The switches, refused where one is not known."""
    unknown = [s for s in switches if s not in known]
    if unknown:
        raise ConfigError([f"{s} is not a switch here; see --help" for s in unknown])
    return set(switches)


def values(words: list[str], *keys: str) -> dict[str, str]:
    """`key=value` words as a dictionary, all keys given."""
    found = dict(word.split("=", 1) for word in words if "=" in word)
    if set(found) != set(keys) or len(found) != len(words):
        raise ConfigError(
            [f"give {' '.join(f'{key}=…' for key in keys)}, got: {' '.join(words) or 'nothing'}"]
        )
    return found


def run_smoke(words: list[str], switches: list[str]) -> int:
    from launch.smoke import smoke  # draws pictures: its imports take a second

    values(words)
    return smoke(resume="--resume" in only(switches, {"--resume"}))


def run_submit(words: list[str], switches: list[str]) -> int:
    ours = {"--dry-run", "--test-only"}
    suites = [s.removeprefix("--evals=") for s in switches if s.startswith("--evals=")]
    return submit(
        words,
        [s for s in switches if s not in ours and not s.startswith("--evals=")],
        dry_run="--dry-run" in switches,
        test_only="--test-only" in switches,
        suites=suites[-1] if suites else None,
    )


def run_data(words: list[str], switches: list[str]) -> int:
    from launch.data_jobs import data_jobs

    options = [switch for switch in switches if switch != "--dry-run"]
    return data_jobs(words, options, dry_run="--dry-run" in switches)


def run_status(words: list[str], switches: list[str]) -> int:
    from launch.status import status

    only(switches, set())
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    if set(keys) - {"runs"}:
        raise ConfigError([f"status takes runs=FOLDER and names of runs, got: {' '.join(words)}"])
    return status(Path(keys.get("runs", "runs")), [word for word in words if "=" not in word])


def run_watch(words: list[str], switches: list[str]) -> int:
    from launch.watch import watch

    if len(words) != 1:
        raise ConfigError([f"watch takes one run directory, got: {' '.join(words) or 'nothing'}"])
    return watch(Path(words[0]), once="--once" in only(switches, {"--once"}))


def run_dashboard(words: list[str], switches: list[str]) -> int:
    from launch.dashboard import dashboard

    if len(words) != 1:
        raise ConfigError([f"dashboard takes one run directory, got: {' '.join(words) or 'nothing'}"])
    return dashboard(Path(words[0]), follow="--follow" in only(switches, {"--follow"}))


def run_plan(words: list[str], switches: list[str]) -> int:
    from rich.console import Console

    from launch.plan import plan

    only(switches, set())
    return plan(words, Console(width=None if sys.stdout.isatty() else 160))


def run_prepare(words: list[str], switches: list[str]) -> int:
    only(switches, set())
    print(prepare(words).path)
    return 0


def run_begin(words: list[str], switches: list[str]) -> int:
    only(switches, set())
    return begin(RunDir(values(words, "run")["run"]))


def run_end(words: list[str], switches: list[str]) -> int:
    only(switches, set())
    given = values(words, "run", "attempt", "status", "signal", "problem")
    signal = cast("Signal", given["signal"]) if given["signal"] in get_args(Signal) else None
    return end(RunDir(given["run"]), int(given["attempt"]), int(given["status"]), signal, given["problem"])


def run_successor(words: list[str], switches: list[str]) -> int:
    only(switches, set())
    given = values(words, "run", "nodes")
    return successor(RunDir(given["run"]), given["nodes"])


LOOKING = ("status", "watch", "dashboard", "plan")
"""Verbs that only read runs and write pictures: what they cannot read or write is the user's to mend."""

VERBS: dict[str, Callable[[list[str], list[str]], int]] = {
    "smoke": run_smoke,
    "submit": run_submit,
    "data": run_data,
    "status": run_status,
    "watch": run_watch,
    "dashboard": run_dashboard,
    "plan": run_plan,
    "prepare": run_prepare,
    "begin": run_begin,
    "end": run_end,
    "successor": run_successor,
}
