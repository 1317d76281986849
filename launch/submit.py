"""`python -m launch submit`: check a run, freeze its code, hand it to Slurm; a chain of phases by dependency."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.job import job_of, say
from train.config import ConfigError, RunConfig, compose, load_resolved
from train.run_dir import RunDir, append_line, write_atomic

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("core", "builtin", "code", "validation")  # those of python -m eval
PHASES = ("phase1", "phase2", "sft")
FROZEN = ("configs", "data_mixtures", "eval", "launch", "model", "train")
SITE = Path("launch/site.env")


@dataclass(frozen=True)
class Phase:
    """One job of a chain: the phase file and the Hydra words it is given."""

    name: str
    words: tuple[str, ...]

    @property
    def script(self) -> str:
        return f"launch/{self.name}.slurm"


def read_phases(words: Sequence[str]) -> list[Phase]:
    """`[key=value …] phase [key=value …] [phase …]`: words before the first phase go to every phase."""
    shared: list[str] = []
    phases: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" in word or word.startswith("~"):
            (phases[-1][1] if phases else shared).append(word)
        elif word in PHASES:
            phases.append((word, [*shared]))
        else:
            raise ConfigError([f"{word!r} is neither key=value nor a phase ({', '.join(PHASES)})"])
    if not phases:
        raise ConfigError([f"name at least one phase: {', '.join(PHASES)}"])
    return [Phase(name, tuple(with_experiment(name, given))) for name, given in phases]


def with_experiment(default: str, words: Sequence[str]) -> list[str]:
    """The words with one `experiment=`: the last given, else the phase's own."""
    given = [word for word in words if word.startswith("experiment=")]
    rest = [word for word in words if not word.startswith("experiment=")]
    return [given[-1] if given else f"experiment={default}", *rest]


def prepare(words: Sequence[str], switches: Sequence[str] = ()) -> RunDir:
    """Write the run directory, as `python -m train … --prepare` does, and freeze the code beside it."""
    last = [word for word in words if word.startswith("experiment=")][-1]
    words = with_experiment(last.removeprefix("experiment="), words)
    command = [sys.executable, "-m", "train", *words, *switches, "--prepare"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line.removeprefix("error: ") for line in result.stderr.strip().splitlines()]
        raise ConfigError(lines or [f"{shlex.join(command)} exited with {result.returncode}"])
    run = RunDir(result.stdout.strip())
    freeze(ROOT, run)
    return run


def freeze(root: Path, run: RunDir) -> str:
    """Copy the code that the job will run to code/tree, so that edits after submission don't reach it.

    Returns the SHA-256 over names and contents, also written to code/tree.sha256; nothing is copied when it is
    unchanged.
    """
    files = [file for folder in FROZEN for file in sorted((root / folder).rglob("*")) if wanted(file)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    tree, note = run.code / "tree", run.code / "tree.sha256"
    if tree.exists() and note.exists() and note.read_text().strip() == digest.hexdigest():
        return digest.hexdigest()
    fresh = run.code / f".tree.{os.getpid()}.tmp"
    for file in files:
        target = fresh / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    note.unlink(missing_ok=True)
    if tree.exists():
        shutil.rmtree(tree)
    fresh.rename(tree)
    write_atomic(note, digest.hexdigest() + "\n")
    return digest.hexdigest()


def wanted(file: Path) -> bool:
    return file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".")


def sbatch_command(phase: Phase, config: RunConfig, run: RunDir, options: Sequence[str]) -> list[str]:
    """The sbatch command line: what the configuration says of the machine wins over the phase file's lines."""
    cluster = config.cluster
    gpus = cluster.ranks_per_node if cluster.device == "cuda" else 0
    return [
        "sbatch",
        "--parsable",
        f"--chdir={ROOT}",
        f"--job-name={config.name}",
        f"--comment={run.path}",
        f"--output={run.logs}/slurm-%j.log",
        f"--nodes={cluster.nodes}",
        f"--ntasks-per-node={cluster.ranks_per_node}",
        f"--cpus-per-task={cluster.threads_per_rank}",
        f"--gpus-per-node={gpus}",
        *options,
        str(ROOT / phase.script),
        *phase.words,
    ]


def with_site(command: list[str]) -> list[str]:
    """The command under the site's environment, where sbatch finds SBATCH_ACCOUNT, SBATCH_PARTITION, …"""
    site = Path(os.environ.get("LANEFORMER_SITE", ROOT / SITE))
    if not site.exists():
        return command
    return ["bash", "-c", 'set -a; source "$0"; set +a; exec "$@"', str(site), *command]


def sbatch(command: list[str]) -> str:
    """Run an sbatch command; returns its output, which is the job's id with --parsable."""
    result = subprocess.run(with_site(command), capture_output=True, text=True, check=False)
    if result.returncode:
        raise ConfigError([f"{shlex.join(command)}: {result.stderr.strip()}"])
    return (result.stdout or result.stderr).strip()


def eval_command(run: RunDir, suites: str, after: str) -> list[str]:
    """The job that scores the run's checkpoints, from when its own job `after` has started."""
    return [
        "sbatch",
        "--parsable",
        f"--chdir={ROOT}",
        f"--job-name=eval-{run.path.name}",
        f"--output={run.logs}/eval-%j.log",
        f"--dependency=after:{after}",
        str(ROOT / "launch" / "eval.slurm"),
        f"run={run.path}",
        f"suite={suites}",
    ]


