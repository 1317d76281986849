"""`python -m launch data`: prepare sources by array jobs, each followed by the job that puts its shares together."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from launch.submit import ROOT, sbatch
from train.config import ConfigError

SCRIPT = str(ROOT / "launch" / "prepare.slurm")


def data_jobs(words: Sequence[str], options: Sequence[str], *, dry_run: bool) -> int:
    """Submit both jobs of each source of `source=a,b`, in `tasks=N` tasks; prints a line for each job.

    Other words go to `python -m data_mixtures prepare` and, but for `workers=`, to `merge`; `options` to both sbatch
    commands.
    """
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    problems = [f"{word!r} is not of the form key=value" for word in words if "=" not in word]
    if not keys.get("source"):
        problems.append("give source=NAME, or several: source=a,b")
    if not keys.get("tasks", "").isdecimal() or int(keys["tasks"]) < 1:
        problems.append(
            f"tasks={keys.get('tasks', '')} must be a whole number from 1: the tasks of the array job"
        )
    if not dry_run and shutil.which("sbatch") is None:
        problems.append("sbatch is not installed here: submit on a machine with Slurm, or use --dry-run")
    if problems:
        raise ConfigError(problems)
    sources, tasks = keys.pop("source").split(","), keys.pop("tasks")
    given = [f"{key}={value}" for key, value in keys.items()]
    for source in sources:
        common = ["sbatch", "--parsable", f"--chdir={ROOT}", *options]
        array = [*common, f"--job-name=prepare-{Path(source).stem}", f"--array=0-{int(tasks) - 1}"]
        array += [SCRIPT, f"tasks={tasks}", f"source={source}", *given]
        job = f"<prepare {source}>" if dry_run else sbatch(array).split(";")[0]
        merge = [
            *common,
            f"--job-name=merge-{Path(source).stem}",
            f"--dependency=afterok:{job}",
            "--kill-on-invalid-dep=yes",
        ]
        merge += [
            SCRIPT,
            "merge",
            f"source={source}",
            *(word for word in given if not word.startswith("workers=")),
        ]
        if dry_run:
            print(f"{source}: {shlex.join(array)}\n{source}: {shlex.join(merge)}")
        else:
            print(f"{source}: job {job}, {tasks} tasks; job {sbatch(merge)} puts them together")
    return 0