def submit(
    words: Sequence[str], options: Sequence[str], *, dry_run: bool, test_only: bool, suites: str | None
) -> int:
    """Submit the phases, each after the one before has ended well (afterok). Prints one line a job.

    `options` go to sbatch unchanged, but for --allow-change, which is `python -m train`'s. With `dry_run` the
    commands are printed and nothing is written; with `test_only` Slurm checks each command and submits nothing.
    `suites` of evaluation, if any, follow each run.
    """
    changes = [option for option in options if option.startswith("--allow-change=")]
    options = [option for option in options if option not in changes]
    phases = read_phases(words)
    configs = [compose(list(phase.words)) for phase in phases]
    problems = chain_problems(phases, configs)
    if suites is not None and (wrong := {*suites.split(",")} - {*SUITES}):
        problems.append(
            f"--evals={suites}: {', '.join(map(repr, sorted(wrong)))} is none of {', '.join(SUITES)}"
        )
    if not (dry_run or test_only):
        problems += disk_problems(configs)
    if not dry_run and shutil.which("sbatch") is None:
        problems.append("sbatch is not installed here: submit on a machine with Slurm, or use --dry-run")
    if problems:
        raise ConfigError(problems)
    before: str | None = None
    for phase, config in zip(phases, configs, strict=True):
        run = RunDir(Path(config.runs) / config.name)
        if dry_run or test_only:
            extra = ["--test-only"] if test_only else []
            if dry_run and phase is not phases[0]:
                extra += [f"--dependency=afterok:<{phases[phases.index(phase) - 1].name} job>"]
            command = sbatch_command(phase, config, run, [*extra, *options])
            print(f"{phase.name}: {shlex.join(command)}" if dry_run else f"{phase.name}: {sbatch(command)}")
            if suites and dry_run:
                print(f"{phase.name}: {shlex.join(eval_command(run, suites, f'<{phase.name} job>'))}")
            continue
        waiting = job_of(run)
        if waiting:
            raise ConfigError([f"{run.path} has job {', '.join(waiting)} already: scancel it first"])
        if run.done:
            print(f"{phase.name}: {run.path} is done")
            continue
        run = prepare(phase.words, changes)
        run.logs.mkdir(exist_ok=True)
        chain = [f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes"] if before else []
        before = sbatch(sbatch_command(phase, config, run, [*chain, *options])).split(";")[0]
        print(f"{phase.name}: job {before}  {run.path}  {config.steps:,} steps")
        if suites:
            print(f"{phase.name}: job {sbatch(eval_command(run, suites, before))}  evaluation, {suites}")
    return 0


def chain_problems(phases: Sequence[Phase], configs: Sequence[RunConfig]) -> list[str]:
    """A run that starts from another of this chain must come after it."""
    problems = []
    for index, config in enumerate(configs):
        later = [c.name for c in configs[index:]]
        if config.train.init_from in later:
            problems.append(
                f"{phases[index].name}: train.init_from={config.train.init_from} is not submitted before it"
            )
    return problems


def disk_problems(configs: Sequence[RunConfig]) -> list[str]:
    """All runs' checkpoints must fit on the disk, less those that are there already."""
    needed: dict[int, tuple[Path, int]] = {}  # by device
    for config in configs:
        run = RunDir(Path(config.runs) / config.name)
        there = next(path for path in run.path.parents if path.exists())
        folder, size = needed.get(there.stat().st_dev, (there, 0))
        missing = max(config.most_checkpoints - len(run.complete_checkpoints()), 1)
        needed[there.stat().st_dev] = folder, size + missing * config.checkpoint_bytes
    return [
        f"{folder}: {shutil.disk_usage(folder).free / 1e9:.1f} GB free, but the checkpoints to come take up to "
        f"{size / 1e9:.1f} GB: free space, set runs= to another disk, or keep fewer (checkpoint.keep_latest, "
        "checkpoint.milestone_every_steps)"
        for folder, size in needed.values()
        if shutil.disk_usage(folder).free < size
    ]


def successor(run: RunDir, bad: str) -> int:
    """Submit this job again without the nodes `bad` (comma-separated); jobs that wait for it wait for the new one.

    Called inside the job. Slurm can't exclude nodes of a job that is requeued.
    """
    job = os.environ["SLURM_JOB_ID"]
    fields = show_job(job)
    kept = {"partition": "Partition", "account": "Account", "qos": "QOS", "time": "TimeLimit"}
    options = [
        f"--{o}={fields[f]}" for o, f in kept.items() if fields.get(f, "(null)") not in ("(null)", "N/A")
    ]
    excluded = [nodes for nodes in (fields.get("ExcNodeList", "(null)"), bad) if nodes != "(null)"]
    options += [f"--dependency=afterany:{job}", f"--exclude={','.join(excluded)}"]
    # The run directory is written and named by the job's comment, so the phase file needs no words.
    phase = Phase(Path(fields["Command"]).stem, ())
    new = sbatch(sbatch_command(phase, load_resolved(run.resolved), run, options)).split(";")[0]
    for waiting in dependents(job):
        subprocess.run(["scontrol", "update", f"JobId={waiting}", f"Dependency=afterok:{new}"], check=True)
    append_line(
        run.attempts, {"event": "successor", "time": time.time(), "job": job, "new": new, "excluded": bad}
    )
    say(f"{bad} failed the health check: job {new} goes on without it")
    return 0


def dependents(job: str) -> list[str]:
    """Jobs that wait for this one to end well."""
    command = ["squeue", "--noheader", "--states=PENDING", "--format=%A %E"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=1) for line in listing.splitlines()]
    return [row[0] for row in rows if len(row) == 2 and re.search(rf"\bafterok:{job}\b", row[1])]


def show_job(job: str) -> dict[str, str]:
    """What Slurm says of a job, by its own field names; values that hold spaces are cut at the first."""
    command = ["scontrol", "show", "job", "--oneliner", job]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(word.split("=", 1) for word in text.split() if "=" in word)
